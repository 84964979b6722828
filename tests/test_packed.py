"""Small arrays as the columns of one table, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejax.numerics.packed import Packed

TREE = {
    "flag": jnp.array([True, False]),
    "count": jnp.array([-3, 2**30], jnp.int32),
    "vector": jnp.array([[1.5, -0.0, jnp.nan], [jnp.inf, 1e-38, 2.0]]),
    "matrix": jnp.arange(8.0).reshape(2, 2, 2),
    "image": jnp.ones((2, 16, 16)),
    "bytes": jnp.array([[1], [255]], jnp.uint8),
    "key": jax.random.split(jax.random.key(0), 2),
}


def bits(tree: object) -> list[bytes]:
    data = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves(tree)
    ]
    return [np.asarray(x).tobytes() for x in data]


def test_what_was_packed_comes_back_bit_by_bit() -> None:
    packed = Packed.of(TREE)
    assert packed.table.shape == (2, 1 + 1 + 3 + 4)
    assert [x.shape for x in packed.others] == [(2, 1), (2, 16, 16), (2,)]
    back = packed.tree()
    assert jax.tree.map(lambda x: (x.shape, x.dtype), back) == jax.tree.map(lambda x: (x.shape, x.dtype), TREE)
    assert bits(back) == bits(TREE)


def test_a_scan_stacks_tables_that_come_back_as_stacked_trees() -> None:
    _, log = jax.lax.scan(lambda carry, _: (carry, Packed.of(TREE)), None, length=3)
    assert bits(log.tree()) == bits(jax.tree.map(lambda x: jnp.stack([x] * 3), TREE))


@pytest.mark.parametrize("tree", [{"image": TREE["image"]}, {"flag": TREE["flag"]}], ids=["large", "small"])
def test_either_kind_of_array_may_be_missing(tree: dict[str, jax.Array]) -> None:
    assert bits(Packed.of(tree).tree()) == bits(tree)
