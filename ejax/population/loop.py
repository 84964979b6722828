"""The training of a population: one program makes every member's updates, in the loop of a single run."""

from functools import partial
from pathlib import Path
from typing import Any

from ejax.config import ConfigError, Problem, RunConfig, bind
from ejax.population.lanes import MemberLanes, PopulationResult
from ejax.population.members import build_population
from ejax.runtime.sharding import process_count
from ejax.schema.frozen import with_value
from ejax.schema.registry import is_foreign_checkpoint
from ejax.store.checkpoint import CheckpointError, load_checkpoint
from ejax.training.loop import Loop
from ejax.training.open_run import open_run
from ejax.training.sink import RunSink


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
        text = f"got --resume {resume}, but a population continues from its latest state, or from a checkpoint of all"
        raise CheckpointError(f"{text}; --run RUN/members/I --resume best continues one member alone")
    if process_count() > 1:
        text = "is trained by one process; start it on one machine, or leave population out"
        raise ConfigError([Problem("population", text)])
    # the members' numbers do not depend on the devices that share them, and a run may change them
    alone = with_value(config, "trainer.distributed", False)
    with open_run(alone, resume, run_dir) as run:
        with run.building():
            shared = with_value(run.config, "trainer.distributed", config.trainer.distributed)
            built = build_population(bind(shared))
        state, meta = built.parts.state, dict[str, Any]()
        if run.location.checkpoint is not None:
            state, meta = load_checkpoint(run.location.checkpoint, state)
            run.directory.previous[:] = [run.location.checkpoint]
        run.begin(built.parts, built.configs[0], state, meta)
        return Loop(run, RunSink(run, members=partial(MemberLanes, run, built))).run()
