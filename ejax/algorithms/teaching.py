"""Options that name teachers, and what PPO and GRPO need of them."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self, TypeVar

from flax.core import FrozenDict
from pydantic import BeforeValidator, Field, PositiveFloat, model_validator

from ejax.optim import ScheduleConfig, bind_schedule
from ejax.schema.frozen import Kwargs, PathText, StrictModel
from ejax.schema.problems import Problem

T = TypeVar("T")
Listed = Annotated[T, BeforeValidator(lambda x: tuple(x) if isinstance(x, list) else x)]
LossKind = Literal["kl", "nll", "mse"]


class Responsibility(StrictModel):
    """The rows that a teacher is responsible for: those of some environments, or those where numbers of the observation
    lie in a range. Of several ``entries`` the range is of their Euclidean length, such as a command's."""

    envs: Listed[tuple[float, float]] | None = None
    """From this share of the environments on, and up to that: ``[0, 0.5]`` is the first half."""
    obs: str | None = None
    """Dotted path of the part of the observation that has the numbers. None: all of it."""
    entries: Listed[tuple[int, ...]] = ()
    """Their places in that part, from 0."""
    at_least: float | None = None
    """The lowest value in the range. None: no limit."""
    below: float | None = None
    """The lowest value above the range. None: no limit."""

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.envs is None) == (not self.entries):
            raise ValueError("set either envs or entries of the observation with at_least, below or both")
        if self.envs is not None and not 0.0 <= self.envs[0] < self.envs[1] <= 1.0:
            raise ValueError(f"envs: got {list(self.envs)}; they are shares, such as [0, 0.5] and [0.5, 1]")
        limits = [self.at_least, self.below]
        if (limits == [None, None]) == bool(self.entries) or min(self.entries, default=0) < 0:
            raise ValueError(
                f"got entries {list(self.entries)} between {limits}; entries ≥ 0 need a limit, and envs none"
            )
        return self


class TeacherConfig(StrictModel):
    """One teacher: ``algorithm.cfg`` of ``distill``, or an entry of ``teachers``."""

    teacher: PathText | None = None
    """A run's folder (its best checkpoint), a checkpoint's, that of an export, or EmbodiChain's file ``….pt``."""
    teacher_obs: str | None = None
    """The part of the observation, by dotted path, that the teacher sees as its whole one. None: all of it."""
    teacher_policy: Kwargs = Field(default_factory=FrozenDict)
    """The section ``policy`` of the teacher, where it is a ``.pt``: the file does not describe its networks. Empty:
    the student's."""
    when: Responsibility | None = None
    """In ``teachers``: the rows that it is responsible for. The last entry has none: it has all that are left."""


class TeachersConfig(TeacherConfig):
    """One teacher, or several."""

    teachers: Listed[tuple[TeacherConfig, ...]] = ()
    """Several, in place of ``teacher``: of each row, the first one whose ``when`` holds is imitated."""
    loss: LossKind = "kl"
    """``kl`` hands on how much the teacher explores; ``mse`` leaves the standard deviation as it is."""


class DistillationConfig(TeachersConfig):
    """``algorithm.cfg.distillation`` of ``ppo`` and ``grpo``: a loss that imitates a teacher besides the rewards."""

    coef: PositiveFloat = 1.0
    """Weight of the loss at the first update."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Its change from update to update, as ``lr_scheduler``'s. Without a name: it stays."""
    until_success: PositiveFloat | None = Field(default=None, le=1.0)
    """Multiply it by 1 − success/this, at least 0, the success of the last 100 episodes. None: do not."""


def teacher_problems(options: TeachersConfig | None, key: str) -> Iterator[Problem]:
    """Find problems of the teachers' options, which ``key`` has."""
    if options is None:
        return
    if options.when is not None:
        yield Problem(f"{key}.when", "is for an entry of teachers; leave it out")
    if (options.teacher is None) == (not options.teachers):
        text = "is missing: a student needs a teacher" if options.teacher is None else "got one besides teachers"
        yield Problem(f"{key}.teacher", f"{text}; set {key}.teacher=RUN, or several as {key}.teachers")
    for i, each in enumerate(options.teachers):
        last = i == len(options.teachers) - 1
        if each.teacher is None:
            yield Problem(f"{key}.teachers.{i}.teacher", "is missing; name a run's folder, a checkpoint or an export")
        if last != (each.when is None):
            text = "got a condition, but the last teacher has all rows that are left; leave it out"
            other = "is missing, so no later teacher would be asked; set envs, or entries with a limit"
            yield Problem(f"{key}.teachers.{i}.when", text if last else other)


def _bind(options: Any, num_updates: int) -> Any:
    bound: dict[str, Any] = {"lr_scheduler": bind_schedule(options.lr_scheduler, num_updates)}
    if (section := options.distillation) is not None:
        schedule = bind_schedule(section.schedule, num_updates)
        bound["distillation"] = section.model_copy(update={"schedule": schedule})
    return options.model_copy(update=bound)


TAUGHT_FIELDS: dict[str, Any] = {"taught": lambda options: options.distillation, "bind": _bind}
"""Fields of an ``Algorithm`` whose options have ``distillation``."""
