"""The training of a population: one program makes every member's updates, in the loop of a run by itself."""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from ejax.config import ConfigError, Problem, RunConfig, bind
from ejax.logs.best import REWARD
from ejax.logs.json_records import read_facts
from ejax.logs.metric_log import MetricLog, read_log
from ejax.population.leaderboard import PopulationResult, summaries, write_summary
from ejax.population.members import build_population
from ejax.population.sink import PopulationSink
from ejax.population.step import FITNESS
from ejax.run import run_training, train
from ejax.runtime.sharding import process_count
from ejax.runtime.streams import keep_streams
from ejax.schema.frozen import with_value
from ejax.schema.messages import explain
from ejax.schema.registry import is_foreign_checkpoint
from ejax.schema.writing import by_product, make_folder
from ejax.store.checkpoint import CheckpointError, load_checkpoint
from ejax.store.resume_rules import record_changes
from ejax.store.run_dir import RunDirectory, RunMeta
from ejax.training.loop import Cadence
from ejax.training.parts import rows_per_update
from ejax.training.saver import Progress
from ejax.training.skipped import NonFiniteUpdateError
from ejax.training.start import Call, RunLocation, StartState, locate_run


class MemberJob(NamedTuple):
    """One member's training, which any process may do that sees the folder: it can be pickled."""

    name: str
    config: RunConfig
    directory: RunDirectory


class MemberOutcome(NamedTuple):
    alive: bool = True
    finished: bool = True
    trained_s: float = 0.0
    steps: int = 0


MapMembers: TypeAlias = Callable[[Callable[[MemberJob], MemberOutcome], list[MemberJob]], Iterable[MemberOutcome]]


def train_separately(config: RunConfig, find: Callable[..., RunLocation], map_members: MapMembers) -> PopulationResult:
    """Train each member as ``ejax.run.train`` does; arguments and errors as ``run_training`` and ``train_population``.

    A member that stops at a non-finite update is reported and passed over. A resume goes on with unfinished members.
    """
    with ExitStack() as locks:
        location = find(config, locks=locks)
        directory = location.directory
        if location.given is not None:
            step = max(_meta(directory.member(i)).get("global_step", 0) for i in range(len(config.members)))
            record_changes(directory.config_file, location.given, step)
        return _train_members(config, directory, map_members)


def train_member(job: MemberJob) -> MemberOutcome:
    """Train one member, from its last checkpoint if there is one."""
    keep_streams()  # a pool's process begins here
    if job.config.trainer.console:
        print(job.name, flush=True)
    resume = "latest" if job.directory.config_file.exists() else None
    try:
        result = train(job.config, resume=resume, run_dir=job.directory.path)
    except NonFiniteUpdateError as error:
        print(f"{job.name.partition(':')[0]}: {explain(error)}", flush=True)
        return MemberOutcome(alive=False)
    return MemberOutcome(True, result.finished, result.elapsed_time_sec, result.global_step)


def _train_members(config: RunConfig, directory: RunDirectory, map_members: MapMembers) -> PopulationResult:
    started = time.monotonic()
    members, count = config.members, len(config.members)
    alive, finished, trained_s, steps = [True] * count, True, 0.0, 0
    jobs: dict[int, MemberJob] = {}
    for i, member in enumerate(members):
        own, folder = config.of_member(member), directory.member(i)
        make_folder(folder.path, directory.path)
        if _meta(folder).get("num_updates", 0) < own.trainer.num_updates:  # else finished by an earlier call
            name = f"member {i} of {count}: trainer.seed={member.seed} {member.values}"
            jobs[i] = MemberJob(name, own, folder)
    for i, outcome in zip(jobs, map_members(train_member, list(jobs.values())), strict=False):
        alive[i], finished = outcome.alive, outcome.finished
        trained_s, steps = trained_s + outcome.trained_s, steps + outcome.steps
        if not finished:  # a signal stopped it: the others wait for the resume
            break
    metas = [_meta(directory.member(i)) for i in range(count)]
    logs = [read_log(directory.member(i).path / "logs" / "metrics.jsonl")[0] for i in range(count)]
    progress = [Progress.of(meta, config.trainer)[0] for meta in metas]
    known = [[line[FITNESS] for line in log if line.get(FITNESS) is not None] for log in logs]
    rewards = [float(each[-1]) if each else math.nan for each in known]
    step = max(meta.get("global_step", 0) for meta in metas)
    best = write_summary(
        directory.path, config.trainer, members, progress, step=step, rewards=rewards, alive=alive, values={}
    )
    last: dict[str, float] = {}
    with by_product("the log of all members"):
        last = _summarize(config, directory, logs)
    return PopulationResult.of(
        progress,
        alive,
        run_dir=directory.path,
        members=members,
        global_step=step,
        num_updates=max(meta.get("num_updates", 0) for meta in metas),
        elapsed_time_sec=time.monotonic() - started,
        training_fps=steps / max(trained_s, 1e-9),
        finished=finished,
        best_member=best,
        latest_checkpoint_path=None,
        last_eval_metrics=last,
    )


def _meta(folder: RunDirectory) -> dict[str, Any]:
    newest = next(iter(folder.periodic()), None)
    return {} if newest is None else read_facts(newest / "meta.json", RunMeta)


def _summarize(config: RunConfig, directory: RunDirectory, logs: Sequence[list[dict[str, Any]]]) -> dict[str, float]:
    """Write the summaries of every step of the members' ``logs``. Return the last one of evaluations."""
    best = {REWARD: "max", FITNESS: "max", config.trainer.best_eval_metric: config.trainer.best_eval_mode}
    steps: dict[tuple[int, bool], dict[str, list[float]]] = {}
    for line in itertools.chain.from_iterable(logs):
        evaluated = any(tag.startswith("eval/") for tag in line)
        at = steps.setdefault((line["step"], evaluated), {})
        for tag, value in line.items():
            if tag not in ("step", "time") and value is not None:
                at.setdefault(tag, []).append(value)
    file = directory.path / "logs" / "metrics.jsonl"
    make_folder(file.parent, directory.path)
    file.unlink(missing_ok=True)  # made of the members' logs, whole each time
    last: dict[str, float] = {}
    with MetricLog(file) as log:
        for (step, evaluated), values in sorted(steps.items()):
            rows = summaries({tag: np.array(each) for tag, each in values.items()}, best=best)
            log.write(step, rows)
            last = rows if evaluated else last
    return last


def train_population(
    config: RunConfig, *, resume: str | None = None, run_dir: Path | None = None, map_members: MapMembers = map
) -> PopulationResult:
    """Train the members that ``config.population`` describes.

    Args:
        resume: ``latest``, or the path of a checkpoint of this population. None: a new run.
        map_members: calls a function with each of a list and gives the results in that order, as ``map`` does, which is
            one after the other here: a pool's ``imap`` has other processes train the members of ``separate_runs``.

    Raises:
        ConfigError: as ``build_population``. CheckpointError: nothing to resume from, or it has another config.
    """
    if config.population is None:
        raise ConfigError([Problem("population", "is missing; ejax.run.train trains one run")])
    if resume == "best" or (resume is not None and is_foreign_checkpoint(resume)):
        text = f"got --resume {resume}, but a population goes on from its latest state, or from a checkpoint of all"
        raise CheckpointError(f"{text}; --run RUN/members/I --resume best goes on with one member by itself")
    find = partial(locate_run, resume=resume, run_dir=run_dir)
    if config.population.separate_runs:
        return train_separately(config, find, map_members)
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
