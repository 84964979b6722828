"""Populations whose members are runs of their own, one after the other: ``population.separate_runs``."""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from ejax.config import RunConfig
from ejax.logs.best import REWARD
from ejax.logs.json_records import read_facts
from ejax.logs.metric_log import MetricLog, read_log
from ejax.population.leaderboard import PopulationResult, summaries, write_summary
from ejax.population.step import FITNESS
from ejax.run import train
from ejax.store.resume_rules import record_changes
from ejax.store.run_dir import RunDirectory, RunMeta
from ejax.training.saver import Progress
from ejax.training.skipped import NonFiniteUpdateError
from ejax.training.start import RunLocation


def train_separately(config: RunConfig, find: Callable[..., RunLocation]) -> PopulationResult:
    """Train each member as ``ejax.run.train`` does; arguments and errors as ``run_training``.

    A member that stops at a non-finite update is reported and passed over. A resume goes on with unfinished members.
    """
    with ExitStack() as locks:
        location = find(config, locks=locks)
        directory = location.directory
        if location.given is not None:
            step = max(_meta(directory.member(i)).get("global_step", 0) for i in range(len(config.members)))
            record_changes(directory.config_file, location.given, step)
        return _train_members(config, directory)


def _train_members(config: RunConfig, directory: RunDirectory) -> PopulationResult:
    started = time.monotonic()
    members, count = config.members, len(config.members)
    alive, finished, trained_s, steps = [True] * count, True, 0.0, 0
    for i, member in enumerate(members):
        own, folder = config.of_member(member), directory.member(i)
        if _meta(folder).get("num_updates", 0) >= own.trainer.num_updates:  # finished by an earlier call
            continue
        if own.trainer.console:
            print(f"member {i} of {count}: trainer.seed={member.seed} {member.values}", flush=True)
        try:
            result = train(own, resume="latest" if folder.config_file.exists() else None, run_dir=folder.path)
        except NonFiniteUpdateError as error:
            alive[i] = False
            print(f"member {i}: {error}", flush=True)
            continue
        trained_s, steps = trained_s + result.elapsed_time_sec, steps + result.global_step
        finished = result.finished  # a signal stopped it: the others wait for the resume
        if not finished:
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
        last_eval_metrics=_summarize(config, directory, logs),
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
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)  # made of the members' logs, whole each time
    last: dict[str, float] = {}
    with MetricLog(file) as log:
        for (step, evaluated), values in sorted(steps.items()):
            rows = summaries({tag: np.array(each) for tag, each in values.items()}, best=best)
            log.write(step, rows)
            last = rows if evaluated else last
    return last
