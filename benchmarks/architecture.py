"""Draw the picture of ``docs/architecture.md``: what a run is made of.

python benchmarks/architecture.py --out docs/architecture.png
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

INK, SOFT = "#16323a", "#5b7078"
FILL = {"entry": "#e8eef0", "trainer": "#cfe7e3", "part": "#ffffff", "update": "#eef6f4", "folder": "#fbf1dc"}
PARTS = (
    ("Env", "envs/", "reset(key)\nstep(state, action, key)"),
    ("Policy", "policies/", "get_action, get_value,\nevaluate_actions"),
    ("Rollout", "rollout.py, collectors/", "unroll, HostCollector\n[T, N, …]"),
    ("Algorithm", "algorithms/", "update(state, rollout, key)\n→ (state, metrics)"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/architecture.png"))
    args = parser.parse_args()
    draw().savefig(args.out, dpi=110)


def draw() -> plt.Figure:
    figure = plt.figure(figsize=(10, 5), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 100), ylim=(0, 50))
    axes.axis("off")

    box(
        axes,
        (25, 43, 50, 6),
        "entry",
        "ejax train --config FILE",
        "JSON or YAML, checked before anything is built",
    )
    box(axes, (25, 34, 50, 6), "trainer", "Trainer", "one loop: advance, log, evaluate, save; callbacks at each")
    box(axes, (82, 34, 16, 6), "folder", "run folder", "config, logs, checkpoints")
    line(axes, (50, 43), (50, 40))
    line(axes, (75, 37), (82, 37))

    box(axes, (2, 1, 96, 26), "update")
    centres = [14.5 + 23.6 * i for i in range(len(PARTS))]
    for centre, (name, place, functions) in zip(centres, PARTS, strict=True):
        line(axes, (50, 34), (50, 30.5), (centre, 30.5), (centre, 24.5))
        box(axes, (centre - 10.5, 12.5, 21, 12), "part", name, f"{place}\n\n{functions}")
    for left in centres[:-1]:
        line(axes, (left + 10.5, 17.5), (left + 13.1, 17.5))
    line(axes, (centres[1] - 10.5, 15), (centres[0] + 10.5, 15))
    line(axes, (centres[3], 12.5), (centres[3], 9), (centres[1], 9), (centres[1], 12.5))
    axes.text(sum(centres[1::2]) / 2, 10, "new parameters", fontsize=8.5, color=SOFT, ha="center")
    axes.text(50, 6, "one update: RunState → (RunState, metrics)", fontsize=10, color=INK, weight="bold", ha="center")
    text = (
        "environments in JAX: one compiled program; outside JAX: a collector, alternating with updates or beside them"
    )
    axes.text(50, 3, text, fontsize=8.5, color=SOFT, ha="center")
    return figure


def box(axes: Axes, place: tuple[float, float, float, float], kind: str, title: str = "", text: str = "") -> None:
    """Draw a box at (left, bottom, width, height), its title at the top and the text under it."""
    left, bottom, width, height = place
    shape = {"boxstyle": "round,pad=0,rounding_size=1", "fc": FILL[kind], "ec": INK, "lw": 1.2}
    axes.add_patch(FancyBboxPatch((left, bottom), width, height, **shape))
    style = {"ha": "center", "va": "top"}
    axes.text(left + width / 2, bottom + height - 1, title, fontsize=11, weight="bold", color=INK, **style)
    axes.text(left + width / 2, bottom + height - 3.7, text, fontsize=8.5, color=SOFT, linespacing=1.3, **style)


def line(axes: Axes, *points: tuple[float, float]) -> None:
    """Draw a line from point to point that ends in an arrow."""
    axes.plot(*zip(*points[:-1], strict=True), color=INK, lw=1.2)
    style = {"arrowstyle": "-|>", "color": INK, "lw": 1.2, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", points[-1], points[-2], arrowprops=style)


if __name__ == "__main__":
    main()
