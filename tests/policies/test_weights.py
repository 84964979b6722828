"""Weights that others trained: found, read, and placed by name."""

import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from case_tables import cases, refused

from ejax.policies.pretrained.weights import WeightsError, find_weights, fit_weights, load_weights
from ejax.schema.registry import WEIGHT_READERS
from ejax.store.checkpoint import save_checkpoint

save_file = pytest.importorskip("safetensors.numpy").save_file
TREE = {"dense": {"kernel": jnp.zeros((3, 2)), "bias": jnp.zeros(2)}, "norm": {"scale": jnp.ones(2)}}
RNG = np.random.default_rng(0)
FLAT = {
    "dense.weight": RNG.normal(size=(2, 3)).astype(np.float32),
    "dense.bias": RNG.normal(size=2).astype(np.float32),
    "norm.weight": RNG.normal(size=2).astype(np.float32),
}
WINDOWS = RNG.normal(size=(4, 3, 5, 2)).astype(np.float32)
ZERO = np.zeros(1, np.float32)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the folder of an installed package that must not be imported."""
    folder = tmp_path / "site" / "some_weights"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return folder


def test_a_network_may_call_a_part_module() -> None:
    tree, flat = (
        {"module": TREE, "other": TREE},
        {f"{part}.{k}": x for part in ("module", "other") for k, x in FLAT.items()},
    )
    fitted = fit_weights(tree, flat)
    np.testing.assert_array_equal(fitted["module"]["dense"]["bias"], FLAT["dense.bias"])
    assert jax.tree.structure(fitted) == jax.tree.structure(tree)


@cases(
    "leaf name given expected",
    ("kernel", "weight", WINDOWS[..., 0, 0], WINDOWS[..., 0, 0].T),
    ("kernel", "weight", WINDOWS, WINDOWS.transpose(2, 3, 1, 0)),
    ("kernel", "weight", WINDOWS[..., :1, :1], WINDOWS[..., 0, 0].T),
    *(
        (leaf, name, WINDOWS, WINDOWS)
        for leaf, name in (("kernel", "kernel"), ("scale", "weight"), ("embedding", "weight"))
    ),
    ids=["dense", "convolution", "convolution of one entry", "kernel of Flax", "no kernel", "no kernel either"],
)
def test_a_weight_of_torchs_is_turned_where_it_is_a_kernel(leaf: str, name: str, given: Any, expected: Any) -> None:
    """From [out, in, *window] to [*window, in, out]."""
    assert np.array_equal(fit_weights({leaf: jnp.zeros(expected.shape)}, {name: given})[leaf], expected)


def test_names_are_changed_by_expressions_one_after_the_other() -> None:
    flat = {f"model.{name}": x for name, x in FLAT.items()}
    fitted = fit_weights(TREE, flat, {r"^model\.": "net.", r"^net\.": ""})
    assert np.array_equal(fitted["dense"]["bias"], FLAT["dense.bias"])


def test_everything_that_does_not_fit_is_in_one_error() -> None:
    flat = {"dense.weight": np.zeros((2, 4), np.float32), "dense.bias": np.zeros(2, int), "head.weight": np.zeros(1)}
    error = refused(fit_weights, TREE, flat, source="file.pt", error=WeightsError)
    assert str(error) == (
        "file.pt do not fit the network: 1 without an array: norm.scale; 1 of the file without a place: head.weight; "
        "1 with other numbers: dense.bias is int64, needed is float32; "
        "1 of another shape: dense.kernel [3, 2] from dense.weight [4, 2]"
    )


@cases(
    "tree flat names text",
    ({}, {"a.b": ZERO}, {"^a": "c"}, r"1 of the file without a place: a\.b \(as c\.b\)"),
    ({"a": ZERO}, {"a": ZERO, "b": ZERO}, {"b": "a"}, r"1 for a place that another has taken: b \(as a, which is a\)"),
    ({"a": np.zeros(1, np.int32)}, {"a": np.array([2**40])}, {}, "a has values beyond int32"),
    *(
        ({"a": ZERO}, {"a": np.array([value])}, {}, "a has NaN or infinity, or values beyond float32")
        for value in (np.nan, np.inf, 1e300)
    ),
)
def test_what_has_no_place_or_cannot_be_held_is_refused(tree: Any, flat: Any, names: Any, text: str) -> None:
    refused(fit_weights, tree, flat, names, match=text, error=WeightsError)


def test_a_long_list_is_shortened_and_counted() -> None:
    with pytest.raises(WeightsError, match=r"100 of the file without a place: .*, and 88 more") as error:
        fit_weights({}, {f"{i:03d}{'x' * 1000}": np.zeros(1) for i in range(100)})
    assert len(str(error.value)) < 5000


def test_only_named_arrays_may_be_left() -> None:
    flat = {**FLAT, "pooler.weight": np.zeros(1), "head.weight": np.zeros(1)}
    with pytest.raises(WeightsError, match=r"1 of the file without a place: head\.weight$"):
        fit_weights(TREE, flat, may_be_left=("pooler.",))
    fit_weights(TREE, flat, may_be_left=("pooler.", "head."))


def test_shapes_suffice_as_tree() -> None:
    shapes = jax.eval_shape(lambda: TREE)
    assert jax.tree.structure(fit_weights(shapes, FLAT)) == jax.tree.structure(TREE)


@pytest.mark.parametrize("given", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_floats_of_any_width_become_those_of_the_tree(given: type) -> None:
    fitted = fit_weights({"a": jnp.zeros(2)}, {"a": np.array([0.5, -3.0], given)})["a"]
    assert fitted.dtype == jnp.float32
    assert np.array_equal(fitted, [0.5, -3.0])


def write_raw(file: Path, header: bytes, data: bytes = b"") -> None:
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)


def test_safetensors_are_read_as_they_are(tmp_path: Path) -> None:
    save_file(FLAT, tmp_path / "w.safetensors")
    flat = load_weights(tmp_path / "w.safetensors")
    assert flat.keys() == FLAT.keys()
    assert all(np.array_equal(flat[name], x) and flat[name].dtype == x.dtype for name, x in FLAT.items())


@pytest.mark.parametrize("keep", [0, 4, 30])
def test_a_damaged_file_is_named(tmp_path: Path, keep: int) -> None:
    file = tmp_path / "w.safetensors"
    save_file(FLAT, file)
    file.write_bytes(file.read_bytes()[:keep])
    refused(load_weights, file, match=r"w\.safetensors is not a safetensors file, or is damaged", error=WeightsError)


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F4", "F6_E2M3", "F6_E3M2"])
def test_quantized_arrays_are_refused_by_name_and_type(kind: str, tmp_path: Path) -> None:
    """Their numbers are wrong by a scale that stands elsewhere in the file."""
    size = int(kind[1])  # bytes of 8 numbers
    entry = {"dtype": kind, "shape": [8], "data_offsets": [0, size]}
    write_raw(tmp_path / "w.safetensors", json.dumps({"layer.weight": entry}).encode(), b"\x38" * size)
    with pytest.raises(WeightsError, match=rf"w\.safetensors: layer\.weight is {kind}; allowed are F64, F32.*convert"):
        load_weights(tmp_path / "w.safetensors")


def test_bfloat16_is_read_right(tmp_path: Path) -> None:
    header = {"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}
    write_raw(tmp_path / "w.safetensors", json.dumps(header).encode(), b"\x80\x3f\x00\xc0")
    assert load_weights(tmp_path / "w.safetensors")["a"].astype(np.float32).tolist() == [1, -2]


@cases("header", b'{"a":' + b"[" * 100_000, b"{" + b" " * 10, b'{"a":{"dtype":"I3"}}', b"[]", b"\xff")
def test_a_strange_header_is_refused(header: bytes, tmp_path: Path) -> None:
    write_raw(tmp_path / "w.safetensors", header)
    with pytest.raises(WeightsError, match=r"w\.safetensors is not a safetensors file, or is damaged"):
        load_weights(tmp_path / "w.safetensors")


def test_a_header_that_claims_more_than_a_file_can_hold_is_refused(tmp_path: Path) -> None:
    for claimed in (2**63, 200 << 20):
        with (tmp_path / "w.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", claimed))
            file.truncate(300 << 20)
        with pytest.raises(WeightsError, match="is not a safetensors file, or is damaged"):
            load_weights(tmp_path / "w.safetensors")
    os.truncate(tmp_path / "w.safetensors", 2**41)
    refused(load_weights, tmp_path / "w.safetensors", match="has 2199023255552 bytes; at most", error=WeightsError)


def test_a_missing_safetensors_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(FLAT, tmp_path / "w.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    refused(load_weights, tmp_path / "w.safetensors", match="pip install safetensors", error=WeightsError)


def test_a_missing_torch_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WEIGHT_READERS, ".pth", "no_such_module:read")
    (tmp_path / "w.pth").touch()
    with pytest.raises(WeightsError, match=r"w\.pth is a torch file.*pip install -e '\.\[torch\]'"):
        load_weights(tmp_path / "w.pth")


def test_a_checkpoint_gives_the_policys_parameters(tmp_path: Path) -> None:
    params = {"params": {"actor": {"kernel": jnp.arange(6.0).reshape(2, 3)}}}
    state = {"train": {"params": params, "step": jnp.zeros((), jnp.int32)}, "env": jnp.zeros(3)}
    path = save_checkpoint(tmp_path, "some", state, {})
    flat = load_weights(path)
    assert flat.keys() == {"params.actor.kernel"}
    assert np.array_equal(fit_weights(params, flat)["params"]["actor"]["kernel"], params["params"]["actor"]["kernel"])


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, "some", {"train": {"params": {"a": jnp.zeros(1)}}}, {})
    (path / "meta.json").write_text(json.dumps({}))
    refused(load_weights, path, match=r"some is damaged", error=WeightsError)


def test_a_checkpoint_without_a_policy_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, "some", {"other": jnp.zeros(1)}, {})
    refused(load_weights, path, match=r"some has no policy in it", error=WeightsError)


@cases(
    "names found",
    (["notes.txt", "w.pth"], "w.pth"),
    (["pytorch_model.bin", "model.safetensors"], "model.safetensors"),
)
def test_a_folder_stands_for_its_weights_file(names: list[str], found: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert find_weights(tmp_path) == tmp_path / found


@cases(
    "given text",
    ("several", r"has 2 weights files \(a\.pth, b\.safetensors\); name one"),
    ("run", "is the folder of a run; name one of"),
    *((name, r"\.safetensors") for name in ("nothing", "empty", "notes.txt")),
    *((f"package:{name}", "names no package; write package:name") for name in ("", "../x", "os.path", "a b")),
    ("package:no_such_weights", r"pip install -e '\.\[pretrained\]'.*pip install no-such-weights$"),
)
def test_what_holds_no_weights_is_refused(given: str, text: str, tmp_path: Path) -> None:
    for folder in ("several", "empty", "run/checkpoints"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("notes.txt", "several/a.pth", "several/b.safetensors"):
        (tmp_path / file).touch()
    refused(find_weights, given if ":" in given else tmp_path / given, match=text, error=WeightsError)


@pytest.mark.parametrize("name", ["some_weights", "some-weights", "some_weights/models/w.pth"])
def test_a_package_gives_the_weights_file_inside_and_is_not_imported(package: Path, name: str) -> None:
    (package / "models").mkdir()
    (package / "models" / "w.pth").touch()
    assert find_weights(f"package:{name}") == package / "models" / "w.pth"


@pytest.mark.parametrize("name", ["__main__", "math"])
def test_a_module_without_a_folder_carries_no_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    refused(find_weights, f"package:{name}", match=f"no package '{name}' is installed", error=WeightsError)


def test_nothing_outside_the_package_is_read(package: Path) -> None:
    (package.parent / "other.pth").touch()
    with pytest.raises(WeightsError, match="is not inside the package's folder"):
        find_weights("package:some_weights/../other.pth")
