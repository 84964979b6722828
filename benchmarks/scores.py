"""Training on tasks that others have published scores of, several seeds each, and comparison with their tables.

``train`` plays each task of ``configs/gymnasium/zoo`` (or the configs that are named) with seeds 1 to N, one after the
other, seed by seed, and adds a line to ``<out>/scores.jsonl`` for each; what is there is not trained again, so that it
can be stopped and go on. A score is the mean return of 100 episodes of the last policy, deterministic, after training.

    python benchmarks/scores.py train --out outputs/scores --seeds 5 [CONFIG …]
    python benchmarks/scores.py train --out outputs/scores --seeds 5 CONFIG --tasks envpool:Ant-v4 …
    python benchmarks/scores.py train --out outputs/scores --seeds 5 --peer-python PYTHON CONFIG …
    python benchmarks/scores.py train --out outputs/scores --seeds 5 CONFIG --tasks playground
    python benchmarks/scores.py table --out outputs/scores --plot docs/scores.png     # needs matplotlib

The second plays other tasks than the config's own; ``--set KEY=VALUE …`` changes it. The third trains
Stable-Baselines3, of the interpreter that is named, with the same numbers of the same file. The fourth plays
the 23 tasks of Playground's DeepMind Control Suite that REPPO was published on.

Any runs can be compared with a table of scores per seed, and become one (``score_tables.py``):

    python benchmarks/scores.py compare outputs/RUN … --against sac.csv --at 300000 [--plot curves.png]
    python benchmarks/scores.py export outputs/RUN … --csv benchmarks/scores/NAME.csv
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from plots import finish, panels
from scipy import stats
from score_tables import BANDS, TableError, compare, draw_band, export

from ejax.config import load_config
from ejax.logs.json_records import FactsError

ZOO = Path(__file__).parents[1] / "configs" / "gymnasium" / "zoo"
EPISODES = 100
PUBLISHED: dict[str, dict[str, float]] = {
    "CartPole": {"zoo": 500},
    "Pendulum": {"zoo": -172},
    "HalfCheetah": {"zoo": 5819, "tianshou": 5784},
    "Hopper": {"zoo": 2410, "tianshou": 2609},
    "Walker2d": {"zoo": 3479, "tianshou": 3589},
    "Ant": {"zoo": 1327, "tianshou": 3258},
    "Swimmer": {"zoo": 282, "tianshou": 67},
    "Acrobot": {"zoo": -74},
}
"""PPO in rl-baselines3-zoo's benchmark.md, one run each, and in tianshou's docs/tutorials/benchmark.rst, the highest
mean of ten runs at any time; MuJoCo tasks of v3, within 1 M steps."""
PLAYGROUND: dict[str, dict[str, float]] = {
    "AcrobotSwingup": {"reppo": 126},
    "AcrobotSwingupSparse": {"reppo": 1},
    "BallInCup": {"reppo": 925},
    "CartpoleBalance": {"reppo": 929},
    "CartpoleBalanceSparse": {"reppo": 945},
    "CartpoleSwingup": {"reppo": 828},
    "CartpoleSwingupSparse": {"reppo": 496},
    "CheetahRun": {"reppo": 906},
    "FingerSpin": {"reppo": 631},
    "FingerTurnEasy": {"reppo": 786},
    "FingerTurnHard": {"reppo": 692},
    "FishSwim": {"reppo": 581},
    "HopperHop": {"reppo": 41},
    "HopperStand": {"reppo": 191},
    "HumanoidRun": {"reppo": 239},
    "HumanoidStand": {"reppo": 917},
    "HumanoidWalk": {"reppo": 727},
    "PendulumSwingup": {"reppo": 201},
    "ReacherEasy": {"reppo": 970},
    "ReacherHard": {"reppo": 962},
    "WalkerRun": {"reppo": 841},
    "WalkerStand": {"reppo": 982},
    "WalkerWalk": {"reppo": 972},
}
"""REPPO's large batches at 50 M steps, mean of its runs, 4 to 21 a task: results/<task>_large_data.csv of its
repository, between the two nearest of its 20 steps."""
_OURS = """
import json, resource, sys, time
from pathlib import Path
from ejax.config import load_config
from ejax.runtime.device import prepare_jax
from ejax.run import train
began = time.monotonic()
config = load_config(Path(sys.argv[1]), sys.argv[2:])
prepare_jax(config.trainer.device)
result = train(config)
seconds, usage = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({
    "best": result.best_eval_value,
    "fresh": result.fresh_eval_metrics,
    "steps": result.global_step,
    "curve": [[each["global_step"], each["eval/avg_reward"]] for each in result.eval_history],
    "trained": result.last_train_metrics.get("charts/episode_reward_avg_100"),
    "wall_s": seconds,
    "cpu_s": usage.ru_utime + usage.ru_stime,
}))
"""
_PEER = """
import json, resource, sys, time
import numpy as np, torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize
began = time.monotonic()
config, episodes, seed = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
trainer, policy, cfg = config["trainer"], config["policy"], config["algorithm"]["cfg"]
torch.set_num_threads(1)
name, gamma = config["env"]["id"].partition(":")[2], cfg["gamma"]

