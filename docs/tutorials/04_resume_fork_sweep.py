# %% [markdown]
# # Resume, fork and sweep
#
# A run is a folder. This page stops a run and resumes it, forks another from its best state, trains six
# members in one program, and reports on all of them. Less than a minute on two CPU cores.

# %%
import json
from pathlib import Path

from ejax.config import parse_config
from ejax.population.loop import train_population
from ejax.report.__main__ import main as report
from ejax.run import train

UPDATES = 60
QUIET = ["trainer.console=false", "trainer.updates_per_dispatch=8"]
NETWORK = {"type": "mlp", "network_cfg": {"hidden_sizes": [32, 32], "activation": "tanh"}}
CONFIG = {
    "env": {"id": "PlanarReachRL", "cfg": {"success_threshold": 0.1}},
    "trainer": {"exp_name": "reach", "iterations": UPDATES, "num_envs": 32, "buffer_size": 32},
    "policy": {"name": "actor_critic", "initial_log_std": -0.5, "actor": NETWORK, "critic": NETWORK},
    "algorithm": {
        "name": "ppo",
        "cfg": {
            "optimizer": {"learning_rate": 3e-3},
            # a schedule that does not depend on the run's length: a run that is made longer goes on as it was
            "lr_scheduler": {"name": "exponential", "kwargs": {"gamma": 0.995}},
            "gamma": 0.95,
            "batch_size": 256,
            "n_epochs": 8,
            "ent_coef": 0.0,
        },
    },
}


# %% [markdown]
# ## Stop
#
# `on_log` is called with each line of the log. If it returns False, the run finishes the current update, saves its
# state and stops; so it does after Ctrl-C in a terminal, the stop button in Jupyter or SIGTERM. Small updates are
# dispatched and logged a dozen at a time; `updates_per_dispatch` changes that.


# %%
def until_half(step: int, metrics: dict[str, float]) -> bool:
    return step < UPDATES // 2 * 32 * 32


config = parse_config(CONFIG, QUIET)
stopped = train(config, on_log=until_half)
print(f"finished: {stopped.finished}, after {stopped.num_updates} of {UPDATES} updates")

# %% [markdown]
# ## Resume
#
# `resume="latest"` continues from the last checkpoint of the newest run with this `exp_name`; `run_dir` selects another
# run. Random numbers depend only on seed and update, so a resumed run equals an uninterrupted one, bit for bit.
#
# In a shell: `ejax train --config FILE --resume latest`.

# %%
resumed = train(config, resume="latest", run_dir=stopped.run_dir)
print(f"finished: {resumed.finished}, in the same folder: {resumed.run_dir == stopped.run_dir}")
print(f"return {resumed.last_train_metrics['charts/episode_reward_avg_100']:.1f}")

# %% [markdown]
# ## Fork
#
# A fork is a new run that starts from the whole state of another (parameters, optimizer, environments, counts). Its
# config may differ as long as the state has the same arrays. Here we lower λ for the last updates.
#
# In a shell: `ejax train --fork RUN trainer.iterations=90 algorithm.cfg.gae_lambda=0.8`.

# %%
forked = train(
    parse_config(CONFIG, [*QUIET, f"trainer.iterations={UPDATES + 30}", "algorithm.cfg.gae_lambda=0.8"]),
    fork=resumed.run_dir,
)
print(
    f"began at update {UPDATES}, ended at {forked.num_updates}; return "
    f"{forked.last_train_metrics['charts/episode_reward_avg_100']:.1f}"
)

# %% [markdown]
# ## Sweep
#
# Three learning rates with two seeds each make six members of one program. On a CPU this saves five compilations; on a
# GPU, which a small training leaves mostly idle, it also saves most of the time ([A population](../population.md)).
#
# Each member has a run folder with its log, checkpoints and config.
#
# In a shell: `population.seeds=2 'population.algorithm.cfg.optimizer.learning_rate=[1e-3,3e-3,1e-2]'`.

# %%
sweep = train_population(
    parse_config(
        {
            **CONFIG,
            "trainer": {**CONFIG["trainer"], "exp_name": "sweep"},
            "population": {"seeds": 2, "algorithm.cfg.optimizer.learning_rate": [1e-3, 3e-3, 1e-2]},
        },
        QUIET,
    )
)
for member in sweep.members:
    log = (sweep.run_dir / "members" / str(member.number) / "logs" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(log[-1])["charts/episode_reward_avg_100"]
    print(f"seed {member.seed}, learning rate {next(iter(member.values.values()))}: return {last:.1f}")

# %% [markdown]
# ## One page about all of them
#
# `ejax report RUN…` writes one HTML file that needs no network. Runs that differ only in their seed form one curve
# with quartiles.

# %%
members = sorted(str(path) for path in (sweep.run_dir / "members").iterdir())
report([*members, "--to", "sweep.html"])
print(f"{Path('sweep.html').stat().st_size / 1e3:.0f} kB")
