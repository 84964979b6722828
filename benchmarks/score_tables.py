"""Scores per seed as a table that others share, and two such tables side by side.

Columns: exp_name, env_name, seed, metric, env_step, value; a row for each evaluation. The repositories of SimbaV2 and
FlashSAC keep their results so. The commands are ``python benchmarks/scores.py compare`` and ``export``.

Of each task: the interquartile mean (IQM) over seeds, mean ± sample standard deviation, and the probability that a seed
of the one side has more than a seed of the other, P(X > Y) + P(X = Y) / 2. Intervals are the 2.5% and 97.5% percentiles
of a bootstrap that draws the seeds of each task with replacement. Source: Agarwal et al. 2021.
"""

import csv
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from plots import COLOURS, finish, panels
from scipy import stats

from ejax.report.runs import Run, runs_in

COLUMNS = ("exp_name", "env_name", "seed", "metric", "env_step", "value")
TAGS = {"avg_return": "eval/avg_reward", "avg_success": "eval/success_rate"}
"""Metrics of the tables, and ejax's tags."""
PREFIXES = ("gymnasium:", "envpool:", "playground:")
"""Those of ``env.id`` whose tasks others publish under the name that follows; any other id stays as it is."""
NEAR = 0.05
"""Part of a step by which an evaluation may lie beside it."""
RESAMPLES = 10_000
Array: TypeAlias = NDArray[np.float64]


class TableError(ValueError):
    """A table, or what is to be one, that cannot be used."""


class Row(NamedTuple):
    exp_name: str
    env_name: str
    seed: str
    metric: str
    env_step: float
    value: float
    source: Path


class Side(NamedTuple):
    """All curves of one metric: task -> seed -> step -> value."""

    name: str
    curves: dict[str, dict[str, dict[float, float]]]
    problems: dict[str, str]
    """Tasks whose rows contradict each other, and how."""


class Compared(NamedTuple):
    task: str
    step: float
    at: tuple[str, str]
    """Steps of the evaluations that are compared, of each side."""
    scores: tuple[Array, Array]


def compare(runs: Sequence[Path], against: Path, metric: str, at: int | None, plot: Path | None) -> None:
    """Print each task, all tasks together, and what is not compared, and draw the curves.

    Raises:
        TableError: nothing can be compared. FileNotFoundError: one of ``runs`` is no run.
    """
    name = "runs" if against.stem != "runs" else "these runs"
    sides = (collect(name, rows_of(runs), metric), collect(against.stem, rows_of([against]), metric))
    found, reasons = pair(*sides, at)
    listed = "\n".join(
        f"- {', '.join(task for task in reasons if reasons[task] == reason)}: {reason}"
        for reason in dict.fromkeys(reasons.values())
    )
    if not found:
        raise TableError(f"no task can be compared:\n{listed}")
    print("\n".join(table(found, (sides[0].name, sides[1].name))))
    if listed:
        print(f"\nNot compared:\n{listed}")
    if plot is not None:
        draw(found, sides, metric, plot)


def export(runs: Sequence[Path], file: Path) -> int:
    """Write the evaluations of runs as a table, sorted, and return the number of its rows.

    Raises:
        TableError: two runs have the same name, task and seed. FileNotFoundError: one of ``runs`` is no run.
    """
    rows = list(rows_of(runs))
    owners: dict[tuple[str, ...], Path] = {}
    for row in rows:
        if (other := owners.setdefault(row[:3], row.source)) != row.source:
            raise TableError(
                f"{other} and {row.source} are both {row.exp_name}, {row.env_name}, seed {row.seed}: keep one of them"
            )
    rows.sort(key=lambda row: (*row[:2], _numbered(row.seed), row.metric, row.env_step))
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([*row[:4], f"{row.env_step:.0f}", row.value] for row in rows)
    return len(rows)


