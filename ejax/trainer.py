"""``Trainer``: train the caller's own environment, policy and algorithm; a layer over ``ejax.run.train``."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ejax import run
from ejax.algorithms.record import Algorithm
from ejax.collectors.stateful import BaseAlgorithm
from ejax.config import ConfigError, Problem, RunConfig
from ejax.config.load import parse_untrusted
from ejax.schema.values import plain
from ejax.training.callbacks import Callback, RunResult
from ejax.training.environments import UserObjects
from ejax.training.from_objects import Events, config_of, section_of
from ejax.training.policies import check_is_policy
from ejax.training.reporter import OnLog
from ejax.types import Policy


class ScalarWriter(Protocol):
    """A writer of TensorBoard's, by tensorboardX, torch or one's own."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object: ...


class Trainer:
    """Trainer of a policy in an environment, both objects of the caller's; the folder of the run is as ``train``'s.

    Its config describes the objects as far as a file can: ``train(resume=…)`` of a trainer made alike continues it.

    Args:
        env: an ``Env``; or one outside JAX, a ``HostEnv`` or a vector environment of Gymnasium's, closed at the end.
        policy: ``ActorCritic``, ``ActorOnly``, or your own.
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
        check_is_policy("policy", policy)
        if "num_envs" not in trainer and hasattr(env, "num_envs"):
            trainer["num_envs"] = env.num_envs  # a vector environment has its size
        if eval_env is not None:
            trainer.setdefault("enable_eval", True)
        trainer = section_of(trainer, num_steps=num_steps, event_cfg=event_cfg, eval_event_cfg=eval_event_cfg)
        if checkpoint_dir is not None and Path(checkpoint_dir).name != "checkpoints":
            text = f"got {checkpoint_dir}; a run keeps its own in RUN/checkpoints: pass that, or train(run_dir=RUN)"
            raise ConfigError([Problem("checkpoint_dir", text)])
        self.config = config_of(env, policy, algorithm, options, trainer, batch_size)
        self.callbacks = tuple(callbacks)
        self.objects, self._writer = UserObjects(env, policy, eval_env), writer
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
        config = self.config if total_timesteps is None else with_total(self.config, total_timesteps)
        log = on_log if self._writer is None else partial(_write, self._writer, on_log)
        self._saved = None
        result = run.train(
            config,
            resume=resume,
            run_dir=run_dir or self._run_dir,
            fork=fork,
            on_log=log,
            callbacks=(*self.callbacks, *callbacks),
            objects=self.objects,
        )
        self._saved = result.latest_checkpoint_path
        return result

    def save_checkpoint(self) -> Path | None:
        """Return the last checkpoint of the run: ``train`` saves when it ends or is interrupted. None: it raised."""
        return self._saved


def with_total(config: RunConfig, total_timesteps: int) -> RunConfig:
    """Set the environment steps of a run in all."""
    raw = config.to_dict()
    raw["trainer"]["total_timesteps"] = total_timesteps  # validated again, as from a file
    return parse_untrusted(plain(raw))


def _write(writer: ScalarWriter, on_log: OnLog | None, step: int, metrics: dict[str, float]) -> object:
    for tag, value in metrics.items():
        writer.add_scalar(tag, value, step)
    return None if on_log is None else on_log(step, metrics)
