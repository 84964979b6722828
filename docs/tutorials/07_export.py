# %% [markdown]
# # Export and deploy
#
# Export a policy trained in JAX to a process that has only torch or ONNX Runtime, with a certificate that it
# computes the same actions. Needs `pip install -e '.[export]'`; half a minute on two CPU cores.

# %%
import json
from pathlib import Path

import numpy as np

from ejax import load
from ejax.config import parse_config
from ejax.run import train
from interop.export import export_run
from interop.policy import load_policy
from interop.verify import format_table, verify

UPDATES = 20

# %% [markdown]
# ## A policy to export

# %%
NETWORK = {"type": "mlp", "network_cfg": {"hidden_sizes": [32, 32], "activation": "tanh"}}
result = train(
    parse_config(
        {
            "env": {"id": "PlanarReachRL"},
            "trainer": {
                "exp_name": "to_export",
                "iterations": UPDATES,
                "num_envs": 32,
                "buffer_size": 32,
                "console": False,
            },
            "policy": {"name": "actor_critic", "actor": NETWORK, "critic": NETWORK},
            "algorithm": {"name": "ppo", "cfg": {"learning_rate": 3e-3, "batch_size": 256}},
        }
    )
)

# %% [markdown]
# ## Export
#
# Each format is written, loaded again, and evaluated on the same observations as the JAX policy: ordinary, extreme
# and adversarial ones. The export fails unless all formats agree within the policy's own rounding error.
#
# In a shell: `ejax export RUN --to policy --formats pt,safetensors,onnx,torchscript,stablehlo`.

# %%
export_run(result.run_dir, Path("policy"), ["pt", "safetensors", "onnx"])
print(*sorted(path.name for path in Path("policy").iterdir()), sep="\n")

# %% [markdown]
# ## The certificate
#
# `contract.json` describes inputs and outputs with their units; `parity.json` has the errors, hashes and
# versions.

# %%
contract = json.loads(Path("policy/contract.json").read_text())
print(*contract, sep=", ")
print(json.dumps(contract["action"], indent=1))

# %% [markdown]
# ## Verify it anywhere
#
# In a shell, on the robot's computer, without jax: `ejax verify policy`.

# %%
print(format_table(verify(Path("policy"))))

# %% [markdown]
# ## Act, from torch
#
# Compare with the JAX policy on the same observations:

# %%
import torch

obs = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
policy = load_policy("policy")
action = policy.act(torch.from_numpy(obs)).numpy()  # clipped to the action space, as the environment would
in_jax = load(result.run_dir).act(obs).clip(-1.0, 1.0)
print(f"largest difference: {np.abs(action - in_jax).max():.1e}")

# %% [markdown]
# `examples/deploy_torch.py` and `examples/deploy_onnx.py` are complete programs that play the
# episode in `episode.json`, for any task. More: [Export](../export.md), [the functions](../reference/interop.md).
