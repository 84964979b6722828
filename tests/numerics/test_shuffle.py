"""Permutations without a sort, and minibatches that take equally many rows from each stratum."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejax.numerics.shuffle import minibatch_rows, permute

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def permutation() -> Callable[..., Any]:
    return jax.jit(lambda key, size: permute(jnp.arange(size, dtype=jnp.uint32), key, size), static_argnums=1)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 17, 31, 64, 100, 1000])
def test_permute_is_a_bijection(permutation: Callable[..., Any], size: int) -> None:
    for seed in range(5):
        assert sorted(permutation(jax.random.key(seed), size).tolist()) == list(range(size))


@pytest.fixture(scope="module", params=[16, 33])
def permutations(request: pytest.FixtureRequest) -> Any:
    """[20000, size], one row for each key."""
    index = jnp.arange(request.param, dtype=jnp.uint32)
    keys = jax.random.split(KEY, 20_000)
    return np.asarray(jax.jit(jax.vmap(lambda key: permute(index, key, index.size)))(keys)).astype(int)


def test_permute_sends_every_index_everywhere_equally_often(permutations: int) -> None:
    draws, size = permutations.shape
    counts = np.array([np.bincount(permutations[:, i], minlength=size) for i in range(size)])
    chi_squared = ((counts - draws / size) ** 2 / (draws / size)).sum()
    freedom = (size - 1) ** 2
    assert abs(chi_squared - freedom) < 4 * np.sqrt(2 * freedom)


def test_permute_scatters_neighbours_evenly(permutations: int) -> None:
    size = permutations.shape[1]
    apart = (permutations[:, 1:] - permutations[:, :-1]) % size
    share = np.bincount(apart.ravel(), minlength=size)[1:] / apart.size
    np.testing.assert_allclose(share, 1.0 / (size - 1), rtol=0.08)


@pytest.mark.slow
@pytest.mark.parametrize(("num_rows", "size", "num_strata"), [(24, 8, 4), (24, 8, 1), (20, 8, 2), (12, 12, 3)])
def test_an_epoch_takes_every_row_of_every_stratum_once(num_rows: int, size: int, num_strata: int) -> None:
    stratum = num_rows // num_strata
    orders = np.asarray(jax.jit(minibatch_rows, static_argnums=(1, 2, 3))(KEY, num_rows, size, num_strata))
    assert orders.shape == (-(-num_rows // size), num_strata, size // num_strata)
    for each in orders.swapaxes(0, 1).reshape(num_strata, -1):
        assert sorted(each[each < stratum]) == list(range(stratum))
        assert (each[stratum:] >= stratum).all()  # padding is at the end


def test_strata_have_orders_of_their_own() -> None:
    orders = np.asarray(minibatch_rows(KEY, 64, 64, 4))[0]
    assert len({tuple(order) for order in orders.tolist()}) == 4


def test_one_stratum_is_the_permutation_itself() -> None:
    whole = permute(jnp.arange(24, dtype=jnp.uint32), KEY, 24)
    np.testing.assert_array_equal(minibatch_rows(KEY, 24, 8).reshape(-1), whole)


def test_there_is_no_loop_whose_length_is_not_known() -> None:
    assert "while" not in str(jax.make_jaxpr(lambda key: minibatch_rows(key, 100, 20, 2))(KEY))
