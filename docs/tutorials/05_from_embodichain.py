# %% [markdown]
# # From EmbodiChain
#
# Train from the two unchanged files of an EmbodiChain training, here its PushCube, and see what each key does. No key
# is silently ignored: a run lists keys without effect, and unsupported ones are errors. Less than a minute on two CPU
# cores.

# %%
from pathlib import Path

import ejax
from ejax.config import load_config
from ejax.config.__main__ import main as config_command
from ejax.run import train

UPDATES = 3  # 200 solve it: see docs/benchmarks.md

# %% [markdown]
# The files are in the repository, under `configs/agents/rl/push_cube`; this cell finds them wherever it runs.

# %%
FILE = Path(ejax.__file__).parents[1] / "configs/agents/rl/push_cube/train_config.json"

# %% [markdown]
# ## Every key, one by one
#
# `ejax config check FILE` reports each key as used, renamed, without effect or unsupported.

# %%
config_command(["check", str(FILE)])

# %% [markdown]
# ## The run that the file describes
#
# `load_config` converts the spellings of every release into one canonical form, that of `configs/resolved.json` in a
# run's folder: EmbodiChain's `rollout_steps` is `buffer_size`, its `gym_config` is `env`. Overrides are
# written as on the command line.

# %%
config = load_config(
    FILE,
    [
        f"trainer.iterations={UPDATES}",
        "trainer.num_envs=16",
        "trainer.buffer_size=64",
        "algorithm.cfg.batch_size=512",
        "trainer.enable_eval=false",
        "trainer.output_dir=outputs",
        "trainer.console=false",
    ],
    device="cpu",
)
print("env:", config.env.id, dict(config.env.cfg))
print("rollout:", config.trainer.num_envs, "x", config.trainer.buffer_size, "steps")
print("videos:", [camera.name for camera in config.trainer.cameras])
for notice in config.notices:
    print(f"[config] {notice.key}: {notice.text}")

# %% [markdown]
# ## Train
#
# MuJoCo steps the environments on all cores, from inside one jitted program.

# %%
result = train(config)
print(f"{result.global_step:,} steps, success {result.last_train_metrics.get('charts/success_rate_avg_100', 0.0):.2f}")

# %% [markdown]
# ## The exact numbers of a release
#
# ejax's defaults differ where EmbodiChain has defects (`benchmarks/notes/defects.md`). `compat` reproduces the numbers
# of a release, to compare with an existing training:

# %%
as_released = load_config(FILE, ["compat=embodichain-0.3"], device="cpu")
for key in ("timeout_bootstrap", "advantage_rule", "clip_grad_per_network"):
    print(f"{key}: {getattr(config.algorithm.cfg, key)} -> {getattr(as_released.algorithm.cfg, key)}")

# %% [markdown]
# Checkpoints work too: `policy.init_from: policy.pt` starts from EmbodiChain's policy, `--resume policy.pt` continues
# its training, and `ejax embodichain to-pt RUN --out policy.pt` writes one ([Torch](../torch.md)). Names and concepts
# side by side: [Coming from EmbodiChain](../coming_from/embodichain.md).