def env_name(identifier: str) -> str:
    """Return the name under which others publish a task of ejax."""
    for prefix in PREFIXES:
        identifier = identifier.removeprefix(prefix)
    return identifier


def rows_of(paths: Iterable[Path]) -> Iterator[Row]:
    """Read tables (``.csv``) and folders of runs, of a population each member; a folder's problems go to stderr.

    Raises:
        TableError: a table lacks columns or numbers, or a run has no evaluations. FileNotFoundError: there is none.
    """
    for path in paths:
        yield from table_rows(path) if path.suffix == ".csv" else run_rows(path)


def table_rows(path: Path) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8") as opened:
        reader = csv.DictReader(opened)
        given = [name or "(no name)" for name in reader.fieldnames or ()]
        if lacking := [name for name in COLUMNS if name not in given]:
            raise TableError(
                f"{path} lacks the columns {', '.join(lacking)}; it has {', '.join(given[:8]) or 'none'}"
                f"{', …' if len(given) > 8 else ''}. A table has {', '.join(COLUMNS)}, and a row for each evaluation; "
                "docs/scores.md shows how one with a column for each seed becomes that"
            )
        for each in reader:
            try:
                step, value = float(each["env_step"]), float(each["value"])
            except (TypeError, ValueError):
                raise TableError(
                    f"{path}, line {reader.line_num}: env_step {each['env_step']!r} and value {each['value']!r} are "
                    "not two numbers; correct the line, or take it out"
                ) from None
            yield Row(each["exp_name"], each["env_name"], each["seed"], each["metric"], step, value, path)


def run_rows(given: Path) -> Iterator[Row]:
    for folder in runs_in(given):
        run = Run(folder)
        for problem in run.problems:
            print(f"{folder}: {problem}", file=sys.stderr)
        curves = {metric: curve for metric, tag in TAGS.items() if (curve := run.series(tag))}
        identifier = run.config["env"].get("id")
        if not identifier:
            raise TableError(f"{folder} has no env.id in its config: pass runs that were trained in an environment")
        if not curves:
            raise TableError(f"{folder} has no evaluations in its log: train it with trainer.enable_eval=true")
        name, seed = run.trainer.exp_name, str(run.trainer.seed)
        for metric, curve in curves.items():
            for step, value in curve.items():
                yield Row(name, env_name(identifier), seed, metric, float(step), value, folder)


def collect(name: str, rows: Iterable[Row], metric: str) -> Side:
    """Sort rows of one metric by task, seed and step; what contradicts itself is noted.

    The tables write one task ``h1-sit_hard-v0`` and ``h1_sit_hard_v0``: underscores count as hyphens.

    Raises:
        TableError: no row is of the metric.
    """
    side = Side(name, {}, {})
    counts: Counter[str] = Counter()
    sources: dict[tuple[str, str], Path] = {}
    names: dict[tuple[str, Path], str] = {}
    for row in rows:
        counts[row.metric] += 1
        if row.metric != metric:
            continue
        task = row.env_name.replace("_", "-")
        curve = side.curves.setdefault(task, {}).setdefault(row.seed, {})
        if (other := sources.setdefault((task, row.seed), row.source)) != row.source:
            side.problems[task] = f"seed {row.seed} of {name} is in {other} and in {row.source}: keep one of them"
        elif (method := names.setdefault((task, row.source), row.exp_name)) != row.exp_name:
            side.problems[task] = f"{row.source} has it of {method} and of {row.exp_name}: keep the rows of one of them"
        elif str(before := curve.setdefault(row.env_step, row.value)) != str(row.value):  # nan is nan
            side.problems[task] = (
                f"seed {row.seed} of {name} has two values at step {row.env_step:,.0f}, {_short(before)} and "
                f"{_short(row.value)}: use another seed for each run, or take one of them out"
            )
    if not side.curves:
        known = ", ".join(f"{each} ({count:,} rows)" for each, count in counts.items()) or "no rows"
        raise TableError(f"{name}: no row is of the metric {metric}; there are {known}. Use --metric for one of those")
    return side


