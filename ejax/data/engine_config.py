"""The config of an online data engine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias, get_args

from ejax.data.checks import check_choice, check_count, check_seed
from ejax.schema.configclass import ConfigClass, MayChange, Range
from ejax.schema.tables import tables_beside

if TYPE_CHECKING:
    from ejax.data.task import DemonstrationTask, EpisodeSpec

RefillPolicy = Literal["sample_threshold", "manual"]
Count: TypeAlias = Annotated[int, Range(ge=1)]
Seconds: TypeAlias = Annotated[float, Range(gt=0.0, le=1e9)]

FROM_GYM_CONFIG = "ejax.config.embodichain.demonstrations:make_task"
"""Task that the worker runs for a ``gym_config``; by name, since nothing here needs more than NumPy."""
SIDE_BY_SIDE = 16
"""Episodes made side by side where a gym config has no ``num_envs``: there EmbodiChain makes one."""
_WIDTHS = {"state_dim": "obs/robot/qpos", "action_dim": "actions"}
_LACKING: dict[str, dict[str, str]] = tables_beside(__file__)
OF_EMBODICHAIN_ONLY = (*_LACKING["refused"], *_LACKING["without_effect"])
"""The fields of EmbodiChain's class that this one lacks."""


@dataclass(frozen=True)
class OnlineDataEngineCfg(ConfigClass):
    """The options of an engine and of what demonstrates: ``task``, or an EmbodiChain ``gym_config``. Of a config, they
    are the section ``data.engine``.

    Raises:
        ValueError, TypeError: a value outside its range; neither ``task`` nor ``gym_config``, or both.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    task: str | Callable[..., Any] | None = None
    """Called in the worker as ``task(**task_cfg)``. Given as ``"package.module:Name"``, only the worker imports it."""
    task_cfg: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Arguments of ``task``."""
    buffer_size: Count = 16
    """Rows, one episode each: those that are drawn from at any time."""
    max_episode_steps: Count = 300
    """Frames that a row holds. A longer episode is a failed attempt. That of ``gym_config`` wins, as in EmbodiChain."""
    refill_threshold: Count = 50
    """All rows are refilled after ``refill_threshold · buffer_size`` chunks were drawn, by all consumers together.
    What is drawn during a refill counts for the next. At least 1: endless refilling is not offered."""
    refill_policy: RefillPolicy = "sample_threshold"
    """``manual``: rows are refilled where the owner calls ``request_refill``, and never else."""
    episode_sample_budget: Count | None = None
    """Chunks that may be drawn of one episode, by all consumers together. None: without end. Where the episodes have
    none left, a draw raises DataBudgetExhaustedError; it requests no refill."""
    episode_sample_hard_limit: Count | None = None
    """The most that ``episode_sample_budget`` may be."""
    lifecycle_event_capacity: int = 0
    """Events that ``drain_lifecycle_events`` has not taken yet, after which the worker waits. 0: none are kept. Else at
    least 2 · ``buffer_size``."""
    max_generation_attempts: Count = 3
    """Consecutive attempts without a success after which the worker gives up."""
    initialization_timeout: MayChange[Seconds] = 300.0
    """Time limit of ``start``, in s."""
    worker_timeout: MayChange[Seconds] = 120.0
    """Time limit of one attempt, in s, after which the worker counts as hanging; of the first one, which may compile,
    ``initialization_timeout`` is the limit."""
    shutdown_timeout: Seconds = 5.0
    """Time for the worker to end before it is killed, in s."""
    seed: Annotated[int, Range(ge=0)] = 0
    """Attempt k of the task gets the k-th seed of this one. Of a config, 0 means ``data.seed``."""
    gym_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """EmbodiChain's, already loaded: what demonstrates does so in this environment, ``num_envs`` episodes side by side
    (where it has none 16, or ``buffer_size`` if that is less). See docs/data.md for the ids."""
    action_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Arguments of what demonstrates in ``gym_config``: an expert's ``noise`` and ``variety``, or a custom
    function, ``{"create_demo_action_list": "package.module:name"}``, and what that takes."""
    state_dim: Count | None = None
    """Width of ``obs/robot/qpos``, which the worker checks. None: as the environment has it."""
    action_dim: Count | None = None
    """Width of ``actions``, likewise."""
    buffer_device: Literal["cpu"] = "cpu"
    """Only there can processes share it; ``ejax.data.prefetch`` puts batches onto a device."""

    @classmethod
    def from_embodichain(
        cls, fields: Mapping[str, Any], task: "str | Callable[..., DemonstrationTask] | None" = None, **options: Any
    ) -> Self:
        """Make the options that EmbodiChain 0.3.2's class of this name has; ``task`` in place of its ``gym_config``.

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

    @property
    def demonstrator(self) -> "tuple[str | Callable[..., DemonstrationTask], dict[str, Any]]":
        """Return what the worker calls, and with which arguments."""
        if self.task is not None:
            return self.task, dict(self.task_cfg)
        taken = {"gym_config": dict(self.gym_config), "action_config": dict(self.action_config)}
        side_by_side = min(SIDE_BY_SIDE, self.buffer_size)
        return FROM_GYM_CONFIG, taken | {"max_episode_steps": self.max_episode_steps, "num_envs": side_by_side}

    def named(self) -> Self:
        """Return the options with the name of what demonstrates, without its code and arguments."""
        task, _ = self.demonstrator
        name = task if isinstance(task, str) else f"{task.__module__}:{getattr(task, '__qualname__', repr(task))}"
        return self.replace(task=name, task_cfg={}, gym_config={}, action_config={})

    def check_widths(self, spec: "EpisodeSpec") -> None:
        """Raise ValueError if episodes have not the widths given."""
        for name, path in _WIDTHS.items():
            given, shape = getattr(self, name), spec.frames.get(path, (None, ""))[0]
            if given is not None and shape != (given,):
                there = f"it has {', '.join(spec.frames)}" if shape is None else f"{path} is {list(shape)}"
                raise ValueError(f"{name} is {given}, the width of {path}, but {there}; leave {name} out")

    def _check_source(self) -> None:
        if (self.task is None) == (not self.gym_config):
            given = "neither" if self.task is None else "both"
            raise ValueError(f"set either task or gym_config; got {given}")
        if not isinstance(self.gym_config, Mapping) or not isinstance(self.action_config, Mapping):
            raise TypeError("gym_config and action_config are mappings, as json.load gives them, not file paths")
        if self.task is None and self.task_cfg:
            text = "task_cfg holds the arguments of task; the expert of a gym_config takes action_config"
            raise ValueError(text)
        if self.task is not None and self.action_config:
            raise ValueError("action_config holds the arguments of a gym_config's expert; a task takes task_cfg")
        if self.buffer_device != "cpu":
            raise ValueError(
                f"buffer_device is {self.buffer_device!r}, but the buffer is in memory that processes share, on the "
                f"cpu; ejax.data.prefetch puts batches onto a device"
            )

    def __post_init__(self) -> None:
        self._check_source()
        env = _section(self.gym_config, "env")
        extensions = _section(env, "extensions")
        limits = extensions | dict(self.gym_config)
        limit = limits.get("max_episode_steps") or limits.get("episode_length")
        object.__setattr__(self, "max_episode_steps", limit or self.max_episode_steps)
        num_envs = self.gym_config.get("num_envs", env.get("num_envs"))
        if isinstance(num_envs, int) and isinstance(self.buffer_size, int) and num_envs > self.buffer_size:
            raise ValueError(
                f"gym_config has num_envs {num_envs}, episodes that are made side by side, and buffer_size is "
                f"{self.buffer_size}; it must be at least that"
            )
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type == Count or (each.type == Count | None and value is not None):
                check_count(each.name, value)
            if each.type in (Seconds, MayChange[Seconds]) and value not in Range(gt=0.0, le=1e9):
                raise ValueError(f"{each.name} must be finite and above 0 s, got {value}")
        check_seed(self.seed)
        check_choice("refill_policy", self.refill_policy, get_args(RefillPolicy))
        budget, hard_limit = self.episode_sample_budget, self.episode_sample_hard_limit
        if hard_limit is not None and (budget is None or budget > hard_limit):
            given = "without episode_sample_budget" if budget is None else f"below episode_sample_budget, {budget}"
            text = f"episode_sample_hard_limit is {hard_limit}, {given}; set both, the budget at most the limit"
            raise ValueError(text)
        if self.lifecycle_event_capacity != 0:
            check_count("lifecycle_event_capacity", self.lifecycle_event_capacity)
            if self.lifecycle_event_capacity < 2 * self.buffer_size:
                raise ValueError(
                    f"lifecycle_event_capacity must be 0 or at least 2 · buffer_size, {2 * self.buffer_size}: each "
                    f"episode may go and another come at once; got {self.lifecycle_event_capacity}"
                )


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a section, {} where it is not one: the worker reports that with the rest."""
    section = config.get(name)
    return dict(section) if isinstance(section, Mapping) else {}


def embodichain_field(name: str, value: Any) -> tuple[Literal["used", "without effect", "refused"], str]:
    """Judge a field of EmbodiChain 0.3.2's ``OnlineDataEngineCfg``: its use here, and the reason."""
    if name in _LACKING["without_effect"]:
        return "without effect", _LACKING["without_effect"][name]
    if name in _LACKING["refused"]:
        return "refused", _LACKING["refused"][name]
    if name in OnlineDataEngineCfg.__dataclass_fields__:
        return "used", ""
    return "refused", "EmbodiChain's OnlineDataEngineCfg has no such field"