def envs(count, seed, training):
    vec = make_vec_env(name, n_envs=count, seed=seed)
    if not policy["actor_obs_normalization"]:
        return vec
    return VecNormalize(vec, training=training, norm_reward=training, gamma=gamma)

net = policy["actor"]["network_cfg"]
kwargs = dict(
    net_arch=list(net["hidden_sizes"]),
    activation_fn={"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}[net["activation"]],
    ortho_init=net["orthogonal_init"] is not None,
    log_std_init=policy["initial_log_std"],
)
rate, linear = cfg["optimizer"]["learning_rate"], cfg["lr_scheduler"]["name"] == "linear"
model = PPO(
    "MlpPolicy", envs(trainer["num_envs"], seed, True), n_steps=trainer["buffer_size"], batch_size=cfg["batch_size"],
    n_epochs=cfg["n_epochs"], learning_rate=(lambda left: left * rate) if linear else rate, gamma=gamma,
    gae_lambda=cfg["gae_lambda"], clip_range=cfg["clip_coef"], ent_coef=cfg["ent_coef"], vf_coef=cfg["vf_coef"],
    max_grad_norm=cfg["max_grad_norm"], normalize_advantage=cfg["normalize_advantage"], policy_kwargs=kwargs, seed=seed,
    device="cpu",
)
watch = EvalCallback(
    envs(1, seed + 10000, False), n_eval_episodes=trainer["num_eval_episodes"], verbose=0,
    eval_freq=max(1, trainer["eval_freq"] // trainer["num_envs"]), deterministic=True,
)
curve, record = [], watch._on_step
def on_step():
    before = watch.last_mean_reward
    on = record()
    if watch.n_calls % watch.eval_freq == 0:
        curve.append([watch.num_timesteps, float(watch.last_mean_reward)])
    return on
watch._on_step = on_step
model.learn(trainer["total_timesteps"], callback=watch)
seconds, usage = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF)
last = envs(10, seed + 20000, False)
if isinstance(last, VecNormalize):
    last.obs_rms = model.get_vec_normalize_env().obs_rms
score, _ = evaluate_policy(model, last, episodes, deterministic=True)
returns = [each["r"] for each in model.ep_info_buffer]
print(json.dumps({
    "score": float(score), "steps": model.num_timesteps, "curve": curve,
    "trained": float(np.mean(returns)) if returns else None,
    "wall_s": seconds, "cpu_s": usage.ru_utime + usage.ru_stime,
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train")
    train.add_argument("configs", nargs="*", type=Path, metavar="CONFIG", default=sorted(ZOO.glob("*.yaml")))
    train.add_argument(
        "--tasks", nargs="+", metavar="ID", help="play these instead of the configs' own, or playground: all 23"
    )
    train.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="change the configs, as ejax train does"
    )
    train.add_argument("--seeds", type=int, default=5)
    train.add_argument("--peer-python", metavar="PYTHON", help="train Stable-Baselines3 of this interpreter instead")
    table = commands.add_parser("table")
    table.add_argument("--plot", type=Path)
    for each in (train, table):
        each.add_argument("--out", type=Path, default=Path("outputs/scores"))
    against, csv = commands.add_parser("compare"), commands.add_parser("export")
    for each in (against, csv):
        each.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or a table (.csv)")
    csv.add_argument("--csv", type=Path, required=True, metavar="FILE.csv")
    against.add_argument("--against", type=Path, required=True, metavar="FILE.csv")
    against.add_argument("--metric", default="avg_return")
    against.add_argument("--at", type=int, metavar="STEP", help="without it the last that all seeds of a task have")
    against.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw the curves")
    args = parser.parse_args()
    try:
        if args.command == "compare":
            compare(args.runs, args.against, args.metric, args.at, args.plot)
        elif args.command == "export":
            print(f"{args.csv}: {export(args.runs, args.csv):,} rows")
        elif args.command == "table":
            show(read(args.out), args.plot)
        else:
            tasks = [f"playground:{task}" for task in PLAYGROUND] if args.tasks == ["playground"] else args.tasks
            for seed, config, task in product(range(1, args.seeds + 1), args.configs, tasks or [None]):
                changes = [*args.set, *([f"env.id={task}"] if task else [])]
                train_one(args.out, config, changes, seed, args.peer_python)
    except (TableError, FileNotFoundError, FactsError) as error:
        raise SystemExit(f"{parser.prog} {args.command}: {error}") from None


def train_one(out: Path, path: Path, changes: Sequence[str], seed: int, peer: str | None) -> None:
    """Add the line of this training, if it is not there; what else than the task is changed is part of its name."""
    overrides = list(changes)
    config = load_config(path, overrides)
    if peer and config.algorithm.cfg.schedule != "fixed":
        raise SystemExit(f"{path} has schedule: {config.algorithm.cfg.schedule}, which Stable-Baselines3 has not")
    label = ", ".join(each for each in changes if not each.startswith("env.id="))
    which = {
        "task": config.env.id.rpartition(":")[2].partition("-")[0],
        "config": ("zoo" if path.parent == ZOO else path.stem) + (f" with {label}" if label else ""),
        "library": "sb3" if peer else "ejax",
        "seed": seed,
    }
    if any(which.items() <= row.items() for row in read(out)):
        return
    out.mkdir(parents=True, exist_ok=True)
    if peer:
        facts = last_line([peer, "-c", _PEER, json.dumps(config.to_dict()), str(EPISODES), str(seed)])
    else:
        facts = train_ours(path, seed, EPISODES, out / "runs", overrides)
        facts["score"] = facts["fresh"]["last"]["eval/avg_reward"]
    row = which | facts
    with (out / "scores.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(f"{time.strftime('%H:%M:%S')} {which} {row['score']:.1f} in {row['wall_s']:.0f} s", flush=True)


def train_ours(path: Path, seed: int, episodes: int, runs: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Train a config in its own process, evaluate it in fresh episodes, and return its facts."""
    own = [f"trainer.seed={seed}", f"trainer.final_eval_episodes={episodes}", f"trainer.output_dir={runs}"]
    return last_line([sys.executable, "-c", _OURS, str(path), *overrides, *own, "trainer.console=false"])


def last_line(command: Sequence[str]) -> dict[str, Any]:
    """Return the JSON that a process prints last.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[3:]} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def read(out: Path) -> list[dict[str, Any]]:
    path = out / "scores.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def show(rows: Sequence[dict[str, Any]], plot: Path | None) -> None:
    """Tabulate each task, config and library: interquartile mean of the seeds' scores with a 95% interval."""
    print(
        "| task | config | library | seeds | IQM [95% interval] | mean ± std | best mean | zoo's | tianshou's | "
        "REPPO's | CPU min of a run |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for (task, config, library), group in groups(rows):
        scores = np.array([row["score"] for row in group])
        middle, (low, high) = interquartile_mean(scores)
        others = PUBLISHED.get(task, {}) | PLAYGROUND.get(task, {})
        published = " | ".join(f"{others.get(source, '')}" for source in ("zoo", "tianshou", "reppo"))
        print(
            f"| {task} | {config} | {library} | {len(scores)} | {middle:.0f} [{low:.0f}, {high:.0f}] | "
            f"{scores.mean():.0f} ± {scores.std():.0f} | {best_mean(group):.0f} | {published} | "
            f"{np.mean([row['cpu_s'] for row in group]) / 60:.1f} |"
        )
    if plot is not None:
        draw(rows, plot)


def best_mean(rows: Sequence[dict[str, Any]]) -> float:
    """Return the highest mean over the seeds at any evaluation, which is what tianshou reports."""
    length = min(len(row["curve"]) for row in rows)
    return float(max(np.mean([[point[1] for point in row["curve"][:length]] for row in rows], axis=0)))


def groups(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[tuple[str, str, str], list[dict[str, Any]]]]:
    for key in sorted({(row["task"], row["config"], row["library"]) for row in rows}):
        yield key, [row for row in rows if (row["task"], row["config"], row["library"]) == key]


def interquartile_mean(scores: np.ndarray[Any, Any]) -> tuple[float, tuple[float, float]]:
    """Average one task's seeds, with the 95% percentile interval of a bootstrap. Source: Agarwal et al. 2021."""
    middle = float(stats.trim_mean(scores, 0.25))
    if len(scores) < 2 or np.ptp(scores) == 0.0:
        return middle, (middle, middle)
    found = stats.bootstrap((scores,), partial(stats.trim_mean, proportiontocut=0.25), method="percentile", rng=0)
    return middle, (float(found.confidence_interval.low), float(found.confidence_interval.high))


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw a panel for each task: the seeds' evaluations, thin, and their interquartile mean with its interval."""
    tasks = sorted({row["task"] for row in rows})
    figure, axes = panels(tasks)
    for axis, task in zip(axes, tasks, strict=True):
        for (_, config, library), group in groups([row for row in rows if row["task"] == task]):
            colour = _COLOURS.get((config, library), "tab:grey")
            length = min(len(row["curve"]) for row in group)
            steps = np.array([point[0] for point in group[0]["curve"][:length]]) / 1e3
            curves = np.array([[point[1] for point in row["curve"][:length]] for row in group])
            label = f"{library}, {config}, {len(group)} seed{'s' if len(group) > 1 else ''}"
            draw_band(axis, steps, curves, colour, label)
        for (source, score), line in zip(PUBLISHED.get(task, {}).items(), (":", "--"), strict=False):
            axis.axhline(score, color="black", linestyle=line, linewidth=1, label=f"{source}'s")
        axis.legend(fontsize=6, loc="lower right", framealpha=0.6)
    finish(figure, axes, path, x="thousand environment steps", y="return", note=f"deterministic actions; {BANDS}")


_COLOURS = {("zoo", "ejax"): "tab:blue", ("zoo", "sb3"): "tab:orange", ("mujoco", "ejax"): "tab:green"}


if __name__ == "__main__":
    main()