def pair(runs: Side, table: Side, at: int | None) -> tuple[list[Compared], dict[str, str]]:
    """Compare each task at step ``at``, or the last that all its seeds have; return reasons where that fails."""
    found, reasons = [], {}
    for task in sorted(runs.curves.keys() | table.curves.keys()):
        try:
            found.append(_pair_one(task, (runs, table), at))
        except TableError as error:
            reasons[task] = str(error)
    return found, reasons


def _pair_one(task: str, sides: tuple[Side, Side], at: int | None) -> Compared:
    if any(task not in side.curves for side in sides):
        raise TableError(f"only in {next(side.name for side in sides if task in side.curves)}")
    for side in sides:
        if task in side.problems:
            raise TableError(side.problems[task])
        if len(seeds := side.curves[task]) < 2:
            raise TableError(
                f"{side.name} has one seed, {next(iter(seeds))}, and an interval needs two: add one with another "
                "trainer.seed"
            )
    last = min(max(curve) for side in sides for curve in side.curves[task].values())
    step = last if at is None else float(at)
    scores, steps = [], []
    for side in sides:
        seeds = side.curves[task]
        near = {seed: min(curve, key=lambda each: (abs(each - step), each)) for seed, curve in seeds.items()}
        for seed, each in near.items():
            curve = seeds[seed]
            if abs(each - step) > NEAR * step:
                remedy = f"pass --at {each:.0f}" if max(curve) > step else f"train it on, or pass --at {last:.0f}"
                raise TableError(
                    f"seed {seed} of {side.name} has no evaluation within {NEAR:.0%} of step {step:,.0f}; the "
                    f"nearest is at {each:,.0f}: {remedy}"
                )
            if not np.isfinite(curve[each]):
                raise TableError(f"seed {seed} of {side.name} is {curve[each]} at step {each:,.0f}; pass another --at")
        scores.append(np.array([seeds[seed][near[seed]] for seed in sorted(seeds, key=_numbered)]))
        low, high = min(near.values()), max(near.values())
        steps.append(f"{low:,.0f}" + (f" to {high:,.0f}" if high > low else ""))
    return Compared(task, step, (steps[0], steps[1]), (scores[0], scores[1]))


def table(found: Sequence[Compared], names: tuple[str, str]) -> Iterator[str]:
    """Return the lines of the comparison: the tasks, and all together.

    For all together each score is divided by the second side's mean in its task, and the probability is the mean of
    the tasks'.
    """
    head = [cell for name in names for cell in (f"{name}: IQM [95%]", "mean ± std")]
    yield f"| task | steps | seeds | {' | '.join(head)} | P({names[0]} > {names[1]}) [95%] |"
    yield "|---" * 8 + "|"
    rng = np.random.default_rng(0)
    drawn = [tuple(resample(scores, rng) for scores in each.scores) for each in found]
    for each, draws in zip(found, drawn, strict=True):
        cells = []
        for scores, draw in zip(each.scores, draws, strict=True):
            cells += [_estimate(iqm(scores), iqm(draw)), _deviation(scores)]
        chance = _estimate(improvement(*each.scores), improvement(*draws))
        seeds = " / ".join(str(len(scores)) for scores in each.scores)
        yield f"| {each.task} | {' / '.join(each.at)} | {seeds} | {' | '.join(cells)} | {chance} |"
    if len(found) > 1:
        scales = [each.scores[1].mean() for each in found]
        cells = [f"no scale: a mean of {names[1]} is not positive", "", "", ""]
        if min(scales) > 0.0:
            cells = []
            for side in (0, 1):
                scores = np.concatenate([each.scores[side] / scale for each, scale in zip(found, scales, strict=True)])
                draw = np.concatenate(
                    [draws[side] / scale for draws, scale in zip(drawn, scales, strict=True)], axis=-1
                )
                cells += [_estimate(iqm(scores), iqm(draw)), _deviation(scores)]
        chance = _estimate(
            np.mean([improvement(*each.scores) for each in found]),
            np.mean([improvement(*draws) for draws in drawn], axis=0),
        )
        yield f"| all {len(found)}, {names[1]}'s mean = 1 | | | {' | '.join(cells)} | {chance} |"


