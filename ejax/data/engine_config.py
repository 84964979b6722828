"""The config of an online data engine."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ejax.data.chunks import check_count
from ejax.data.samplers import check_seed
from ejax.data.task import DemonstrationTask


@dataclass(frozen=True)
class OnlineDataEngineCfg:
    """The options of an engine and of the task it runs.

    Raises:
        ValueError, TypeError: a value outside its range.
    """

    task: str | Callable[..., DemonstrationTask]
    """Called in the worker as ``task(**task_cfg)``. Given as ``"package.module:Name"``, only the worker imports it."""
    task_cfg: Mapping[str, Any] = field(default_factory=dict)
    buffer_size: int = 16
    """Rows, one episode each."""
    max_episode_steps: int = 300
    """Frames that a row holds. A longer episode is a failed attempt."""
    refill_threshold: int = 50
    """All rows are refilled after ``refill_threshold · buffer_size`` chunks were drawn, by all consumers together.
    What is drawn during a refill counts for the next. At least 1: endless refilling is not offered."""
    max_generation_attempts: int = 3
    """Consecutive attempts without a success after which the worker gives up."""
    initialization_timeout: float = 300.0
    """Time limit of ``start``, in s."""
    worker_timeout: float = 120.0
    """Time limit of one attempt, in s, after which the worker counts as hanging."""
    shutdown_timeout: float = 5.0
    """Time for the worker to end before it is killed, in s."""
    seed: int = 0
    """Attempt k of the task gets the k-th seed of this one."""

    def __post_init__(self) -> None:
        for name in ("buffer_size", "max_episode_steps", "refill_threshold", "max_generation_attempts"):
            check_count(name, getattr(self, name))
        for name in ("initialization_timeout", "worker_timeout", "shutdown_timeout"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} must be finite and above 0 s, got {getattr(self, name)}")
        check_seed(self.seed)
