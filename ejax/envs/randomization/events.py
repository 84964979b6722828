"""Reads ``{name: {func, mode, interval_step, params}}`` into what each event does."""

import inspect
import itertools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import gymnasium
import jax
import mujoco
import numpy as np
from numpy.typing import NDArray

from ejax.envs.randomization.changes import Change, base, refuse_overlaps
from ejax.envs.randomization.curriculum import Curriculum
from ejax.envs.randomization.names import CURRICULUM, REFUSED, modes_of
from ejax.envs.randomization.physics import PHYSICS
from ejax.envs.randomization.sensing import SENSING, Sensing, Side
from ejax.schema.frozen import thaw
from ejax.schema.problems import KeyReport
from ejax.schema.registry import did_you_mean
from ejax.schema.sections import Section
from ejax.types import Key

D = TypeVar("D")
FUNCS: dict[str, Callable[..., Any]] = {**PHYSICS, **SENSING, CURRICULUM: Curriculum}
"""Everything that a ``RandomizedEnv`` can do, by name."""
MODES = ("startup", "reset", "interval")
SOURCE = "events"


class Event(NamedTuple, Generic[D]):
    """One entry."""

    name: str
    func: str
    mode: str
    interval_step: int
    does: D

    def key_of(self, key: Key) -> Key:
        """This event's own: what is drawn does not depend on which others there are."""
        return jax.random.fold_in(key, zlib.crc32(self.name.encode()))


@dataclass(frozen=True)
class Events:
    """All of them, in the config's order within each kind."""

    physics: tuple[Event[Change], ...]
    sensing: tuple[Event[Sensing], ...]
    curriculum: Curriculum | None
    parameters: Mapping[str, NDArray[np.float32]]
    """The MJCF's value of each parameter that is written."""


def read_events(
    entries: Mapping[str, Any], model: mujoco.MjModel | None, spaces: Mapping[Side, gymnasium.Space[Any]], why_none: str
) -> Events:
    """
    Args:
        model: None: there is none to change, for the reason ``why_none``.

    Raises:
        ConfigError: everything that is wrong, by key.
    """
    report = KeyReport()
    read = [_read(name, data, model, spaces, why_none, report) for name, data in thaw(entries).items()]
    events = [event for event in read if event is not None]
    _check_apart(events, report)
    report.raise_if_refused(SOURCE)
    physics = tuple(event for event in events if isinstance(event.does, Change))
    return Events(
        physics=physics,
        sensing=tuple(event for event in events if isinstance(event.does, Sensing)),
        curriculum=next((event.does for event in events if isinstance(event.does, Curriculum)), None),
        parameters={} if model is None else base(model, [event.does for event in physics]),
    )


def _read(
    name: str,
    data: Any,
    model: mujoco.MjModel | None,
    spaces: Mapping[Side, gymnasium.Space[Any]],
    why_none: str,
    report: KeyReport,
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
        if func in PHYSICS and model is None:
            section.problem("func", f"{func}: {why_none}")
            return None
        given = () if func == CURRICULUM else (spaces,) if func in SENSING else (model,)
        if not _fits(params, func, len(given), report):
            return None
        try:
            return Event(name, func, mode, interval_step, FUNCS[func](*given, **params.data))
        except (TypeError, ValueError) as error:
            _refuse(params, str(error))
            return None


def _fits(params: Section, func: str, num_given: int, report: KeyReport) -> bool:
    """Check that the parameters are the functor's; the report names those that are not."""
    for each in list(inspect.signature(FUNCS[func]).parameters.values())[num_given:]:
        params.take(each.name)
        if each.default is each.empty and each.name not in params.data:
            params.problem(each.name, f"is missing: {func} needs it")
    params.close()
    return not any(report.refuses(params.key(str(name))) for name in params.data) and not any(
        problem.key.startswith(f"{params.path}.") for problem in report.problems
    )


def _refuse(params: Section, text: str) -> None:
    """A functor's error begins with the parameter that it is about."""
    name, colon, rest = text.partition(": ")
    if colon and name in params.data:
        params.problem(name, rest)
    else:
        params.report.refuse(params.path, text)


def _check_apart(events: list[Event[Any]], report: KeyReport) -> None:
    """Refuse events that would undo each other."""
    refuse_overlaps(((event.name, event.does) for event in events if isinstance(event.does, Change)), report)
    only_once = [CURRICULUM, *(name for name in SENSING if name.startswith("delay_"))]
    for one, other in itertools.combinations(events, 2):
        if one.func == other.func and one.func in only_once:
            report.refuse(other.name, f"is a second {other.func}, after {one.name}; keep one of them")
