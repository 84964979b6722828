"""Begin a run: a new one, one that goes on, a fork of another, or one from another system's file."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from ejax.algorithms.step import RunState
from ejax.collectors.host_rows import HostRows
from ejax.collectors.replay_buffer import replays_in
from ejax.config import ConfigError, Problem, RunConfig, bind
from ejax.config.run_config import NOTHING, idle_notes
from ejax.logs.json_records import read_facts
from ejax.logs.metrics import MetricWriter
from ejax.optim import schedule_note
from ejax.runtime.process_exit import refuse_rerun
from ejax.runtime.processes import Group
from ejax.runtime.stopwatch import Stopwatch
from ejax.schema.frozen import with_value
from ejax.schema.messages import short_repr
from ejax.schema.plain_files import expanded
from ejax.schema.registry import is_foreign_checkpoint
from ejax.store.checkpoint import CheckpointError, load_checkpoint, verify_checkpoint
from ejax.store.resume_rules import check_same_run, differences, record_changes, with_changes
from ejax.store.run_dir import (
    RunDirectory,
    RunMeta,
    create_run_directory,
    never_began,
    new_run_folder,
    newest_run,
    open_run_directory,
)
from ejax.store.run_lock import run_lock
from ejax.store.schedule_file import check_schedule, write_schedule
from ejax.training.build import build, num_devices
from ejax.training.environments import engine_of, resolve_physics
from ejax.training.evaluators import check_best_metric
from ejax.training.given import Given
from ejax.training.loop import Cadence
from ejax.training.parts import Parts, rows_per_update
from ejax.training.warm_start import (
    check_teacher,
    find_checkpoint,
    set_rates,
    start_from_file,
    start_from_policy,
    start_from_run,
)
from ejax.training.watchdog import Watchdog


@dataclass(frozen=True)
class RunLocation:
    """A run's folder, and what is there to go on from."""

    directory: RunDirectory
    config: RunConfig
    """Bound, and with a named physics engine."""
    checkpoint: Path | None = None
    file: str | None = None
    """To start from without a checkpoint: a file of another system, or a checkpoint of another run."""
    given: RunConfig | None = None
    """The config that a resumed run records: bound, before it is shared out among other devices."""
    is_new: bool = False
    alarms: tuple[str, ...] = ()
    """Messages that a person must see: damaged checkpoints, a run that starts from the beginning."""
    notes: tuple[str, ...] = ()

    @contextmanager
    def building(self) -> Iterator[None]:
        """Take a new folder back if what is built inside fails."""
        try:
            yield
        except BaseException:
            if self.is_new:
                self.directory.take_back()
            raise


@dataclass(frozen=True)
class Call:
    """One call that trains, with what its parts share."""

    location: RunLocation
    started: float
    """``time.monotonic`` when it began."""
    clock: Stopwatch
    stack: ExitStack
    """Closed when the call ends."""
    watchdog: Watchdog
    group: Group | None
    """The processes that train together, of which the first writes. None: this is the only one."""


@dataclass(frozen=True)
class StartState:
    """All that the loop begins with."""

    parts: Parts
    state: RunState
    cadence: Cadence
    meta: dict[str, Any] = field(default_factory=dict)
    """The checkpoint's meta; empty for a run from the beginning."""
    notes: tuple[str, ...] = ()
    evaluation_due: bool = False
    """The evaluation of the saved state is still to be made."""

    @property
    def update(self) -> int:
        return int(self.state.update)


def locate_run(
    config: RunConfig, resume: str | None, run_dir: Path | None, fork: Path | None = None, *, locks: ExitStack
) -> RunLocation:
    """Begin as the arguments name it; they and the errors are ``ejax.run.train``'s. ``locks`` keeps the lock."""
    refuse_rerun()
    if fork is not None and resume is not None:
        raise ConfigError([], f"got fork {fork} and resume '{resume}'; a fork is a new run, so give one of them")
    run_dir = run_dir and Path(expanded(str(run_dir)))
    if fork is not None:
        passed_over: list[str] = []
        origin = str(find_checkpoint(fork, passed_over).absolute())
        return new_run(config, run_dir, locks, origin=origin, alarms=tuple(passed_over))  # the other run is only read
    if resume is None or is_foreign_checkpoint(resume):
        return new_run(config, run_dir, locks, origin=resume)
    return resume_run(config, resume, run_dir, locks)


