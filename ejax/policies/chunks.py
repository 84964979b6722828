"""Chunks of actions on a robot that does not wait: when the next one is asked for, when it is there, how it goes on.

A chunk [H, A] is computed from the observation of the control step that asks for it, and is there d steps later; its
action i is for the i-th step after the question. Steps are an episode's, from 0 on.

    sync      asks when s actions of a chunk are done, holds for d steps, and begins at the chunk's action 0
    async     asks in every s-th step, d ≤ s ≤ H − d, and goes over to the chunk's action d as soon as it is there
    ensemble  as async; an action is the mean of all chunks that have one for this step, weighted by exp(−m·i), the
              oldest's i is 0. Source: ACT (Zhao et al. 2023)
    rtc       as async; the chunk is computed to continue the plan. Source: real-time chunking (Black et al. 2025)

It needs NumPy alone; a program gives ``numpy=jax.numpy`` and any leading axes [...].
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

METHODS = ("sync", "async", "ensemble", "rtc")
GUIDANCE = 5.0
"""β: the most that rtc multiplies a difference from the plan by (Black et al. 2025)."""


class Plan(NamedTuple):
    """The actions ahead of a robot [..., H, A], of this step the first; of how many chunks each is made [..., H], 0:
    there is none; the action before [..., A]; the number of this step [...]."""

    actions: Any
    count: Any
    last: Any
    step: Any


@dataclass(frozen=True)
class Execution:
    """A method and its numbers. Raises ValueError: a chunk is too short for them.

    Args:
        horizon: H. latency: d. every: s; None: the larger of d and H / 2, of ensemble that of d and 1.
        keeps: for each number of an action: a step without one repeats the last (otherwise it is 0).
        decay: m of ensemble. guidance: β of rtc.
    """

    method: str
    horizon: int
    latency: int = 0
    every: int | None = None
    keeps: tuple[bool, ...] = (False,)
    decay: float = 0.01
    guidance: float = GUIDANCE

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"no way to execute chunks '{self.method}'; there is {', '.join(METHODS)}")
        waits = self.method == "sync"
        least, most = (1, self.horizon) if waits else (max(1, self.latency), self.horizon - self.latency)
        if self.latency < 0 or not least <= self.steps <= most:
            text = f"{self.method} of chunks of {self.horizon} actions, {self.latency} steps late"
            how = f"{least} … {most}" if self.latency >= 0 and least <= most else "none: the latency is out of range"
            raise ValueError(f"{text}, got one in {self.steps} steps; allowed: {how}")

    @property
    def steps(self) -> int:
        """s: the actions that are executed of a chunk."""
        least = 1 if self.method == "ensemble" else self.horizon // 2
        return max(self.latency, least) if self.every is None else self.every

    @property
    def period(self) -> int:
        """Steps from one question to the next."""
        return self.steps + self.latency * (self.method == "sync")

    @property
    def weights(self) -> NDArray[np.float32]:
        """rtc's [H], equation 5: 1 for the d actions that are executed meanwhile, then less, 0 past the plan's end."""
        left, d, i = self.horizon - self.steps, self.latency, np.arange(self.horizon)
        c = np.clip((left - i) / (left - d + 1), 0.0, 1.0)
        return np.where(i < d, 1.0, c * np.expm1(c) / math.expm1(1.0)).astype(np.float32)

    def first(self, rows: tuple[int, ...], num_actions: int, numpy: Any = np) -> Plan:
        """Make the plan of an episode's start, without an action."""
        actions = numpy.zeros((*rows, self.horizon, num_actions))
        return Plan(actions, 0 * actions[..., 0].astype(np.int32), 0 * actions[..., 0, :], numpy.zeros(rows, np.int32))

    def arrives(self, step: Any) -> Any:
        """Return whether a chunk comes into use in this step."""
        return (step >= self.latency) & ((step - self.latency) % self.period == 0)

    def is_seam(self, step: Any) -> Any:
        """Return whether the actions of this step and the one before are of different chunks; a hold counts as one."""
        holds = (self.method == "sync") & (step % self.period == 0)
        return (self.arrives(step) | holds) & (step > self.latency)

    def accept(self, plan: Plan, chunk: Any, numpy: Any = np) -> Plan:
        """Take ``chunk`` [..., H, A] into the plan where it arrives: what is late of it is dropped."""
        waits, there, i = self.method == "sync", self.arrives(plan.step)[..., None], np.arange(self.horizon)
        late, num_actions = (0, self.steps) if waits else (self.latency, self.horizon - self.latency)
        share = 1.0  # of the chunk, in each action
        if self.method == "ensemble":  # exp(−m·n) / Σ_{i ≤ n} exp(−m·i)
            share = (1.0 / sum(np.exp(self.decay * n) * (n <= plan.count) for n in i))[..., None]
        else:  # nothing of the former plan is left
            plan = plan._replace(count=numpy.where(there, 0, plan.count))
        takes = there & np.broadcast_to(i < num_actions, plan.count.shape)
        mixed = plan.actions + share * (_ahead(chunk, late, numpy) - plan.actions)
        return plan._replace(actions=numpy.where(takes[..., None], mixed, plan.actions), count=plan.count + takes)

    def act(self, plan: Plan, numpy: Any = np) -> tuple[Any, Plan]:
        """Return this step's action [..., A], and the plan after it."""
        held = numpy.where(np.broadcast_to(self.keeps, plan.last.shape), plan.last, 0.0)
        action = numpy.where(plan.count[..., :1] > 0, plan.actions[..., 0, :], held)
        count = _ahead(plan.count[..., None], 1, numpy)[..., 0]
        return action, Plan(_ahead(plan.actions, 1, numpy), count, action, plan.step + 1)


def _ahead(x: Any, steps: int, numpy: Any) -> Any:
    """Drop the first of [..., H, A]; zeros follow the last."""
    return numpy.concatenate([x[..., steps:, :], numpy.zeros_like(x[..., :steps, :])], axis=-2)
