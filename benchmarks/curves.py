"""Draw one number of some runs over their training: a line what training logs, points the evaluations.

python benchmarks/curves.py Go2=outputs/go2 'ANYmal C=outputs/anymal' --metric metrics/linear_velocity_error \
    --label 'velocity error, m/s' --top 1 --level stands=0.63 --out robots.png
python benchmarks/curves.py SAC=outputs/pick_place_sac PPO=outputs/pick_place_ppo --metric success_rate \
    --label success --seconds --out docs/pick_place.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from plots import COLOURS, finish, panels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN", help="runs of one name have one color")
    parser.add_argument("--metric", required=True, metavar="TAG", help="in training, and with eval/ in evaluations")
    parser.add_argument("--label", required=True, metavar="TEXT", help="of the metric")
    parser.add_argument("--title", metavar="TEXT", help="of the picture; the label, unless given")
    parser.add_argument("--top", type=float, metavar="X", help="of the metric's axis")
    parser.add_argument("--level", metavar="NAME=X", help="a dashed line")
    parser.add_argument("--seconds", action="store_true", help="over the time since the start, not environment steps")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.png")
    draw(parser.parse_args())


def draw(args: argparse.Namespace) -> None:
    figure, (axis,) = panels([args.title or args.label])
    colors: dict[str, str] = {}
    note = "points: evaluations"
    for name, _, run in (text.partition("=") for text in args.runs):
        new = name not in colors
        style: dict[str, Any] = {"color": colors.setdefault(name, COLOURS[len(colors) % len(COLOURS)])}
        style |= {"label": name} if new else {}
        x, y = _series(Path(run), f"eval/{args.metric}", args.seconds)
        steps, values = _series(Path(run), args.metric, args.seconds)
        axis.plot(x, y, "o-" if not steps else "o", markersize=4, **style)
        if steps:
            axis.plot(steps, _smooth(values), color=style["color"])
            note = "points: evaluations; lines: mean of nine logs of training"
    if args.level:
        name, _, level = args.level.partition("=")
        axis.axhline(float(level), color="0.5", linestyle="--", linewidth=1)
        axis.text(axis.get_xlim()[1], float(level), name, color="0.4", ha="right", va="bottom")
    axis.set_ylim(min(0.0, axis.dataLim.y0), args.top)
    x = "seconds since the start" if args.seconds else "million environment steps"
    finish(figure, [axis], args.out, x=x, y=args.label, note=note)


def _series(run: Path, tag: str, seconds: bool) -> tuple[list[float], list[float]]:
    """Read a metric of a run, over steps in millions or the time since the start, pauses included."""
    start = json.loads((run / "logs" / "sessions.jsonl").read_text().splitlines()[0])["start"]
    lines = [json.loads(line) for line in (run / "logs" / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if line.get(tag) is not None]
    return [line["time"] - start if seconds else line["step"] / 1e6 for line in found], [line[tag] for line in found]


def _smooth(values: list[float], window: int = 9) -> np.ndarray:
    """Average each with the four before and after it."""
    padded = np.pad(values, window // 2, mode="edge")
    return np.convolve(padded, np.full(window, 1.0 / window), mode="valid")


if __name__ == "__main__":
    main()
