"""Train: a ``Trainer`` of objects, and ``train`` of a config, which is one layer over it."""

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ejax.algorithms.record import Algorithm
from ejax.algorithms.stateful import BaseAlgorithm
from ejax.algorithms.step import RunState
from ejax.config import ConfigError, Problem, RunConfig
from ejax.config.load import parse_untrusted
from ejax.runtime.device import matmul_precision
from ejax.runtime.process_exit import owns_process
from ejax.runtime.processes import failing_together
from ejax.runtime.sharding import is_main_process
from ejax.runtime.stopwatch import Stopwatch
from ejax.runtime.streams import keep_streams
from ejax.training.callbacks import Callback, RunResult, TrainingRun
from ejax.training.given import Events, Given, config_of, section_of
from ejax.training.loop import Loop, Sink
from ejax.training.multiprocess import FollowerSink, group_of, locate_together, rescue, saving_all_envs
from ejax.training.profile import Profiler
from ejax.training.sink import OnLog, RunSink
from ejax.training.start import Call, RunLocation, StartState, build_start, locate_run
from ejax.training.watchdog import guarded_calls
from ejax.types import Policy

R = TypeVar("R")

__all__ = ["Callback", "OnLog", "RunResult", "Trainer", "TrainingRun", "train"]


def train(
    config: RunConfig,
    *,
    resume: str | None = None,
    run_dir: Path | None = None,
    fork: Path | None = None,
    on_log: OnLog | None = None,
    callbacks: Iterable[Callback] = (),
) -> RunResult:
    """Train by a config, as ``python -m ejax.train`` does.

    Args:
        resume: ``latest``, ``best``, or the path of a checkpoint of this very config. None: a new run. EmbodiChain's
            ``FILE.pt``: a new run that goes on where that training stands. ``latest`` of a run that was killed before
            its first checkpoint starts it from the beginning.
        run_dir: the run's folder. None: a new one, or with ``resume`` the newest of this ``exp_name``.
        fork: a checkpoint, or a run, its best one: a new run that begins with that whole state (parameters, optimizer,
            environments, counts) and may have another config with the same arrays.
        on_log: called with ``(env step, metrics)`` after each line of the log; if it returns False, the run stops as
            after Ctrl-C. Of several processes only the leading one calls it.
        callbacks: run at its events; of several processes only the leading one has them.

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
    find = partial(locate_run, resume=resume, run_dir=run_dir, fork=fork)
    return run_training(config, find, partial(_begin, None, tuple(callbacks), on_log))


class ScalarWriter(Protocol):
    """A writer of TensorBoard's, by tensorboardX, torch or one's own."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object: ...


