"""Train one run by a config; ``ejax.trainer`` does so with objects."""

from collections.abc import Iterable
from pathlib import Path

from ejax.config import ConfigError, Problem, RunConfig
from ejax.runtime.process_exit import owns_process
from ejax.runtime.sharding import is_main_process
from ejax.schema.lazy_names import lazy_names
from ejax.training.callbacks import Callback, RunResult, TrainingRun
from ejax.training.environments import UserObjects
from ejax.training.loop import Loop
from ejax.training.open_run import open_run
from ejax.training.reporter import OnLog
from ejax.training.sink import RunSink

__all__ = ["Callback", "OnLog", "RunResult", "TrainingRun", "train"]
__getattr__ = lazy_names("ejax.run", {"ejax.trainer": ("Trainer",)})


def train(
    config: RunConfig,
    *,
    resume: str | None = None,
    run_dir: Path | None = None,
    fork: Path | None = None,
    on_log: OnLog | None = None,
    callbacks: Iterable[Callback] = (),
    objects: UserObjects | None = None,
) -> RunResult:
    """Train by a config, as ``ejax train`` does.

    Args:
        resume: ``latest``, ``best``, or the path of a checkpoint of this very config. None: a new run. EmbodiChain's
            ``FILE.pt``: a new run that continues where that training stands. ``latest`` of a run that was killed before
            its first checkpoint starts it from the beginning.
        run_dir: the run's folder. None: a new one, or with ``resume`` the newest of this ``exp_name``.
        fork: a checkpoint, or a run, its best one: a new run that begins with that whole state (parameters, optimizer,
            environments, counts) and may have another config with the same arrays.
        on_log: called with ``(env step, metrics)`` after each line of the log; if it returns False, the run stops as
            after Ctrl-C. Of several processes only the leading one calls it.
        callbacks: run at its events; of several processes only the leading one has them.
        objects: take the place of those that the config names, as ``ejax.Trainer`` has them.

    Raises:
        ConfigError: the environment or the policy cannot be built from the config.
        CheckpointError: nothing to resume from, or a checkpoint of another config.
        NonFiniteUpdateError: a non-finite update, where ``skip_nonfinite_updates`` is off.
        ProcessesError: another of several processes failed.
        HostEnvError: an environment failed, or tried to end the process.
        KeyboardInterrupt: a second Ctrl-C; its note names what is left of the run.
    """
    if config.population is not None:
        text = "is trained by ejax.population.train_population; train trains one run"
        raise ConfigError([Problem("population", text)])
    with open_run(config, resume, run_dir, fork) as run:
        run.build(objects)
        sink = RunSink(run, callbacks, on_log) if is_main_process() else RunSink(run, writes=False)
        if owns_process():
            run.watchdog.rescue = sink.rescue  # only a command line may end the process
        return Loop(run, sink).run()
