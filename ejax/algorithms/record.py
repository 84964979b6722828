"""The description of an algorithm for the assembly, at the end of its file. A config names one of your own by
``algorithm.name: package.module:ALGORITHM``; ``docs/tutorials/03_own_algorithm.py`` has the least: ``Config`` and
``update``."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import optax
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from pydantic import BaseModel

from ejax.optim import bind_schedule, make_optimizer
from ejax.schema.problems import Problem
from ejax.types import Env, HostEnv, Params, Policy, PolicyWithMemory, PyTree, Rollout


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """The facts about a run that an algorithm's options are judged by."""

    num_envs: int
    buffer_size: int
    """Steps per environment and update, T."""
    policy: str
    """The policy's registered name."""
    distributed: bool = False
    """Several devices have ``num_envs`` each."""
    shared_by: str | None = None
    """The key by which several devices, processes or members share the program. None: it is for one device."""

    @property
    def rows(self) -> int:
        """Rows of one rollout on one device."""
        return self.buffer_size * self.num_envs

    @property
    def rows_text(self) -> str:
        return f"a rollout has {self.rows} rows (buffer_size {self.buffer_size} · num_envs {self.num_envs})"

    def too_many(self, option: str, count: int) -> Problem:
        """Report that the ``count`` of an option is more than there are rows."""
        text = f"got {count}, but {self.rows_text}; use at most {self.rows}: algorithm.cfg.{option}={self.rows}"
        return Problem(f"algorithm.cfg.{option}", text)


class Teacher(NamedTuple):
    """A trained policy that another one learns from."""

    policy: Policy
    params: Params
    obs: str | None = None
    """Dotted path of the part of the observation that it sees. None: all of it."""


@dataclass(frozen=True, kw_only=True)
class ResetPolicy:
    """The starts of a rollout's episodes, where an algorithm chooses them."""

    restart: bool = False
    """New episodes in every rollout."""
    group_size: int = 1
    """Consecutive environments that then start from the same state."""
    first_only: bool = False
    """Only first episodes count: with ``restart``, nothing is simulated after them."""


MakeStep: TypeAlias = Callable[..., Any]
"""``(policy, env, optimizer, config, *, num_steps, dropout) -> Step`` of ``ejax.algorithms.step``, whose environments
are part of the program."""


