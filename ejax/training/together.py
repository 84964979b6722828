"""A run of several processes: the first trains as it would alone, and tells the others, which do the same.

What it decides by its own clock, such as how many updates go into a dispatch, the others cannot know; all else follows
from the config and the seed.

Where environments live outside the program, each process collects from its own groups of them. An update begins once
process 0 has heard that all have their parts; until then it can be given up, by a signal or a step that hangs, and the
state before it be saved.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax

from ejax.algorithms.step import RunState
from ejax.config import ConfigError, Problem, RunConfig
from ejax.config.load import parse_untrusted
from ejax.runtime.interrupt import interruptible
from ejax.runtime.process_exit import leave_now, owns_process
from ejax.runtime.processes import Channel, ProcessesError, count, exchange
from ejax.store.checkpoint import save_arrays
from ejax.store.run_dir import RunDirectory
from ejax.training.parts import Parts
from ejax.training.start import RunLocation, StartState, build_start
from ejax.training.steppers import DeviceStepper, Facts, HostStepper, Interrupted
from ejax.training.watchdog import Watchdog
from ejax.types import PyTree

_STATES = 2
"""States that a process keeps: while it moves on from one, process 0 may have the one before saved."""
_COMBINED: Mapping[str, Callable[[Sequence[float]], float]] = {
    "collector/learner_wait_s": max,
    "collector/actor_wait_s": max,
    "collector/staleness": max,
    "collector/queued_rollouts": min,
}
"""How the metrics of several processes' collections become one; others are added up."""


@contextmanager
def leading(config: RunConfig) -> Iterator[Channel | None]:
    """Process 0, inside: what happens here the others hear of, and at last how it ended. None: it is the only one."""
    if count() == 1:
        yield None
        return
    channel = Channel(timeout_s=config.trainer.process_timeout_s, leave=leave_now)
    with channel.watching():
        try:
            if not config.trainer.distributed:
                text = "got false in one of several processes that were joined, which would all train the same"
                raise ConfigError([Problem("trainer.distributed", f"{text}; give true")])
            yield channel
        except BaseException as error:
            if isinstance(error, jax.errors.JaxRuntimeError):
                channel.look_for_missing(error)
            channel.tell("end", error=f"{type(error).__name__}: {error}")
            raise
        channel.tell("end", error=None)


def gather(channel: Channel, place: RunLocation) -> None:
    """Tell the others where the run starts."""
    channel.tell(
        "start",
        config=place.config.to_dict(),
        run_dir=str(place.directory.path.absolute()),
        checkpoint=str(place.checkpoint.absolute()) if place.checkpoint else None,
        file=place.file,
    )


def lead(channel: Channel, place: RunLocation, parts: Parts) -> RunLocation:
    """Have the others take every step that is taken here, and write their parts of its checkpoints from now on."""
    stepper = _stepper(parts)
    stepper.announce = lambda count: channel.tell("advance", count=count)
    if isinstance(stepper, HostStepper):
        stepper.agree = partial(_wait_for_all, channel, stepper.notes)

    def save(folder: Path, state: PyTree) -> None:
        channel.tell("save", folder=str(folder.absolute()), update=int(state.update))
        save_arrays(folder, _whole(stepper, state))

    return replace(place, directory=replace(place.directory, save_arrays=save))


def _wait_for_all(channel: Channel, notes: list[str], facts: Facts | None, interrupted: Interrupted) -> Facts | None:
    """Process 0: when each of the others has its part of the rollout, have them learn from it."""
    answers = None if facts is None else channel.answers(interrupted)
    if facts is None or answers is None:
        return None
    for process, answer in answers.items():
        if answer is None:
            notes.append(f"process {process} was asked to stop, and gave up its rollout")
            return None
        notes += [f"process {process}: {text}" for text in answer["reports"]]
    channel.tell("learn")
    return _of_all([facts, *(answer["facts"] for answer in answers.values())])


