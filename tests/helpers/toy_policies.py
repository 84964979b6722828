"""Policies of a toy environment with a nested observation."""

import dataclasses
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from ejax.distributions import action_spec
from ejax.policies import ActorCritic, NetworkConfig
from ejax.types import Timestep

ORIGIN = {"checkpoint": "none", "global_step": 0, "env": {"id": "Toy", "cfg": {}}}


@dataclasses.dataclass(frozen=True)
class Toy:
    """A nested observation, any action space; actions do what they say, clipped or not."""

    action_space: gymnasium.Space
    clips: bool = False
    max_episode_steps: int = 10
    observation_space = gymnasium.spaces.Dict(
        {
            "robot": gymnasium.spaces.Dict(
                {"q": gymnasium.spaces.Box(-1, 1, (3,)), "v": gymnasium.spaces.Box(-9, 9, (2,))}
            ),
            "hidden": gymnasium.spaces.Box(-np.inf, np.inf, (1,)),
        }
    )

    def __hash__(self) -> int:
        return hash((str(self.action_space), self.clips))

    def reset(self, key: jax.Array) -> tuple[Any, Any]:
        x = jax.random.uniform(key, (6,))
        return x, self._observe(x)

    def step(self, state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, Timestep]:
        effect = jnp.atleast_1d(action).astype(jnp.float32)
        effect = jnp.clip(effect, -1.0, 1.0) if self.clips else effect
        state = jnp.clip(state + 0.1 * effect.sum() + 0.1 * jax.random.normal(key, (6,)), -9.0, 9.0)
        never = jnp.bool_(False)
        return state, Timestep(
            obs=self._observe(state), reward=effect.sum(), terminated=never, truncated=never, info={}
        )

    def _observe(self, x: jax.Array) -> Any:
        return {"robot": {"q": x[:3], "v": x[3:5]}, "hidden": x[5:]}


def policy_for(env: Any, *, squash: bool = False, **network: Any) -> tuple[Any, Any]:
    """Make an actor that reads the robot and a critic that reads everything; random weights, a used normalizer."""
    nested = isinstance(env, Toy)
    config = NetworkConfig(hidden_sizes=(16, 8), **{"activation": "tanh", **network})
    policy = ActorCritic(
        action_spec(env.action_space, squash=squash),
        config,
        config,
        actor_obs_groups=("robot",) if nested else (),
        actor_obs_normalization=True,
    )
    obs = jax.eval_shape(lambda: env.reset(jax.random.key(0))[1])
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(policy.init, jax.random.key(0), obs)
    params = jax.tree.map(lambda x: jnp.asarray(rng.uniform(-0.7, 0.7, x.shape), x.dtype), shapes)
    params["normalizer"]["actor_obs_normalizer"]["variance"] += 0.8
    return policy, params
