"""The files of a population: a folder for each member, as of a run by itself, and summaries over all."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.algorithms.step import RunState
from ejax.config import RunConfig
from ejax.logs.best import REWARD
from ejax.logs.metrics import MetricWriter
from ejax.logs.usage import TIME, memory_in_use, times
from ejax.population.leaderboard import PopulationResult, summaries, write_summary
from ejax.population.lineage import EXPLOITS, Exploited, read_exploits, write_exploit
from ejax.population.members import PopulationParts, member_state, take
from ejax.population.step import FITNESS, PARENT, PopulationState
from ejax.runtime.stopwatch import ENGINE
from ejax.schema.writing import by_product, make_folder, replace_file
from ejax.store.resume_rules import record_changes
from ejax.store.run_dir import create_run_directory
from ejax.store.run_lock import run_lock
from ejax.training.fresh import BROKEN_OFF, best_or_last, fresh_seeds, params_of, play_best_and_last, write_fresh
from ejax.training.loop import Dispatch, Sink
from ejax.training.open_run import OpenRun
from ejax.training.saver import Progress, Saver
from ejax.training.skipped import skipped_fraction
from ejax.training.steppers import ShouldStop
from ejax.types import Metrics, Params

Arrays = dict[str, NDArray[Any]]
_SHOWN = ("charts/SPS", "population/alive", "train/loss/median")
"""Summaries on the console, besides the reward's."""


