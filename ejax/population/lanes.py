"""The files and figures of a population: a lane for each member, as of a single run; summaries, and the best of all."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from numpy.typing import NDArray

from ejax.config import RunConfig
from ejax.config.models import TrainerConfig
from ejax.config.population import OPTIONS, Member
from ejax.logs.best import REWARD
from ejax.logs.metrics import MetricWriter
from ejax.population.lineage import EXPLOITS, Exploited, lineage, read_exploits, value_texts, write_exploit
from ejax.population.members import PopulationParts, take
from ejax.population.step import FITNESS, PARENT, PopulationState
from ejax.runtime.process_exit import refused
from ejax.runtime.stopwatch import ENGINE
from ejax.schema.frozen import thaw
from ejax.schema.plain_files import to_json
from ejax.schema.writing import by_product, make_folder, replace_file
from ejax.store.resume_rules import record_changes
from ejax.store.run_dir import create_run_directory
from ejax.store.run_lock import run_lock
from ejax.training.callbacks import TrainingRun
from ejax.training.command import last_evaluation, of_fresh_episodes, print_facts
from ejax.training.evaluators import read_fresh
from ejax.training.open_run import OpenRun
from ejax.training.reporter import memory_in_use, skipped_fraction, times
from ejax.training.saver import Lane, Progress
from ejax.training.sink import Members
from ejax.types import PyTree

MemberArrays = Mapping[str, NDArray[Any]]
_SHOWN = ("charts/SPS", "population/alive", "train/loss/median")
"""Summaries on the console, besides the reward's."""


@dataclass(kw_only=True)
class PopulationResult:
    """The end of a population's training."""

    run_dir: Path
    members: tuple[Member, ...]
    global_step: int
    """Environment steps of each member."""
    num_updates: int
    elapsed_time_sec: float
    training_fps: float
    """Environment steps of all members per second, after compilation."""
    finished: bool
    alive: tuple[bool, ...]
    """False: the member's parameters were not finite; it is held as it was before."""
    skipped_updates: tuple[float, ...]
    best_member: int | None
    """The one with the best evaluation; without evaluations, with the highest reward in training."""
    best_eval_values: tuple[float | None, ...]
    best_eval_steps: tuple[int | None, ...]
    latest_checkpoint_path: Path | None
    last_eval_metrics: dict[str, float]
    """Summaries over the members."""


