"""The order of a step (``Task.step``), of every task.

    1  act                    the action becomes the control of drives or actuators, and moves the physics for one
                              control period
    2  update                 what else happens then: kept numbers, markers, pushes, the next command
    3  apply_interval_events  interval events that are due
    4  observe_noisy          the observation of the world after it
    5  outcome                success, failure, an early end; neither of the first two for a world that is not finite
    6  total                  base reward + Σ weight·term, of the world before and after
    7  end                    terminated: success or failure; truncated: an early end, the time limit, a world that is
                              not finite

Differs from mjlab: interval events come before the ends, so that a fall by a push ends its own step.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flax import struct

from ejax.schema.paths import unique
from ejax.types import Array, PyTree


@struct.dataclass(kw_only=True)
class Snapshot:
    """A state and what led there: the world of a task without MuJoCo, whose own code knows where its numbers are."""

    state: Any  # Arrays only, with ``episode_step``
    executed: Any = None  # [A]: the last action as it was done; None at the step's beginning
    before: Any = None  # The world before the last control step; None at an episode's start, and in events and actions
    obs: PyTree = None
    """The observation of ``state``, where terms are computed from it; computed again, its last bits may be others."""
    info: Mapping[str, Array] = struct.field(default_factory=dict)
    """``success`` and ``fail`` of this step, where rewards are computed."""

    @property
    def action(self) -> Any:
        """[A]: the last one, as the state has it, zeros at the start; where it has none, as it was done."""
        return vars(self.state).get("action", self.executed)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Ends of a step: all of them, or those of one term of kind ``terminations``."""

    success: Array | None = None
    """bool; ends the episode, with no value after it, as does ``fail``. None: the task has no notion of success."""
    fail: Array | None = None  # None: never
    truncated: Array | None = None
    """bool: an early end with a value after it; the time limit is not included. None: never."""
    reward: Array | None = None  # Base reward, to which the terms are added. None: 0.
    metrics: dict[str, Array] = field(default_factory=dict)


def join_outcomes(outcomes: Iterable[Outcome]) -> Outcome:
    """Join outcomes: any of them ends the episode; base rewards add up."""
    whole = Outcome()
    # None stays None: a task without a notion of success logs none
    for i, each in enumerate(outcomes):
        # two terms may measure the same
        names = {name: f"{name}_{i}" if name in whole.metrics else name for name in each.metrics}
        whole = Outcome(
            success=_joined(whole.success, each.success),
            fail=_joined(whole.fail, each.fail),
            truncated=_joined(whole.truncated, each.truncated),
            reward=_joined(whole.reward, each.reward, operator.add),
            metrics=unique((*whole.metrics.items(), *((names[k], x) for k, x in each.metrics.items())), "metrics"),
        )
    return whole


def _joined(one: Array | None, other: Array | None, join: Callable[..., Array] = operator.or_) -> Array | None:
    return other if one is None else one if other is None else join(one, other)