class PopulationSink(Sink[PopulationState, PopulationResult]):
    """The events of one population. Used once."""

    def __init__(self, start: OpenRun, parts: PopulationParts) -> None:
        config, first = start.config, start.update
        self._start, self._config, self._trainer, self._parts = start, config, config.trainer, parts
        self._directory, self._clock = start.directory, start.clock
        self._cadence, self._rows = start.cadence, start.cadence.rows
        state, meta = cast(PopulationState, start.state), start.meta
        self._alive = np.asarray(state.alive).copy()
        self._rewards: NDArray[Any] = np.asarray(meta.get("rewards", [math.nan] * len(parts.members)), float)
        self._last_eval: dict[str, float] = {}
        self._exploits = config.population is not None and config.population.exploit is not None

        self._writer = start.open_log()
        self._saver = Saver(
            config, self._directory, self._writer, Progress(), start.clock, (state, first), self._rows, more=self._more
        )
        if self._exploits:
            # exploits after the checkpoint are made again
            kept = [each for each in read_exploits(self._directory.path) if each.update <= first]
            text = "".join(f"{each.model_dump_json()}\n" for each in kept)
            replace_file(self._directory.path / EXPLOITS, text, self._directory.path)
        if self._trainer.cameras:
            self.note("no videos of a population's members: python -m ejax.evaluate RUN --member I --video FILE")
        metas = meta.get("members", [{}] * len(parts.members))
        self._folders = [MemberFolder(start, i, own, metas[i]) for i, own in enumerate(parts.configs)]
        known = [each.progress.last_eval_metrics for each in self._folders]
        # the end reports the last evaluation, which may be from before the resume
        if all(known):
            self._summarize_evaluation({tag: np.array([each[tag] for each in known]) for tag in known[0]})

    def note(self, text: str) -> None:
        self._writer.note(text)

    def compile(self, state: PopulationState) -> None:
        if self._trainer.enable_eval:
            self._parts.evaluator.compile(state.members.train.params)

    def start(self, state: PopulationState, seconds: float) -> None:
        del state
        number = len(self._parts.members)
        self.note(f"built and compiled {number} members in {seconds:.1f} s")

    def reached(self, state: PopulationState, update: int) -> Callable[[], Metrics] | None:
        # here, while the state of all is on the device
        at_end = update == self._trainer.num_updates and self._trainer.enable_eval
        if not (self._cadence.evaluates(update) or at_end):
            return None
        return self._parts.evaluator.begin(state.members.train.params)

    def finish(self, dispatch: Dispatch[PopulationState], metrics: Arrays, steps_per_s: float) -> None:
        for i in range(dispatch.count):
            update = dispatch.update - dispatch.count + i + 1
            self._log_update(update, {name: x[i] for name, x in metrics.items()}, steps_per_s * len(self._folders))
        if dispatch.evaluation is not None:
            self._record_evaluation(dispatch.state, dispatch.update, dispatch.evaluation)
        if self._cadence.saves(dispatch.update):
            self._save(dispatch.state, dispatch.update)

    def _log_update(self, update: int, metrics: Arrays, fps: float) -> None:
        step, was = update * self._rows, self._alive
        # seconds of all members: summaries over members must not see them
        self._clock.add("train", float(metrics.pop(f"{TIME}train_s")))
        self._alive = metrics.pop("population/alive") > 0.0
        for i in np.flatnonzero(was & ~self._alive).tolist():
            member = self._parts.members[i]
            own = ", ".join(f"{key}={value}" for key, value in {"trainer.seed": member.seed, **member.values}.items())
            self._writer.alarm(f"member {i} ({own}): update {update} was not finite; it is held as it was before")
        if PARENT in metrics:
            self._record_exploits(update, metrics)
        for i, folder in enumerate(self._folders):
            if was[i]:
                folder.progress.skipped_updates += skipped_fraction({name: x[i] for name, x in metrics.items()})
        self._rewards = np.where(was, metrics[FITNESS], self._rewards)
        if not self._cadence.logs(update):
            return
        for i in np.flatnonzero(was).tolist():
            row = {name: float(x[i]) for name, x in metrics.items() if not math.isnan(x[i])}
            self._folders[i].writer.write(step, row | {"charts/SPS": fps / len(self._folders)})
        # members that broke earlier report NaN
        living = {name: x[was] for name, x in metrics.items() if name != PARENT}
        rows = summaries(living, best={FITNESS: "max"}) | {
            "charts/SPS": fps,
            "population/alive": float(self._alive.sum()),
        }
        rows |= times(self._clock.take() | ENGINE.take()) | memory_in_use(jax.devices()[0])
        shown = {tag: x for tag, x in rows.items() if tag in _SHOWN or tag.startswith(FITNESS)}
        self._writer.write(step, rows, shown=shown)

    def _record_exploits(self, update: int, metrics: Arrays) -> None:
        own = np.arange(len(self._folders))
        parents = metrics[PARENT].astype(int)  # a metric is float
        for i in np.flatnonzero(parents != own).tolist():
            values = {
                f"algorithm.cfg.{name}": float(metrics[f"population/{name}"][i]) for name in self._parts.state.values
            }
            step, parent = update * self._rows, int(parents[i])
            exploited = Exploited(step=step, update=update, member=i, parent=parent, values=values)
            with by_product(EXPLOITS, self._writer.alarm):
                write_exploit(self._directory.path, exploited)
            self.note(f"update {update}: member {i} goes on from member {parents[i]} with {values}")
            # the metric is from before the copy, which revives a broken member
            self._alive[i] = True

    def _record_evaluation(self, state: PopulationState, update: int, evaluation: Callable[[], Metrics]) -> None:
        with self._clock.of("evaluate"):
            metrics: Arrays = {name: np.asarray(x) for name, x in jax.device_get(evaluation()).items()}
        for i, folder in enumerate(self._folders):
            if self._alive[i]:
                own_state = partial(member_state, state, i)  # sliced on the device, and only if it is saved
                folder.record_evaluation(own_state, update, {name: x[i] for name, x in metrics.items()})
        self._summarize_evaluation(metrics)
        best = self._write_summary(state, update)
        shown = {k: x for k, x in self._last_eval.items() if k.startswith((self._trainer.best_eval_metric, REWARD))}
        known = None if best is None else self._folders[best].progress.best  # the console shows the best of all members
        self._writer.write(update * self._rows, self._last_eval, known, shown=shown)

    def _summarize_evaluation(self, metrics: Arrays) -> None:
        living = {name: x[self._alive] for name, x in metrics.items()}
        best = {REWARD: "max", self._trainer.best_eval_metric: self._trainer.best_eval_mode}
        self._last_eval = summaries(living, best=best)

    def _write_summary(self, state: PopulationState, update: int) -> int | None:
        values = {}
        if self._exploits:
            values = {name: np.asarray(x).tolist() for name, x in jax.device_get(state.values).items()}
        return write_summary(
            self._directory.path,
            self._trainer,
            self._parts.members,
            [folder.progress for folder in self._folders],
            step=update * self._rows,
            rewards=self._rewards.tolist(),
            alive=self._alive.tolist(),
            values=values,
        )

    def _more(self) -> dict[str, Any]:
        members = [{**asdict(folder.progress), "log": folder.writer.logged()} for folder in self._folders]
        # JSON has no NaN
        return {"members": members, "rewards": [x if math.isfinite(x) else None for x in self._rewards.tolist()]}

    def _save(self, state: PopulationState, update: int) -> None:
        # the members' best first: a kill in between leaves a best checkpoint that is newer than the state of all,
        # which the resumed population sets aside
        for folder in self._folders:
            folder.saver.write_held()
        self._saver.save(state, update)

    def _evaluate_fresh(self, state: PopulationState, should_stop: ShouldStop) -> None:
        params = state.members.train.params
        if not fresh_seeds(self._trainer):
            return
        folders = [folder.directory for folder in self._folders]
        last = [folder.periodic()[0] for folder in folders]
        alarm = self._writer.alarm
        best = [best_or_last(next(iter(each.best()), None), last[i], alarm) for i, each in enumerate(folders)]
        kept = [params_of(best[i], last[i], take(params, i)) for i in range(len(folders))]
        # stacked, so that one program plays all members
        bests = jax.tree.map(lambda *own: jnp.stack(own), *kept)

        def play(params: Params, seed: int) -> Arrays | None:
            return None if should_stop() else jax.device_get(self._parts.evaluator.begin(params, seed)())

        found = play_best_and_last(self._trainer, bests, params, play)
        if found is None:
            self.note(BROKEN_OFF)
            return
        for i, folder in enumerate(folders):
            for which, checkpoints in (("best", best), ("last", last)):
                own = {tag: float(x[i]) for tag, x in found[which].items()}
                write_fresh(folder.path, which, checkpoints[i], self._trainer, own)

    def end(self, state: PopulationState, update: int, steps_per_s: float, should_stop: ShouldStop) -> PopulationResult:
        finished = update >= self._trainer.num_updates
        self._save(state, update)
        for i, folder in enumerate(self._folders):
            folder.saver.save(member_state(state, i), update)  # so that each member can be gone on with by itself
        best = self._write_summary(state, update)
        if finished:
            self._evaluate_fresh(state, should_stop)
        else:
            self.note(
                f"stopped at {update * self._rows} {self._config.step_name} of each member; "
                f"go on with python -m ejax.train --run {self._directory.path} --resume latest"
            )
        return PopulationResult.of(
            [folder.progress for folder in self._folders],
            self._alive.tolist(),
            run_dir=self._directory.path,
            members=self._parts.members,
            global_step=update * self._rows,
            num_updates=update,
            elapsed_time_sec=time.monotonic() - self._start.started,
            training_fps=steps_per_s * len(self._folders),
            finished=finished,
            best_member=best,
            latest_checkpoint_path=self._saver.latest,
            last_eval_metrics=self._last_eval,
        )


