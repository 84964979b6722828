"""Measure which tiles a legged policy crosses, by kind and level.

    python benchmarks/crossed.py RUN [--speed 0.5] [--seconds 10] [--episodes 2000]

An episode starts in the middle of a tile and succeeds where the robot, commanded straight ahead, ends more than half a
tile away without a fall: at the default speed with a metre to spare.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from ejax.play.saved_policy import evaluate_run
from ejax.store.run_dir import open_policy_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run of VelocityRL on tiles")
    parser.add_argument("--checkpoint", default="latest", metavar="best|latest|PATH")
    parser.add_argument("--speed", type=float, default=0.5, help="m/s (default: 0.5)")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of an episode (default: 10)")
    parser.add_argument("--episodes", type=int, default=2000, metavar="N")
    print(table(*measure(parser.parse_args())))


def measure(args: Any) -> tuple[list[str], dict[str, np.ndarray]]:
    """Play the episodes; return the kinds of tiles, and what was measured of each episode."""
    ahead = {"lin_vel_x": [args.speed] * 2, "lin_vel_y": [0, 0], "ang_vel_z": [0, 0], "heading": 0, "standing": 0}
    cfg = {"command": ahead, "max_episode_steps": round(args.seconds / 0.02), "push": None}
    changes = [f"env.cfg.{key}={json.dumps(value)}" for key, value in cfg.items()]
    result = evaluate_run(
        args.run, changes, checkpoint=args.checkpoint, num_episodes=args.episodes, num_envs=args.episodes
    )
    episodes = json.loads(Path(str(result["report"])).read_text())["per_episode"]
    kinds = list(open_policy_run(args.run)[1].env.cfg["terrain"]["tiles"])
    return kinds, {name: np.asarray(x) for name, x in episodes.items()}


def table(kinds: list[str], episodes: dict[str, np.ndarray]) -> str:
    """Success of each kind, a column for each level."""
    level, column = (episodes[f"metrics/terrain_{name}"].astype(int) for name in ("level", "column"))
    levels = range(level.max() + 1)
    lines = ["| tile | " + " | ".join(f"level {n}" for n in levels) + " |", "|---" * (len(levels) + 1) + "|"]
    for i, kind in enumerate([*kinds, "all"]):
        of_kind = (column == i) | (kind == "all")
        rates = [episodes["success"][of_kind & (level == n)].mean() for n in levels]
        lines.append(f"| {kind} | " + " | ".join(f"{rate:.2f}" for rate in rates) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