def new_run(
    config: RunConfig,
    run_dir: Path | None,
    locks: ExitStack,
    *,
    origin: str | None = None,
    alarms: tuple[str, ...] = (),
) -> RunLocation:
    """Make the folder of a run from the beginning, or from ``origin``: a foreign file or another run's checkpoint."""
    config = bind(config)  # a schedule takes its horizon from the run it begins with
    settled, notes = resolve_physics(config)
    run_dir = run_dir or new_run_folder(config)
    locks.enter_context(run_lock(run_dir))  # before anything is written there
    directory = create_run_directory(config, run_dir, origin=origin, notes=notes)
    return RunLocation(directory, settled, file=origin, is_new=True, alarms=alarms, notes=notes)


def resume_run(config: RunConfig, which: str, run_dir: Path | None, locks: ExitStack) -> RunLocation:
    """Open a run's folder, put it in order, and find the checkpoint ``which``: ``latest``, ``best`` or a path."""
    checkpoint = file = None
    if which not in ("latest", "best"):
        checkpoint = Path(which)
        verify_checkpoint(checkpoint, RunMeta)
        run_dir = run_dir or checkpoint.absolute().parents[1]  # RUN/checkpoints/NAME
    elif which == "latest" and run_dir is not None and never_began(run_dir):
        alarm = f"a kill came before {run_dir} was a run: it starts from the beginning"
        return new_run(config, run_dir, locks, alarms=(alarm,))
    path = run_dir or newest_run(Path(config.trainer.output_dir), config.trainer.exp_name)
    left_behind = locks.enter_context(run_lock(path)) if (path / "configs").is_dir() else ""  # else it is no run
    directory, saved = open_run_directory(path)
    filled = {key for key, *_ in differences(config.to_dict(), bind(config).to_dict(), "")}
    for key, _, there in differences(config.to_dict(), saved.to_dict(), ""):
        if key in filled:  # a schedule keeps the horizon that the run was started with, or stretched to
            config = with_value(config, key, there)
    given = bind(config)
    check_same_run(given, saved)  # before the folder is put in order
    alarms = [*([left_behind] if left_behind else []), *directory.recover()]
    if which == "latest" and not directory.saved():
        file = directory.versions().get("origin")
        origin = file or "the beginning"
        alarms.append(f"{path} has no checkpoint, a kill came before the first: it starts from {origin}")
    elif checkpoint is None:
        checkpoint = directory.find(which, alarms.append)
    config, notes = resolve_physics(given, None if checkpoint is None else engine_of(checkpoint))
    if checkpoint is not None:
        config, shared = rescale_for_devices(config, checkpoint, num_devices(config))
        notes += shared
    return RunLocation(directory, config, checkpoint, file, given, alarms=tuple(alarms), notes=notes)


def build_start(location: RunLocation, given: Given | None = None) -> StartState:
    """Build the run's parts, of ``given`` objects if any, and first state."""
    config = location.config
    with location.building():
        parts = build(config, run=location.directory.path, given=given)
        state, meta, notes = _first_state(location, parts)
        parts = replace(parts, state=state)  # the one that was made would stay in memory, with its replay buffer
        check_best_metric(config, parts)
    # the checkpoint was saved before its evaluation
    due = config.trainer.enable_eval and meta.get("evaluation_due", False)
    cadence = Cadence(config.trainer, rows_per_update(config, parts))
    return StartState(parts, state, cadence, meta, (*parts.notes, *notes), due)


def open_log(call: Call, start: StartState) -> MetricWriter:
    """Put the folder in order for a run that begins or goes on here, and show every message of its start."""
    location, directory, step = call.location, call.location.directory, start.update * start.cadence.rows
    writer = call.stack.enter_context(
        MetricWriter(
            directory.path,
            location.config,
            start.meta,
            rows=start.cadence.rows,
            update=start.update,
            is_new=location.is_new,
            evaluates_again=start.evaluation_due,
            started=call.started,
        )
    )
    beyond = schedule_note(location.config.algorithm.cfg, start.update, start.cadence.num_updates)
    for text in filter(None, (*location.alarms, beyond)):
        writer.alarm(text)
    for text in (*location.notes, *start.notes, *idle_notes(location.config, start.cadence.rows)):
        (writer.alarm if NOTHING in text else writer.note)(text)
    if location.config.trainer.distributed:
        each = f", {location.config.trainer.num_envs} environments on each"
        writer.note(f"{start.parts.num_devices} devices{each if location.config.data is None else ' share each batch'}")
    if not location.is_new:
        for aside in directory.set_aside_after(step):
            writer.note(f"set aside {aside}: the run goes on from before it")
    if location.given is not None:  # what this call runs with, before devices share it
        record_changes(directory.config_file, location.given, step)
    if location.checkpoint is not None:
        problems = directory.check_sealed()
        if start.update and start.parts.stepper.versions() is not None:
            problems += check_schedule(directory.path, start.update, start.meta.get("schedule_sha256"))
        for problem in problems:
            writer.alarm(problem)
        writer.note(f"resumed from {location.checkpoint} at {step} {location.config.step_name}")
    return writer


