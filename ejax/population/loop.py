"""The loop of a population: one program trains all members, and each is logged, evaluated and saved by itself.

The run's folder holds, besides the state of all members to go on from, a folder for each: ``members/3`` is a run like
any other, with the config of this member, its metrics and its checkpoints.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.config import ConfigError, Problem, RunConfig
from ejax.config.bind import bind
from ejax.logs.best import REWARD, Best, improves
from ejax.logs.console import make_view
from ejax.logs.metrics import MetricWriter
from ejax.logs.usage import memory_in_use, times
from ejax.population.leaderboard import PopulationResult, summaries, write_standing
from ejax.population.members import PopulationParts, build_population, member_state, take
from ejax.population.separate_runs import train_apart
from ejax.population.step import FITNESS, PARENT, PopulationState
from ejax.runtime.device import matmul_precision
from ejax.runtime.interrupt import interruptible
from ejax.runtime.stopwatch import ENGINE, Stopwatch
from ejax.schema.registry import is_foreign_checkpoint
from ejax.store.checkpoint import CheckpointError, load_checkpoint
from ejax.store.run_dir import RunDirectory, create_run_directory
from ejax.store.run_lock import run_lock
from ejax.training.cadence import Throttle
from ejax.training.fresh import BROKEN_OFF, best_or_last, evaluate_fresh, fresh_seeds, params_of, write_fresh
from ejax.training.lineage import EXPLOITS, Exploited, read_exploits, write_exploit
from ejax.training.parts import cadence_of, rows_per_update
from ejax.training.progress import Progress
from ejax.training.saver import Saver
from ejax.training.skipped import skipped_fraction
from ejax.training.start import RunLocation, locate_run
from ejax.training.watchdog import guarded_calls
from ejax.types import Metrics, Params

_Arrays = dict[str, NDArray[Any]]


def train_population(config: RunConfig, *, resume: str | None = None, run_dir: Path | None = None) -> PopulationResult:
    """Train the members that ``config.population`` describes: what ``python -m ejax.train`` runs for such a config.

    Args:
        resume: ``latest``, or the path of a checkpoint of this population. None: a new run.
        run_dir: as in ``ejax.run.train``.

    Raises:
        ConfigError: what ``ejax.population.members.build_population`` refuses.
        CheckpointError: nothing to resume from, or a checkpoint of another config.
    """
    started = time.monotonic()
    if config.population is None:
        raise ConfigError([Problem("population", "is missing; ejax.run.train trains one run")])
    if resume == "best" or (resume is not None and is_foreign_checkpoint(resume)):
        text = f"got --resume {resume}, but a population goes on from its latest state, or from a checkpoint of all"
        raise CheckpointError(f"{text}; --run RUN/members/I --resume best goes on with one member by itself")
    if config.population.apart:
        return train_apart(config, resume=resume, run_dir=run_dir)
    # the members' numbers do not depend on the devices that share them, and a run may change them
    trainer = config.trainer
    alone = config.model_copy(update={"trainer": trainer.model_copy(update={"distributed": False})})
    with ExitStack() as locks:
        place = locate_run(alone, resume, run_dir, locks=locks)
        try:
            with (
                guarded_calls(config.env.id, trainer.collector),
                matmul_precision(trainer.matmul_precision, trainer.device),
                ExitStack() as stack,
            ):
                loop = _begin(place, trainer.distributed, stack, started)
                return loop.run()
        except KeyboardInterrupt as error:
            error.add_note(place.directory.last_word())
            raise


def _begin(place: RunLocation, distributed: bool, stack: ExitStack, started: float) -> "_Loop":
    config = place.config
    trainer = config.trainer.model_copy(update={"distributed": distributed})
    try:
        parts = build_population(bind(config.model_copy(update={"trainer": trainer})))
    except BaseException:
        if place.is_new:
            place.directory.take_back()
        raise
    state = parts.state
    meta: dict[str, Any] = {}
    if place.checkpoint is not None:
        state, meta = load_checkpoint(place.checkpoint, state)
    return _Loop(place, parts, state, meta, stack, started)


class _Folder:
    """A member's folder, what is written there, and what the host knows of it."""

    def __init__(
        self, loop: "_Loop", index: int, meta: Mapping[str, Any], stack: ExitStack, *, is_new: bool, update: int
    ) -> None:
        config, step = loop.parts.configs[index], update * loop.rows
        directory = loop.directory.member(index)
        stack.enter_context(run_lock(directory.path))  # a member can be gone on with by itself
        if is_new or not directory.config_file.exists():
            create_run_directory(config, directory.path)
        else:
            directory.recover()
            directory.set_aside_after(step)
            directory.record(config, step)
        self.directory = directory
        self.progress, _ = Progress.of({**meta, "config": config.to_dict()}, config.trainer)
        self.writer = stack.enter_context(
            MetricWriter(
                directory.path,
                config.trainer.exp_name,
                total_steps=config.trainer.num_updates * loop.rows,
                start_step=step,
                resume_step=None if is_new else step,
                logged=meta.get("log"),
                config=config.to_dict(),
                console=False,
            )
        )
        single = (loop.parts.parts.state, update)  # only its number is used: nothing rescues a member
        self.saver = Saver(
            config, directory, self.writer, loop.parts.parts.stepper, self.progress, single, loop.rows, 1
        )

    def record_evaluation(self, loop: "_Loop", index: int, state: PopulationState, update: int, row: Metrics) -> None:
        metrics = {name: float(x) for name, x in row.items()}
        trainer, progress = loop.trainer, self.progress
        tag, step = trainer.best_eval_metric, update * loop.rows
        is_best = improves(metrics, progress.best, tag=tag, mode=trainer.best_eval_mode)
        if is_best:
            progress.best = Best(metrics[tag], step, metrics.get(REWARD))
        progress.last_evaluated, progress.last_eval_metrics = update, metrics
        self.writer.write(step, metrics, progress.best)
        if is_best:
            # a run that is killed makes the evaluations after the last checkpoint of all again
            self.saver.hold_best(member_state(state, index), update)


