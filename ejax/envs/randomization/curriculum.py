"""The share of everything that is drawn: a level from 0, the MJCF as it is, to 1, all of each range."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax.numpy as jnp

from ejax.envs.randomization.draws import check_choice
from ejax.types import Array

By = Literal["steps", "success"]


@dataclass(frozen=True)
class Curriculum:
    """A row's level; rows know nothing of each other.

        by steps:    level = min(1, start + control steps of the row / num_steps)
        by success:  after each of its episodes, + raise_by if it was one, − lower_by if not, within 0 … 1

    Args:
        start: the level of a row that is new.
        num_steps: control steps of a row, that is a run's environment steps over its ``num_envs``; by steps only.
        raise_by, lower_by: by success only.
    """

    by: By = "success"
    start: float = 0.0
    num_steps: int = 10_000
    raise_by: float = 0.05
    lower_by: float = 0.05

    def __post_init__(self) -> None:
        check_choice("by", self.by, get_args(By))
        _check_share("start", self.start)
        _check_share("raise_by", self.raise_by)
        _check_share("lower_by", self.lower_by)
        if isinstance(self.num_steps, bool) or not isinstance(self.num_steps, int) or self.num_steps < 1:
            raise ValueError(f"num_steps: got {self.num_steps!r}; must be an integer >= 1")

    def after(self, level: Array, num_steps: Array, ended: Array, success: Array) -> Array:
        """The level after a control step.

        Args:
            num_steps: of the row so far, this one counted.
            ended: whether the episode did, with ``success``.
        """
        if self.by == "steps":
            return jnp.minimum(1.0, self.start + num_steps.astype(jnp.float32) / self.num_steps)
        change = jnp.where(success, self.raise_by, -self.lower_by)
        return jnp.where(ended, jnp.clip(level + change, 0.0, 1.0), level).astype(jnp.float32)


def _check_share(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{name}: got {value!r}; must be within 0 … 1")
