"""Evaluation of a run: its environment and its episodes, compiled once.

A finished run plays its best checkpoint and its last in fresh episodes, which chose neither. Their seeds are used in
neither training nor the periodic evaluations, the best of which flatters.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt

from ejax.config import ConfigError, Problem, RunConfig
from ejax.config.models import TrainerConfig
from ejax.evaluation import REPEATED_EPISODES, UNFINISHED_EPISODES, evaluate, evaluate_host, summarize
from ejax.logs.json_records import FactsError, read_facts
from ejax.numerics.finite import NONFINITE_EPISODES
from ejax.schema.messages import noting
from ejax.schema.plain_files import to_json
from ejax.schema.writing import by_product, replace_file
from ejax.store.checkpoint import CheckpointError, load_params, verify_checkpoint
from ejax.training.environments import build_env, evaluation_env
from ejax.training.parts import Parts
from ejax.training.programs import kept, key_of
from ejax.types import Env, HostEnv, Key, Metrics, Params, Policy

_FRESH = 0xF4E5  # sets these seeds apart from training and evaluation


class Evaluator(AbstractContextManager[Any], Protocol):
    """A context manager: it owns the environments of the evaluation."""

    def compile(self, params: Params) -> None:
        """In any thread; the callable that ``begin`` returns waits for it."""
        return

    def begin(self, params: Params, seed: int | None = None) -> Callable[[], Metrics]:
        """Start an evaluation from the start states of ``seed`` (None: ``trainer.eval_seed``).
        Returns a function that waits for it, and gives the means over the episodes by EmbodiChain's tags or raises."""
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
    traced = DeviceEvaluator(parts.policy, env, trainer).trace(parts.state.train.params)
    require_measured(trainer.best_eval_metric, cast(Metrics, traced.out_info))


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
        program = jax.jit(self._evaluate if self._each is None else self._each(self._evaluate))
        return program.trace(*self._placed(params, self._trainer.eval_seed))

    def _evaluate(self, params: Params, key: Key) -> Metrics:
        # in one program: outside it each of the means would be another
        return summarize(evaluate(self._policy, self._env, params, key, **episode_options(self._trainer)))

    def begin(self, params: Params, seed: int | None = None) -> Callable[[], Metrics]:
        outcome: Future[Metrics] = Future()
        seed = self._trainer.eval_seed if seed is None else seed
        try:
            outcome.set_result(self._compiled.result()(*self._placed(params, seed)))
        except Exception as error:
            outcome.set_exception(error)
        return outcome.result

    def _placed(self, params: Params, seed: int) -> tuple[Params, Key]:
        if self._each is None:
            return params, jax.random.key(seed)
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


class FreshFacts(BaseModel):
    """``evaluations/fresh_<which>.json``; its other keys are tags."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | None]
    checkpoint: str
    step: NonNegativeInt
    episodes: PositiveInt
    seeds: list[int]


def fresh_seeds(trainer: TrainerConfig) -> list[int]:
    """Draw one for each evaluation of ``num_eval_episodes`` that ``final_eval_episodes`` takes; none if it is off."""
    wanted, each = trainer.final_eval_episodes or 0, trainer.num_eval_episodes
    if not trainer.enable_eval:
        return []
    number_of = 1 if wanted == "auto" else math.ceil(wanted / each)
    return np.random.SeedSequence((trainer.seed, trainer.eval_seed, _FRESH)).generate_state(number_of).tolist()


def load_best(best: Path | None, last: Path, params: Params, note: Callable[[str], None]) -> tuple[Path, Params]:
    """Load the policy of the best checkpoint to where ``params`` are, which are those of the checkpoint ``last``.

    Where there is none, or it is damaged, which is worth a note, it is the last one.
    """
    if best is None:
        return last, params
    try:
        verify_checkpoint(best)
    except CheckpointError as error:
        note(f"{error}; the last checkpoint replaces it in the fresh episodes")
        return last, params
    if step_of(best) == step_of(last):  # saved as best and as last
        return best, params
    own = load_params(best, jax.eval_shape(lambda: params))
    return best, jax.tree.map(lambda x, there: jax.device_put(x, there.sharding), own, params)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("_")[2])


def evaluate_fresh(seeds: Sequence[int], play: Callable[[int], Mapping[str, Any]]) -> dict[str, Any]:
    """Take means over the evaluations ``play(seed)``, all of equally many episodes; counts are added up."""
    found = [play(seed) for seed in seeds]
    total = {tag: sum(metrics[tag] for metrics in found) for tag in found[0]}
    counts = (NONFINITE_EPISODES, UNFINISHED_EPISODES, REPEATED_EPISODES)
    return {tag: x if tag in counts else x / len(seeds) for tag, x in total.items()}


def write_fresh(
    run: Path, which: str, checkpoint: Path, trainer: TrainerConfig, metrics: Mapping[str, float]
) -> dict[str, Any]:
    """Write ``evaluations/fresh_<which>.json`` of a run, ``best`` or ``last``, and return its contents."""
    seeds, each = fresh_seeds(trainer), trainer.num_eval_episodes
    repeated = len(seeds) * (each - 1)  # if each evaluation is of one episode
    count = 1 if repeated and metrics.get(REPEATED_EPISODES) == repeated else len(seeds) * each
    own = {"checkpoint": str(checkpoint), "step": step_of(checkpoint), "episodes": count, "seeds": seeds}
    facts: dict[str, Any] = {**metrics, **own}
    file = run / "evaluations" / f"fresh_{which}.json"
    with by_product(str(file)):
        replace_file(file, to_json(facts, indent=2), run)
    return facts


def read_fresh(run: Path) -> dict[str, dict[str, Any]]:
    """Read what ``write_fresh`` wrote into a run's folder; without what is not there, or cannot be read."""
    found = {}
    for which in ("best", "last"):
        with suppress(FactsError):
            facts = read_facts(run / "evaluations" / f"fresh_{which}.json", FreshFacts)
            found[which] = {name: math.nan if x is None else x for name, x in facts.items()}
    return found
