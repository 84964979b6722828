"""Your own environment and policy, trained from a config: nothing to register, nothing to inherit from.

python examples/own_env.py
"""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from ejax.config import parse_config
from ejax.distributions import ActionSpec
from ejax.run import train
from ejax.types import Array, Key, PyTree, Timestep


@dataclass(frozen=True)
class Pendulum:
    """Hold a damped pendulum at an angle: pure functions of a state, no reset inside ``step``."""

    target: float = 1.0
    max_episode_steps: int = 60

    @property
    def observation_space(self) -> gymnasium.Space[Any]:
        return gymnasium.spaces.Box(-np.inf, np.inf, (2,))

    @property
    def action_space(self) -> gymnasium.Space[Any]:
        return gymnasium.spaces.Box(-1.0, 1.0, (1,))

    def reset(self, key: Key) -> tuple[PyTree, Array]:
        angle = jax.random.uniform(key, (), minval=-0.5, maxval=0.5)
        state = (angle, jnp.zeros(()), jnp.zeros((), jnp.int32))
        return state, jnp.stack([angle, jnp.zeros(())])

    def step(self, state: PyTree, action: Array, key: Key) -> tuple[PyTree, Timestep]:
        del key
        angle, velocity, t = state
        velocity = 0.9 * velocity + 0.2 * (3.0 * jnp.clip(action[0], -1.0, 1.0) - jnp.sin(angle))
        angle = angle + 0.2 * velocity
        error = jnp.abs(angle - self.target)
        timestep = Timestep(
            obs=jnp.stack([angle, velocity]),
            reward=-error,
            terminated=jnp.asarray(False),
            truncated=t + 1 >= self.max_episode_steps,
            info={"success": error < 0.1, "metrics": {"error": error}},
        )
        return (angle, velocity, t + 1), timestep


class TinyPolicy(nn.Module):
    """Any Flax module ``obs -> (distribution, value)``; the constructor gets what it names."""

    action_spec: ActionSpec
    width: int = 16

    @nn.compact
    def __call__(self, obs: Array) -> tuple[Any, Array]:
        x = jnp.tanh(nn.Dense(self.width)(obs))
        log_std = self.param("log_std", nn.initializers.constant(-0.5), self.action_spec.sizes)
        return self.action_spec.distribution(nn.Dense(1)(x), log_std), nn.Dense(1)(x)[..., 0]


CONFIG = {
    "env": {"id": f"{__name__}:Pendulum", "cfg": {"target": 0.8}},
    "trainer": {"exp_name": "pendulum", "num_envs": 32, "buffer_size": 60, "iterations": 60},
    "policy": {"name": f"{__name__}:TinyPolicy", "cfg": {"width": 32}},
    "algorithm": {"name": "ppo", "cfg": {"learning_rate": 3e-3, "batch_size": 480, "n_epochs": 5, "ent_coef": 0.0}},
}


def main(output_dir: str = "outputs") -> float:
    """Train, and return the mean error of the last rollout in rad."""
    config = parse_config(CONFIG, [f"trainer.output_dir={output_dir}"])
    result = train(config)
    return result.last_train_metrics["metrics/error"]


if __name__ == "__main__":
    print(f"mean error: {main():.3f} rad")