def follow(config: RunConfig, watchdog: Watchdog) -> tuple[RunLocation, StartState, RunState]:
    """Every process but the first: do what process 0 tells, until the end.

    Args:
        config: for how long to wait; the run's own comes from process 0.
        watchdog: of this process, under way.

    Returns:
        Where the run is and what it computes, as process 0 says; its parts, and its last state.

    Raises:
        ProcessesError: process 0 ended with an error.
    """
    jax.devices()  # process 0 finds none before all have looked
    channel = Channel(timeout_s=config.trainer.process_timeout_s, leave=leave_now)

    def rescue(reason: str, asked: bool) -> None:
        del asked
        channel.fail(reason)
        print(f"ejax: {reason}", file=sys.stderr)
        leave_now(1)

    if owns_process():
        watchdog.rescue = rescue
    # a scheduler signals all of them: process 0 decides when to stop, and tells
    with channel.watching(), interruptible():
        try:
            return _follow(channel)
        except ProcessesError:
            raise
        except BaseException as error:
            if isinstance(error, jax.errors.JaxRuntimeError):
                channel.look_for_missing(error)
            channel.fail(f"{type(error).__name__}: {error}")
            raise


def _follow(channel: Channel) -> tuple[RunLocation, StartState, RunState]:
    told = channel.hear()
    _check_end(told)
    directory = RunDirectory(Path(told["run_dir"]), told["config"]["trainer"]["exp_name"])
    checkpoint = Path(told["checkpoint"]) if told["checkpoint"] else None
    place = RunLocation(directory, parse_untrusted(told["config"]), checkpoint, told["file"])
    start = build_start(place)
    update, stepper = start.update, _stepper(start.parts)
    if isinstance(stepper, HostStepper):
        stepper.agree = partial(_answer, channel, stepper)
    with stepper:
        state = stepper.start(start.state)
        stepper.reports()  # process 0 has the same
        states = {update: state}
        while (told := channel.hear())["kind"] != "end":
            if told["kind"] == "save":
                save_arrays(Path(told["folder"]), _whole(stepper, states[told["update"]]))
                continue
            moved = stepper.advance(state, told["count"], channel.overtaken)
            if moved is None:  # given up, there or here
                continue
            state, update = moved[0], update + told["count"]
            states = {**dict([*states.items()][1 - _STATES :]), update: state}
    _check_end(told)
    return place, start, state


def _answer(channel: Channel, stepper: HostStepper, facts: Facts | None, interrupted: Interrupted) -> Facts | None:
    """The others: tell process 0 whether this part of the rollout is there, and hear whether all learn."""
    del interrupted  # process 0 decides
    channel.answer(None if facts is None else {"facts": facts, "reports": stepper.reports()})
    if facts is None or channel.hear()["kind"] == "learn":
        return facts
    channel.unhear()
    return None


def _whole(stepper: DeviceStepper | HostStepper, state: RunState) -> RunState:
    """The state with the environments of all processes, where each has its own outside the program."""
    if isinstance(stepper, DeviceStepper) or state.envs == ():
        return state
    return replace(state, envs=tuple(group for groups in exchange(state.envs) for group in groups))


def _of_all(parts: Sequence[Facts]) -> Facts:
    """The metrics of all processes' collections: seconds of work and counts add up; of waiting, the longest counts."""
    return {name: _COMBINED.get(name, sum)([part[name] for part in parts]) for name in parts[0]}


def _check_end(told: dict[str, object]) -> None:
    if told["kind"] == "end" and told["error"]:
        raise ProcessesError(f"process 0 ended with {told['error']}")


def _stepper(parts: Parts) -> DeviceStepper | HostStepper:
    if not isinstance(parts.stepper, DeviceStepper | HostStepper):
        raise ProcessesError(f"{type(parts.stepper).__name__} is for one process")
    return parts.stepper
