"""Cells, tables and figures of the page.

Each number stands in a ``<data value=…>`` that holds it exactly, each text is escaped. Runs that differ in their seeds
are drawn as one curve with its quartiles.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from os.path import commonprefix
from typing import Any

import numpy as np

from ejax.logs.charts import NUM_COLOURS, curve_of, curves_figure, number_text
from ejax.report.runs import Run
from ejax.schema.messages import duration

_SEEDS = {"trainer.seed", "trainer.eval_seed", "data.seed"}
NAMES = {f"trainer.{name}" for name in ("exp_name", "output_dir", "console", "use_wandb", "wandb_project_name")}
"""Keys of a run's names and places, which change nothing that it computes."""
_MAX_KEYS = 8
"""Keys that runs of a sweep differ in; runs that differ in more are not a sweep."""
_HEADLINES = (
    *("eval/success_rate", "eval/avg_reward", "eval/avg_length"),
    *("charts/success_rate_avg_100", "charts/episode_reward_avg_100", "charts/episode_length_avg_100"),
)
_LOSSES = ("train/flow", "train/prediction")
"""Beside all that has ``loss`` in its name."""
_LABEL = 60
"""Characters of the name of runs that are drawn as one."""
EMPTY_CELL = "—"
MISSING = object()
"""In place of a key that a config does not have."""
_LONG = 120
"""Characters of a config's value that are shown at once."""


def number_cell(value: float | None) -> str:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return EMPTY_CELL
    return f'<data value="{value!r}">{number_text(value)}</data>'


def duration_cell(seconds: float) -> str:
    text = f"{seconds:.1f} s" if seconds < 60 else f"{number_text(seconds)} s"
    if 60 <= seconds < 1e12:
        text = duration(seconds)
    return f'<data value="{seconds!r}">{text}</data>'


def value_cell(value: Any, *, columns: int = 1) -> str:
    text = value_text(value)
    cell = escape(text)
    if len(text) > _LONG:
        cell = f"<details><summary>{escape(text[: _LONG - 40])}…</summary>{cell}</details>"
    return f'<td colspan="{columns}">{cell}</td>' if columns > 1 else cell


def swatch(colour: int) -> str:
    dashed = " dashed" if colour // NUM_COLOURS % 2 else ""
    return f'<i class="swatch c{colour % NUM_COLOURS}{dashed}"></i>'


def bar(share: float) -> str:
    share = min(max(share, 0.0), 1.0)
    return f'<i class="bar" style="width:{share * 8:.2f}em"></i> {share:.0%}'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], name: str) -> str:
    """Make a table of cells that are HTML already; one that is a whole ``<td>`` stays as it is."""
    top = "".join(f"<th>{escape(cell).replace('.', '.<wbr>')}</th>" for cell in head)
    body = "".join(
        f"<tr>{''.join(cell if cell.startswith('<td') else f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows
    )
    return f'<div class="wide"><table id="{name}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def value_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return EMPTY_CELL if value is MISSING else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class CurveGroup:
    """Runs that differ in their seeds only, drawn as one."""

    label: str
    colour: int
    runs: list[Run]


def groups_of(runs: Sequence[Run]) -> list[CurveGroup]:
    """Group runs that differ in seeds and names only, in their order. Members that copied each other differ."""
    grouped: list[list[Run]] = []
    for run in runs:
        for group in grouped:
            if not run.exploits and not _swept([group[0], run]):
                group.append(run)
                break
        else:
            grouped.append([run])
    keys = _swept([group[0] for group in grouped])
    names = [run.name for run in runs]
    groups = []
    for i, group in enumerate(grouped):
        label = group[0].name
        if len(group) > 1:
            own = [run.name for run in group]
            by_keys = ", ".join(f"{key.rpartition('.')[2]}={value_text(values[i])}" for key, values in keys)
            prefix = commonprefix(own)  # noqa: RUF071 of names, letter by letter
            # of no other run's name
            by_prefix = f"{prefix}…" if sum(name.startswith(prefix) for name in names) == len(own) else ""
            # the first that names their values, and fits
            fitting = [text for text in (by_keys, by_prefix, " + ".join(own)) if 1 < len(text) <= _LABEL]
            label = f"{fitting[0] if fitting else f'{label}, …'} ({len(group)} runs)"
        groups.append(CurveGroup(label, i, group))
    return groups


def _swept(runs: Sequence[Run]) -> list[tuple[str, tuple[Any, ...]]]:
    """List the keys that decide what runs compute, and in which they differ, with each one's value."""
    return [(key, values) for key, values in differing([run.config for run in runs]) if key not in _SEEDS | NAMES]