def refuse_memory(options: Any, policy: Policy) -> Iterator[Problem]:
    """Refuse a policy with memory, for an algorithm that looks at single steps."""
    del options
    if isinstance(policy, PolicyWithMemory):
        text = "got an algorithm that learns from single steps, but the policy has a memory; use ppo, grpo or bc, or"
        yield Problem("algorithm.name", f"{text} leave out policy.actor.memory")


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """An algorithm's options, its update, and what the run must know to serve it. ``options``: a ``Config``."""

    Config: type[BaseModel]
    """``algorithm.cfg``, frozen and hashable. The defaults of ``make_optimizer`` and ``bind`` read its ``optimizer``
    (``OptimizerConfig``) and ``lr_scheduler`` (``ScheduleConfig``)."""
    update: Any = None
    """``Update``; of demonstrations, ``bc_update``'s form. With ``make_own`` its state is ``(TrainState, own)``. None:
    the environment is needed inside ``make_step``."""
    make_step: MakeStep | None = None
    """None: collect a rollout, then ``update``."""
    taught: Callable[[Any], Any] = lambda options: None
    """The ``TeachersConfig`` of a run that learns from other policies too, by which ``ejax.training.teachers`` finds
    them. None: it does not."""
    with_teacher: Callable[["Algorithm", Teacher], "Algorithm"] | None = None
    """``(record, teacher) -> record`` of a run that is ``taught``. None: ``ejax.algorithms.taught.make_taught``."""
    learns_from: Literal["environments", "demonstrations"] = "environments"
    make_optimizer: Callable[[Any], optax.GradientTransformation] = lambda options: make_optimizer(options.optimizer)
    bind: Callable[[Any, int], Any] = lambda options, num_updates: options.model_copy(
        update={"lr_scheduler": bind_schedule(options.lr_scheduler, num_updates)}
    )
    """``(options, updates of the run) -> options`` with what was left open, such as a schedule's horizon."""
    resets: Callable[[Any], ResetPolicy] = lambda options: ResetPolicy()
    keeps_reference: Callable[[Any], bool] = lambda options: False
    """``TrainState.reference`` holds the first parameters."""
    keeps_target: bool = False
    """``TrainState.target`` holds a target critic."""
    stops_at_nonfinite: Callable[[Any], bool] = lambda options: not getattr(options, "skip_nonfinite_updates", True)
    """Training ends with FloatingPointError at the first update that is not finite."""
    make_own: Callable[[Any, Policy, Env | HostEnv, int], PyTree] | None = None
    """``(options, policy, env, num_envs) -> RunState.own``, like a replay buffer; ``update`` or ``make_step`` reads and
    writes it."""
    add_demonstrations: Callable[[Any, PyTree, Rollout], PyTree] | None = None
    """``(options, RunState.own, rollout) -> RunState.own``, before the first update, of options with
    ``demonstrations``: a rollout of theirs, leaves [T, 1, ...]."""
    sizes: Callable[[Any, int], Mapping[str, int]] = lambda options, chunk_size: {}
    """``(options, data.chunk_size) -> {"buffer_size": …, "num_envs": …}`` where the algorithm decides them itself."""
    rescale_for_devices: Callable[[Any, int, int], Any] = lambda options, was, now: options
    """``(options, devices before, devices now) -> options`` that compute the same; for options of one device."""
    problems: Callable[[Any, RunShape], Iterable[Problem]] = lambda options, run: ()
    """Options that contradict the rest of the run."""
    actions: tuple[type[Any], ...] = (Box, Discrete, MultiDiscrete)
    """Kinds of action spaces that it learns in."""
    env_problems: Callable[[Any, Env | HostEnv], Iterable[Problem]] = lambda options, env: ()
    """Environments that it cannot learn in."""
    policy_problems: Callable[[Any, Policy], Iterable[Problem]] = refuse_memory
    """Policies that it cannot train, or options that are not for this one: those with memory, where none is given."""
    ignored_options: tuple[str, ...] = ()
    """Options that every algorithm of EmbodiChain accepts, and that have no effect on this one."""
    compat: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """``compat`` mode -> options that give this EmbodiChain release's numbers."""

    def action_problems(self, space: Any) -> Iterator[Problem]:
        """Refuse an action space of another kind than ``actions``; what no algorithm takes, policies refuse."""
        if isinstance(space, Algorithm.actions) and not isinstance(space, self.actions):
            kinds = " or ".join(kind.__name__ for kind in self.actions)
            name = self.Config.__name__.removesuffix("Config")
            text = f"got {name}, which learns actions of a {kinds}, but these are {space}; use ppo or grpo"
            yield Problem("algorithm.name", text)

    @property
    def learns_from_rewards(self) -> bool:
        """Return whether it learns from discounted returns of rollouts."""
        collects = self.make_step is None and self.update is not None and self.make_own is None
        return collects and "gamma" in self.Config.model_fields

    def __post_init__(self) -> None:
        if self.update is None and self.make_step is None and self.with_teacher is None:
            raise ValueError("an Algorithm needs update, make_step, or both; got neither")


def find_algorithm(name: str) -> Algorithm:
    """Find the record of a registered name, or of ``package.module:ALGORITHM``. ValueError: it is not a record.
    Raises ImportError, UnknownNameError or UntrustedCodeError as ``ejax.schema.registry.resolve``."""
    from ejax.schema.registry import resolve  # who calls an update needs no names

    found = resolve("algorithm", name)
    record = getattr(found, "record", found)  # of a class of ``ejax.collectors.stateful``
    if not isinstance(record, Algorithm):
        text = "name the record that its file ends in, such as package.module:ALGORITHM"
        raise ValueError(f"'{name}' is a {type(found).__name__}, not an ejax.algorithms.record.Algorithm: {text}")
    return record
