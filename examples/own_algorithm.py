"""Your own algorithm, trained from a config: its options, one update, one record. Here advantage actor-critic (A2C).

python examples/own_algorithm.py
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from pydantic import BaseModel, ConfigDict

from ejax.algorithms.record import Algorithm
from ejax.config import parse_config
from ejax.losses import value_loss
from ejax.optim import OptimizerConfig, ScheduleConfig, apply_gradient, clip_by_global_norm, step_schedule
from ejax.returns import gae, normalize
from ejax.run import train
from ejax.types import Array, Key, Metrics, Policy, Rollout, TrainState


class A2CConfig(BaseModel):
    """``algorithm.cfg``: whatever your algorithm needs. Frozen, since it is a static argument of the update."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    optimizer: OptimizerConfig = OptimizerConfig(name="rmsprop", learning_rate=5e-3)
    lr_scheduler: ScheduleConfig = ScheduleConfig()
    gamma: float = 0.95
    gae_lambda: float = 0.95
    vf_coef: float = 0.5
    max_grad_norm: float = 1.0


@partial(jax.jit, static_argnames=("policy", "optimizer", "config"))
def a2c_update(
    state: TrainState,
    rollout: Rollout,
    key: Key,
    *,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    config: A2CConfig,
) -> tuple[TrainState, Metrics]:
    """One gradient step on −log π(a|o)·A + vf_coef·(V − R)² over the whole rollout."""
    del key  # nothing is shuffled
    steps = (rollout.reward, rollout.value, rollout.next_value, rollout.terminated, rollout.truncated)
    advantage, value_target = gae(*steps, gamma=config.gamma, gae_lambda=config.gae_lambda)

    def loss(trained: Any) -> tuple[Array, Metrics]:
        distribution, value = policy.apply({**state.params, "params": trained}, rollout.obs)
        actor = -(distribution.log_prob(rollout.action) * normalize(advantage)).mean()
        critic = value_loss(value, value_target).mean()
        total = actor + config.vf_coef * critic
        return total, {"loss": total, "actor_loss": actor, "value_loss": critic}

    grads, metrics = jax.grad(loss, has_aux=True)(state.params["params"])
    grads, norm = clip_by_global_norm(grads, config.max_grad_norm)
    # a step that is not finite is not taken; the run counts and reports it
    state, finite = apply_gradient(state, grads, optimizer=optimizer, finite=jnp.isfinite(norm), skip=True)
    metrics |= {"grad_norm": norm, "skipped_update": 1.0 - finite}
    return step_schedule(state, config.optimizer, config.lr_scheduler), metrics


ALGORITHM = Algorithm(Config=A2CConfig, update=a2c_update)


def main(output_dir: str = "outputs", num_updates: int = 150) -> float:
    """Train, and return the mean reward per step of the last episodes."""
    network = {"type": "mlp", "network_cfg": {"hidden_sizes": [32, 32], "activation": "tanh"}}
    config = parse_config(
        {
            "trainer": {
                "exp_name": "own_algorithm",
                "output_dir": output_dir,
                "num_envs": 64,
                "buffer_size": 32,
                "iterations": num_updates,
                "learning_env": {"name": "own_env:Pendulum"},
                "console": False,
            },
            "policy": {"name": "actor_critic", "actor": network, "critic": network},
            "algorithm": {"name": "own_algorithm:ALGORITHM"},
        }
    )
    result = train(config)
    return result.last_train_metrics["charts/episode_reward_avg_100"] / 60


if __name__ == "__main__":
    print(f"reward {main():.3f} a step")
