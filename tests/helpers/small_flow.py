"""A small flow of chunks that has learned to pass on either side, and an environment where it changes sides."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ejax.policies.vla.config import HeadConfig
from ejax.policies.vla.flow import FlowChunk, FlowSpec
from ejax.types import Array, Key, Timestep

HORIZON = 8


class Network(nn.Module):
    @nn.compact
    def velocity(self, context: Array, x: Array, tau: Array) -> Array:
        y = jnp.concatenate([context, x.reshape(len(x), -1), tau[:, None]], axis=-1)
        for _ in range(2):
            y = nn.silu(nn.Dense(32)(y))
        return nn.Dense(HORIZON)(y).reshape(x.shape)


class InUnits(Network):
    """The same in its own units, half of the environment's, and by the time that is left: as LeRobot's models."""

    @nn.compact
    def velocity(self, context: Array, x: Array, left: Array) -> Array:
        return Network.velocity(self, context, x, 1.0 - left)

    def to_env(self, chunk: Array) -> Array:
        return 2.0 * chunk

    def to_model(self, chunk: Array) -> Array:
        return 0.5 * chunk


NETWORK = Network()


@dataclass(frozen=True)
class Flow:
    """A policy of chunks of one number, from an observation of one number."""

    network: Network = NETWORK

    def init(self, key: Key, obs: Array) -> Any:
        return self.network.init(key, obs, jnp.zeros((len(obs), HORIZON, 1)), jnp.zeros(len(obs)), method="velocity")

    def apply(self, params: Any, obs: Array) -> tuple[FlowChunk, Array]:
        spec = FlowSpec(self.network, HORIZON, 1, HeadConfig(num_steps=8))
        return FlowChunk(params, obs, spec, (len(obs),)), jnp.zeros(len(obs))


@cache
def learned() -> Any:
    """Clone chunks on either side of 0: the larger the observation, the more often on its side."""
    policy, optimizer, shape = Flow(), optax.adam(1e-2), 0.8 * jnp.sin(0.3 * jnp.arange(1, HORIZON + 1))

    def one(carry: Any, key: Key) -> tuple[Any, None]:
        key_obs, key_side, key_loss = jax.random.split(key, 3)
        obs = jax.random.uniform(key_obs, (128, 1), minval=-1.0, maxval=1.0)
        side = jnp.where(jax.random.bernoulli(key_side, jax.nn.sigmoid(8.0 * obs)), 1.0, -1.0)

        def loss(params: Any) -> Array:
            return policy.apply(params, obs)[0].matching_loss((side * shape[None])[..., None], key_loss).mean()

        updates, state = optimizer.update(jax.grad(loss)(carry[0]), carry[1])
        return (optax.apply_updates(carry[0], updates), state), None

    params = policy.init(jax.random.key(0), jnp.zeros((1, 1)))
    start = (params, optimizer.init(params))
    return jax.jit(lambda start: jax.lax.scan(one, start, jax.random.split(jax.random.key(1), 300))[0][0])(start)


@dataclass(frozen=True)
class Wander:
    """An observation that no action moves. It wanders about 0, where both sides are as good: chunks change sides."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    max_episode_steps = 40

    def reset(self, key: Key) -> tuple[Any, Array]:
        obs = jax.random.uniform(key, (1,), minval=-0.2, maxval=0.2)
        return (obs, jnp.zeros((), jnp.int32)), obs

    def step(self, state: Any, action: Array, key: Key) -> tuple[Any, Timestep]:
        del action
        obs = jnp.clip(state[0] + 0.1 * jax.random.normal(key, (1,)), -0.3, 0.3)
        ended, never = state[1] + 1 == self.max_episode_steps, jnp.zeros((), bool)
        return (obs, state[1] + 1), Timestep(obs=obs, reward=obs[0], terminated=never, truncated=ended, info={})
