"""The training of a population: one program makes every member's updates, in the loop of a run by itself."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from ejax.config import ConfigError, Problem, RunConfig, bind
from ejax.population.leaderboard import PopulationResult
from ejax.population.members import build_population
from ejax.population.sink import PopulationSink
from ejax.run import run_training
from ejax.runtime.sharding import process_count
from ejax.schema.frozen import with_value
from ejax.schema.registry import is_foreign_checkpoint
from ejax.store.checkpoint import CheckpointError, load_checkpoint
from ejax.training.loop import Cadence
from ejax.training.parts import rows_per_update
from ejax.training.start import Call, StartState, locate_run


def train_population(config: RunConfig, *, resume: str | None = None, run_dir: Path | None = None) -> PopulationResult:
    """Train the members that ``config.population`` describes.

    Args:
        resume: ``latest``, or the path of a checkpoint of this population. None: a new run.

    Raises:
        ConfigError: as ``build_population``. CheckpointError: nothing to resume from, or it has another config.
    """
    if config.population is None:
        raise ConfigError([Problem("population", "is missing; ejax.run.train trains one run")])
    if resume == "best" or (resume is not None and is_foreign_checkpoint(resume)):
        text = f"got --resume {resume}, but a population goes on from its latest state, or from a checkpoint of all"
        raise CheckpointError(f"{text}; --run RUN/members/I --resume best goes on with one member by itself")
    find = partial(locate_run, resume=resume, run_dir=run_dir)
    if process_count() > 1:
        text = "is trained by one process; start it on one machine, or leave population out"
        raise ConfigError([Problem("population", text)])
    # the members' numbers do not depend on the devices that share them, and a run may change them
    alone = with_value(config, "trainer.distributed", False)
    return run_training(alone, find, partial(_begin, config.trainer.distributed))


def _begin(distributed: bool, call: Call) -> tuple[StartState, PopulationSink]:
    location, config = call.location, call.location.config
    with location.building():
        built = build_population(bind(with_value(config, "trainer.distributed", distributed)))
    state, meta = built.state, dict[str, Any]()
    if location.checkpoint is not None:
        state, meta = load_checkpoint(location.checkpoint, state)
        location.directory.previous[:] = [location.checkpoint]
    cadence = Cadence(config.trainer, rows_per_update(built.configs[0], built.parts))
    parts = replace(built.parts, stepper=cast(Any, built.stepper), state=cast(Any, state))
    start = StartState(parts, cast(Any, state), cadence, meta, built.notes)
    return start, PopulationSink(call, start, built)
