"""Pure environments, host environments and a policy for the tests of collectors."""

import time
from dataclasses import dataclass
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.distributions import Normal
from ejax.types import Array, HostTimestep, Key, Params, PyTree, Timestep


@dataclass(frozen=True)
class Drift:
    """A pure environment: the state moves by the action and by noise; cut off after ``limit`` steps, ends beyond 3."""

    limit: int = 7

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    @property
    def max_episode_steps(self) -> int:
        return self.limit

    def reset(self, key: Key) -> tuple[Array, Array]:
        state = jnp.append(jax.random.normal(key, (1,)), 0.0)
        return state, state

    def step(self, state: Array, action: Array, key: Key) -> tuple[Array, Timestep]:
        place = state[:1] + 0.5 * action + 0.1 * jax.random.normal(key, (1,))
        state = jnp.append(place, state[1] + 1.0)
        timestep = Timestep(
            obs=state,
            reward=-jnp.abs(place[0]),
            terminated=jnp.abs(place[0]) > 3.0,
            truncated=state[1] == self.limit,
            info={},
        )
        return state, timestep


@dataclass(frozen=True)
class Linear:
    """A Gaussian with linear mean, and a linear value. With ``naps`` it sleeps at random when it is asked."""

    naps: float = 0.0

    def init(self, key: Key, obs: PyTree) -> Params:
        del obs
        weight = 0.1 * jax.random.normal(key, (2,))
        return {"params": {"mean": weight, "value": weight[::-1], "log_std": jnp.zeros(1)}}

    def apply(self, params: Params, obs: Array) -> tuple[Normal, Array]:
        p = params["params"]
        mean = (obs @ p["mean"])[..., None]
        if self.naps:
            jax.debug.callback(lambda _: nap(self.naps), mean.reshape(-1)[0])
        log_std = jnp.broadcast_to(p["log_std"].reshape((1,) * (mean.ndim - 1) + (1,)), mean.shape)
        return Normal(mean, log_std), obs @ p["value"]


def nap(most_s: float) -> None:
    time.sleep(most_s * np.random.default_rng().random())


class Wrapped:
    """A host environment around another, for what a test wants to happen in between. Counts steps."""

    def __init__(self, env: Any) -> None:
        self.env, self.num_envs, self.num_steps, self.closed = env, env.num_envs, 0, False
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.max_episode_steps, self.seeds_rows = env.max_episode_steps, env.seeds_rows

    @property
    def row_seed(self) -> NDArray[np.uint32]:
        return self.env.row_seed

    def reset(self, seed: NDArray[np.uint32], rows: NDArray[np.bool_] | None = None) -> PyTree:
        return self.env.reset(seed, rows)

    def step(self, action: NDArray[Any]) -> HostTimestep:
        self.before()
        self.num_steps += 1
        return self.env.step(action)

    def before(self) -> None:
        """Act before each step."""

    def close(self) -> None:
        self.closed = True
        self.env.close()


class Sleepy(Wrapped):
    """Sleeps at random, and can be saved where the other can."""

    most_s = 2e-3

    def before(self) -> None:
        nap(self.most_s)

    def get_state(self) -> PyTree:
        return self.env.get_state()

    def set_state(self, state: PyTree) -> PyTree:
        return self.env.set_state(state)


class SameArrays:
    """A host environment that hands out the same arrays at every step, as C libraries do."""

    max_episode_steps, seeds_rows = 0, False
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, num_envs: int = 3, sound: int = 1000) -> None:
        self.num_envs, self.sound, self.t = num_envs, sound, 0
        self.row_seed = np.zeros(num_envs, np.uint32)
        self.obs = np.zeros((num_envs, 2), np.float32)
        self.told = HostTimestep(
            obs=self.obs,
            reward=np.zeros(num_envs, np.float32),
            terminated=np.zeros(num_envs, bool),
            truncated=np.zeros(num_envs, bool),
            info={},
            final_obs=self.obs,
        )

    def reset(self, seed: NDArray[np.uint32], rows: NDArray[np.bool_] | None = None) -> PyTree:
        self.obs[slice(None) if rows is None else rows] = 100.0
        return self.obs

    def step(self, action: NDArray[Any]) -> HostTimestep:
        self.t += 1
        self.obs[:] = self.t if self.t <= self.sound else np.nan
        self.told.reward[:] = self.t
        return self.told

    def close(self) -> None: ...