@dataclass
class _Launched:
    """Updates in flight."""

    update: int
    count: int
    state: PopulationState
    metrics: Metrics
    evaluation: Metrics | None


class _Loop:
    """One ``train_population`` call on the host. Used once."""

    def __init__(
        self,
        place: RunLocation,
        parts: PopulationParts,
        state: PopulationState,
        meta: Mapping[str, Any],
        stack: ExitStack,
        started: float,
    ) -> None:
        config, self.trainer = place.config, place.config.trainer
        trainer = self.trainer
        self.place, self.config, self.parts, self.state, self.started = place, config, parts, state, started
        self.directory, self.first = place.directory, int(state.update)
        self.rows = rows_per_update(parts.configs[0], parts.parts)
        step = self.first * self.rows
        self.cadence = cadence_of(trainer, self.rows)
        self.throttle = Throttle(parts.stepper.max_updates, adapts=trainer.updates_per_dispatch == "auto")
        self.alive = np.asarray(state.alive).copy()
        self.rewards: NDArray[Any] = np.asarray(meta.get("rewards", [math.nan] * len(parts.members)), float)
        self.last_eval: dict[str, float] = {}
        self.latest: Path | None = None
        self.last_saved: int | None = None
        is_new = place.checkpoint is None
        self.writer = stack.enter_context(
            MetricWriter(
                self.directory.path,
                trainer.exp_name,
                total_steps=trainer.num_updates * self.rows,
                start_step=step,
                resume_step=None if place.is_new else step,
                logged=meta.get("log"),
                config=config.to_dict(),
                use_wandb=trainer.use_wandb,
                wandb_project_name=trainer.wandb_project_name,
                console=False,
                started=started,
            )
        )
        self.view = None
        if trainer.console:
            self.view = make_view(trainer.exp_name, total_steps=trainer.num_updates * self.rows, start_step=step)
            stack.callback(self.view.close)
        if not place.is_new:
            for aside in self.directory.set_aside_after(step):
                self.note(f"set aside {aside}: the population goes on from before it")
            if place.given is not None:
                self.directory.record(place.given, step)
        kept = meta.get("members", [{}] * len(parts.members))
        self.folders = [
            _Folder(self, i, each, stack, is_new=is_new and place.is_new, update=self.first)
            for i, each in enumerate(kept)
        ]
        self.exploits = config.population is not None and config.population.exploit is not None
        if self.exploits:
            _keep_exploits(self.directory, step)
        for text in place.alarms:
            self.alarm(text)
        for text in (*place.notes, *parts.notes):
            self.note(text)
        if trainer.cameras:
            self.note("no videos of a population's members: python -m ejax.evaluate RUN --member I --video FILE")
        if place.checkpoint is not None:
            self.note(f"resumed from {place.checkpoint} at {step} {config.step_name} of each member")
        self.compiled_at = self.clock = started
        self.times = Stopwatch()
        known = [folder.progress.last_eval_metrics for folder in self.folders]
        if all(known):
            self._summarize_evaluation({tag: np.array([each[tag] for each in known]) for tag in known[0]})

    def run(self) -> PopulationResult:
        state, update, total = self.state, self.first, self.trainer.num_updates
        pending: _Launched | None = None
        with interruptible() as interrupted:
            state = self._compile(state)
            while update < total and not interrupted():
                count = self.cadence.updates_until_event(update, self.throttle.limit)
                with self.times.of("train"):
                    state, metrics = self.parts.stepper.advance(state, count)
                update += count
                evaluates = self.cadence.evaluates(update) or (update == total and self.trainer.enable_eval)
                evaluation = self.parts.evaluator.begin(state.members.train.params) if evaluates else None
                launched = _Launched(update, count, state, metrics, evaluation)
                if pending is not None:  # the device works on what was launched while the host writes the former
                    self._finish(pending)
                pending = launched
            if pending is not None:
                self._finish(pending)
            return self._end(state, update, interrupted)

    def note(self, text: str) -> None:
        if self.view is not None:
            self.view.note(text)

    def alarm(self, text: str) -> None:
        """What a person must see, console or not."""
        if self.view is not None:
            self.view.note(text)
        else:
            print(f"ejax: {text}", file=sys.stderr, flush=True)

    def _compile(self, state: PopulationState) -> PopulationState:
        with ThreadPoolExecutor(1, "ejax-compiler") as compiler:
            if self.trainer.enable_eval:
                compiler.submit(self.parts.evaluator.compile, state.members.train.params)
            state = self.parts.stepper.start(state)
        self.compiled_at = self.clock = time.monotonic()
        seconds, number = self.compiled_at - self.started, len(self.parts.members)
        self.times.add("compile", seconds)
        ENGINE.take()  # of what the process did before
        self.note(f"built and compiled {number} members in {seconds:.1f} s; run folder {self.directory.path}")
        return state

    def _finish(self, launched: _Launched) -> None:
        with self.times.of("train"):
            metrics: _Arrays = {name: np.asarray(x) for name, x in jax.device_get(launched.metrics).items()}
        now = time.monotonic()
        self.throttle.took(launched.count, now - self.clock)
        self.clock = now
        fps = self._fps(launched.update, now)
        for i in range(launched.count):
            update = launched.update - launched.count + i + 1
            self._log_update(update, {name: x[i] for name, x in metrics.items()}, fps)
        if launched.evaluation is not None:
            self._record_evaluation(launched.state, launched.update, launched.evaluation)
        if self.cadence.saves(launched.update):
            self._save(launched.state, launched.update)

    def _fps(self, update: int, now: float) -> float:
        return (update - self.first) * self.rows * len(self.folders) / max(now - self.compiled_at, 1e-9)

    def _log_update(self, update: int, metrics: _Arrays, fps: float) -> None:
        step, was = update * self.rows, self.alive
        self.alive = metrics.pop("population/alive") > 0.0
        for i in np.flatnonzero(was & ~self.alive).tolist():
            self.alarm(f"member {i} ({self._named(i)}): update {update} was not finite; it is held as it was before")
        if PARENT in metrics:
            self._record_exploits(update, metrics)
        for i, folder in enumerate(self.folders):
            if was[i]:
                folder.progress.skipped_updates += skipped_fraction({name: x[i] for name, x in metrics.items()})
        self.rewards = np.where(was, metrics[FITNESS], self.rewards)
        if not self.cadence.logs(update):
            return
        for i in np.flatnonzero(was).tolist():
            row = {name: float(x[i]) for name, x in metrics.items() if not math.isnan(x[i])}
            self.folders[i].writer.write(step, row | {"charts/SPS": fps / len(self.folders)})
        living = {name: x[was] for name, x in metrics.items() if name != PARENT}
        rows = summaries(living, best={FITNESS: "max"}) | {
            "charts/SPS": fps,
            "population/alive": float(self.alive.sum()),
        }
        rows |= times(self.times.take() | ENGINE.take()) | memory_in_use(jax.devices()[0])
        self.writer.write(step, rows)
        if self.view is not None:
            self.view.write(step, {tag: x for tag, x in rows.items() if tag in _SHOWN or tag.startswith(FITNESS)}, None)

    def _record_exploits(self, update: int, metrics: _Arrays) -> None:
        own = np.arange(len(self.folders))
        parents = metrics[PARENT].astype(int)
        for i in np.flatnonzero(parents != own).tolist():
            values = {
                f"algorithm.cfg.{name}": float(metrics[f"population/{name}"][i]) for name in self.parts.state.values
            }
            step, parent = update * self.rows, int(parents[i])
            exploited = Exploited(step=step, update=update, member=i, parent=parent, values=values)
            write_exploit(self.directory.path, exploited)
            self.note(f"update {update}: member {i} goes on from member {parents[i]} with {values}")
            self.alive[i] = True

    def _record_evaluation(self, state: PopulationState, update: int, evaluation: Metrics) -> None:
        with self.times.of("evaluate"):
            metrics: _Arrays = {name: np.asarray(x) for name, x in jax.device_get(evaluation).items()}
        for i, folder in enumerate(self.folders):
            if self.alive[i]:
                folder.record_evaluation(self, i, state, update, {name: x[i] for name, x in metrics.items()})
        self._summarize_evaluation(metrics)
        tag = self.trainer.best_eval_metric
        self.writer.write(update * self.rows, self.last_eval)
        best = self._write_standing(state, update)
        if self.view is not None:
            shown = {name: x for name, x in self.last_eval.items() if name.startswith((tag, REWARD))}
            self.view.write(update * self.rows, shown, None if best is None else self.folders[best].progress.best)

    def _summarize_evaluation(self, metrics: _Arrays) -> None:
        living = {name: x[self.alive] for name, x in metrics.items()}
        best = {REWARD: "max", self.trainer.best_eval_metric: self.trainer.best_eval_mode}
        self.last_eval = summaries(living, best=best)

    def _write_standing(self, state: PopulationState, update: int) -> int | None:
        values = {}
        if self.exploits:
            values = {name: np.asarray(x).tolist() for name, x in jax.device_get(state.values).items()}
        return write_standing(
            self.directory.path,
            self.trainer,
            self.parts.members,
            [folder.progress for folder in self.folders],
            step=update * self.rows,
            rewards=self.rewards.tolist(),
            alive=self.alive.tolist(),
            values=values,
        )

    def _save(self, state: PopulationState, update: int) -> None:
        if self.last_saved == update:
            return
        members = [{**folder.progress.meta(), "log": folder.writer.logged()} for folder in self.folders]
        meta = {
            "global_step": update * self.rows,
            "num_updates": update,
            "num_devices": 1,
            "log": self.writer.logged(),
            "config": self.config.to_dict(),
            "members": members,
            "rewards": [reward if math.isfinite(reward) else None for reward in self.rewards.tolist()],
        }
        for folder in self.folders:
            folder.saver.write_held()
        with self.times.of("save"):
            self.latest = self.directory.save(state, meta, keep=self.trainer.keep_checkpoints)
        self.last_saved = update
        self.note(f"saved {self.latest}")

    def _evaluate_fresh(self, state: PopulationState, interrupted: Callable[[], bool]) -> None:
        """Evaluate each member's best checkpoint and its last in the same fresh episodes, and write that down."""
        seeds, params = fresh_seeds(self.trainer), state.members.train.params
        if not seeds:
            return
        folders = [folder.directory for folder in self.folders]
        last = [folder.periodic()[0] for folder in folders]
        best = [best_or_last(next(iter(each.best()), None), last[i], self.alarm) for i, each in enumerate(folders)]
        kept = [params_of(best[i], last[i], take(params, i)) for i in range(len(folders))]
        bests = jax.tree.map(lambda *own: jnp.stack(own), *kept)

        for which, checkpoints, own in (("best", best, bests), ("last", last, params)):

            def play(seed: int, own: Params = own) -> _Arrays | None:
                return None if interrupted() else jax.device_get(self.parts.evaluator.begin(own, seed))

            metrics = evaluate_fresh(seeds, play)
            if metrics is None:
                self.note(BROKEN_OFF)
                return
            for i, folder in enumerate(folders):
                of_one = {tag: float(x[i]) for tag, x in metrics.items()}
                write_fresh(folder.path, which, checkpoints[i], self.trainer, of_one)

    def _end(self, state: PopulationState, update: int, interrupted: Callable[[], bool]) -> PopulationResult:
        trained_until, finished = time.monotonic(), update >= self.trainer.num_updates
        self._save(state, update)
        for i, folder in enumerate(self.folders):
            folder.saver.save(member_state(state, i), update)
        best = self._write_standing(state, update)
        if finished:
            self._evaluate_fresh(state, interrupted)
        if not finished:
            self.note(
                f"stopped at {update * self.rows} {self.config.step_name} of each member; "
                f"go on with python -m ejax.train --run {self.directory.path} --resume latest"
            )
        progress = [folder.progress for folder in self.folders]
        return PopulationResult(
            run_dir=self.directory.path,
            members=self.parts.members,
            global_step=update * self.rows,
            num_updates=update,
            elapsed_time_sec=time.monotonic() - self.started,
            training_fps=self._fps(update, trained_until),
            finished=finished,
            alive=tuple(self.alive.tolist()),
            skipped_updates=tuple(each.skipped_updates for each in progress),
            best_member=best,
            best_eval_values=tuple(each.best.value if each.best else None for each in progress),
            best_eval_steps=tuple(each.best.step if each.best else None for each in progress),
            latest_checkpoint_path=self.latest,
            last_eval_metrics=self.last_eval,
        )

    def _named(self, index: int) -> str:
        member = self.parts.members[index]
        return ", ".join(f"{key}={value}" for key, value in {"trainer.seed": member.seed, **member.values}.items())


_SHOWN = ("charts/SPS", "population/alive", "train/loss/median")
"""Summaries on the console, besides the reward's."""


def _keep_exploits(directory: RunDirectory, step: int) -> None:
    """Set up the file of who copied whom, up to where the run goes on from."""
    kept = [each for each in read_exploits(directory.path) if each.step <= step]
    file = directory.path / EXPLOITS
    partial = file.with_suffix(".partial")
    partial.write_text("".join(f"{each.model_dump_json()}\n" for each in kept))
    os.replace(partial, file)
