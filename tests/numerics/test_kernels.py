"""Forms with fewer kernels: the same numbers in both, each on its platform; packed rows and parameters, and back."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases

from ejax.numerics import platforms
from ejax.numerics.kernels import flat_params, map_parts, pack_rows
from ejax.numerics.platforms import unrolled_scan
from ejax.optim import OptimizerConfig, make_optimizer
from ejax.runtime.device import matmul_precision

XS = jnp.sin(jnp.arange(36.0)).reshape(18, 2)
TREE = {
    "flag": jnp.array([True, False]),
    "count": jnp.array([-3, 2**30], jnp.int32),
    "vector": jnp.array([[1.5, -0.0, jnp.nan], [jnp.inf, 1e-38, 2.0]]),
    "matrix": jnp.arange(8.0).reshape(2, 2, 2),
    "image": jnp.ones((2, 16, 16)),
    "bytes": jnp.array([[1], [255]], jnp.uint8),
    "key": jax.random.split(jax.random.key(0), 2),
}
PARAMS = {
    "actor": {"bias": jnp.arange(2.0), "kernel": jnp.arange(6.0).reshape(3, 2)},
    "critic": {"kernel": 10.0 + jnp.arange(3.0)},
    "log_std": -jnp.ones(2),
}


def decay(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    carry = 0.9 * carry + x
    return carry, carry


@pytest.mark.parametrize("form", [None, "as_on_a_gpu"])
@pytest.mark.parametrize("reverse", [False, True])
def test_it_is_a_scan(request: pytest.FixtureRequest, reverse: bool, form: str | None) -> None:
    if form is not None:
        request.getfixturevalue(form)
    expected = jax.lax.scan(decay, jnp.zeros(2), XS, reverse=reverse)
    chex.assert_trees_all_equal(unrolled_scan(decay, jnp.zeros(2), XS, reverse=reverse), expected)


@pytest.mark.parametrize(("platform", "trips"), [("cpu", 18), ("cuda", 2)])
def test_a_gpu_takes_several_steps_in_each_trip(platform: str, trips: int) -> None:
    traced = jax.jit(lambda xs: unrolled_scan(decay, jnp.zeros(2), xs)).trace(XS)
    assert f"dense<{trips}> : tensor<i32>" in traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(("device", "forms"), [("cpu", 1), ("cuda", 2)])
def test_a_run_on_a_cpu_traces_no_form_of_a_gpu(device: str, forms: int) -> None:
    with matmul_precision("float32", device):
        assert str(jax.make_jaxpr(lambda xs: unrolled_scan(decay, jnp.zeros(2), xs))(XS)).count("scan[") == forms


@pytest.mark.usefixtures("as_on_a_gpu")
def test_it_has_a_scans_gradient() -> None:
    through = [jax.grad(lambda xs: f(decay, jnp.zeros(2), xs)[1].sum())(XS) for f in (unrolled_scan, jax.lax.scan)]  # noqa: B023
    np.testing.assert_array_equal(*through)


def bits(tree: object) -> list[bytes]:
    data = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves(tree)
    ]
    return [np.asarray(x).tobytes() for x in data]


def test_packed_rows_come_back_bit_by_bit() -> None:
    packed = pack_rows(TREE)
    assert packed.table.shape == (2, 1 + 1 + 3 + 4)
    assert [x.shape for x in packed.others] == [(2, 1), (2, 16, 16), (2,)]
    back = packed.tree()
    assert jax.tree.map(lambda x: (x.shape, x.dtype), back) == jax.tree.map(lambda x: (x.shape, x.dtype), TREE)
    assert bits(back) == bits(TREE)


def test_a_scan_stacks_tables_that_come_back_as_stacked_trees() -> None:
    _, log = jax.lax.scan(lambda carry, _: (carry, pack_rows(TREE)), None, length=3)
    assert bits(log.tree()) == bits(jax.tree.map(lambda x: jnp.stack([x] * 3), TREE))


@pytest.mark.parametrize("tree", [{"image": TREE["image"]}, {"flag": TREE["flag"]}], ids=["large", "small"])
def test_either_kind_of_array_may_be_missing(tree: dict[str, jax.Array]) -> None:
    assert bits(pack_rows(tree).tree()) == bits(tree)


@pytest.mark.parametrize("critic_apart", [False, True])
def test_packed_parameters_come_back(critic_apart: bool) -> None:
    vectors = flat_params(PARAMS, critic_apart=critic_apart)
    assert vectors is not None
    packed = vectors.pack(PARAMS)
    assert {name: x.size for name, x in packed.items()} == ({"rest": 10, "critic": 3} if critic_apart else {"all": 13})
    chex.assert_trees_all_equal(vectors.unpack(packed), PARAMS)


def test_moments_are_packed_and_counts_stay() -> None:
    optimizer = make_optimizer(OptimizerConfig())
    _, state = optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)
    vectors = flat_params(PARAMS)
    assert vectors is not None
    packed = map_parts(vectors.pack, PARAMS, state)
    assert sorted(x.shape for x in jax.tree.leaves(packed)) == [(), (), (13,), (13,)]
    back = map_parts(lambda _, x: vectors.unpack(x), PARAMS, state, packed)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    chex.assert_trees_all_equal(back, state)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "rmsprop"])
def test_every_optimizer_of_a_config_takes_the_vector_for_the_tree(name: Any) -> None:
    optimizer = make_optimizer(OptimizerConfig(name=name, kwargs={"weight_decay": 0.1}))
    vectors = flat_params(PARAMS)
    assert vectors is not None
    grads = jax.tree.map(jnp.sin, PARAMS)
    updates, _ = optimizer.update(grads, optimizer.init(PARAMS), PARAMS)
    packed = vectors.pack(PARAMS)
    flat_updates, _ = optimizer.update(vectors.pack(grads), optimizer.init(packed), packed)
    chex.assert_trees_all_close(vectors.unpack(flat_updates), updates, rtol=1e-6)


@cases(
    "params",
    {"kernel": jnp.zeros(3)},
    {"kernel": jnp.zeros(3), "bias": jnp.zeros(3, jnp.bfloat16)},
    {"kernel": jnp.zeros((1024, 1025)), "bias": jnp.zeros(3)},
    ids=["one", "types", "large"],
)
def test_one_array_types_that_differ_and_large_parameters_stay_as_they_are(params: Any) -> None:
    assert flat_params(params) is None


def test_a_critic_apart_needs_a_critic_and_something_else() -> None:
    assert flat_params({"a": jnp.zeros(2), "b": jnp.zeros(2)}, critic_apart=True) is None
    assert flat_params({"critic": {"a": jnp.zeros(2), "b": jnp.zeros(2)}}, critic_apart=True) is None


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 6])
def test_a_small_system_is_solved_as_by_linalg(size: int) -> None:
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        factors, vectors = rng.normal(size=(20, size, size + 1)), jnp.asarray(rng.normal(size=(20, size)))
        matrices = jnp.asarray(factors @ factors.transpose(0, 2, 1) + 1e-3 * np.eye(size))
        wanted = jnp.linalg.solve(matrices, vectors[..., None])[..., 0]
        for solve in (platforms._solve_written_out, platforms.solve_positive):  # what a GPU computes, and this device
            np.testing.assert_allclose(jax.jit(jax.vmap(solve))(matrices, vectors), wanted, rtol=1e-9)