def _first_state(location: RunLocation, parts: Parts) -> tuple[RunState, dict[str, Any], Sequence[str]]:
    directory, config = location.directory, location.config
    if location.checkpoint is not None or (location.file and not is_foreign_checkpoint(location.file)):
        rows = [each.rows for each in replays_in(parts.state) if not isinstance(each.rows, HostRows)]
        for x in jax.tree.leaves(rows):
            x.delete()  # of empty buffers: memory for those that are read, of which these still have the shapes
    if location.checkpoint is not None:
        state, meta = load_checkpoint(location.checkpoint, parts.state)
        directory.previous[:] = [location.checkpoint]
        check_teacher(config, parts.state, state)
        state, notes = set_rates(state, config, meta)
        return state, meta, notes
    if location.file is None:
        state, notes = start_from_policy(parts, config)
        return state, {}, notes
    if is_foreign_checkpoint(location.file):
        state, notes = start_from_file(Path(location.file), parts, config)
    else:
        state, notes = start_from_run(Path(location.file), parts, config)
        directory.previous[:] = [Path(location.file)]
    if parts.stepper.versions() is not None:  # of the rollouts made there, each by the newest parameters
        write_schedule(directory.path, 0, range(int(state.update)))
    return state, {}, (f"goes on from {location.file}", *notes)


def rescale_for_devices(config: RunConfig, checkpoint: Path, num_devices: int) -> tuple[RunConfig, tuple[str, ...]]:
    """Give the config for this number of devices that computes what the checkpoint's did, and a note if they differ.

    Options for one device (``num_envs``, ``batch_size``) grow as the devices get fewer; minibatches keep their strata.

    Raises:
        ConfigError: the environments, or the rows of a minibatch, cannot be shared by so many.
        CheckpointError: the checkpoint's config is no config of this run.
    """
    meta = read_facts(checkpoint / "meta.json", RunMeta)
    was = meta.get("num_devices")
    if was is None:  # an older checkpoint
        return config, ()
    record = config.algorithm.record
    before, saved = _saved_options(config, checkpoint, meta["config"])
    # rows of demonstrations are counted by the algorithm, those of rollouts by the environments
    sizes = {} if config.data is None else record.sizes(saved, config.data.chunk_size)
    if (was, before) == (num_devices, config.trainer.num_envs) and sizes.items() <= config.trainer.model_dump().items():
        return config, ()
    num_envs, rest = divmod(was * before, num_devices)  # all environments stay: their states are in the checkpoint
    if rest and config.data is None:
        text = f"the run has {was} x {before} environments, of which {num_devices} devices would leave {rest}"
        raise ConfigError([Problem("trainer.num_envs", f"{text}; give a number of devices that divides them")])
    options = record.rescale_for_devices(with_changes(saved, config.algorithm.cfg), was, num_devices)
    if config.data is None:
        sizes = {"num_envs": num_envs}
        note = f"{num_devices} devices, {num_envs} environments on each; the checkpoint was made on {was} with {before}"
    else:
        sizes = record.sizes(options, config.data.chunk_size)
        note = f"{num_devices} devices share each batch; the checkpoint was made on {was}"
    config = config.model_copy(
        update={
            "trainer": config.trainer.model_copy(update=dict(sizes)),
            "algorithm": config.algorithm.model_copy(update={"cfg": options}),
        }
    )
    return config, (note,) if was != num_devices else ()


def _saved_options(config: RunConfig, checkpoint: Path, saved: dict[str, Any]) -> tuple[int, Any]:
    """Read ``num_envs`` and the algorithm's options of a checkpoint. Names in it are compared, never resolved."""
    try:
        num_envs, algorithm = saved["trainer"]["num_envs"], saved["algorithm"]
        name = short_repr(algorithm["name"])
        if algorithm["name"] != config.algorithm.name:
            raise ValueError(f"it names the algorithm {name}, the run's is {config.algorithm.name}")
        if type(num_envs) is not int or num_envs < 1:
            raise ValueError(f"trainer.num_envs is {short_repr(num_envs)}")
        return num_envs, type(config.algorithm.cfg).model_validate_json(json.dumps(algorithm["cfg"]), strict=True)
    except (KeyError, TypeError, ValueError) as error:  # pydantic's is a ValueError
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
        raise CheckpointError(f"the config in {checkpoint / 'meta.json'} is no config of this run: {reason}") from error