class Trainer:
    """Trainer of a policy in an environment, both objects of the caller's; the folder of the run is as ``train``'s.

    Its config describes the objects as far as a file can: ``train(resume=…)`` of a trainer made alike goes on with it.

    Args:
        env: an ``Env``; or one outside JAX, a ``HostEnv`` or a vector environment of Gymnasium's, closed at the end.
        policy: ``ActorCritic``, ``ActorOnly``, or one of your own.
        algorithm: what ``build_algo`` gives, a record such as ``ejax.algorithms.ppo.ALGORITHM``, or its name. Of an
            object like ``PPO(cfg, policy)`` the options count; the run begins from its seed, not from its state.
        options: of the algorithm: its ``Config``, or a mapping. None: its own, or the defaults.
        callbacks: called in this order at each event of the run.
        eval_env: to evaluate in, where ``enable_eval`` is not False. None: ``env``, with ``enable_eval`` True; one
            outside JAX cannot serve both.
        writer: gets each line of the log as well, by ``add_scalar(tag, value, step)``, as a ``SummaryWriter`` of
            TensorBoard's; the caller closes it.
        event_cfg, eval_event_cfg: ``events`` of either phase, ``{name: {func, mode, interval_step, params}}``, where
            ``func`` may be a function. Environments outside JAX cannot have any.
        num_steps: ``buffer_size``, by its older name.
        batch_size: the algorithm's.
        checkpoint_dir: ``RUN/checkpoints``, which makes RUN the run's folder.
        trainer: keys of the config's section ``trainer``: ``num_envs``, ``buffer_size``, ``eval_freq``, ``seed``, …

    Raises:
        ConfigError: a config with these values would be refused.
    """

    def __init__(
        self,
        env: Any,
        policy: Policy,
        algorithm: Algorithm | BaseAlgorithm | str,
        *,
        options: Any = None,
        callbacks: Iterable[Callback] = (),
        eval_env: Any = None,
        writer: ScalarWriter | None = None,
        event_cfg: Events | None = None,
        eval_event_cfg: Events | None = None,
        num_steps: int | None = None,
        batch_size: int | None = None,
        checkpoint_dir: str | Path | None = None,
        **trainer: Any,
    ) -> None:
        if not callable(getattr(env, "reset", None)):
            text = f"got {type(env).__name__}, which has no reset; the order is env, policy, algorithm; or use keywords"
            raise ConfigError([Problem("env", text)])
        if "num_envs" not in trainer and hasattr(env, "num_envs"):
            trainer["num_envs"] = env.num_envs  # a vector environment has its size
        if eval_env is not None:
            trainer.setdefault("enable_eval", True)
        trainer = section_of(trainer, num_steps=num_steps, event_cfg=event_cfg, eval_event_cfg=eval_event_cfg)
        if checkpoint_dir is not None and Path(checkpoint_dir).name != "checkpoints":
            text = f"got {checkpoint_dir}; a run keeps its own in RUN/checkpoints: give that, or train(run_dir=RUN)"
            raise ConfigError([Problem("checkpoint_dir", text)])
        self.config = config_of(env, policy, algorithm, options, trainer, batch_size)
        self.callbacks = tuple(callbacks)
        self._given, self._writer = Given(env, policy, eval_env), writer
        self._run_dir = None if checkpoint_dir is None else Path(checkpoint_dir).parent
        self._saved: Path | None = None

    def train(
        self,
        total_timesteps: int | None = None,
        *,
        resume: str | None = None,
        run_dir: Path | None = None,
        fork: Path | None = None,
        on_log: OnLog | None = None,
        callbacks: Iterable[Callback] = (),
    ) -> RunResult:
        """Train for so many environment steps in all; the other arguments and errors are ``train``'s.

        Args:
            total_timesteps: None: ``trainer.iterations`` or ``trainer.total_timesteps``.
            run_dir: None: that of ``checkpoint_dir``, or a new one.
            callbacks: of this call, after the trainer's own.
        """
        config = self.config
        if total_timesteps is not None:
            raw = config.to_dict()
            raw["trainer"]["total_timesteps"] = total_timesteps  # validated again, as from a file
            config = parse_untrusted(raw)
        find = partial(locate_run, resume=resume, run_dir=run_dir or self._run_dir, fork=fork)
        log = on_log if self._writer is None else partial(_write, self._writer, on_log)
        self._saved = None
        result = run_training(config, find, partial(_begin, self._given, (*self.callbacks, *callbacks), log))
        self._saved = result.latest_checkpoint_path
        return result

    def save_checkpoint(self) -> Path | None:
        """Return the last checkpoint of the run: ``train`` saves when it ends or is interrupted. None: it raised."""
        return self._saved


def _write(writer: ScalarWriter, on_log: OnLog | None, step: int, metrics: dict[str, float]) -> object:
    for tag, value in metrics.items():
        writer.add_scalar(tag, value, step)
    return None if on_log is None else on_log(step, metrics)


def run_training(
    config: RunConfig,
    find: Callable[..., RunLocation],
    begin: Callable[[Call], tuple[StartState, Sink[Any, R]]],
) -> R:
    """Train one run, or all members of a population, until it ends.

    Args:
        find: finds the folder, as ``locate_run`` does; called with ``config`` and ``locks``.
        begin: builds what is trained, and its sink.
    """
    keep_streams()
    trainer, started, clock = config.trainer, time.monotonic(), Stopwatch()
    with (
        failing_together(),
        # before the environment is built: that may hang as well
        guarded_calls(config.env.id, trainer.collector) as watchdog,
        matmul_precision(trainer.matmul_precision, trainer.device),
        ExitStack() as stack,
    ):
        group = group_of(config)  # first of all: the others wait for this one
        location = locate_together(group, partial(find, config, locks=stack))
        if trainer.console and is_main_process():  # building and compiling take from seconds to minutes
            print(f"run folder {location.directory.path}; building the environment {config.env.id} …", flush=True)
        try:
            start, sink = begin(Call(location, started, clock, stack, watchdog, group))
            return Loop(
                start.parts.stepper,
                sink,
                start.cadence,
                clock,
                first=start.update,
                started=started,
                profiler=Profiler(trainer.profile if is_main_process() else None, location.directory.path / "profile"),
                group=group,
            ).run(start.state)
        except KeyboardInterrupt as error:
            error.add_note(location.directory.last_word())
            raise


def _begin(
    given: Given | None, callbacks: tuple[Callback, ...], on_log: OnLog | None, call: Call
) -> tuple[StartState, Sink[RunState, RunResult]]:
    start = build_start(call.location, given)
    call = saving_all_envs(call, start)
    sink: RunSink | FollowerSink
    if call.group is None or is_main_process():
        sink = RunSink(call, start, callbacks, on_log)
    else:
        sink = FollowerSink(call, start, call.group)
    if owns_process():
        call.watchdog.rescue = partial(rescue, sink, call.group)  # only a command line may end the process
    return start, sink