class MemberLanes(Members):
    """The members' lanes, and the log of all of them, which ``writer`` has."""

    def __init__(self, run: OpenRun, parts: PopulationParts, writer: MetricWriter) -> None:
        config, meta, count = run.config, run.meta, len(parts.members)
        self._open, self._trainer, self._parts, self._writer = run, config.trainer, parts, writer
        self._folder, self.evaluator = run.directory.path, parts.evaluator
        self._alive = np.asarray(run.state.alive).copy()
        self._rewards: NDArray[Any] = np.asarray(meta.get("rewards", [math.nan] * count), float)
        self._last_eval: dict[str, float] = {}
        self._best: int | None = None
        self._exploits = config.population is not None and config.population.exploit is not None
        if self._exploits:
            # exploits after the checkpoint are made again
            kept = [each for each in read_exploits(self._folder) if each.update <= run.update]
            text = "".join(f"{each.model_dump_json()}\n" for each in kept)
            replace_file(self._folder / EXPLOITS, text, self._folder)
        if self._trainer.cameras:
            writer.note("no videos of a population's members: ejax evaluate RUN --member I --video FILE")
        metas = meta.get("members", [{}] * count)
        self.lanes = [_lane(run, i, own, metas[i]) for i, own in enumerate(parts.configs)]
        known = [each.progress.last_eval_metrics for each in self.lanes]
        # the end reports the last evaluation, which may be from before the resume
        if all(known):
            self._summarize_evaluation({tag: np.array([each[tag] for each in known]) for tag in known[0]})

    def take(self, tree: PyTree, index: int) -> PyTree:
        return take(tree.members if isinstance(tree, PopulationState) else tree, index)

    def on_update(self, run: TrainingRun, metrics: Mapping[str, Any]) -> None:
        was, count = self._alive, len(self.lanes)
        self._alive = metrics["population/alive"] > 0.0
        metrics = {name: x for name, x in metrics.items() if name != "population/alive"}
        for i in np.flatnonzero(was & ~self._alive).tolist():
            member = self._parts.members[i]
            own = ", ".join(f"{key}={value}" for key, value in {"trainer.seed": member.seed, **member.values}.items())
            self._writer.alarm(f"member {i} ({own}): update {run.update} was not finite; it is held as it was before")
        if PARENT in metrics:
            self._record_exploits(run, metrics)
        living = np.flatnonzero(was).tolist()
        for i in living:
            self.lanes[i].progress.skipped_updates += skipped_fraction({name: x[i] for name, x in metrics.items()})
        self._rewards = np.where(was, metrics[FITNESS], self._rewards)
        if not run.cadence.logs(run.update):
            return
        for i in living:
            row = {name: float(x[i]) for name, x in metrics.items() if not math.isnan(x[i])}
            self.lanes[i].writer.write(run.step, row | {"charts/SPS": run.steps_per_s})
        # members that broke earlier report NaN
        rows = summaries({name: x[was] for name, x in metrics.items() if name != PARENT}, best={FITNESS: "max"})
        rows |= {"charts/SPS": run.steps_per_s * count, "population/alive": float(self._alive.sum())}
        rows |= times(self._open.clock.take() | ENGINE.take()) | memory_in_use(jax.devices()[0])
        shown = {tag: x for tag, x in rows.items() if tag in _SHOWN or tag.startswith(FITNESS)}
        self._writer.write(run.step, rows, shown=shown)

    def _record_exploits(self, run: TrainingRun, metrics: MemberArrays) -> None:
        parents, names = metrics[PARENT].astype(int), cast(Any, self._parts.parts.state).values  # a metric is float
        for i in np.flatnonzero(parents != np.arange(len(parents))).tolist():
            values = {f"{OPTIONS}{name}": float(metrics[f"population/{name}"][i]) for name in names}
            parent = int(parents[i])
            with by_product(EXPLOITS, self._writer.alarm):
                exploited = Exploited(step=run.step, update=run.update, member=i, parent=parent, values=values)
                write_exploit(self._folder, exploited)
            run.note(f"update {run.update}: member {i} continues from member {parent} with {values}")
            # the metric is from before the copy, which revives a broken member
            self._alive[i] = True

    def on_evaluation(self, run: TrainingRun, metrics: Mapping[str, Any]) -> None:
        for i in np.flatnonzero(self._alive).tolist():
            lane, row = self.lanes[i], {name: float(x[i]) for name, x in metrics.items()}
            is_best = lane.progress.update_best(lane.config.trainer, row, run.update, run.step)
            lane.writer.write(run.step, row, lane.progress.best)
            if is_best:  # sliced on the device, and only if it is saved
                lane.hold_best(self.take(run.state, i), run.update)
        self._summarize_evaluation(metrics)
        self._write_summary(run)
        shown = {k: x for k, x in self._last_eval.items() if k.startswith((self._trainer.best_eval_metric, REWARD))}
        # the console shows the best of all members
        known = None if self._best is None else self.lanes[self._best].progress.best
        self._writer.write(run.step, self._last_eval, known, shown=shown)

    def _summarize_evaluation(self, metrics: MemberArrays) -> None:
        living = {name: x[self._alive] for name, x in metrics.items()}
        best = {REWARD: "max", self._trainer.best_eval_metric: self._trainer.best_eval_mode}
        self._last_eval = summaries(living, best=best)

    def _write_summary(self, run: TrainingRun) -> None:
        """Write ``population.json``, with the best member."""
        progress, rewards = [each.progress for each in self.lanes], self._rewards.tolist()
        self._best = best_member(self._trainer, progress, rewards)
        state: Any = run.state
        values = {name: np.asarray(x) for name, x in state.values.items()} if self._exploits else {}
        rows = []
        for i, (member, own) in enumerate(zip(self._parts.members, progress, strict=True)):
            row: dict[str, Any] = {"member": i, "seed": member.seed}
            row |= {key: thaw(value) for key, value in member.values.items()}
            row |= {f"{key} now": float(each[i]) for key, each in values.items()}
            if own.best is not None:
                row |= {"best_eval_value": own.best_eval_value, "best_eval_step": own.best_eval_step}
            row |= {"last_eval": own.last_eval_metrics, FITNESS: rewards[i] if math.isfinite(rewards[i]) else None}
            rows.append(row | {"alive": bool(self._alive[i]), "skipped_updates": own.skipped_updates})
        facts = {"best": self._best, "metric": self._trainer.best_eval_metric, "step": run.step, "members": rows}
        with by_product(f"{self._folder / 'population.json'}, with the best member"):
            replace_file(self._folder / "population.json", to_json(facts, indent=2), self._folder)

    def meta(self) -> dict[str, Any]:
        # the members' best first: a kill in between leaves a best checkpoint that is newer than the state of all,
        # which the resumed population sets aside
        for lane in self.lanes:
            lane.save_best()
        members = [{**asdict(each.progress), "log": each.writer.logged()} for each in self.lanes]
        # JSON has no NaN
        return {"members": members, "rewards": [x if math.isfinite(x) else None for x in self._rewards.tolist()]}

    def result(self, run: TrainingRun, facts: Mapping[str, Any]) -> PopulationResult:
        self._write_summary(run)
        progress = [each.progress for each in self.lanes]
        return PopulationResult(
            **facts,
            members=self._parts.members,
            alive=tuple(self._alive.tolist()),
            skipped_updates=tuple(each.skipped_updates for each in progress),
            best_member=self._best,
            best_eval_values=tuple(each.best_eval_value for each in progress),
            best_eval_steps=tuple(each.best_eval_step for each in progress),
            last_eval_metrics=self._last_eval,
        )


