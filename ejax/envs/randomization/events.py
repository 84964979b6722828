"""Events of ``trainer.events``: ``{name: {func, mode, interval_step, params}}`` becomes what each does."""

import inspect
import itertools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

import gymnasium
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from numpy.typing import NDArray

from ejax.envs.randomization.draws import check_choice
from ejax.envs.randomization.names import CURRICULUM, REFUSED, modes_of
from ejax.envs.randomization.physics import PHYSICS, Change, base, refuse_overlaps
from ejax.envs.randomization.sensing import SENSING, Sensing, Side
from ejax.schema.frozen import thaw
from ejax.schema.messages import did_you_mean
from ejax.schema.problems import KeyReport
from ejax.schema.sections import Section
from ejax.schema.values import is_number
from ejax.types import Array, Key

D = TypeVar("D")
By = Literal["steps", "success"]


@dataclass(frozen=True)
class Curriculum:
    """A row's level, from 0, the MJCF as it is, to 1, all of each range; rows know nothing of each other.

        by steps:    level = min(1, start + control steps of the row / num_steps)
        by success:  after each of its episodes, + raise_by if it was one, − lower_by if not, within 0 … 1

    ``num_steps`` are control steps of a row: a run's environment steps over its ``num_envs``.
    """

    by: By = "success"
    start: float = 0.0
    num_steps: int = 10_000
    raise_by: float = 0.05
    lower_by: float = 0.05

    def __post_init__(self) -> None:
        check_choice("by", self.by, get_args(By))
        for name in ("start", "raise_by", "lower_by"):
            value: Any = getattr(self, name)
            if not is_number(value) or not 0.0 <= value <= 1.0:
                raise ValueError(f"{name}: got {value!r}; must be within 0 … 1")
        if isinstance(self.num_steps, bool) or not isinstance(self.num_steps, int) or self.num_steps < 1:
            raise ValueError(f"num_steps: got {self.num_steps!r}; must be an integer >= 1")

    def after(self, level: Array, num_steps: Array, ended: Array, success: Array) -> Array:
        """Compute the level after a row's ``num_steps``-th control step, which may have ended an episode."""
        if self.by == "steps":
            return jnp.minimum(1.0, self.start + num_steps.astype(jnp.float32) / self.num_steps)
        change = jnp.where(success, self.raise_by, -self.lower_by)
        return jnp.where(ended, jnp.clip(level + change, 0.0, 1.0), level).astype(jnp.float32)


FUNCS = (*PHYSICS, *SENSING, CURRICULUM)
"""Names of everything that a ``RandomizedEnv`` can do."""


class Event(NamedTuple, Generic[D]):
    name: str
    func: str
    mode: str
    interval_step: int
    does: D

    def key_of(self, key: Key) -> Key:
        """Derive this event's own key: what is drawn does not depend on which others there are."""
        return jax.random.fold_in(key, zlib.crc32(self.name.encode()))  # ``hash`` differs between processes


@dataclass(frozen=True)
class RowEvents:
    physics: tuple[Event[Change], ...]
    sensing: tuple[Event[Sensing], ...]
    curriculum: Curriculum | None
    parameters: Mapping[str, NDArray[np.float32]]
    """The MJCF's value of each parameter that is written."""


def read_row_events(
    entries: Mapping[str, Any], model: mujoco.MjModel | None, spaces: Mapping[Side, gymnasium.Space[Any]], why_none: str
) -> RowEvents:
    """Read the entries. ``model`` None: there is none to change, for the reason ``why_none``. Raises ConfigError:
    everything that is wrong, by key."""
    report = KeyReport()
    physical = {} if model is None else {name: partial(make, model) for name, make in PHYSICS.items()}
    funcs = physical | {name: partial(make, spaces) for name, make in SENSING.items()} | {CURRICULUM: Curriculum}
    read = [_read(name, data, funcs, why_none, report) for name, data in thaw(entries).items()]
    events = [event for event in read if event is not None]
    # events that would undo each other; one row has one latency and one level
    refuse_overlaps(((event.name, event.does) for event in events if isinstance(event.does, Change)), report)
    only_once = [CURRICULUM, "delay_observation", "delay_action"]
    for one, other in itertools.combinations(events, 2):
        if one.func == other.func and one.func in only_once:
            report.refuse(other.name, f"is a second {other.func}, after {one.name}; keep one of them")
    report.raise_if_refused("events")
    physics = tuple(event for event in events if isinstance(event.does, Change))
    return RowEvents(
        physics=physics,
        sensing=tuple(event for event in events if isinstance(event.does, Sensing)),
        curriculum=next((event.does for event in events if isinstance(event.does, Curriculum)), None),
        parameters={} if model is None else base(model, [event.does for event in physics]),
    )


def _read(
    name: str, data: Any, funcs: Mapping[str, Callable[..., Any]], why_none: str, report: KeyReport
) -> Event[Any] | None:
    with Section(data, name, report) as section:
        func = section.take("func")
        mode = section.take("mode", modes_of(func)[0] if isinstance(func, str) else "reset")
        interval_step = section.integer("interval_step", 10, at_least=1)
        params = section.open("params")
        section.ignore("is_global", "no effect: each environment counts its own steps")
        if func not in FUNCS:
            why = REFUSED.get(func, f"there is {', '.join(FUNCS)}{did_you_mean(str(func), FUNCS)}")
            section.problem("func", f"no event '{func}': {why}")
            return None
        if mode not in modes_of(func):
            section.problem("mode", f"got {mode!r}; {func} takes {', '.join(modes_of(func))}")
        if func not in funcs:
            section.problem("func", f"{func}: {why_none}")
            return None
        for each in inspect.signature(funcs[func]).parameters.values():
            params.take(each.name)
            if each.default is each.empty and each.name not in params.data:
                params.problem(each.name, f"is missing: {func} needs it")
        params.close()
        if any(problem.key.startswith(f"{params.path}.") for problem in report.problems):
            return None
        try:
            return Event(name, func, mode, interval_step, funcs[func](**params.data))
        except (TypeError, ValueError) as error:
            # a functor's error begins with the parameter that it is about
            about, _, rest = str(error).partition(": ")
            known = about in params.data
            report.refuse(params.key(about) if known else params.path, rest if known else str(error))
            return None
