"""A run that is open in this process: its folder, lock and clock, its parts, and the state that it continues from."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from ejax.algorithms.host_rows import HostRows
from ejax.algorithms.replay_buffer import replays_in
from ejax.config import ConfigError, Problem, RunConfig
from ejax.config.run_config import NOTHING, idle_notes
from ejax.logs.metrics import MetricWriter
from ejax.optim import schedule_note
from ejax.runtime.device import matmul_precision
from ejax.runtime.processes import Group, failing_together
from ejax.runtime.sharding import is_main_process, process_count
from ejax.runtime.stopwatch import Stopwatch
from ejax.runtime.streams import keep_streams
from ejax.schema.registry import is_foreign_checkpoint
from ejax.store.checkpoint import load_checkpoint, save_arrays
from ejax.store.digests import LISTING
from ejax.store.resume_rules import record_changes
from ejax.store.schedule_file import check_schedule, write_schedule
from ejax.training.build import build
from ejax.training.cadence import Cadence
from ejax.training.environments import UserObjects
from ejax.training.evaluators import check_best_metric
from ejax.training.parts import Parts, rows_per_update
from ejax.training.start import RunLocation, locate_run, locate_together
from ejax.training.warm_start import set_rates, start_from_file, start_from_policy, start_from_run
from ejax.training.watchdog import Watchdog, guarded_calls
from ejax.types import PyTree


class OpenRun:
    """One call that trains. Its parts and its state are there from ``begin`` on.

    Args:
        stack: closed when the call ends.
        group: the processes that train together, of which the first writes. None: this is the only one.
        started: ``time.monotonic`` when the call began.
    """

    parts: Parts
    state: Any
    """The one to begin with."""
    update: int
    cadence: Cadence
    meta: dict[str, Any]
    """The checkpoint's meta; empty for a run from the beginning."""
    evaluation_due: bool
    """The evaluation of the saved state is still to be made."""

    def __init__(
        self, location: RunLocation, watchdog: Watchdog, stack: ExitStack, group: Group | None, started: float
    ) -> None:
        self.location, self.config, self.directory = location, location.config, location.directory
        self.watchdog, self.stack, self.group, self.started = watchdog, stack, group, started
        self.clock = Stopwatch()

    @contextmanager
    def building(self) -> Iterator[None]:
        """Take a new folder back if what is built inside fails."""
        try:
            yield
        except BaseException:
            if self.location.is_new:
                self.directory.delete_if_new()
            raise

    def build(self, objects: UserObjects | None = None) -> None:
        """Build the parts, with the user's ``objects`` if any, and the first state."""
        with self.building():
            parts = build(self.config, run=self.directory.path, objects=objects)
            state, meta, notes = first_state(self.location, parts)
            check_best_metric(self.config, parts)

        def save_whole(folder: Path, state: PyTree) -> None:
            save_arrays(folder, parts.stepper.joined(state))

        if self.group is not None:
            self.directory = replace(self.directory, save_arrays=save_whole)
        self.begin(replace(parts, notes=(*parts.notes, *notes)), self.config, state, meta)

    def begin(self, parts: Parts, config: RunConfig, state: Any, meta: dict[str, Any]) -> None:
        """Begin with ``state``; ``config`` is that of ``parts``, which for a population is a member's."""
        # the state that was made would stay in memory, with its replay buffer
        self.parts, self.state, self.meta = replace(parts, state=state), state, meta
        self.update = int(state.update)
        self.cadence = Cadence(self.config.trainer, rows_per_update(config, parts))
        # a checkpoint is saved before its evaluation
        self.evaluation_due = self.config.trainer.enable_eval and meta.get("evaluation_due", False)

    def writer(self, folder: Path, config: RunConfig, meta: Mapping[str, Any], **options: Any) -> MetricWriter:
        """Open the log of a folder, the run's or a member's, for what follows here; it is closed with the run."""
        rows, is_new, due = self.cadence.rows, self.location.is_new, self.evaluation_due
        own: dict[str, Any] = {"rows": rows, "update": self.update, "is_new": is_new, "evaluates_again": due}
        return self.stack.enter_context(MetricWriter(folder, config, meta, **own, **options))

    def open_log(self) -> MetricWriter:
        """Put the folder in order for a run that begins or continues here, and show every message of its start."""
        location, directory, config = self.location, self.directory, self.config
        update, rows = self.update, self.cadence.rows
        acts = "mean action" if hasattr(self.parts.env.action_space, "low") else "most likely action"
        writer = self.writer(directory.path, config, self.meta, started=self.started, acts=acts)
        beyond = schedule_note(config.algorithm.cfg, update, config.trainer.num_updates)
        for text in filter(None, (*location.alarms, beyond)):
            writer.alarm(text)
        for text in (*location.notes, *self.parts.notes, *idle_notes(config, rows)):
            (writer.alarm if NOTHING in text else writer.note)(text)
        if config.trainer.distributed:
            each = " share each batch" if config.data else f", {config.trainer.num_envs} environments on each"
            writer.note(f"{self.parts.num_devices} devices{each}")
        if not location.is_new:
            for aside in directory.archive_after(update * rows):
                writer.note(f"set aside {aside}: the run continues from before it")
        if location.recorded is not None:  # what this call runs with, before devices share it
            record_changes(directory.config_file, location.recorded, update * rows)
        if location.checkpoint is not None:
            seal = directory.config_file.with_name(LISTING)
            problems = [] if seal.exists() else [f"{seal} is gone: no change to {directory.config_file} can be seen"]
            if update and self.parts.stepper.versions() is not None:
                problems += check_schedule(directory.path, update, self.meta.get("schedule_sha256"))
            for problem in problems:
                writer.alarm(problem)
            writer.note(f"resumed from {location.checkpoint} at {update * rows} {config.step_name}")
            if update >= (all_updates := config.trainer.num_updates):
                done = f"the run has {update} updates, and the config asks for {all_updates}"
                writer.note(f"nothing is left to train: {done}; raise trainer.iterations or trainer.total_timesteps")
        return writer


