"""Figures of the page: runs that differ in their seeds are drawn as one curve with its quartiles."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import takewhile

import numpy as np

from ejax.logs.charts import curve_of, curves_figure, slice_figure
from ejax.report.cells import number_cell, plain_value, swatch, table, value_cell
from ejax.report.runs import Run, as_text, computing, differing, same_but_seed

_MOST_KEYS = 8
"""Keys that runs of a sweep differ in; runs that differ in more are no sweep."""
_HEADLINES = (
    *("eval/success_rate", "eval/avg_reward", "eval/avg_length"),
    *("charts/success_rate_avg_100", "charts/episode_reward_avg_100", "charts/episode_length_avg_100"),
)
_LOSSES = ("train/flow", "train/prediction")
"""Beside all that has ``loss`` in its name."""
_LABEL = 60
"""Characters of the name of runs that are drawn as one."""


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seeds only, drawn as one."""

    label: str
    colour: int
    runs: list[Run]


def groups_of(runs: Sequence[Run], names: Sequence[str]) -> list[Group]:
    grouped = same_but_seed(runs)
    keys = [(key, values) for key, values in differing([group[0].config for group in grouped]) if computing(key)]
    name_of = {id(run): name for run, name in zip(runs, names, strict=True)}
    groups = []
    for i, group in enumerate(grouped):
        label = name_of[id(group[0])]
        if len(group) > 1:
            by_keys = ", ".join(f"{key.rpartition('.')[2]}={as_text(values[i])}" for key, values in keys)
            own = [name_of[id(run)] for run in group]
            shared = takewhile(lambda letters: len(set(letters)) == 1, zip(*own, strict=False))
            prefix = "".join(letters[0] for letters in shared)
            by_prefix = f"{prefix}…" if sum(name.startswith(prefix) for name in names) == len(own) else ""
            fitting = [text for text in (by_keys, by_prefix, " + ".join(own)) if 1 < len(text) <= _LABEL]
            label = f"{fitting[0] if fitting else f'{label}, …'} ({len(group)} runs)"
        groups.append(Group(label, i, group))
    return groups


def sweep(groups: Sequence[Group], names: Sequence[str], runs: Sequence[Run]) -> str:
    if len(runs) < 3:
        return ""
    if any(run.exploits for run in runs):
        return '<p class="note">No table: members went on from each other, and with other values than their first.</p>'
    watched = {(run.trainer["best_eval_metric"], run.trainer["best_eval_mode"]) for run in runs}
    keys = [(key, values) for key, values in differing([group.runs[0].config for group in groups]) if computing(key)]
    if len(watched) > 1:
        return '<p class="note">No table: the runs watch different metrics.</p>'
    if len(keys) > _MOST_KEYS:
        return f'<p class="note">No table: the runs differ in {len(keys)} keys, which is no sweep.</p>'
    ((metric, mode),) = watched
    fresh = all(run.fresh("best") for run in runs)
    title = f"{metric} of the best checkpoint in fresh episodes" if fresh else f"best {metric}"

    def figure(run: Run) -> float | None:
        found = run.fresh("best") if fresh else None
        return found[1] if found else run.best.value if run.best else None

    rows = []
    for i, group in enumerate(groups):
        best = [found for run in group.runs if (found := figure(run)) is not None]
        low, middle, high = np.percentile(best, (25, 50, 75)).tolist() if best else (None, None, None)
        cells = [
            f"{swatch(group.colour)}{escape(group.label)}",
            number_cell(middle),
            number_cell(low),
            number_cell(high),
        ]
        cells += [
            f"{number_cell(len(best))} of {number_cell(len(group.runs))}",
            *(value_cell(values[i]) for _, values in keys),
        ]
        rows.append((math.inf if middle is None else middle if mode == "min" else -middle, cells))
    rows.sort(key=lambda row: row[0])
    head = [
        "runs",
        f"{title}: median",
        "1st quartile",
        "3rd quartile",
        "runs with one",
        *(key for key, _ in keys),
    ]
    figures = []
    name_of = {id(run): name for run, name in zip(runs, names, strict=True)}
    for key, values in keys:
        if any(isinstance(value, dict | list) for value in values):
            continue  # the table has them
        points = [
            (plain_value(value), found, name_of[id(run)], group.colour)
            for group, value in zip(groups, values, strict=True)
            for run in group.runs
            if (found := figure(run)) is not None
        ]
        if points:
            figures.append(slice_figure(key, points, title))
    grid = f'<h3>{escape(title)}</h3><div class="grid">{"".join(figures)}</div>' if figures else ""
    return table(head, [cells for _, cells in rows], "sweep") + grid


def curves(runs: Sequence[Run], groups: Sequence[Group]) -> str:
    tags = set().union(*(run.tags for run in runs))
    if not tags:
        return '<p class="note">Nothing is logged.</p>'
    values = {tag: [list(run.series(tag).values()) for run in runs] for tag in tags}
    constant = {tag: found for tag in tags if (found := _only_value(values[tag])) is not None}
    watched = [run.trainer["best_eval_metric"] for run in runs]
    headlines = [tag for tag in dict.fromkeys([*watched, *_HEADLINES]) if tag in tags]
    headlines = [tag for tag in headlines if tag not in constant or tag in watched or "success" in tag]
    drawn = sorted(tags - constant.keys() - set(headlines))
    losses = [tag for tag in drawn if tag in _LOSSES or (tag.startswith("train/") and "loss" in tag)]
    rewards = [tag for tag in drawn if tag.startswith("rewards/")]
    others: dict[str, list[str]] = {}
    for tag in drawn:
        if tag not in losses and tag not in rewards:
            others.setdefault(tag.rpartition("/")[0], []).append(tag)
    steps = " or ".join(dict.fromkeys(run.step_name for run in runs))

    def grid(tags: Iterable[str]) -> str:
        figures = []
        for tag in tags:
            series = [(group, [run.series(tag) for run in group.runs if tag in run.tags]) for group in groups]
            drawn_runs = [curve_of(group.label, group.colour, found) for group, found in series if found]
            figures.append(curves_figure(tag, drawn_runs, steps))
        return f'<div class="grid">{"".join(figures)}</div>'

    parts = [_legend(groups), grid(headlines)]
    for title, some in (("Losses", losses), ("Reward terms", rewards)):
        if some:
            parts.append(f"<h3>{title}</h3>{grid(some)}")
    for name, some in sorted(others.items()):
        parts.append(f"<details><summary>{escape(name)}/… ({len(some)})</summary>{grid(some)}</details>")
    flat = {tag: x for tag, x in constant.items() if tag not in headlines}
    if flat:
        items = "".join(f"<li><code>{escape(tag)}</code> {number_cell(x)}</li>" for tag, x in sorted(flat.items()))
        parts.append(f"<details><summary>the same throughout ({len(flat)})</summary><ul>{items}</ul></details>")
    return "".join(parts)


def _legend(groups: Sequence[Group]) -> str:
    items = "".join(f"<span>{swatch(group.colour)}{escape(group.label)}</span>" for group in groups)
    several = any(len(group.runs) > 1 for group in groups)
    note = (
        "<span class=note>lines: median, bands: quartiles, of runs that differ in the seed only</span>"
        if several
        else ""
    )
    return f'<div class="legend">{items}{note}</div>'


def _only_value(values: Sequence[Sequence[float]]) -> float | None:
    """The one finite value of all; None: there are several, or none."""
    found = {value for each in values for value in each}
    only = found.pop() if len(found) == 1 else math.nan
    return only if math.isfinite(only) else None
