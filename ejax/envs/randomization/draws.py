"""Drawing a number, and combining it with the MJCF's value."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.schema.messages import did_you_mean
from ejax.types import Array, Key

DrawDistribution: TypeAlias = Literal["uniform", "log_uniform", "gaussian"]
DrawOperation: TypeAlias = Literal["abs", "scale", "add"]
_CUT = 3.0
"""Standard deviations beyond which a gaussian draws nothing: every range has ends that can be checked."""


class Draw(NamedTuple):
    """
    x ~ U(low, high),  log x ~ U(log low, log high),  or x ~ N(low, high²) within 3 standard deviations
    value = x (abs),  MJCF's · x (scale),  MJCF's + x (add)
    """

    low: NDArray[np.float64]
    high: NDArray[np.float64]
    distribution: DrawDistribution
    operation: DrawOperation

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> Array:
        """Draw x, of a shape that the range's ends broadcast to."""
        low, high = (jnp.asarray(end, jnp.float32) for end in (self.low, self.high))
        if self.distribution == "gaussian":
            return low + high * jax.random.truncated_normal(key, -_CUT, _CUT, shape)
        if self.distribution == "log_uniform":
            return jnp.exp(jax.random.uniform(key, shape, minval=jnp.log(low), maxval=jnp.log(high)))
        return jax.random.uniform(key, shape, minval=low, maxval=high)

    def value(self, nominal: NDArray[np.float64], x: Array, level: Array | None) -> Array:
        """Return what ``x`` makes of the MJCF's value; at a curriculum's ``level``, so far on the way to it."""
        start = jnp.asarray(nominal, jnp.float32)
        value = {"abs": jnp.broadcast_to(x, start.shape), "scale": start * x, "add": start + x}[self.operation]
        return value if level is None else start + level * (value - start)

    def ends(self, nominal: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the lowest and the highest value, with the MJCF's own among them: a curriculum starts there."""
        low, high = self.low, self.high
        if self.distribution == "gaussian":
            low, high = self.low - _CUT * self.high, self.low + _CUT * self.high
        made = [
            {"abs": end + 0.0 * nominal, "scale": end * nominal, "add": end + nominal}[self.operation]
            for end in (low, high)
        ]
        return np.minimum(*made), np.maximum(*made)  # a negative value of the MJCF's turns them round


def read_draw(
    name: str,
    given: Any,
    operation: Any = "abs",
    distribution: Any = "uniform",
    shape: tuple[int, ...] = (),
    *,
    above: float = -np.inf,
) -> Draw:
    """Read a config's range: (low, high), or (mean, standard deviation) of a gaussian; each of ``shape``. Raises
    ValueError: not such a range, or its ends are not above ``above``."""
    check_choice("operation", operation, get_args(DrawOperation))
    check_choice("distribution", distribution, get_args(DrawDistribution))
    try:
        ends = np.asarray(given, np.float64)
    except (TypeError, ValueError):
        ends = np.zeros(0)
    what = "(mean, standard deviation)" if distribution == "gaussian" else "(low, high) with low <= high"
    if ends.shape != (2, *shape) or not np.isfinite(ends).all():
        numbers = "two numbers" if shape == () else f"two lists of {shape[0]} numbers"
        raise ValueError(f"{name}: got {given!r}; must be {numbers}, {what}")
    if (ends[1] < 0.0).any() if distribution == "gaussian" else (ends[0] > ends[1]).any():
        raise ValueError(f"{name}: got {given!r}; must be {what}")
    if distribution == "log_uniform" and (ends[0] <= 0.0).any():
        raise ValueError(f"{name}: got {given!r}, but log_uniform draws positive numbers; use a low > 0")
    if distribution != "gaussian" and (ends[0] <= above).any():
        raise ValueError(f"{name}: got {given!r}; must be > {above:g}")
    return Draw(ends[0], ends[1], distribution, operation)


def check_choice(name: str, given: Any, allowed: Sequence[str]) -> None:
    """Raise ValueError unless it is one of the allowed words."""
    if given not in allowed:
        raise ValueError(f"{name}: got {given!r}; allowed: {', '.join(allowed)}{did_you_mean(str(given), allowed)}")