class MemberFolder:
    """Log, checkpoints and progress of a member, as of a run by itself; ``meta``: its part of the population's."""

    def __init__(self, start: OpenRun, index: int, config: RunConfig, meta: Mapping[str, Any]) -> None:
        directory, is_new = start.directory.member(index), start.location.is_new
        rows, update, step = start.cadence.rows, start.update, start.update * start.cadence.rows
        make_folder(directory.path, start.directory.path)
        start.stack.enter_context(run_lock(directory.path))  # a member can be gone on with by itself
        if is_new or not directory.config_file.exists():
            create_run_directory(config, directory.path)
        else:
            directory.recover()
            directory.set_aside_after(step)
            record_changes(directory.config_file, config, step)
        log = MetricWriter(directory.path, config, meta, rows=rows, update=update, is_new=is_new, quiet=True)
        self.directory, self._config, self._rows = directory, config, rows
        self.writer = start.stack.enter_context(log)
        self.progress, _ = Progress.of({**meta, "config": start.meta.get("config", {})}, config.trainer)
        # nothing rescues a member: of its first state only the number is used
        self.saver = Saver(config, directory, self.writer, self.progress, start.clock, (None, update), rows)

    def record_evaluation(self, state: Callable[[], RunState], update: int, row: Metrics) -> None:
        """Write an evaluation, and hold the member's state if it is its best."""
        metrics = {name: float(x) for name, x in row.items()}
        is_best = self.progress.judge(self._config.trainer, metrics, update, update * self._rows)
        self.writer.write(update * self._rows, metrics, self.progress.best)
        if is_best:
            # a run that is killed makes the evaluations after the last checkpoint of all again
            self.saver.hold_best(state(), update)
