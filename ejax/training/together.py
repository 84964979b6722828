"""A run of several processes: the first trains as it would alone, and tells the others, which do the same.

What it decides by its own clock, such as how many updates go into a dispatch, the others cannot know; all else follows
from the config and the seed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ejax.algorithms.step import RunState
from ejax.config import ConfigError, Problem, RunConfig, parse_config
from ejax.processes import Channel, ProcessesError, count
from ejax.training.checkpoint import save_arrays
from ejax.training.interrupt import interruptible
from ejax.training.leave import leave_now
from ejax.training.parts import Parts
from ejax.training.run_dir import RunDirectory
from ejax.training.start import Place, Start, begin
from ejax.training.steppers import DeviceStepper
from ejax.types import PyTree

_STATES = 2
"""States that a process keeps: while it moves on from one, process 0 may have the one before saved."""


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
            channel.tell("end", error=f"{type(error).__name__}: {error}")
            raise
        channel.tell("end", error=None)


def gather(channel: Channel, place: Place) -> Place:
    """Tell the others where the run starts, and have them write their parts of its checkpoints from now on."""
    channel.tell(
        "start",
        config=place.config.to_dict(),
        run_dir=str(place.directory.path.absolute()),
        checkpoint=str(place.checkpoint.absolute()) if place.checkpoint else None,
        file=place.file,
    )

    def save(folder: Path, state: PyTree) -> None:
        channel.tell("save", folder=str(folder.absolute()), update=int(state.update))
        save_arrays(folder, state)

    return replace(place, directory=replace(place.directory, save_arrays=save))


def lead(channel: Channel, parts: Parts) -> None:
    """Have the others take every step that is taken here."""
    _device_stepper(parts).announce = lambda count: channel.tell("advance", count=count)


def follow(config: RunConfig) -> tuple[Place, Start, RunState]:
    """Every process but the first: do what process 0 tells, until the end.

    Args:
        config: for how long to wait; the run's own comes from process 0.

    Returns:
        Where the run is and what it computes, as process 0 says; its parts, and its last state.

    Raises:
        ProcessesError: process 0 ended with an error.
    """
    channel = Channel(timeout_s=config.trainer.process_timeout_s, leave=leave_now)
    # a scheduler signals all of them: process 0 decides when to stop, and tells
    with channel.watching(), interruptible():
        told = channel.hear()
        _check_end(told)
        directory = RunDirectory(Path(told["run_dir"]), told["config"]["trainer"]["exp_name"])
        checkpoint = Path(told["checkpoint"]) if told["checkpoint"] else None
        place = Place(directory, parse_config(told["config"]), checkpoint, told["file"])
        start = begin(place)
        update = start.update
        with _device_stepper(start.parts) as stepper:
            state = stepper.start(start.state)
            states = {update: state}
            while (told := channel.hear())["kind"] != "end":
                if told["kind"] == "save":
                    save_arrays(Path(told["folder"]), states[told["update"]])
                    continue
                state, _ = stepper.advance(state, told["count"], lambda: False)
                update += told["count"]
                states = {**dict([*states.items()][1 - _STATES :]), update: state}
        _check_end(told)
    return place, start, state


def _check_end(told: dict[str, object]) -> None:
    if told["kind"] == "end" and told["error"]:
        raise ProcessesError(f"process 0 ended with {told['error']}")


def _device_stepper(parts: Parts) -> DeviceStepper:
    if not isinstance(parts.stepper, DeviceStepper):
        raise ProcessesError("several processes train on the device only; give trainer.collector.mode: device")
    return parts.stepper
