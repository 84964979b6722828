"""Evaluation of a run: its environment and its episodes, compiled once."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import jax

from ejax.config import ConfigError, Problem, RunConfig
from ejax.config.models import TrainerConfig
from ejax.evaluation import evaluate, evaluate_host, summarize
from ejax.training.environments import build_env, evaluation_env
from ejax.training.parts import Parts
from ejax.training.programs import compiled
from ejax.types import Env, HostEnv, Metrics, Params, Policy

E = TypeVar("E", bound="Evaluator")


class Evaluator(Protocol):
    """A context manager: it owns the environments of the evaluation."""

    def compile(self, params: Params) -> None:
        """In any thread; the callable that ``begin`` returns waits for it."""
        return

    def begin(self, params: Params, seed: int | None = None) -> Callable[[], Metrics]:
        """Start an evaluation from the start states of ``seed`` (None: ``trainer.eval_seed``).

        Returns:
            A function that waits for it, and gives the means over the episodes under EmbodiChain's tags or raises.
        """
        ...

    def __enter__(self: E) -> E:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return


def make_evaluator(config: RunConfig, parts: Parts, quarantine: Path) -> Evaluator:
    """Make what evaluates: in an environment of its own, where it lives outside JAX."""
    trainer, env = config.trainer, parts.eval_env
    if not isinstance(parts.env, HostEnv):
        return DeviceEvaluator(parts.policy, evaluation_env(config, parts.env, env), trainer)
    if env is None and trainer.enable_eval:
        num_envs = min(trainer.num_eval_envs, trainer.num_eval_episodes)
        env = build_env(config, phase="eval", num_envs=num_envs, quarantine=quarantine)
    return HostEvaluator(parts.policy, env if isinstance(env, HostEnv) and trainer.enable_eval else None, trainer)


def check_best_metric(config: RunConfig, parts: Parts) -> None:
    """Raise ConfigError before anything is compiled, if the evaluation does not measure ``trainer.best_eval_metric``.

    Environments outside JAX show what they measure at their first evaluation; see ``require_measured``.
    """
    trainer = config.trainer
    if not trainer.enable_eval or isinstance(parts.env, HostEnv):
        return
    play = partial(
        evaluate, parts.policy, evaluation_env(config, parts.env, parts.eval_env), **episode_options(trainer)
    )
    shapes = jax.eval_shape(lambda *x: summarize(play(*x)), parts.state.train.params, jax.random.key(0))
    require_measured(trainer.best_eval_metric, shapes)


def require_measured(tag: str, tags: Iterable[str]) -> None:
    """Raise ConfigError for a ``trainer.best_eval_metric`` that is not among ``tags`` of an evaluation."""
    if tag not in tags:
        text = f"'{tag}' is not measured here; there is {', '.join(sorted(tags))}"
        raise ConfigError([Problem("trainer.best_eval_metric", text)])


class DeviceEvaluator(Evaluator):
    """One jitted program; its results are not waited for."""

    def __init__(self, policy: Policy, env: Env, trainer: TrainerConfig) -> None:
        self._policy, self._env, self._trainer = policy, env, trainer
        self._compiled: Future[Any] = Future()

    def compile(self, params: Params) -> None:
        try:
            what = ("evaluate", self._policy, self._env, *episode_options(self._trainer).items())
            self._compiled.set_result(compiled(what, params, lambda: self.lower(params)))
        except BaseException as error:
            self._compiled.set_exception(error)

    def lower(self, params: Params) -> jax.stages.Lowered:
        """The program of an evaluation, not compiled yet; shapes of the parameters will do."""
        key = jax.random.key(self._trainer.eval_seed)
        return evaluate.lower(self._policy, self._env, params, key, **episode_options(self._trainer))

    def begin(self, params: Params, seed: int | None = None) -> Callable[[], Metrics]:
        outcome: Future[Metrics] = Future()
        key = jax.random.key(self._trainer.eval_seed if seed is None else seed)
        try:
            outcome.set_result(summarize(self._compiled.result()(params, key)))
        except Exception as error:
            outcome.set_exception(error)
        return outcome.result


class HostEvaluator(Evaluator):
    """Steps environments of its own, in the caller's thread. Without any it serves a run that is not evaluated."""

    def __init__(self, policy: Policy, env: HostEnv | None, trainer: TrainerConfig) -> None:
        self._policy, self._env, self._trainer = policy, env, trainer

    def begin(self, params: Params, seed: int | None = None) -> Callable[[], Metrics]:
        trainer = self._trainer
        if self._env is None:
            raise RuntimeError("enable_eval is off: there is no environment to evaluate in")
        play = partial(
            evaluate_host,
            self._policy,
            self._env,
            params,
            trainer.eval_seed if seed is None else seed,
            num_episodes=trainer.num_eval_episodes,
            choice=trainer.eval_episode_choice,
        )
        return lambda: summarize(play())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._env is not None:
                self._env.close()
        except Exception as problem:
            if error is None:
                raise
            error.add_note(f"while closing the environments of the evaluation: {problem}")


def episode_options(trainer: TrainerConfig) -> dict[str, Any]:
    return {
        "num_envs": trainer.num_eval_envs,
        "num_episodes": trainer.num_eval_episodes,
        "choice": trainer.eval_episode_choice,
    }
