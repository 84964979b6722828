# %% [markdown]
# # Your own policy
#
# A policy is any Flax module `obs -> (distribution, value)`. Here a two-link arm reaches for a point, and our policy
# uses the features a roboticist would choose: the sine and cosine of the angles, and the target *relative to the
# hand*. We write it twice, in Flax Linen and in Flax NNX, and compare both with the built-in network, with the same
# PPO.
#
# About a minute on two CPU cores, most of it compilation.

# %%
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from ejax import register_policy
from ejax.config import parse_config
from ejax.distributions import ActionSpec
from ejax.policies.nnx import NnxPolicy
from ejax.run import train

UPDATES = 60  # raise it, and the arm arrives more often

# %% [markdown]
# ## The run that all three share
#
# The observation of `PlanarReachRL` has eight numbers: two joint angles (rad), the positions of hand and target (m),
# and the previous action. A policy's constructor receives the values that it names as arguments: `action_spec`,
# `observation_space`, the section `actor` of the config and others, and the keys of `policy.cfg`.


# %%
def run_of(policy: dict[str, Any]) -> float:
    """Train with this section ``policy``; the mean return of the last 100 episodes."""
    config = parse_config(
        {
            "env": {"id": "PlanarReachRL", "cfg": {"success_threshold": 0.1}},
            "trainer": {"exp_name": "own_policy", "iterations": UPDATES, "num_envs": 64, "buffer_size": 32},
            "policy": policy,
            "algorithm": {
                "name": "ppo",
                "cfg": {"learning_rate": 3e-3, "gamma": 0.95, "batch_size": 512, "n_epochs": 8, "ent_coef": 0.0},
            },
        },
        ["trainer.console=false"],
    )
    return train(config).last_train_metrics["charts/episode_reward_avg_100"]


NETWORK = {"type": "mlp", "network_cfg": {"hidden_sizes": [32, 32], "activation": "tanh"}}
built_in = run_of({"name": "actor_critic", "initial_log_std": -0.5, "actor": NETWORK, "critic": NETWORK})
print(f"actor_critic: return {built_in:.1f}")

# %% [markdown]
# ## In Linen
#
# `action_spec.distribution(mean, log_std)` makes the distribution that fits the action space: a Gaussian here, a
# categorical one for discrete actions. Observations have any number of leading axes (`[N, 8]` when acting, `[B, 8]` in
# an update), so everything works on the last axis.


# %%
def features(obs: jax.Array) -> jax.Array:
    """[..., 8] -> [..., 8]: sine and cosine of the angles, the way from hand to target, the last action."""
    angle, hand, target, previous = (obs[..., i : i + 2] for i in (0, 2, 4, 6))
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle), target - hand, previous], axis=-1)


@register_policy("reacher", override=True)
class Reacher(nn.Module):
    """One network for the action, one for the value."""

    action_spec: ActionSpec
    width: int = 32

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[Any, jax.Array]:
        x = features(obs)
        small = nn.initializers.orthogonal(0.01)  # the first actions are near 0
        mean = nn.Dense(2, kernel_init=small)(self.hidden(x))
        value = nn.Dense(1)(self.hidden(x))
        log_std = self.param("log_std", nn.initializers.constant(-0.5), self.action_spec.sizes)
        return self.action_spec.distribution(mean, log_std), value[..., 0]

    def hidden(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(nn.Dense(self.width)(jnp.tanh(nn.Dense(self.width)(x))))


linen = run_of({"name": "reacher", "cfg": {"width": 32}})
print(f"Linen: return {linen:.1f}")

# %% [markdown]
# `register_policy` registers a short name; running the cell again replaces it. In a file, no registration is
# needed: the name is `package.module:Reacher`.
#
# ## In NNX
#
# An NNX module holds its arrays, but JAX needs them separate. `NnxPolicy(make)` separates them, so the run sees an
# ordinary policy. The config then names a function that makes it. `nnx.Dropout` and `nnx.BatchNorm` work unchanged;
# [What a policy is](../reference/policies.md) explains when they drop units and update statistics.


# %%
class ReacherNNX(nnx.Module):
    def __init__(self, spec: ActionSpec, width: int, *, rngs: nnx.Rngs) -> None:
        self.spec = spec
        self.actor = network(width, 2, rngs)
        self.critic = network(width, 1, rngs)
        self.log_std = nnx.Param(jnp.full(spec.sizes, -0.5))

    def __call__(self, obs: jax.Array) -> tuple[Any, jax.Array]:
        x = features(obs)
        return self.spec.distribution(self.actor(x), self.log_std[...]), self.critic(x)[..., 0]


def network(width: int, outputs: int, rngs: nnx.Rngs) -> nnx.Sequential:
    first, second = nnx.Linear(8, width, rngs=rngs), nnx.Linear(width, width, rngs=rngs)
    return nnx.Sequential(first, jnp.tanh, second, jnp.tanh, nnx.Linear(width, outputs, rngs=rngs))


@register_policy("reacher_nnx", override=True)
def make_reacher(action_spec: ActionSpec, width: int = 32) -> NnxPolicy:
    return NnxPolicy(lambda rngs: ReacherNNX(action_spec, width, rngs=rngs))


in_nnx = run_of({"name": "reacher_nnx"})
print(f"NNX: return {in_nnx:.1f}")

# %% [markdown]
# ## Comparing them
#
# The three differ in their features and initialization, not in the algorithm. One seed proves little: set
# `population: {seeds: 8}` in the config ([Resume, fork and sweep](04_resume_fork_sweep.py)) before you trust a
# difference.
#
# Next: [Policies with memory](../memory.md), [Extend ejax](../extend.md), and [what a policy
# is](../reference/policies.md), function by function.
