"""The training of a population: one program makes every member's updates, in the loop of a run by itself."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ejax.config import ConfigError, Problem, RunConfig, bind
from ejax.population.leaderboard import PopulationResult
from ejax.population.members import build_population
from ejax.population.separate_runs import train_separately
from ejax.population.sink import PopulationSink
from ejax.population.step import PopulationState
from ejax.runtime.device import matmul_precision
from ejax.runtime.stopwatch import Stopwatch
from ejax.schema.frozen import with_value
from ejax.schema.registry import is_foreign_checkpoint
from ejax.store.checkpoint import CheckpointError, load_checkpoint
from ejax.training.loop import Cadence, Loop
from ejax.training.parts import rows_per_update
from ejax.training.profile import Profiler
from ejax.training.start import RunLocation, locate_run
from ejax.training.watchdog import guarded_calls


def train_population(config: RunConfig, *, resume: str | None = None, run_dir: Path | None = None) -> PopulationResult:
    """Train the members that ``config.population`` describes.

    Args:
        resume: ``latest``, or the path of a checkpoint of this population. None: a new run.

    Raises:
        ConfigError: as ``build_population``. CheckpointError: nothing to resume from, or it has another config.
    """
    started = time.monotonic()
    if config.population is None:
        raise ConfigError([Problem("population", "is missing; ejax.run.train trains one run")])
    if resume == "best" or (resume is not None and is_foreign_checkpoint(resume)):
        text = f"got --resume {resume}, but a population goes on from its latest state, or from a checkpoint of all"
        raise CheckpointError(f"{text}; --run RUN/members/I --resume best goes on with one member by itself")
    if config.population.separate_runs:
        return train_separately(config, resume=resume, run_dir=run_dir)
    # the members' numbers do not depend on the devices that share them, and a run may change them
    trainer, alone = config.trainer, with_value(config, "trainer.distributed", False)
    with ExitStack() as locks:
        location = locate_run(alone, resume, run_dir, locks=locks)
        try:
            with (
                guarded_calls(config.env.id, trainer.collector),
                matmul_precision(trainer.matmul_precision, trainer.device),
            ):
                return _train(location, trainer.distributed, started)
        except KeyboardInterrupt as error:
            error.add_note(location.directory.last_word())
            raise


def _train(location: RunLocation, distributed: bool, started: float) -> PopulationResult:
    config = location.config
    try:
        parts = build_population(bind(with_value(config, "trainer.distributed", distributed)))
    except BaseException:
        if location.is_new:
            location.directory.take_back()
        raise
    state = parts.state
    meta: dict[str, Any] = {}
    if location.checkpoint is not None:
        state, meta = load_checkpoint(location.checkpoint, state)
    times = Stopwatch()
    cadence = Cadence.of(config.trainer, rows_per_update(parts.configs[0], parts.parts))
    with ExitStack() as stack:
        sink = PopulationSink(location, parts, state, meta, times, started, stack)
        loop: Loop[PopulationState, PopulationResult] = Loop(
            parts.stepper,
            sink,
            cadence,
            times,
            first=int(state.update),
            started=started,
            adapts=config.trainer.updates_per_dispatch == "auto",
            profiler=Profiler(None, location.directory.path),
        )
        return loop.run(state)
