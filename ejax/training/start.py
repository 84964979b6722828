"""Where a run starts: its folder, the checkpoint that it goes on from, its parts and its first state."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ejax.algorithms.step import RunState
from ejax.config import ConfigError, RunConfig
from ejax.config.bind import bind
from ejax.logs.metrics import MetricWriter
from ejax.schema.registry import is_foreign_checkpoint
from ejax.store.checkpoint import load_checkpoint, verify_checkpoint
from ejax.store.run_dir import (
    RunDirectory,
    RunMeta,
    check_same_run,
    create_run_directory,
    never_began,
    new_run_folder,
    newest_run,
    open_run_directory,
)
from ejax.store.run_lock import run_lock
from ejax.training.build import build, num_devices
from ejax.training.evaluators import check_best_metric
from ejax.training.parts import Parts
from ejax.training.physics import engine_of, settle_physics
from ejax.training.rescale import share_out
from ejax.training.teacher import check_teacher
from ejax.training.warm_start import find_checkpoint, start_from_file, start_from_policy, start_from_run


@dataclass(frozen=True)
class Place:
    """A run's folder, and what is there to go on from."""

    directory: RunDirectory
    config: RunConfig
    """Bound, and with a named physics engine: what ``resolved.json`` holds, but for that and for what a resumed run may
    change."""
    checkpoint: Path | None = None
    file: str | None = None
    """To start from where there is no checkpoint: a file of another system, or a checkpoint of another run."""
    given: RunConfig | None = None
    """The config that a resumed run records: bound, before it is shared out among other devices."""
    is_new: bool = False
    """The folder was made just now."""
    alarms: tuple[str, ...] = ()
    """What a person must see: damaged checkpoints, a run that starts from the beginning."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Start:
    """All that the loop begins with."""

    parts: Parts
    state: RunState
    meta: dict[str, Any] = field(default_factory=dict)
    """The checkpoint's meta; empty for a run from the beginning."""
    notes: tuple[str, ...] = ()

    @property
    def update(self) -> int:
        return int(self.state.update)


def find_place(
    config: RunConfig, resume: str | None, run_dir: Path | None, fork: Path | None = None, *, locks: ExitStack
) -> Place:
    """Find or make the run's folder, and the checkpoint to go on from; arguments and errors as ``ejax.run.train``.

    Args:
        locks: keeps the lock on the folder.
    """
    if fork is not None and resume is not None:
        raise ConfigError([], f"got fork {fork} and resume '{resume}'; a fork is a new run, so give one of them")
    if fork is not None or resume is None or is_foreign_checkpoint(resume):
        origin, passed_over = resume, list[str]()
        if fork is not None:
            origin = str(find_checkpoint(fork, passed_over).absolute())
        config = bind(config)
        settled, notes = settle_physics(config)
        run_dir = run_dir or new_run_folder(config)
        locks.enter_context(run_lock(run_dir))
        directory = create_run_directory(config, run_dir, origin=origin, notes=notes)
        return Place(directory, settled, file=origin, is_new=True, alarms=tuple(passed_over), notes=notes)
    checkpoint = file = None
    if resume not in ("latest", "best"):
        checkpoint = verify_checkpoint(Path(resume), RunMeta).path
        run_dir = run_dir or checkpoint.absolute().parents[1]
    elif resume == "latest" and run_dir is not None and never_began(run_dir):
        alarm = f"a kill came before {run_dir} was a run: it starts from the beginning"
        config = bind(config)
        settled, notes = settle_physics(config)
        locks.enter_context(run_lock(run_dir))
        directory = create_run_directory(config, run_dir, notes=notes)
        return Place(directory, settled, is_new=True, alarms=(alarm,), notes=notes)
    path = run_dir or newest_run(Path(config.trainer.output_dir), config.trainer.exp_name)
    left_behind = locks.enter_context(run_lock(path)) if (path / "configs").is_dir() else ""  # else it is no run
    directory, saved = open_run_directory(path)
    num_updates = directory.started_for(saved)  # a schedule keeps the horizon that the run was started with
    config, saved = bind(config, num_updates), bind(saved, num_updates)
    check_same_run(config, saved)
    given = config
    alarms = [left_behind] if left_behind else []
    alarms += directory.recover()
    if resume == "latest" and not directory.has_checkpoints():
        file = directory.origin()
        alarms.append(
            f"{path} has no checkpoint, a kill came before the first: it starts from {file or 'the beginning'}"
        )
    elif resume in ("latest", "best"):
        checkpoint = directory.find(resume, alarms.append)
    config, notes = settle_physics(config, None if checkpoint is None else engine_of(checkpoint, directory))
    if checkpoint is not None:
        config, shared = share_out(config, checkpoint, num_devices(config))
        notes += shared
    return Place(directory, config, checkpoint, file, given, alarms=tuple(alarms), notes=notes)


def begin(place: Place) -> Start:
    """Build the run's parts and the state that it starts from. A new folder is taken back if that fails."""
    try:
        start = _build(place)
        check_best_metric(place.config, start.parts)
    except BaseException:
        if place.is_new:
            place.directory.take_back()
        raise
    return start


def report(place: Place, start: Start, writer: MetricWriter, rows: int) -> None:
    """Put the folder in order for a run that goes on from here, and show every message of its start.

    Args:
        rows: env steps of one update.
    """
    directory, step = place.directory, start.update * rows
    for text in place.alarms:
        writer.alarm(text)
    for text in (*place.notes, *start.notes):
        writer.note(text)
    if place.config.trainer.distributed:
        writer.note(f"{start.parts.num_devices} devices, {place.config.trainer.num_envs} environments on each")
    if not place.is_new:
        for aside in directory.set_aside_after(step):
            writer.note(f"set aside {aside}: the run goes on from before it")
    if place.given is not None:
        directory.record(place.given, step)
    if place.checkpoint is None:
        return
    for problem in directory.check_sealed(start.meta["schema_version"]):
        writer.alarm(problem)
    if start.update and start.parts.stepper.versions() is not None:
        for problem in directory.check_schedule(start.update, start.meta.get("schedule_sha256")):
            writer.alarm(problem)
    writer.note(f"resumed from {place.checkpoint} at {step} {place.config.step_name}")


def _build(place: Place) -> Start:
    directory, config = place.directory, place.config
    parts = build(config, quarantine=directory.path / "quarantine")
    if place.checkpoint is not None:
        state, meta = load_checkpoint(place.checkpoint, parts.state)
        check_teacher(config, parts.state, state)
        return Start(parts, state, meta, notes=parts.notes)
    if place.file is None:
        state, notes = start_from_policy(parts, config)
        return Start(parts, state, notes=(*parts.notes, *notes))
    if is_foreign_checkpoint(place.file):
        state, notes = start_from_file(Path(place.file), parts, config)
    else:
        state, notes = start_from_run(Path(place.file), parts, config)
    if parts.stepper.versions() is not None:  # of the rollouts made there, each by the newest parameters
        directory.write_schedule(0, range(int(state.update)))
    return Start(parts, state, notes=(f"goes on from {place.file}", *notes))
