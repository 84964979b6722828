"""Draw how fast legged robots learn to walk as commanded: the velocity error, in training and in evaluations.

python benchmarks/velocity_curves.py Go2=outputs/go2 'ANYmal C=outputs/anymal' --standing 0.63 --out docs/robots.png
"""

import argparse
import json
from pathlib import Path

import numpy as np

_ERROR = "metrics/linear_velocity_error"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN")
    parser.add_argument("--standing", type=float, required=True, metavar="M/S", help="the error of a robot that stands")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.png")
    args = parser.parse_args()
    draw({name: Path(run) for name, _, run in (text.partition("=") for text in args.runs)}, args.standing, args.out)


def draw(runs: dict[str, Path], standing: float, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for i, (name, run) in enumerate(runs.items()):
        lines = [json.loads(line) for line in (run / "logs" / "metrics.jsonl").read_text().splitlines()]
        steps, errors = _series(lines, _ERROR)
        axis.plot(steps, _smooth(errors), color=f"C{i}", label=name)
        axis.plot(*_series(lines, f"eval/{_ERROR}"), "o", color=f"C{i}")
    axis.axhline(standing, color="0.5", linestyle="--", linewidth=1)
    axis.text(axis.get_xlim()[1], standing, "stands", color="0.4", ha="right", va="bottom")
    axis.set(xlabel="million environment steps", ylabel="velocity error, m/s", ylim=(0, 1))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, title="line: training, points: evaluation")
    figure.savefig(out, dpi=130)


def _series(lines: list[dict[str, float]], tag: str) -> tuple[list[float], list[float]]:
    found = [(line["step"] / 1e6, line[tag]) for line in lines if line.get(tag) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _smooth(values: list[float], window: int = 9) -> np.ndarray:
    """Average each with the four before and after it."""
    padded = np.pad(values, window // 2, mode="edge")
    return np.convolve(padded, np.full(window, 1.0 / window), mode="valid")


if __name__ == "__main__":
    main()