def sweep(groups: Sequence[CurveGroup]) -> str:
    runs = [run for group in groups for run in group.runs]
    if len(runs) < 3:
        return ""
    watched = {(run.trainer.best_eval_metric, run.trainer.best_eval_mode) for run in runs}
    keys = _swept([group.runs[0] for group in groups])
    reasons = {
        "members continued from each other, and with other values than their first": any(run.exploits for run in runs),
        "the runs watch different metrics": len(watched) > 1,
        f"the runs differ in {len(keys)} keys, which is not a sweep": len(keys) > _MAX_KEYS,
    }
    if why := next((reason for reason, holds in reasons.items() if holds), ""):
        return f'<p class="note">No table: {why}.</p>'
    ((metric, mode),) = watched
    # fresh episodes chose no checkpoint, so they are fair; but only if all runs have them
    fresh = all(run.fresh("best") for run in runs)
    title = f"{metric} of the best checkpoint in fresh episodes" if fresh else f"best {metric}"

    def result(run: Run) -> float | None:
        episodes = run.fresh("best") if fresh else None
        return episodes[1] if episodes else run.best.value if run.best else None

    results = [[(run, x) for run in group.runs if (x := result(run)) is not None] for group in groups]
    rows = []
    for i, (group, found) in enumerate(zip(groups, results, strict=True)):
        low, middle, high = np.percentile([x for _, x in found], (25, 50, 75)).tolist() if found else [None] * 3
        cells = [
            f"{swatch(group.colour)}{escape(group.label)}",
            *map(number_cell, (middle, low, high)),
            f"{number_cell(len(found))} of {number_cell(len(group.runs))}",
            *(value_cell(values[i]) for _, values in keys),
        ]
        # runs without a result come last
        rows.append((math.inf if middle is None else middle if mode == "min" else -middle, cells))
    rows.sort(key=lambda row: row[0])
    head = ["runs", f"{title}: median", "1st quartile", "3rd quartile", "runs with one", *(key for key, _ in keys)]
    return table(head, [cells for _, cells in rows], "sweep")


def curves(groups: Sequence[CurveGroup]) -> str:
    runs = [run for group in groups for run in group.runs]
    tags = set().union(*(run.tags for run in runs))
    if not tags:
        return '<p class="note">Nothing is logged.</p>'
    constant: dict[str, float] = {}  # a flat line says no more than its value
    for tag in tags:
        only, *others = {value for run in runs for value in run.series(tag).values()}
        if not others and math.isfinite(only):
            constant[tag] = only
    watched = [run.trainer.best_eval_metric for run in runs]
    headlines = [tag for tag in dict.fromkeys([*watched, *_HEADLINES]) if tag in tags]
    # a success rate of 0 throughout is news
    headlines = [tag for tag in headlines if tag not in constant or tag in watched or "success" in tag]
    parts_of: dict[str, list[str]] = {"Losses": [], "Reward terms": []}
    for tag in sorted(tags - constant.keys() - set(headlines)):
        parts_of.setdefault(_part(tag), []).append(tag)
    steps = " or ".join(dict.fromkeys(run.step_name for run in runs))

    def grid(tags: Iterable[str]) -> str:
        figures = []
        for tag in tags:
            series = [(group, [run.series(tag) for run in group.runs if tag in run.tags]) for group in groups]
            drawn_runs = [curve_of(group.label, group.colour, found) for group, found in series if found]
            figures.append(curves_figure(tag, drawn_runs, steps))
        return f'<div class="grid">{"".join(figures)}</div>'

    legend = "".join(f"<span>{swatch(group.colour)}{escape(group.label)}</span>" for group in groups)
    if any(len(group.runs) > 1 for group in groups):
        legend += "<span class=note>lines: median, bands: quartiles, of runs that differ in the seed only</span>"
    parts = [f'<div class="legend">{legend}</div>', grid(headlines)]
    parts += [f"<h3>{name}</h3>{grid(parts_of[name])}" for name in ("Losses", "Reward terms") if parts_of[name]]
    for name in sorted(parts_of.keys() - {"Losses", "Reward terms"}):
        own = parts_of[name]
        parts.append(f"<details><summary>{escape(name)}/… ({len(own)})</summary>{grid(own)}</details>")
    flat = {tag: x for tag, x in constant.items() if tag not in headlines}
    if flat:
        items = "".join(f"<li><code>{escape(tag)}</code> {number_cell(x)}</li>" for tag, x in sorted(flat.items()))
        parts.append(f"<details><summary>the same throughout ({len(flat)})</summary><ul>{items}</ul></details>")
    return "".join(parts)


def _part(tag: str) -> str:
    """Name the part of the page that has the curve of ``tag``: one of two, or the first part of its own name."""
    if tag in _LOSSES or (tag.startswith("train/") and "loss" in tag):
        return "Losses"
    return "Reward terms" if tag.startswith("rewards/") else tag.rpartition("/")[0]


def differing(configs: Sequence[Any], path: str = "") -> list[tuple[str, tuple[Any, ...]]]:
    """``(dotted key, its value in each)`` of the keys in which configs differ; ``MISSING`` where one lacks it."""
    if all(isinstance(config, dict) for config in configs):
        names = sorted(set().union(*configs))
        return [
            found
            for name in names
            for found in differing([config.get(name, MISSING) for config in configs], f"{path}.{name}".lstrip("."))
        ]
    return [] if all(config == configs[0] for config in configs) else [(path, tuple(configs))]
