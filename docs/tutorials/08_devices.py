# %% [markdown]
# # Several devices
#
# `trainer.distributed` trains on all devices of this machine, in one program, or on those of several processes. Here
# two virtual devices on one CPU replace two GPUs: they are no faster, but otherwise behave the same. Set the flag
# before jax is imported: run this cell first in a fresh kernel.

# %%
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax

from ejax.config import parse_config
from ejax.run import train

print(jax.devices())

# %% [markdown]
# ## Train on both
#
# As in EmbodiChain, `num_envs` and `batch_size` count *per* device. Two devices collect twice as many steps per
# update. They compute what one device computes with twice the environments, twice the minibatch, and the same number of
# rows from each half of the environments (`minibatch_strata: 2`).

# %%
UPDATES = 10
NETWORK = {"type": "mlp", "network_cfg": {"hidden_sizes": [32, 32], "activation": "tanh"}}


def run_on(devices: int, *overrides: str) -> list[float]:
    """Train with 64 environments in all; the loss of each update."""
    config = parse_config(
        {
            "env": {"id": "PlanarReachRL"},
            "trainer": {
                "exp_name": f"on_{devices}",
                "iterations": UPDATES,
                "num_envs": 64 // devices,
                "buffer_size": 32,
                "console": False,
            },
            "policy": {"name": "actor_critic", "initial_log_std": -0.5, "actor": NETWORK, "critic": NETWORK},
            "algorithm": {
                "name": "ppo",
                "cfg": {
                    "learning_rate": 3e-3,
                    "gamma": 0.95,
                    "batch_size": 512 // devices,
                    "n_epochs": 4,
                    "ent_coef": 0.0,
                },
            },
        },
        overrides,
    )
    result = train(config)
    print(f"{result.global_step:,} steps, policy on {len(jax.tree.leaves(result.params)[0].devices())} device(s)")
    return [row["train/loss"] for row in result.train_history]


count = len(jax.devices())
on_all = run_on(count, "trainer.distributed=true")
on_one = run_on(1, f"algorithm.cfg.minibatch_strata={count}")
for update in (0, 4, UPDATES - 1):
    print(f"update {update}: loss {on_all[update]:.3f} on {count}, {on_one[update]:.3f} on one")

# %% [markdown]
# The two differ by rounding, because sums are computed in a different order.
#
# ## More
#
# - In a shell: `ejax train --config FILE --distributed`; no other change.
# - `trainer.shard_parameters: true` divides parameters and moments among the devices, for policies that do not fit on
#   one.
# - Several machines: `--coordinator HOST:PORT --num-processes N --process-id I`; SLURM and OpenMPI provide
#   these. For Kubernetes, see `examples/kubernetes.yaml`.
# - Environments outside JAX have `collector.actor_devices` and `collector.learner_devices` instead.
#
# Details: [Several devices, several machines](../scaling.md).
