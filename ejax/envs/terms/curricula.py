"""Curricula of a velocity task: numbers of its commands, pushes or rewards that change in stages while the run goes on.

    by steps    the stage of a row is the last whose ``step`` is not above the control steps of the run
    by success  one stage up after an episode without a fall, one down after a fall
    by error    one stage up after an episode without a fall whose ‖c_xy − v_xy‖ was at most ``below`` on average, m/s;
                one down after a fall, or above ``above``

Every row counts its own control steps, which all make together, and judges its own episodes: what outlasts an episode
is in the row's state, so that a resumed run goes on exactly, on any number of devices.

Source: by steps, EmbodiChain 0.3.2's velocity tasks, whose numbers of a stage are likewise the task's own where the
stage does not name them. Stages of pushes and rewards, and those by success or error, are ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.core import FrozenDict

from ejax.envs.terms.commands import check_kind
from ejax.schema.frozen import freeze
from ejax.types import Array, Key, PyTree

Part = Literal["command", "push", "rewards"]
By = Literal["steps", "success", "error"]


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Stages of one part of a task: the task's own numbers are stage 0, ``stages[i]`` is stage i + 1."""

    of: Part
    stages: tuple[Mapping[str, Any], ...]
    """Changes of each: a number or range of ``CommandRanges`` or ``Push``, or the weight of a reward; and ``step``
    by steps: the control step of the run from which the stage holds."""
    by: By = "steps"
    below: float = 0.25
    above: float = float("inf")

    def __post_init__(self) -> None:
        for name, allowed in (("of", get_args(Part)), ("by", get_args(By))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be {' or '.join(allowed)}, got {getattr(self, name)!r}")
        if not isinstance(self.stages, list | tuple) or not all(isinstance(each, Mapping) for each in self.stages):
            raise ValueError(f"stages must be a list of {{name: number, …}}, got {self.stages!r}")
        object.__setattr__(self, "stages", freeze(self.stages))
        if not self.stages or not all(each.keys() - {"step"} for each in self.stages):
            raise ValueError("stages must have at least one, and each must change something")
        steps: list[Any] = [each.get("step") for each in self.stages]
        if self.by != "steps" and steps != [None] * len(steps):
            raise ValueError(f"stages have a step only by steps; by {self.by} a row's episodes decide: leave step out")
        whole = all(isinstance(step, int) and not isinstance(step, bool) and step >= 0 for step in steps)
        if self.by == "steps" and not (whole and steps == sorted(set(steps))):
            raise ValueError(f"step of each stage must be a whole number, each above the one before, got {steps}")
        check_kind("below", self.below, 0.0)
        check_kind("above", self.above, 0.0)
        if not 0.0 < self.below <= self.above:
            raise ValueError(f"below and above must be 0 < below <= above, got {self.below} and {self.above}")

    @property
    def names(self) -> set[str]:
        """Names of the numbers that change."""
        return set().union(*self.stages) - {"step"}

    def numbers(self, own: Mapping[str, Any], stage: Array) -> dict[str, Array]:
        """Look up the numbers of a stage, each [] or, of a range, [2]. ``own``: the task's."""
        stages = (FrozenDict(), *self.stages)
        rows = {name: [each.get(name, own[name]) for each in stages] for name in sorted(self.names)}
        return {name: jnp.asarray(np.array(row, np.float32))[stage] for name, row in rows.items()}

    def stage_after(self, stage: Array, fell: Array, error: Array) -> Array:
        """Return the stage after an episode; ``error``, m/s: the mean of its velocity error."""
        up = ~fell if self.by == "success" else ~fell & (error <= self.below)
        down = fell if self.by == "success" else fell | (error > self.above)
        return jnp.clip(stage + up.astype(jnp.int32) - down.astype(jnp.int32), 0, len(self.stages))


@struct.dataclass(kw_only=True)
class Progress:
    """The place of a row in its run. All but ``seed`` and ``error`` outlasts its episodes."""

    run_step: Array  # Control steps of the row since the run began, int32
    stage: dict[str, Array]  # Curriculum -> its stage, int32
    error: Array  # Sum over the episode of the linear velocity's error, m/s
    seed: Array  # [2] uint32: the key of the episode's start
    spot: PyTree = ()  # (level, column), int32, on a field of tiles

    @classmethod
    def begin(cls, curricula: Mapping[str, Stages], key: Key, spot: PyTree = ()) -> Self:
        zero, seed = jnp.zeros((), jnp.int32), jax.random.key_data(key)
        made = cls(run_step=zero, stage=dict.fromkeys(curricula, zero), error=jnp.zeros(()), seed=seed, spot=spot)
        return made._at_step(curricula)

    def count(self, curricula: Mapping[str, Stages]) -> Self:
        """Count one control step."""
        return replace(self, run_step=self.run_step + 1)._at_step(curricula)

    def judge(self, curricula: Mapping[str, Stages], error: Array, ended: Array, fell: Array, steps: Array) -> Self:
        """Add the step's velocity error; at an episode's end, after its ``steps``, move stages up or down."""
        total = self.error + error
        judged = {name: each.stage_after(self.stage[name], fell, total / steps) for name, each in curricula.items()}
        stage = {
            name: self.stage[name] if each.by == "steps" else jnp.where(ended, judged[name], self.stage[name])
            for name, each in curricula.items()
        }
        return replace(self, stage=stage, error=total)

    def numbers(self, curricula: Mapping[str, Stages], part: Part, own: Mapping[str, Any]) -> dict[str, Array]:
        """Look up the numbers of one part that hold now and change at all. ``own``: the task's."""
        now: dict[str, Array] = {}
        for name, each in curricula.items():
            if each.of == part:
                now |= each.numbers(own, self.stage[name])
        return now

    def _at_step(self, curricula: Mapping[str, Stages]) -> Self:
        now = dict(self.stage)
        for name, each in curricula.items():
            if each.by == "steps":
                steps = jnp.array([stage["step"] for stage in each.stages])
                now[name] = jnp.sum(steps <= self.run_step).astype(jnp.int32)
        return replace(self, stage=now)