@contextmanager
def open_run(
    config: RunConfig, resume: str | None = None, run_dir: Path | None = None, fork: Path | None = None
) -> Iterator[OpenRun]:
    """Find or make the run's folder and hold it, until the call that trains in it ends."""
    keep_streams()
    trainer, started = config.trainer, time.monotonic()
    with (
        failing_together(),
        # before the environment is built: that may hang as well
        guarded_calls(config.env.id, trainer.collector) as watchdog,
        matmul_precision(trainer.matmul_precision, trainer.device),
        ExitStack() as stack,
    ):
        if (is_one_of_several := process_count() > 1) and not trainer.distributed:
            text = "got false in one of several processes that were joined, which would all train the same"
            raise ConfigError([Problem("trainer.distributed", f"{text}; set it to true")])
        # first of all: the others wait for this one
        group = Group(trainer.process_timeout_s) if is_one_of_several else None
        find = partial(locate_run, config, stack, resume, run_dir, fork)
        location = find() if group is None else locate_together(find, group)
        if trainer.console and is_main_process():  # building and compiling take from seconds to minutes
            print(f"run folder {location.directory.path}; building the environment {config.env.id} …", flush=True)
        try:
            yield OpenRun(location, watchdog, stack, group, started)
        except KeyboardInterrupt as error:
            error.add_note(location.directory.status_line())
            raise


def first_state(location: RunLocation, parts: Parts) -> tuple[Any, dict[str, Any], Sequence[str]]:
    """Return the state to begin with, the meta of the checkpoint that has it (else empty), and messages about it."""
    directory, config, file = location.directory, location.config, location.file
    if location.checkpoint is None and file is None:
        state, notes = start_from_policy(parts, config)
        return state, {}, notes
    if location.checkpoint is not None:
        _free_buffers(parts)
        state, meta = load_checkpoint(location.checkpoint, parts.state)
        directory.previous[:] = [location.checkpoint]
        if config.algorithm.record.taught(config.algorithm.cfg) is not None:
            from ejax.training.teachers import check_teacher  # with readers of policies

            check_teacher(config, parts.state, state)
        state, notes = set_rates(state, config, meta)
        return state, meta, notes
    source = Path(str(file))
    if is_foreign_checkpoint(str(file)):
        state, notes = start_from_file(source, parts, config)
    else:
        _free_buffers(parts)
        state, notes = start_from_run(source, parts, config)
        directory.previous[:] = [source]
    if parts.stepper.versions() is not None:  # of the rollouts made there, each by the newest parameters
        write_schedule(directory.path, 0, range(int(state.update)))
    return state, {}, (f"continues from {file}", *notes)


def _free_buffers(parts: Parts) -> None:
    """Free empty replay buffers on devices: memory for those that are read, of which these keep the shapes."""
    rows = [each.rows for each in replays_in(parts.state) if not isinstance(each.rows, HostRows)]
    for x in jax.tree.leaves(rows):
        x.delete()