def iqm(scores: Array) -> Array:
    """Average the middle half of the last axis."""
    return np.asarray(stats.trim_mean(scores, 0.25, axis=-1))


def improvement(ours: Array, theirs: Array) -> Array:
    """Return P(X > Y) + P(X = Y) / 2 over all pairs of the last axes: [..., N], [..., M] -> [...]."""
    difference = ours[..., :, None] - theirs[..., None, :]
    return np.asarray(((difference > 0.0) + 0.5 * (difference == 0.0)).mean((-2, -1)))


def resample(scores: Array, rng: np.random.Generator, count: int = RESAMPLES) -> Array:
    """Draw as many seeds as there are, with replacement: [..., N] -> [count, ..., N]."""
    return np.moveaxis(scores[..., rng.integers(scores.shape[-1], size=(count, scores.shape[-1]))], -2, 0)


def draw(found: Sequence[Compared], sides: tuple[Side, Side], metric: str, path: Path) -> None:
    """Draw a panel for each task up to the step that is compared."""
    figure, axes = panels([each.task for each in found])
    for axis, each in zip(axes, found, strict=True):
        for side, colour in zip(sides, COLOURS, strict=False):
            seeds = side.curves[each.task]
            steps, curves = on_one_grid(list(seeds.values()), each.step * (1.0 + NEAR))
            draw_band(axis, steps / 1e3, curves, colour, f"{side.name}, {len(seeds)} seeds")
        axis.legend(fontsize=7, loc="upper left", framealpha=0.6)
    name = metric.removeprefix("avg_")
    finish(figure, axes, path, x="thousand environment steps", y=name, note=BANDS)


def on_one_grid(curves: Sequence[dict[float, float]], end: float) -> tuple[Array, Array]:
    """Interpolate curves at all steps that lie within each of them, up to ``end``: [T] and [N, T]."""
    first, last = max(min(curve) for curve in curves), min(max(curve) for curve in curves)
    steps = np.array(sorted({step for curve in curves for step in curve if first <= step <= min(last, end)}))
    ordered = [sorted(curve.items()) for curve in curves]
    return steps, np.array([np.interp(steps, *np.array(each).T) for each in ordered]).reshape(len(curves), -1)


BANDS = "thin: a seed; thick: interquartile mean over the seeds; band: its 95% bootstrap interval"


def draw_band(axis: Any, steps: Array, curves: Array, colour: str, label: str) -> None:
    """Draw each curve, thin, and their interquartile mean with its 95% interval; ``curves`` is [N, T]."""
    low, high = np.percentile(iqm(resample(curves.T, np.random.default_rng(0), 2000)), (2.5, 97.5), axis=0)
    axis.plot(steps, curves.T, color=colour, alpha=0.2, linewidth=0.7)
    axis.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
    axis.plot(steps, iqm(curves.T), color=colour, label=label)


def _estimate(middle: Any, draws: Array) -> str:
    low, high = np.percentile(draws, (2.5, 97.5))
    return f"{_short(middle)} [{_short(low)}, {_short(high)}]"


def _deviation(scores: Array) -> str:
    return f"{_short(scores.mean())} ± {_short(scores.std(ddof=1))}"


def _short(value: Any) -> str:
    return f"{value:,.0f}" if abs(value) >= 100.0 else f"{value:.3g}"


def _numbered(seed: str) -> tuple[bool, float, str]:
    return (not seed.isdecimal(), float(seed) if seed.isdecimal() else 0.0, seed)
