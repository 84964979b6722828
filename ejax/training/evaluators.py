"""The evaluation of a run: which environment, how many episodes, compiled once."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast

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
        """In any thread; what ``begin`` returns waits for it."""
        ...

    def begin(self, params: Params, seed: int | None = None) -> Callable[[], Metrics]:
        """Start an evaluation, as far as it goes by itself.

        Args:
            seed: of the start states. None: ``trainer.eval_seed``.

        Returns:
            What does the rest: gives the means over the episodes under EmbodiChain's tags, or raises what went wrong.
        """
        ...

    def __enter__(self: E) -> E: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def make_evaluator(config: RunConfig, parts: Parts, quarantine: Path) -> Evaluator:
    """Evaluates in an environment of its own, where it lives outside JAX.

    Args:
        quarantine: folder for what broke it.
    """
    trainer = config.trainer
    if not isinstance(parts.env, HostEnv):
        return DeviceEvaluator(parts.policy, evaluation_env(config, parts.env, parts.eval_env), trainer)
    if not trainer.enable_eval:
        return HostEvaluator(parts.policy, None, trainer)
    if parts.eval_env is not None:
        return HostEvaluator(parts.policy, cast(HostEnv, parts.eval_env), trainer)
    num_envs = min(trainer.num_eval_envs, trainer.num_eval_episodes)
    env = build_env(config, phase="eval", num_envs=num_envs, quarantine=quarantine)
    return HostEvaluator(parts.policy, env if isinstance(env, HostEnv) else None, trainer)


def check_best_metric(config: RunConfig, parts: Parts) -> None:
    """Refuse ``trainer.best_eval_metric`` before anything is compiled, if the evaluation does not measure it.

    What environments outside JAX measure shows at their first evaluation; see ``require_measured``.

    Raises:
        ConfigError: it is not measured.
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
    """Refuse a ``trainer.best_eval_metric`` that is not among what an evaluation gives.

    Raises:
        ConfigError: it is not.
    """
    if tag not in tags:
        text = f"'{tag}' is not measured here; there is {', '.join(sorted(tags))}"
        raise ConfigError([Problem("trainer.best_eval_metric", text)])


class DeviceEvaluator:
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
        """The program of an evaluation, not compiled yet. Of the parameters, shapes will do."""
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

    def __enter__(self) -> "DeviceEvaluator":
        return self

    def __exit__(self, *error: object) -> None:
        del error


class HostEvaluator:
    """Steps environments of its own, in the caller's thread."""

    def __init__(self, policy: Policy, env: HostEnv | None, trainer: TrainerConfig) -> None:
        self._policy, self._env, self._trainer = policy, env, trainer

    def compile(self, params: Params) -> None:
        del params  # one step of the policy compiles in no time

    def begin(self, params: Params, seed: int | None = None) -> Callable[[], Metrics]:
        return partial(self._evaluate, params, self._trainer.eval_seed if seed is None else seed)

    def _evaluate(self, params: Params, seed: int) -> Metrics:
        if self._env is None:
            raise RuntimeError("enable_eval is off: there is no environment to evaluate in")
        trainer = self._trainer
        episodes = evaluate_host(
            self._policy,
            self._env,
            params,
            seed,
            num_episodes=trainer.num_eval_episodes,
            choice=trainer.eval_episode_choice,
        )
        return summarize(episodes)

    def __enter__(self) -> "HostEvaluator":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._env is None:
            return
        try:
            self._env.close()
        except Exception as problem:
            if error is None:
                raise
            error.add_note(f"while closing the environments of the evaluation: {problem}")


def episode_options(trainer: TrainerConfig) -> dict[str, Any]:
    """Which episodes the program on the device plays."""
    return {
        "num_envs": trainer.num_eval_envs,
        "num_episodes": trainer.num_eval_episodes,
        "choice": trainer.eval_episode_choice,
    }
