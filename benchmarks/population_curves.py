"""Draw a population's evaluations: each member thin, the interquartile mean over the seeds of each combination thick.

python benchmarks/population_curves.py RUN --out docs/population.png [--beside PPO=RUN,RUN …]
"""

import argparse
import json
from glob import glob
from pathlib import Path

import numpy as np
from plots import COLOURS, finish, panels

from ejax.population.lanes import summaries
from ejax.store.run_dir import open_run_directory

_NAMES = {"eval/success_rate": "success", "eval/avg_reward": "return", "eval/avg_length": "length, steps"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN")
    parser.add_argument("--tags", nargs="*", default=["eval/avg_reward", "eval/success_rate"], metavar="TAG")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.png")
    parser.add_argument(
        "--beside", nargs="*", default=[], metavar="NAME=RUN,RUN", help="other runs, seeds of one thing; * is read"
    )
    parser.add_argument("--title", metavar="TEXT", help="of the picture; the run's name, unless given")
    args = parser.parse_args()
    draw(args.run, args.tags, args.out, args.beside, args.title)


def draw(run: Path | None, tags: list[str], out: Path, beside: list[str], title: str | None = None) -> None:
    groups: dict[str, list[Path]] = {}
    if run is not None:
        directory, config = open_run_directory(run)
        for member in config.members:
            values = [f"{key.rpartition('.')[2]} {value:g}" for key, value in member.values.items()]
            label = ", ".join(values) or f"{len(config.members)} seeds"
            groups.setdefault(label, []).append(directory.member(member.number).path)
    for name, _, patterns in (each.partition("=") for each in beside):
        groups[name] = [path for pattern in patterns.split(",") for path in sorted(map(Path, glob(pattern)))]
    figure, axes = panels([title or (run.name if run else out.stem), *[""] * (len(tags) - 1)], columns=len(tags))
    for axis, tag in zip(axes, tags, strict=True):
        for i, (label, folders) in enumerate(groups.items()):
            colour = COLOURS[i % len(COLOURS)]
            curves = [_curve(folder, tag) for folder in folders]
            for curve in curves:
                axis.plot(
                    [step / 1e6 for step in curve],
                    list(curve.values()),
                    color=colour,
                    linewidth=0.6,
                    alpha=0.5,
                )
            steps = [step for step in curves[0] if all(step in curve for curve in curves)]
            middle = [summaries({tag: np.array([curve[step] for curve in curves])})[f"{tag}/iqm"] for step in steps]
            axis.plot([step / 1e6 for step in steps], middle, color=colour, linewidth=2, label=label)
    names = [_NAMES.get(tag, tag) for tag in tags]
    note = "thin: a seed; thick: interquartile mean over the seeds; evaluations of the deterministic action"
    finish(figure, axes, out, x="million environment steps", y=names, note=note)


def _curve(folder: Path, tag: str) -> dict[int, float]:
    lines = map(json.loads, (folder / "logs" / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[tag] for line in lines if line.get(tag) is not None}


if __name__ == "__main__":
    main()
