# %% [markdown]
# # Your own algorithm
#
# An algorithm consists of its options, one pure update, and a record that ties them together. The training loop
# provides the rest: collection, logging, evaluation, checkpoints, resume, several devices.
#
# The example is advantage actor-critic (A2C), with one gradient step per rollout. Half a minute on two CPU cores.

# %%
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from pydantic import BaseModel, ConfigDict

from ejax import Algorithm, register_algorithm
from ejax.config import ConfigError, parse_config
from ejax.losses import value_loss
from ejax.optim import OptimizerConfig, ScheduleConfig, apply_gradient, clip_by_global_norm, step_schedule
from ejax.returns import gae, normalize
from ejax.run import train
from ejax.types import Array, Key, Metrics, Policy, Rollout, TrainState

UPDATES = 300

# %% [markdown]
# ## Options
#
# A frozen pydantic model defines the keys under `algorithm.cfg`, with types, defaults and ranges. It is a static
# argument of the update, so it must be hashable.


# %%
class A2CConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    optimizer: OptimizerConfig = OptimizerConfig(name="rmsprop", learning_rate=2e-3)
    lr_scheduler: ScheduleConfig = ScheduleConfig()
    gamma: float = 0.95
    gae_lambda: float = 0.95
    vf_coef: float = 0.5
    max_grad_norm: float = 1.0


# %% [markdown]
# ## The update
#
# A rollout is time-major: `rollout.reward` is `[T, N]`, `rollout.obs` `[T, N, 8]`. Where a rollout or an episode is
# merely cut off, `gae` uses the value of the true next observation, without a special case. The update is a jitted
# function of arrays and keeps no state elsewhere.


# %%
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
    """One step on −log π(a|o)·A + vf_coef·(V − R)²."""
    del key  # nothing is shuffled
    steps = (rollout.reward, rollout.value, rollout.next_value, rollout.terminated, rollout.truncated)
    advantage, value_target = gae(*steps, gamma=config.gamma, gae_lambda=config.gae_lambda)

    def loss(trained: Any) -> tuple[Array, Metrics]:
        distribution, value = policy.apply({**state.params, "params": trained}, rollout.obs)
        actor = -(distribution.log_prob(rollout.action) * normalize(advantage)).mean()
        critic = value_loss(value, value_target).mean()
        return actor + config.vf_coef * critic, {"actor_loss": actor, "value_loss": critic}

    grads, metrics = jax.grad(loss, has_aux=True)(state.params["params"])
    grads, norm = clip_by_global_norm(grads, config.max_grad_norm)
    # a step that is not finite is not taken; the run counts and reports it
    state, finite = apply_gradient(state, grads, optimizer=optimizer, finite=jnp.isfinite(norm), skip=True)
    metrics |= {"grad_norm": norm, "skipped_update": 1.0 - finite}
    return step_schedule(state, config.optimizer, config.lr_scheduler), metrics


A2C = register_algorithm("a2c", Algorithm(Config=A2CConfig, update=a2c_update), override=True)

# %% [markdown]
# ## Train with it
#
# The log has the metrics that the update returns as `train/…`.

# %%
NETWORK = {"type": "mlp", "network_cfg": {"hidden_sizes": [32, 32], "activation": "tanh"}}
CONFIG = {
    "env": {"id": "PlanarReachRL", "cfg": {"success_threshold": 0.1}},
    "trainer": {"exp_name": "a2c", "iterations": UPDATES, "num_envs": 64, "buffer_size": 8, "console": False},
    "policy": {"name": "actor_critic", "initial_log_std": -0.5, "actor": NETWORK, "critic": NETWORK},
    "algorithm": {"name": "a2c", "cfg": {"gamma": 0.9}},
}
result = train(parse_config(CONFIG))
for row in result.train_history[9 :: UPDATES // 5]:
    print(f"{row['global_step']:>8,} steps  return {row['charts/episode_reward_avg_100']:8.1f}")

# %% [markdown]
# ## What you did not have to write
#
# Options are checked like ejax's own: a mistyped key is an error that names the nearest one.

# %%
try:
    parse_config({**CONFIG, "algorithm": {"name": "a2c", "cfg": {"gama": 0.9}}})
except ConfigError as error:
    print(error)

# %% [markdown]
# You can also call the update directly, in your own loop (`examples/own_loop.py`) or in a test with an invented
# rollout. A record may contain more (checks of options, a step that replaces collection, additional state): see
# [Extend ejax](../extend.md) and [the reference](../reference/algorithms.md).
