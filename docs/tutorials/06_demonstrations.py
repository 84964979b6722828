# %% [markdown]
# # Demonstrations to policy
#
# A scripted expert pushes the cube, a worker process keeps a buffer filled with its episodes, and a policy is cloned
# from them at the same time. Then PPO improves the clone, starting from its weights. A minute on two CPU cores.

# %%
from ejax.config import parse_config
from ejax.data import OnlineDataEngine, OnlineDataEngineCfg, OnlineDataset
from ejax.run import train

UPDATES = 6  # 600, as in configs/push_cube/bc.yaml, succeed in 999 of 1,000 episodes
TASK = {
    "cube_position_range": [[-0.05, -0.05, 0.0], [0.05, 0.05, 0.0]],  # m
    "goal_position_range": [[-0.05, -0.05, 0.0], [0.05, 0.05, 0.0]],
}

# %% [markdown]
# ## Look at the demonstrations
#
# The engine starts a worker process, which needs neither this notebook nor its device. It delivers chunks of
# frames: `obs/state` is the environment's observation, so a cloned policy runs there unchanged; `actions` were
# executed, with noise; `expert_actions` are the expert's actions without noise, the better labels.

# %%
engine_cfg = OnlineDataEngineCfg(
    task="ejax.experts.push_cube:make_task",
    task_cfg={"env": TASK, "num_envs": 8},
    buffer_size=8,
    max_episode_steps=100,
)
with OnlineDataEngine(engine_cfg) as engine:
    batch = next(iter(OnlineDataset(engine, chunk_size=4, batch_size=16)))
    stats = engine.stats()
print("observations", batch["obs"]["state"].shape, "actions", batch["actions"].shape)
print("noise, root mean square:", float(((batch["actions"] - batch["expert_actions"]) ** 2).mean() ** 0.5).__round__(3))
print({name: stats[name] for name in sorted(stats)[:4]})

# %% [markdown]
# ## Clone
#
# The section `data` of the config selects the demonstrations; otherwise it is an ordinary run, with the
# same loop and folder. Its steps are frames. In a shell: `ejax pretrain --config
# configs/push_cube/bc.yaml`.

# %%
NETWORK = {"type": "mlp", "network_cfg": {"hidden_sizes": [64, 64], "activation": "tanh"}}
POLICY = {
    "name": "actor_critic",
    "initial_log_std": -0.5,
    "log_std_range": [-2.5, 2.0],
    "actor_obs_normalization": True,
    "actor": NETWORK,
    "critic": NETWORK,
}
cloned = train(
    parse_config(
        {
            "env": {"id": "PushCubeRL", "cfg": TASK},
            "trainer": {"exp_name": "clone", "iterations": UPDATES, "console": False},
            "policy": POLICY,
            "algorithm": {"name": "bc", "cfg": {"optimizer": {"learning_rate": 1e-3}, "batch_size": 256}},
            "data": {
                "source": "engine",
                "engine": {
                    "task": "PushCubeExpert",
                    "task_cfg": {"env": TASK, "num_envs": 8},
                    "max_episode_steps": 100,
                    "refill_threshold": 1000,
                },
                "obs_field": "obs/state",
                "action_field": "expert_actions",
            },
        }
    )
)
for row in cloned.train_history[:: max(1, UPDATES // 3)]:
    print(f"{row['global_step']:>7,} frames  loss {row['train/loss']:8.3f}")

# %% [markdown]
# ## Improve it by reinforcement learning
#
# `policy.init_from` starts from the clone's weights with a fresh optimizer. The critic is still untrained, so
# the first updates train only the critic (`critic_warmup_updates`), and `kl_coef` keeps the policy close to the
# clone.

# %%
finetuned = train(
    parse_config(
        {
            "env": {"id": "PushCubeRL", "cfg": TASK},
            "trainer": {"exp_name": "finetuned", "iterations": 2, "num_envs": 8, "buffer_size": 32, "console": False},
            "policy": {**POLICY, "init_from": str(cloned.run_dir)},
            "algorithm": {
                "name": "ppo",
                "cfg": {"batch_size": 128, "n_epochs": 2, "kl_coef": 0.1, "critic_warmup_updates": 1, "ent_coef": 0.0},
            },
        }
    )
)
print(f"distance to the clone, KL: {finetuned.last_train_metrics['train/approx_ref_kl']:.4f}")

# %% [markdown]
# ## Next
#
# - Record episodes as a LeRobot data set, and clone from a folder: `ejax record` and `data.source:
#   recorded` ([The online data engine](../data.md)).
# - Pictures and instructions: [Vision, language, action](../vla.md).
# - Another policy as the expert: [Teacher and student](../distill.md).
