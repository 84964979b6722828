"""A robot's actions from chunks, which a thread computes meanwhile. Used by ``serve_client`` and ``robot_loop``.

It needs NumPy and ``ejax/policies/chunks.py``, a file that needs NumPy alone: copy both to a robot that has no ejax.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ejax.policies.chunks import Execution


class ChunkPlayer:
    """An executor for one robot: called in each control step, it gives an action, while a thread computes chunks. Where
    one takes longer than ``latency`` steps, the call waits for it. A context manager.

    Args:
        infer: an observation, the plan [H, A] to continue and its weights [H] (None but for rtc) to a chunk [H, A].
        low, high: [A], finite bounds of an action, which it is clipped to.
    """

    def __init__(self, rule: Execution, infer: Callable[..., Any], low: ArrayLike, high: ArrayLike) -> None:
        self.rule, self._infer, self._bounds = rule, infer, (np.asarray(low, float), np.asarray(high, float))
        self._pool = ThreadPoolExecutor(1, "ejax-chunk")
        self._chunk: Future[Any] = Future()
        self.largest_jump = 0.0
        """The largest change of a number of the action at a seam, in ranges of its bounds."""
        self.reset()

    def reset(self) -> None:
        """Begin an episode."""
        self._plan = self.rule.first((), len(self._bounds[0]))

    def __call__(self, obs: Any) -> NDArray[np.float64]:
        rule, plan, before = self.rule, self._plan, np.clip(self._plan.last, *self._bounds)
        step = int(plan.step)
        if rule.latency and rule.arrives(step):  # before the next one is asked for, which goes on from it
            plan = rule.accept(plan, self._chunk.result())
        if step % rule.period == 0:
            goes_on = rule.method == "rtc" and plan.count[0] > 0
            given = (plan.actions, rule.weights) if goes_on else (None, None)
            self._chunk = self._pool.submit(self._infer, obs, *given)
        if not rule.latency and rule.arrives(step):
            plan = rule.accept(plan, self._chunk.result())
        action, self._plan = rule.act(plan)
        action = np.clip(action, *self._bounds)
        if rule.is_seam(step):
            jump = np.abs(action - before) / (self._bounds[1] - self._bounds[0])
            self.largest_jump = max(self.largest_jump, float(jump.max()))
        return action

    def __enter__(self) -> "ChunkPlayer":
        return self

    def __exit__(self, *raised: object) -> None:
        self._pool.shutdown(cancel_futures=True)
