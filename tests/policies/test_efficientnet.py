"""EfficientNet-Lite0 with random weights, against XLA's convolutions; with real ones: test_interop_pretrained.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from jax import lax

from ejax.policies.pretrained import efficientnet
from ejax.policies.pretrained.efficientnet import (
    EfficientNetLite0,
    EfficientNetLite0Classifier,
    Stride,
    fold_batch_norms,
)
from ejax.types import Array, Params

RNG = np.random.default_rng(0)


def pictures(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, (*shape, 3), np.uint8)


def drawn(module: EfficientNetLite0, image: np.ndarray) -> Params:
    """Parameters that keep the size of what passes through them."""
    shapes = jax.eval_shape(module.init, jax.random.key(0), image)
    return jax.tree.map(lambda x: RNG.normal(size=x.shape, scale=x.size**-0.25).astype(np.float32), shapes)


def convolved(x: Array, layer: Params, stride: int = 1, depthwise: bool = False) -> Array:
    """Compute TensorFlow's ``SAME`` convolution by XLA."""
    kernel = layer["kernel"].reshape((1, 1, *layer["kernel"].shape)[-4:])
    groups = x.shape[-1] if depthwise else 1
    form = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=form, feature_group_count=groups
    )
    return x + layer["bias"].reshape(1, 1, 1, -1)


def reference(params: Params, image: Array) -> Array:
    """Compute features of stride 8."""
    x = jax.nn.relu6(convolved((image.astype(jnp.float32) - 127) / 128, params["stem"], 2))
    for i, stride in enumerate((1, 2, 1, 2, 1)):
        block, before = params[f"block_{i}"], x
        if "expand" in block:
            x = jax.nn.relu6(convolved(x, block["expand"]))
        x = jax.nn.relu6(convolved(x, block["depthwise"], stride, depthwise=True))
        x = convolved(x, block["project"])
        x = x + before if x.shape == before.shape else x
    return x


@pytest.mark.parametrize("size", [(16, 24), (17, 19)], ids=str)
def test_features_are_those_of_xlas_convolutions(size: tuple[int, int]) -> None:
    image = pictures(2, *size)
    module = EfficientNetLite0(8)
    params = drawn(module, image)
    wanted = jax.jit(reference)(params["params"], image)
    np.testing.assert_allclose(jax.jit(module.apply)(params, image), wanted, atol=1e-5)


@cases("stride channels blocks", (2, 16, 1), (4, 24, 3), (8, 40, 5), (16, 112, 11), (32, 320, 16))
def test_a_stride_gives_the_last_block_at_that_resolution(stride: Stride, channels: int, blocks: int) -> None:
    module = EfficientNetLite0(stride)
    features, variables = jax.eval_shape(
        lambda image: module.init_with_output(jax.random.key(0), image), pictures(2, 5, 64, 96)
    )
    assert features.shape == (2, 5, 64 // stride, 96 // stride, channels)
    assert len(variables["params"]) == blocks + 1


def test_the_classifier_has_as_many_parameters_as_published() -> None:
    shapes = jax.eval_shape(EfficientNetLite0Classifier().init, jax.random.key(0), pictures(32, 32))
    count = sum(x.size for x in jax.tree.leaves(shapes))
    batch_norms = sum(x.shape[-1] for path, x in jax.tree_util.tree_leaves_with_path(shapes) if "bias" in str(path[-1]))
    gains = batch_norms - 1000  # folding leaves one bias where γ and β were; the classifier's was one before
    assert count + gains == 4_652_008


@pytest.mark.slow
def test_every_parameter_has_a_gradient() -> None:
    image = pictures(1, 16, 16)
    module = EfficientNetLite0(4)
    params = drawn(module, image)
    gradient = jax.jit(jax.grad(lambda params: jnp.square(module.apply(params, image)).sum()))(params)
    assert all(bool(jnp.abs(x).max() > 0) for x in jax.tree.leaves(gradient))


@pytest.mark.parametrize("image", [np.zeros((8, 8, 3), np.float32), np.zeros((8, 8, 4), np.uint8)], ids=str)
def test_what_is_no_picture_is_refused(image: np.ndarray) -> None:
    refused(lambda: jax.eval_shape(EfficientNetLite0().init, jax.random.key(0), image), match="a picture is uint8")


def test_an_unknown_stride_is_refused() -> None:
    with pytest.raises(ValueError, match="stride must be one of 2, 4, 8, 16, 32, got 3"):
        jax.eval_shape(EfficientNetLite0(3).init, jax.random.key(0), pictures(8, 8))  # type: ignore[arg-type]


def test_a_folded_batch_norm_does_what_it_did_after_the_convolution() -> None:
    flat = {
        "_blocks.0._project_conv.weight": RNG.normal(size=(4, 3, 1, 1)).astype(np.float32),
        **{f"_blocks.0._bn2.{part}": RNG.normal(size=4).astype(np.float32) for part in ("weight", "bias")},
        "_blocks.0._bn2.running_mean": RNG.normal(size=4).astype(np.float32),
        "_blocks.0._bn2.running_var": RNG.uniform(0.1, 2, size=4).astype(np.float32),
        "_blocks.0._bn2.num_batches_tracked": np.array(7),
    }
    folded = fold_batch_norms(flat)
    assert folded.keys() == {"_blocks.0._project_conv.weight", "_blocks.0._project_conv.bias"}
    x = RNG.normal(size=3)
    y = flat["_blocks.0._project_conv.weight"][..., 0, 0] @ x
    gain, bias, mean, variance = (
        flat[f"_blocks.0._bn2.{part}"] for part in ("weight", "bias", "running_mean", "running_var")
    )
    wanted = [gain[c] * (y[c] - mean[c]) / (variance[c] + 1e-3) ** 0.5 + bias[c] for c in range(4)]
    got = folded["_blocks.0._project_conv.weight"][..., 0, 0] @ x + folded["_blocks.0._project_conv.bias"]
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_an_incomplete_batch_norm_is_left_to_be_listed() -> None:
    flat = {"_conv_stem.weight": np.zeros((32, 3, 3, 3)), "_bn0.weight": np.ones(32)}
    assert fold_batch_norms(flat).keys() == flat.keys()


def test_weights_of_another_network_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficientnet, "load_weights", lambda path: {"layer.weight": np.zeros(3)})
    with pytest.raises(ValueError, match=r"some do not fit the network: 66 without an array: .* layer\.weight"):
        efficientnet.load_efficientnet("some", stride=16)
