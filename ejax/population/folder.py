"""The folder of one member of a population: as of a run by itself, and gone on with as such."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from ejax.algorithms.step import RunState
from ejax.logs.best import REWARD, Best, improves
from ejax.logs.metrics import MetricWriter
from ejax.population.members import PopulationParts
from ejax.store.resume_rules import record_changes
from ejax.store.run_dir import RunDirectory, create_run_directory
from ejax.store.run_lock import run_lock
from ejax.training.progress import Progress
from ejax.training.saver import Saver
from ejax.types import Metrics


class MemberFolder:
    """The log, the checkpoints and the progress of a member.

    Args:
        index: the member's number.
        meta: its part of the checkpoint's meta.
        rows: env steps of one update.
        update: updates that are made already.
        stack: closes what is opened here.
        is_new: the whole population begins.
    """

    def __init__(
        self,
        directory: RunDirectory,
        index: int,
        meta: Mapping[str, Any],
        *,
        parts: PopulationParts,
        rows: int,
        update: int,
        stack: ExitStack,
        is_new: bool,
    ) -> None:
        config, step = parts.configs[index], update * rows
        stack.enter_context(run_lock(directory.path))  # a member can be gone on with by itself
        if is_new or not directory.config_file.exists():
            create_run_directory(config, directory.path)
        else:
            directory.recover()
            directory.set_aside_after(step)
            record_changes(directory.config_file, config, step)
        self.directory, self._config, self._rows = directory, config, rows
        self.progress, _ = Progress.of({**meta, "config": config.to_dict()}, config.trainer)
        options: dict[str, Any] = {
            "rows": rows,
            "update": update,
            "is_new": is_new,
            "console": False,
            "use_wandb": False,
        }
        self.writer = stack.enter_context(MetricWriter(directory.path, config, meta, **options))
        single = (parts.parts.state, update)  # only its number is used: nothing rescues a member
        self.saver = Saver(config, directory, self.writer, parts.parts.stepper, self.progress, single, rows, 1)

    def record_evaluation(self, state: Callable[[], RunState], update: int, row: Metrics) -> None:
        """Write an evaluation, and hold the member's state if it is its best."""
        metrics = {name: float(x) for name, x in row.items()}
        trainer, progress, step = self._config.trainer, self.progress, update * self._rows
        is_best = improves(metrics, progress.best, tag=trainer.best_eval_metric, mode=trainer.best_eval_mode)
        if is_best:
            progress.best = Best(metrics[trainer.best_eval_metric], step, metrics.get(REWARD))
        progress.last_evaluated, progress.last_eval_metrics = update, metrics
        self.writer.write(step, metrics, progress.best)
        if is_best:
            # a run that is killed makes the evaluations after the last checkpoint of all again
            self.saver.hold_best(state(), update)
