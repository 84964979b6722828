"""The config of an online data engine."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from ejax.data.chunks import check_count
from ejax.data.samplers import check_seed
from ejax.data.task import DemonstrationTask
from ejax.schema.configclass import ConfigClass
from ejax.schema.plain_files import tables_beside

RefillPolicy = Literal["sample_threshold", "manual"]

_LACKING: dict[str, dict[str, str]] = tables_beside(__file__)
OF_EMBODICHAIN_ONLY = (*_LACKING["refused"], *_LACKING["without_effect"])
"""The fields of EmbodiChain's class that this one lacks."""


@dataclass(frozen=True)
class OnlineDataEngineCfg(ConfigClass):
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
    refill_policy: RefillPolicy = "sample_threshold"
    """``manual``: rows are refilled where the owner calls ``request_refill``, and never else."""
    episode_sample_budget: int | None = None
    """Chunks that may be drawn of one episode, by all consumers together. None: without end. Where the episodes have
    none left, a draw raises DataBudgetExhaustedError; it requests no refill."""
    episode_sample_hard_limit: int | None = None
    """The most that ``episode_sample_budget`` may be."""
    lifecycle_event_capacity: int = 0
    """Events that ``drain_lifecycle_events`` has not taken yet, after which the worker waits. 0: none are kept. Else at
    least 2 · ``buffer_size``."""
    max_generation_attempts: int = 3
    """Consecutive attempts without a success after which the worker gives up."""
    initialization_timeout: float = 300.0
    """Time limit of ``start``, in s."""
    worker_timeout: float = 120.0
    """Time limit of one attempt, in s, after which the worker counts as hanging; of the first one, which may compile,
    ``initialization_timeout`` is the limit."""
    shutdown_timeout: float = 5.0
    """Time for the worker to end before it is killed, in s."""
    seed: int = 0
    """Attempt k of the task gets the k-th seed of this one."""

    @classmethod
    def from_embodichain(
        cls, fields: Mapping[str, Any], task: str | Callable[..., DemonstrationTask], **options: Any
    ) -> Self:
        """Make the options that EmbodiChain 0.3.2's class of this name has, for a task of ejax's.

        Args:
            fields: by name. Those without effect are left out.
            options: those that EmbodiChain's class lacks.

        Raises ValueError for fields that mean something here and cannot be honoured; see ``embodichain_field``.
        """
        verdicts = {name: embodichain_field(name, value) for name, value in fields.items()}
        if refused := [f"{name}: {reason}" for name, (status, reason) in verdicts.items() if status == "refused"]:
            raise ValueError("; ".join(refused))
        used = {name: value for name, value in fields.items() if verdicts[name][0] == "used"}
        return cls(task, **used, **options)

    def __post_init__(self) -> None:
        for name in ("buffer_size", "max_episode_steps", "refill_threshold", "max_generation_attempts"):
            check_count(name, getattr(self, name))
        for name in ("initialization_timeout", "worker_timeout", "shutdown_timeout"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} must be finite and above 0 s, got {getattr(self, name)}")
        check_seed(self.seed)
        if self.refill_policy not in get_args(RefillPolicy):
            raise ValueError(f"no refill_policy {self.refill_policy!r}; there is {', '.join(get_args(RefillPolicy))}")
        check_budget(self.episode_sample_budget, self.episode_sample_hard_limit)
        if self.lifecycle_event_capacity != 0:
            check_count("lifecycle_event_capacity", self.lifecycle_event_capacity)
            if self.lifecycle_event_capacity < 2 * self.buffer_size:
                raise ValueError(
                    f"lifecycle_event_capacity must be 0 or at least 2 · buffer_size, {2 * self.buffer_size}: each "
                    f"episode may go and come at once; got {self.lifecycle_event_capacity}"
                )


def check_budget(budget: int | None, hard_limit: int | None) -> None:
    """Raise unless these may be ``episode_sample_budget`` and ``episode_sample_hard_limit``."""
    for name, value in (("episode_sample_budget", budget), ("episode_sample_hard_limit", hard_limit)):
        if value is not None:
            check_count(name, value)
    if hard_limit is not None and (budget is None or budget > hard_limit):
        given = "without episode_sample_budget" if budget is None else f"below episode_sample_budget, {budget}"
        raise ValueError(f"episode_sample_hard_limit is {hard_limit}, {given}; give both, the budget at most the limit")


def embodichain_field(name: str, value: Any) -> tuple[Literal["used", "without effect", "refused"], str]:
    """Judge a field of EmbodiChain 0.3.2's ``OnlineDataEngineCfg``: its use here, and the reason."""
    if name in _LACKING["without_effect"]:
        return "without effect", _LACKING["without_effect"][name]
    if name == "buffer_device" and value == "cpu":  # the one of its values that changes nothing
        return "without effect", "no effect: the buffer is there"
    if name in _LACKING["refused"]:
        return "refused", _LACKING["refused"][name]
    if name in OnlineDataEngineCfg.__dataclass_fields__:
        return "used", ""
    return "refused", "EmbodiChain's OnlineDataEngineCfg has no such field"