def _lane(run: OpenRun, index: int, config: RunConfig, meta: Mapping[str, Any]) -> Lane:
    """Open a member's folder and log; ``meta``: its part of the population's."""
    directory, is_new = run.directory.member(index), run.location.is_new
    make_folder(directory.path, run.directory.path)
    run.stack.enter_context(run_lock(directory.path))  # a member can be continued alone
    if is_new or not directory.config_file.exists():
        create_run_directory(config, directory.path)
    else:
        step = run.update * run.cadence.rows
        directory.recover()
        directory.archive_after(step)
        record_changes(directory.config_file, config, step)
    progress, _ = Progress.of({**meta, "config": run.meta.get("config", {})}, config.trainer)
    return Lane(run, config, directory, run.writer(directory.path, config, meta, quiet=True), progress)


def summaries(metrics: Mapping[str, NDArray[Any]], *, best: Mapping[str, str] | None = None) -> dict[str, float]:
    """Return median and interquartile mean over each tag's finite values [M], as ``<tag>/median`` and ``<tag>/iqm``.

    The latter leaves out ⌊M/4⌋ members at either end (Agarwal et al. 2021). ``best``: ``max`` or ``min`` for
    ``<tag>/best``.
    """
    rows: dict[str, float] = {}
    for tag, values in metrics.items():
        finite = np.sort(values[np.isfinite(values)].astype(np.float64))
        if len(finite) == 0:
            continue
        cut = len(finite) // 4  # Agarwal et al.: the middle half
        rows[f"{tag}/median"] = float(np.median(finite))
        rows[f"{tag}/iqm"] = float(finite[cut : len(finite) - cut].mean())
        if tag in (best or {}):
            rows[f"{tag}/best"] = float(finite[-1] if (best or {})[tag] == "max" else finite[0])
    return rows


def best_member(trainer: TrainerConfig, progress: Sequence[Progress], rewards: Sequence[float]) -> int | None:
    """Return the member with the best evaluation, of equal ones that of the higher reward.

    Without evaluations: the one of the highest of ``rewards``, in training (NaN: not known). None: nothing is known.
    """
    sign = 1.0 if trainer.best_eval_mode == "max" else -1.0  # so that the largest is the best
    bests = {i: each.best for i, each in enumerate(progress) if each.best is not None}
    if bests:
        own = {i: -math.inf if best.reward is None else best.reward for i, best in bests.items()}
        return max(bests, key=lambda i: (sign * bests[i].value, own[i], -i))  # equal ones: the first
    known = [i for i, reward in enumerate(rewards) if math.isfinite(reward)]
    return max(known, key=lambda i: (rewards[i], -i), default=None)


def print_population(name: str, config: RunConfig, result: PopulationResult) -> int:
    """Print the facts of a population that has ended. Returns the exit code."""
    best, tag = result.best_member, config.trainer.best_eval_metric
    broken = [i for i, alive in enumerate(result.alive) if not alive]
    skipping = [i for i, skipped in enumerate(result.skipped_updates) if skipped > 0.5 * result.num_updates]
    of_best: dict[str, str] = {}
    if best is not None:
        exploits, at = read_exploits(result.run_dir), result.best_eval_steps[best]
        of_best = value_texts(exploits, best, at, result.members[best].values)
        if exploits:
            of_best["its lineage"] = lineage(exploits, best)
            of_best["exploits"] = f"{len(exploits)}: {result.run_dir / EXPLOITS}"
        of_best[f"its best {tag}"] = str(result.best_eval_values[best])
        of_best |= of_fresh_episodes(read_fresh(result.run_dir / "members" / str(best)), tag)
    facts = {
        **last_evaluation(result.last_eval_metrics),
        "best member": "none" if best is None else f"{best}: seed {result.members[best].seed}",
        **of_best,
        "broken members": ", ".join(map(str, broken)) or None,
        "members that skipped most updates": ", ".join(map(str, skipping)) or None,
        "latest checkpoint": result.latest_checkpoint_path or "each member's own",
    }
    print_facts(config, result, facts, " of each", " of all")
    if len(broken) == len(result.members):  # some that broke are a result, all are a failure
        return refused(f"ejax {name}", "every member broke; lower algorithm.cfg.optimizer.learning_rate", 3)
    return 0
