"""Evaluation of a run: its environment and its episodes, compiled once."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from ejax.config import ConfigError, Problem, RunConfig
from ejax.config.models import TrainerConfig
from ejax.evaluation import evaluate, evaluate_host, summarize
from ejax.schema.messages import noting
from ejax.training.environments import build_env, evaluation_env
from ejax.training.parts import Parts
from ejax.training.programs import kept, key_of
from ejax.types import Env, HostEnv, Key, Metrics, Params, Policy


class Evaluator(AbstractContextManager[Any], Protocol):
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

    def __exit__(self, *error: Any) -> None:
        return


def make_evaluator(config: RunConfig, parts: Parts, quarantine: Path) -> Evaluator | None:
    """Make the evaluator; environments outside JAX are built once more for it. None: the run is not evaluated."""
    trainer, env = config.trainer, parts.eval_env
    if not trainer.enable_eval:
        return None
    if not isinstance(parts.env, HostEnv):
        return DeviceEvaluator(parts.policy, evaluation_env(config, parts.env, env), trainer)
    if env is None:
        num_envs = min(trainer.num_eval_envs, trainer.num_eval_episodes)  # more would play episodes that do not count
        env = build_env(config, phase="eval", num_envs=num_envs, quarantine=quarantine)
    return HostEvaluator(parts.policy, cast(HostEnv, env), trainer)


def check_best_metric(config: RunConfig, parts: Parts) -> None:
    """Raise ConfigError before anything is compiled, if the evaluation does not measure ``trainer.best_eval_metric``.

    Environments outside JAX show what they measure at their first evaluation; see ``require_measured``.
    """
    trainer = config.trainer
    if not trainer.enable_eval or isinstance(parts.env, HostEnv):
        return
    env = evaluation_env(config, parts.env, parts.eval_env)
    play = partial(evaluate, parts.policy, env, **episode_options(trainer))
    shapes = jax.eval_shape(lambda *x: summarize(play(*x)), parts.state.train.params, jax.random.key(0))
    require_measured(trainer.best_eval_metric, shapes)


def require_measured(tag: str, tags: Iterable[str]) -> None:
    """Raise ConfigError for a ``trainer.best_eval_metric`` that is not among ``tags`` of an evaluation."""
    if tag not in tags:
        text = f"'{tag}' is not measured here; there is {', '.join(sorted(tags))}"
        raise ConfigError([Problem("trainer.best_eval_metric", text)])


class DeviceEvaluator(Evaluator):
    """One jitted program; its results are not waited for.

    Args:
        each: makes a function of one member that of all members of a population, whose ``params`` and results have a
            first axis. None: one policy is evaluated.
        place: of the members on several devices.
    """

    def __init__(
        self,
        policy: Policy,
        env: Env,
        trainer: TrainerConfig,
        *,
        each: Callable[[Callable[..., Metrics]], Callable[..., Metrics]] | None = None,
        place: Sharding | None = None,
    ) -> None:
        self._policy, self._env, self._trainer, self._each, self._place = policy, env, trainer, each, place
        self._compiled: Future[Any] = Future()

    def compile(self, params: Params) -> None:
        try:
            what = ("evaluate", self._policy, self._env, *episode_options(self._trainer).items())
            # the function of members is another object in each call
            key = key_of(what if self._each is None else None, params)
            self._compiled.set_result(kept(key, lambda: self.trace(params).lower().compile()))
        except BaseException as error:
            self._compiled.set_exception(error)  # raised where the program is needed

    def trace(self, params: Params) -> jax.stages.Traced:
        """Trace the program of an evaluation; shapes of the parameters will do."""
        seed, options = self._trainer.eval_seed, episode_options(self._trainer)
        if self._each is None:
            return evaluate.trace(self._policy, self._env, params, jax.random.key(seed), **options)
        play = partial(evaluate, self._policy, self._env, **options)
        program = jax.jit(self._each(lambda params, key: summarize(play(params, key))))
        return program.trace(*self._of_members(params, seed))

    def begin(self, params: Params, seed: int | None = None) -> Callable[[], Metrics]:
        outcome: Future[Metrics] = Future()
        seed = self._trainer.eval_seed if seed is None else seed
        try:
            program = self._compiled.result()
            if self._each is None:
                outcome.set_result(summarize(program(params, jax.random.key(seed))))
            else:
                outcome.set_result(program(*self._of_members(params, seed)))
        except Exception as error:
            outcome.set_exception(error)
        return outcome.result

    def _of_members(self, params: Params, seed: int) -> tuple[Params, Key]:
        keys = jnp.broadcast_to(jax.random.key(seed), jax.tree.leaves(params)[0].shape[:1])  # the same episodes
        return (params, keys) if self._place is None else jax.device_put((params, keys), self._place)


class HostEvaluator(Evaluator):
    """Steps separate environments, in the caller's thread."""

    def __init__(self, policy: Policy, env: HostEnv, trainer: TrainerConfig) -> None:
        self._policy, self._env, self._trainer = policy, env, trainer

    def begin(self, params: Params, seed: int | None = None) -> Callable[[], Metrics]:
        trainer = self._trainer
        play = partial(evaluate_host, self._policy, self._env, params, trainer.eval_seed if seed is None else seed)
        number, choice = trainer.num_eval_episodes, trainer.eval_episode_choice
        # in the caller's thread: some simulators work in no other
        return lambda: summarize(play(num_episodes=number, choice=choice))

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        with noting(error, "closing the environments of the evaluation"):
            self._env.close()


def episode_options(trainer: TrainerConfig) -> dict[str, Any]:
    return {
        "num_envs": trainer.num_eval_envs,
        "num_episodes": trainer.num_eval_episodes,
        "choice": trainer.eval_episode_choice,
    }
