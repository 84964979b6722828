# %% [markdown]
# # From EmbodiChain
#
# Take the two files of an EmbodiChain training as they are (here those of its PushCube) and see what each key does,
# what the run would be, and what comes out. No key is silently ignored: what has no effect is announced, and what
# cannot be done is an error. Less than a minute on two CPU cores.

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
# `ejax config check FILE` says of each key whether it is used, renamed, without effect or unsupported.

# %%
config_command(["check", str(FILE)])

# %% [markdown]
# ## The run that the file describes
#
# `load_config` turns every spelling of every release into one canonical form, in which a run's `configs/resolved.json`
# is written: EmbodiChain's `rollout_steps` is `buffer_size`, its `gym_config` became `env`. Overrides are the command
# line's.

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
# The environment is MuJoCo's, stepped by all cores from inside one jitted program.

# %%
result = train(config)
print(f"{result.global_step:,} steps, success {result.last_train_metrics.get('charts/success_rate_avg_100', 0.0):.2f}")

# %% [markdown]
# ## The exact numbers of a release
#
# ejax's defaults differ where EmbodiChain computes something that it does not mean to (its defects:
# `benchmarks/notes/defects.md`). `compat` takes the release's own numbers, to compare with a training that you have:

# %%
as_released = load_config(FILE, ["compat=embodichain-0.3"], device="cpu")
for key in ("timeout_bootstrap", "advantage_rule", "clip_grad_per_network"):
    print(f"{key}: {getattr(config.algorithm.cfg, key)} -> {getattr(as_released.algorithm.cfg, key)}")

# %% [markdown]
# Checkpoints come along too: `policy.init_from: policy.pt` starts from EmbodiChain's policy, `--resume policy.pt` goes
# on with its training, and `ejax embodichain to-pt RUN --out policy.pt` writes one back
# ([Torch](../torch.md)). Names and concepts side by side: [Coming from EmbodiChain](../coming_from/embodichain.md).
