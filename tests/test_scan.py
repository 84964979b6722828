"""Scans of short steps: the same numbers in both forms, each on its platform."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejax.numerics.scan import short_steps

XS = jnp.sin(jnp.arange(36.0)).reshape(18, 2)


def decay(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    carry = 0.9 * carry + x
    return carry, carry


@pytest.mark.parametrize("form", [None, "as_on_a_gpu"])
@pytest.mark.parametrize("reverse", [False, True])
def test_it_is_a_scan(request: pytest.FixtureRequest, reverse: bool, form: str | None) -> None:
    if form is not None:
        request.getfixturevalue(form)
    expected = jax.lax.scan(decay, jnp.zeros(2), XS, reverse=reverse)
    chex.assert_trees_all_equal(short_steps(decay, jnp.zeros(2), XS, reverse=reverse), expected)


@pytest.mark.parametrize(("platform", "trips"), [("cpu", 18), ("cuda", 2)])
def test_a_gpu_takes_several_steps_in_each_trip(platform: str, trips: int) -> None:
    traced = jax.jit(lambda xs: short_steps(decay, jnp.zeros(2), xs)).trace(XS)
    assert f"dense<{trips}> : tensor<i32>" in traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_it_has_a_scans_gradient() -> None:
    through = [jax.grad(lambda xs: f(decay, jnp.zeros(2), xs)[1].sum())(XS) for f in (short_steps, jax.lax.scan)]  # noqa: B023
    np.testing.assert_array_equal(*through)
