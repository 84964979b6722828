"""One environment played step by step, to be looked at: in MuJoCo's viewer, or in a video.

A pure environment plays the episodes of ``ejax.evaluate --num-envs 1`` of the same seed. Between two steps its state
may be changed: a command from the keys, a blow, the mouse (``ejax.play.show``).
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.envs.actions import action_form, to_action
from ejax.evaluation import summarize
from ejax.numerics.finite import finite_rows
from ejax.policies.calls import apply_policy, check_obs, first_memory, forget, forget_outside
from ejax.rollout import EnvCarry, reset, restart, with_memory
from ejax.runtime.video import tile_frames
from ejax.types import Array, ChunkedEnv, Env, HostTimestep, Key, Params, Policy, PyTree, RenderableHostEnv, Timestep

_UNLIMITED = 1000
"""Steps filmed of an environment without a time limit."""
_SAMPLES = 0x5A
"""Folded into a step's key: samples are drawn apart from what happens to the environment."""


class Moment(NamedTuple):
    """The picture after a decision, or at the start of an episode."""

    sights: tuple[PyTree, ...]
    """States of one environment after each of the decision's actions; outside JAX its picture. NumPy."""
    reward: float = 0.0
    starts: bool = False
    ended: bool = False
    finite: bool = True
    facts: Mapping[str, float] = {}
    """``success`` and ``metrics/<name>``, where the environment reports them."""
    obs: PyTree = None
    """Observation of a pure environment before the decision, and ``action``, which it was given then. NumPy."""
    action: PyTree = None


def play_pure(
    policy: Policy,
    env: Env,
    params: Params,
    key: Key,
    *,
    samples: bool = False,
    patch: Callable[[PyTree], PyTree] = lambda state: state,
) -> Iterator[Moment]:
    """Play one episode after the other, without an end; ``patch`` changes the state [1, ...] before each decision."""
    # keys as in ``ejax.evaluate``, whose episodes these are
    key_reset, key_steps = jax.random.split(key)
    envs = with_memory(reset(env, key_reset, 1), policy)
    yield Moment((_row(envs.state),), starts=True)
    for t in itertools.count():
        key = jax.random.fold_in(key_steps, t)
        obs, envs = envs.obs, replace(envs, state=patch(envs.state))
        action, states, envs, timestep = _decide(policy, env, params, envs, key, samples=samples)
        states, timestep, seen = jax.device_get((states, timestep, (obs, action)))
        ended = bool((timestep.terminated | timestep.truncated)[0])
        finite = bool(finite_rows(obs, action, timestep.reward, timestep.obs)[0])
        sights = tuple(jax.tree.map(lambda x, i=i: x[i], states) for i in range(len(jax.tree.leaves(states)[0])))
        acted = jax.tree.map(lambda x: x[0], seen)
        yield Moment(sights, float(timestep.reward[0]), False, ended, finite, _facts(timestep.info), *acted)
        if ended:
            # the other half of the key went to the step
            envs = _next_episode(env, envs, jax.random.split(key)[1])
            yield Moment((_row(envs.state),), starts=True)


def play_host(
    policy: Policy, env: RenderableHostEnv, params: Params, seed: int, *, samples: bool = False
) -> Iterator[Moment]:
    """Play one row outside JAX, which starts again by itself, as ``play_pure`` does."""
    for timestep in _host_steps(policy, env, params, seed, samples=samples):
        picture = (env.pictures()[0],)
        if timestep is None:
            yield Moment(picture, starts=True)
            continue
        broken = bool(timestep.info.get("nonfinite", np.zeros(1, bool))[0])
        if not broken and not _valid(timestep)[0]:  # it only reset
            yield Moment(picture, starts=True)
            continue
        ended = bool((timestep.terminated | timestep.truncated)[0])
        reward, facts = float(timestep.reward[0]), _facts(timestep.info)
        yield Moment(picture, reward, ended=ended, finite=not broken, facts=facts)


def film_host(policy: Policy, env: RenderableHostEnv, params: Params, seed: int) -> Iterator[NDArray[np.uint8]]:
    """Film one episode in each row, side by side, until the last has ended; one that ended stands still."""
    ended, pictures = np.zeros(env.num_envs, bool), np.zeros((), np.uint8)
    steps = _host_steps(policy, env, params, seed, samples=False)
    for timestep in itertools.islice(steps, 1 + (env.max_episode_steps or _UNLIMITED)):
        if timestep is not None:
            ended |= timestep.terminated | timestep.truncated
        if ended.all():
            return
        # a row that ended keeps its last picture while the others play on
        pictures = np.where(ended[:, None, None, None], pictures, env.pictures())
        yield tile_frames(pictures)


def _host_steps(
    policy: Policy, env: RenderableHostEnv, params: Params, seed: int, *, samples: bool
) -> Iterator[HostTimestep | None]:
    """Step all rows, without an end; None first, after the reset."""
    key, memory, form = jax.random.key(seed), first_memory(policy, env.num_envs), action_form(env.action_space)
    obs = env.reset(np.random.SeedSequence(seed).generate_state(env.num_envs).astype(np.uint32))
    yield None
    for t in itertools.count():
        check_obs(policy, obs)
        action, memory = act(policy, params, obs, memory, jax.random.fold_in(key, t), samples=samples)
        timestep = env.step(to_action(form, action))
        # a step that only reset belongs to no episode, and must leave no memory either
        memory = forget_outside(policy, memory, timestep.terminated | timestep.truncated | ~_valid(timestep))
        obs = timestep.obs
        yield timestep


