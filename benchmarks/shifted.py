"""Success of PushCube's runs under physics that they were not trained on: a table and a plot.

Each run's policy plays the same start states on the MJCF as it is and on ten others, deterministically. "shifted" is
the mean over those ten.

    python benchmarks/shifted.py plain=push_cube randomized=outputs/push_cube_ppo_randomized_…
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from plots import finish, panels

from ejax.config import parse_config
from ejax.evaluation import evaluate, summarize
from ejax.play.saved_policy import restore_policy
from ejax.store.run_dir import open_run_directory
from ejax.training.environments import build_env

CUBE, ROBOT = {"uid": "cube"}, {"uid": "robot"}


def _event(func: str, **params: Any) -> dict[str, Any]:
    return {"func": func, "mode": "reset", "params": params}


def _mass(scale: float) -> dict[str, Any]:
    return _event("randomize_rigid_object_mass", entity_cfg=CUBE, mass_range=[scale, scale], operation="scale")


def _friction(value: float) -> dict[str, Any]:
    return _event("randomize_rigid_object_friction", entity_cfg=CUBE, friction_range=[value, value])


def _drives(scale: float) -> dict[str, Any]:
    ends = [scale, scale]
    return _event("randomize_drive_gains", entity_cfg=ROBOT, stiffness_range=ends, damping_range=ends)


_OFF_CENTRE = _event(
    "randomize_rigid_object_center_of_mass",
    entity_cfg=CUBE,
    com_pos_offset_range=[[-0.02, -0.02, -0.01], [0.02, 0.02, 0.01]],
)
_NOISE = _event("add_observation_noise", noise=0.005, bias_range=[-0.01, 0.01])
_LATE = _event("delay_action", steps_range=[1.0, 1.0])
SHIFTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "mass x 0.4": {"mass": _mass(0.4)},
    "mass x 3": {"mass": _mass(3.0)},
    "friction 0.3": {"friction": _friction(0.3)},
    "friction 0.9": {"friction": _friction(0.9)},
    "drives x 0.6": {"drives": _drives(0.6)},
    "drives x 1.5": {"drives": _drives(1.5)},
    "centre of mass off by 2 cm": {"centre": _OFF_CENTRE},
    "noise 5 mm, bias 1 cm": {"noise": _NOISE},
    "actions 1 step late": {"late": _LATE},
    "all at once": {
        "mass": _mass(2.0),
        "friction": _friction(0.8),
        "drives": _drives(0.7),
        "noise": _NOISE,
        "late": _LATE,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN")
    parser.add_argument("--checkpoint", default="latest", choices=("best", "latest"))
    parser.add_argument("--episodes", type=int, default=500, help="of each run and physics")
    parser.add_argument("--envs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--metric", default="eval/success_rate")
    parser.add_argument("--markdown", type=Path, help="file for the table")
    parser.add_argument("--plot", type=Path, help="PNG")
    args = parser.parse_args()
    runs = dict(text.partition("=")[::2] for text in args.runs)
    scores = {
        name: [
            score(Path(run), shift, args.checkpoint, args.metric, args.episodes, args.envs, args.seed)
            for shift in SHIFTS.values()
        ]
        for name, run in runs.items()
    }
    text = table(scores, args.metric)
    print(text)
    if args.markdown:
        args.markdown.write_text(text + "\n")
    if args.plot:
        plot(scores, args.metric, args.plot)


def score(
    run: Path, shift: Mapping[str, Any], checkpoint: str, metric: str, num_episodes: int, num_envs: int, seed: int
) -> float:
    """Return one run's metric under one physics."""
    directory, config = open_run_directory(run, policy=True)
    data = config.to_dict()
    data["trainer"]["events"] = {"eval": dict(shift)}
    env = build_env(parse_config(data), phase="eval", num_envs=num_envs)
    policy, params = restore_policy(config, env, directory.find(checkpoint, print))
    episodes = evaluate(policy, env, params, jax.random.key(seed), num_envs=num_envs, num_episodes=num_episodes)
    return float(summarize(episodes)[metric])


def table(scores: Mapping[str, Sequence[float]], metric: str) -> str:
    """Markdown."""
    lines = [f"| {metric} | {' | '.join(scores)} |", "|---" * (1 + len(scores)) + "|"]
    for i, shift in enumerate(SHIFTS):
        lines.append(f"| {shift} | {' | '.join(f'{each[i]:.3f}' for each in scores.values())} |")
    lines.append(f"| shifted | {' | '.join(f'{np.mean(each[1:]):.3f}' for each in scores.values())} |")
    return "\n".join(lines)


def plot(scores: Mapping[str, Sequence[float]], metric: str, path: Path) -> None:
    """Bars, grouped by physics."""
    figure, (axes,) = panels(["Policies under changed physics; longer bars are better"])
    figure.set_size_inches(9.0, 4.5)
    height = 0.8 / len(scores)
    for i, (name, values) in enumerate(scores.items()):
        axes.barh(np.arange(len(values)) + height * (i - (len(scores) - 1) / 2), values, height, label=name)
    axes.set_yticks(range(len(SHIFTS)), list(SHIFTS))
    axes.invert_yaxis()
    axes.set_xlim(0.0, 1.0 if "success" in metric else None)
    finish(figure, [axes], path, x={"eval/success_rate": "success"}.get(metric, metric), y="")


if __name__ == "__main__":
    main()
