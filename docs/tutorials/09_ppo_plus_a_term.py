# %% [markdown]
# # PPO plus a term of your own
#
# `ppo_loss` is a function of parameters and a minibatch: call it and add a term. The example penalizes changes of the
# action from one observation to the next, $c\,\lVert\mu(o_t) - \mu(o_{t+1})\rVert^2$ (CAPS, Mysore et al. 2021).
# Twenty seconds of CPU time. (For the divergence from the initial policy, PPO already has
# `algorithm.cfg.kl_coef`.)

# %%
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from pydantic import NonNegativeFloat

from ejax import PPOConfig, parse_config, ppo_update, register_algorithm
from ejax.algorithms.batch import apply_to_batch
from ejax.algorithms.ppo import ALGORITHM as PPO
from ejax.algorithms.ppo import ppo_loss
from ejax.algorithms.record import refuse_memory
from ejax.run import train

# %% [markdown]
# ## The option, the columns and the loss
#
# A field is a key of `algorithm.cfg`. `columns` computes additional columns `[T, N, ...]`; the loss receives their rows
# of a minibatch. `weight` sums to one over a minibatch and is 0 on padding. All options of PPO still
# work.


# %%
class SmoothConfig(PPOConfig):
    smooth_coef: NonNegativeFloat = 0.0


def next_rows(rollout):
    following = jax.tree.map(lambda x: jnp.roll(x, -1, axis=0), rollout.obs)
    return {"next_obs": following, "goes_on": (~rollout.done).at[-1].set(False)}  # the next row is the same episode's


def smooth_loss(params, batch, *, policy, config):
    loss, metrics = ppo_loss(params, batch, policy=policy, config=config)
    now, _, _ = apply_to_batch(policy, params, batch)  # as in ppo_loss: XLA computes it once
    following, _ = policy.apply(params, batch["next_obs"])
    change = jnp.square(now.mode() - following.mode()).sum(axis=-1)
    term = (batch["weight"] * batch["goes_on"] * change).sum()
    return loss + config.smooth_coef * term, {**metrics, "action_change": term}


smooth_update = partial(ppo_update, loss=smooth_loss, columns=next_rows)
# a policy with memory reads sequences, in which `next_obs` would need its own memory
ALGORITHM = replace(PPO, Config=SmoothConfig, update=smooth_update, compat={}, policy_problems=refuse_memory)
register_algorithm("ppo_smooth", ALGORITHM, override=True)

# %% [markdown]
# ## Train with it
#
# From a config, with the code above in `smooth.py`: `algorithm.name=smooth:ALGORITHM algorithm.cfg.smooth_coef=0.3` on
# the command line, or these keys in the file and `--trust smooth:ALGORITHM`.

# %%
NETWORK = {"type": "mlp", "network_cfg": {"hidden_sizes": [32, 32], "activation": "tanh"}}
CONFIG = {
    "env": {"id": "PlanarReachRL"},
    "trainer": {"exp_name": "smooth", "iterations": 100, "num_envs": 64, "buffer_size": 32, "console": False},
    "policy": {"name": "actor_critic", "initial_log_std": -0.5, "actor": NETWORK, "critic": NETWORK},
    "algorithm": {"name": "ppo_smooth", "cfg": {"learning_rate": 3e-3, "gamma": 0.95, "batch_size": 512}},
}
change = {}
print("smooth_coef  change of the mean action  return")
for coefficient in (0.0, 0.3):
    row = train(parse_config(CONFIG, [f"algorithm.cfg.smooth_coef={coefficient}"])).train_history[-1]
    change[coefficient] = row["train/action_change"]
    print(f"{coefficient:11}  {change[coefficient]:25.4f}  {row['charts/episode_reward_avg_100']:6.1f}")