def _valid(timestep: HostTimestep) -> NDArray[np.bool_]:
    return np.asarray(timestep.info.get("valid", np.ones(len(timestep.reward), bool)))


class Score:
    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._episodes: list[dict[str, float]] = []
        self._moments: list[Moment] = []

    @property
    def num_episodes(self) -> int:
        return len(self._episodes)

    @property
    def text(self) -> str:
        rewards = [0.0, *(each.reward for each in self._moments)]
        return f"step {len(rewards) - 1}, reward {rewards[-1]:.3g}, return {sum(rewards):.3g}"

    def add(self, moment: Moment) -> None:
        """Count a moment; at an episode's end, report its line."""
        # outside JAX an environment starts again in the step that ends
        if moment.starts or (self._moments and self._moments[-1].ended):
            self._moments = []
        if not moment.starts:
            # without the states, which would fill the memory in a long episode
            self._moments.append(moment._replace(sights=(), obs=None, action=None))
        if moment.ended:
            self._end(moment.facts)

    def summary(self) -> dict[str, object]:
        """Summarize the episodes that ended, as ``ejax.evaluate`` does, and the part of one that was cut off."""
        cut: dict[str, object] = {}
        if self._moments and not self._moments[-1].ended:
            cut["cut off, not counted"] = self.text
        if not self._episodes:
            return {"episodes": 0, **cut}
        columns = {name: np.array([each[name] for each in self._episodes], np.float32) for name in self._episodes[0]}
        means = {name: float(x) for name, x in sorted(summarize(columns).items())}
        return {**means, "episodes": self.num_episodes, **cut}

    def _end(self, facts: Mapping[str, float]) -> None:
        moments, finite = self._moments, all(each.finite for each in self._moments)
        total = sum((each.reward for each in moments), 0.0)
        episode = {"return": total, "length": len(moments), "nonfinite": not finite, **facts}
        if "success" in facts and not finite:
            # an episode with NaN is no success, as in ``ejax.evaluation``
            episode["success"] = min(facts["success"], 0.0)
        for name, mean in _TRACKED.items():
            if values := [each.facts[name] for each in moments if name in each.facts]:
                episode[f"metrics/{mean}"] = float(np.mean(values))
        self._episodes.append(episode)
        shown = {name.removeprefix("metrics/"): x for name, x in episode.items() if name != "nonfinite" or not finite}
        text = " ".join(f"{name}={float(value):.4g}" for name, value in shown.items())
        self._report(f"[episode {self.num_episodes}] {text}")


_TRACKED = {
    "metrics/linear_velocity_error": "mean_linear_velocity_error",
    "metrics/yaw_rate_error": "mean_yaw_rate_error",
}
"""Metrics of following a command: at the last step, as every metric, and also over the whole episode."""


def count(
    moments: Iterator[Moment], score: Score, *, num_episodes: int | None = None, num_actions: int | None = None
) -> Iterator[PyTree]:
    """Yield the sights, counted, until so many episodes have ended, or so many actions were taken."""
    left = num_actions
    for moment in moments:
        score.add(moment)
        for sight in moment.sights:
            yield sight
            # an episode's start is seen too, and is no action
            left = left if left is None or moment.starts else left - 1
            if left == 0:
                return
        if num_episodes is not None and score.num_episodes >= num_episodes:
            return


@partial(jax.jit, static_argnames=("policy", "env", "samples"))
def _decide(
    policy: Policy, env: Env, params: Params, envs: EnvCarry, key: Key, *, samples: bool
) -> tuple[Array, PyTree, EnvCarry, Timestep]:
    """Give the action, the states after each of its parts [A, ...], the environment and the timestep before a reset."""
    numbers, remembered = act(policy, params, envs.obs, envs.memory, key, samples=samples)
    action = to_action(action_form(env.action_space), numbers, jnp)
    keys = jax.random.split(jax.random.split(key)[0], 1)  # as ``ejax.rollout.step`` splits it
    state, timestep = jax.vmap(env.step)(envs.state, action, keys)
    states = state
    # a chunk is shown action by action; it is simulated once more, which a viewer can afford
    if isinstance(env, ChunkedEnv) and env.actions_per_decision > 1:
        states = jax.tree.map(lambda x: x[0], jax.vmap(env.trajectory)(envs.state, action, keys))
    done = timestep.terminated | timestep.truncated
    after = EnvCarry(state=state, obs=timestep.obs, memory=forget(policy, remembered, done))
    return action, states, after, timestep


@partial(jax.jit, static_argnames="env")
def _next_episode(env: Env, ended: EnvCarry, key: Key) -> EnvCarry:
    return replace(restart(env, ended, reset(env, key, 1)), memory=ended.memory)


@partial(jax.jit, static_argnames=("policy", "samples"))
def act(
    policy: Policy, params: Params, obs: PyTree, memory: PyTree, key: Key, *, samples: bool
) -> tuple[Array, PyTree]:
    """Give what becomes the environment's action (``ejax.envs.actions``), and the memory after it."""
    distribution, _, remembered = apply_policy(policy, params, obs, memory)
    if not samples:
        return distribution.mode(), remembered
    return distribution.env_action(distribution.sample(jax.random.fold_in(key, _SAMPLES))), remembered


def _facts(info: Mapping[str, Any]) -> dict[str, float]:
    facts = {f"metrics/{name}": x for name, x in info.get("metrics", {}).items() if jnp.ndim(x) == 1}
    if "success" in info and not np.isnan(info["success"]).any():
        facts["success"] = info["success"]
    return {name: float(x[0]) for name, x in facts.items()}


def _row(state: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[0], jax.device_get(state))
