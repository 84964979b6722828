"""A pure environment behind the interface of a ``HostEnv``: for asynchronous collection, and for tests of it."""

from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from numpy.typing import NDArray

from ejax.envs.host.rows import choose_rows
from ejax.types import Array, Env, HostTimestep, PyTree, Timestep, persist


@struct.dataclass(kw_only=True)
class EpisodeRows:
    """Episodes under way."""

    state: PyTree
    obs: PyTree
    seed: Array  # [N] uint32: seeds of the episodes under way
    num_steps: Array  # [N] int32: steps of the episodes under way


class PureHostEnv:
    """N copies of a pure environment. Each row's course follows from its seed, and from what outlasts its episodes."""

    seeds_rows = True

    def __init__(self, env: Env, num_envs: int) -> None:
        self.env, self.num_envs = env, num_envs
        self.observation_space: gymnasium.Space[Any] = env.observation_space
        self.action_space: gymnasium.Space[Any] = env.action_space
        self.max_episode_steps = env.max_episode_steps
        self._rows: EpisodeRows = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(partial(begin, env), np.zeros(num_envs, np.uint32))
        )

    @property
    def row_seed(self) -> NDArray[np.uint32]:
        return np.asarray(self._rows.seed)

    def reset(self, seed: NDArray[np.uint32], rows: NDArray[np.bool_] | None = None) -> PyTree:
        chosen = np.ones(self.num_envs, bool) if rows is None else rows
        self._rows = _reset(self.env, self._rows, np.asarray(seed, np.uint32), chosen)
        return jax.device_get(self._rows.obs)

    def compile(self, action: NDArray[Any]) -> None:
        """Compile what ``reset`` and ``step`` run, for an action [N, ...]; nothing moves."""
        rows = _reset(self.env, self._rows, np.zeros(self.num_envs, np.uint32), np.ones(self.num_envs, bool))
        _step(self.env, rows, action)

    def step(self, action: NDArray[Any]) -> HostTimestep:
        self._rows, timestep = _step(self.env, self._rows, action)
        answer = vars(jax.device_get(timestep))
        return HostTimestep(**{**answer, "info": answer["info"] | {"valid": np.ones(self.num_envs, bool)}})

    def get_state(self) -> PyTree:
        return self._rows

    def set_state(self, state: PyTree) -> PyTree:
        self._rows = state
        return jax.device_get(state.obs)

    def close(self) -> None:
        """Nothing to close."""


def begin(env: Env, seed: Array) -> EpisodeRows:
    """Begin an episode of each seed [N], as ``env.reset(jax.random.key(seed))`` does."""
    state, obs = jax.vmap(lambda each: env.reset(jax.random.key(each)))(seed)
    return EpisodeRows(state=state, obs=obs, seed=jnp.asarray(seed), num_steps=jnp.zeros(seed.shape, jnp.int32))


@partial(jax.jit, static_argnames="env")
def _reset(env: Env, rows: EpisodeRows, seed: Array, chosen: Array) -> EpisodeRows:
    return choose_rows(chosen, begin(env, seed), rows, numpy=jnp)


def advance(env: Env, rows: EpisodeRows, action: Array) -> tuple[EpisodeRows, Timestep]:
    """Make one control step of every row; none is reset."""
    # an episode's own seed and step: what a row draws depends neither on the other rows nor on the rollout
    keys = jax.vmap(lambda seed, step: jax.random.fold_in(jax.random.key(seed), step + 1))(rows.seed, rows.num_steps)
    state, timestep = jax.vmap(env.step)(rows.state, action, keys)
    return replace(rows, state=state, obs=timestep.obs, num_steps=rows.num_steps + 1), timestep


def renew(env: Env, ended: EpisodeRows) -> EpisodeRows:
    """Begin the next episode of every row, from a seed that follows from the last one's seed and length."""
    keys = jax.vmap(lambda seed, step: jax.random.fold_in(jax.random.key(seed), -step))(ended.seed, ended.num_steps)
    fresh = begin(env, jax.vmap(lambda key: jax.random.bits(key, (), jnp.uint32))(keys))
    state, obs = jax.vmap(partial(persist, env))(ended.state, fresh.state, fresh.obs)
    return replace(fresh, state=state, obs=obs)


@partial(jax.jit, static_argnames="env")
def _step(env: Env, rows: EpisodeRows, action: Array) -> tuple[EpisodeRows, Timestep]:
    ended, timestep = advance(env, rows, action)
    done = timestep.terminated | timestep.truncated

    def reset_done(ended: EpisodeRows) -> EpisodeRows:
        return choose_rows(done, renew(env, ended), ended, numpy=jnp)

    # one reset of all rows costs about as much as their step: only where a row needs it
    following = jax.lax.cond(done.any(), reset_done, lambda same: same, ended)
    return following, replace(timestep, obs=following.obs, final_obs=timestep.obs)
