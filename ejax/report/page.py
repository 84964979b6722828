"""The page: tables, figures and videos of runs in one HTML file that loads nothing.

Each number is in a ``<data value=…>`` that holds it exactly, each text is escaped, and the page forbids itself
everything but its own style and its one script.
"""

import base64
import datetime
import hashlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from ejax.logs.charts import LARGEST, NUM_COLOURS, curve_of, curves_figure, number, slice_figure
from ejax.logs.json_records import FactsError
from ejax.report.runs import MISSING, Run, as_text, computing, differing, read_run, same_but_seed
from ejax.runtime.plain_files import read_bytes
from ejax.training.lineage import lineage, value_texts

_LARGEST_VIDEO = 4_000_000
_LARGEST_VIDEOS = 24_000_000
"""Bytes that are embedded, of one video and of all."""
_MOST_KEYS = 8
"""Keys that runs of a sweep differ in; runs that differ in more are no sweep."""
_MOST_ROWS = 25
"""Keys in which configs differ that are shown at once."""
_LONG = 120
"""Characters of a config's value that are shown at once."""
_HEADLINES = (
    *("eval/success_rate", "eval/avg_reward", "eval/avg_length"),
    *("charts/success_rate_avg_100", "charts/episode_reward_avg_100", "charts/episode_length_avg_100"),
)
_LOSSES = ("train/flow", "train/prediction")
"""Beside all that has ``loss`` in its name."""
_LABEL = 60
"""Characters of the name of runs that are drawn as one."""
_NOTHING = "—"


@dataclass(frozen=True)
class _Group:
    """Runs that differ in their seeds only, drawn as one."""

    label: str
    colour: int
    runs: list[Run]


def render(
    runs: Sequence[Run], exports: Mapping[str, dict[str, Any]], folder: Path, left_out: Sequence[str] = ()
) -> str:
    """The page.

    Args:
        exports: path -> content of a ``parity.json``, beside those that are in the runs' folders.
        folder: where the page will be, which links to videos start from.
        left_out: a line for each run that cannot be read.
    """
    names = _names(runs)
    groups = _groups(runs, names)
    colours = {id(run): group.colour for group in groups for run in group.runs}
    found = {f"{names[i]}/{path}": facts for i, run in enumerate(runs) for path, facts in run.exports.items()}
    sections = [
        ("", _problems(runs, names, left_out)),
        ("Runs", _runs(runs, names, colours)),
        ("Sweep", _sweep(groups, names, runs)),
        ("Who went on from whom", _exploits(runs, names)),
        ("Curves", _curves(runs, groups)),
        ("Where the configs differ", _differences(runs, names)),
        ("Where the time goes", _time(runs, names)),
        ("Evaluations of checkpoints", _evaluations(runs, names)),
        ("Exports", _exports({**found, **exports})),
        ("Videos", _videos(runs, names, folder)),
        ("Environment and versions", _environment(runs, names)),
    ]
    body = "".join(
        f"<section>{f'<h2>{title}</h2>' if title else ''}{content}</section>" for title, content in sections if content
    )
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs"
    style, script = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; media-src data:"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} – ejax</title><style>{style}</style></head>"
        f"<body><main><h1>{escape(title)}</h1>{body}</main>"
        f'<div id="tip" hidden></div><script>{script}</script></body></html>\n'
    )


def _names(runs: Sequence[Run]) -> list[str]:
    """The runs' folders, with as much of what is before them as tells them apart."""
    parts = [run.path.resolve().parts for run in runs]
    longest = max(map(len, parts))
    for count in range(1, longest + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(run.path) for run in runs]


def _groups(runs: Sequence[Run], names: Sequence[str]) -> list[_Group]:
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
        groups.append(_Group(label, i, group))
    return groups


def _problems(runs: Sequence[Run], names: Sequence[str], left_out: Sequence[str]) -> str:
    told = [(name, text) for run, name in zip(runs, names, strict=True) for text in run.problems]
    if not told and not left_out:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in left_out)
    items += "".join(f"<li><b>{escape(name)}</b>: {escape(text)}</li>" for name, text in told)
    return f'<div class="problems"><b>To know of the logs</b><ul>{items}</ul></div>'


def _runs(runs: Sequence[Run], names: Sequence[str], colours: Mapping[int, int]) -> str:
    units = dict.fromkeys(run.step_name for run in runs)
    steps = next(iter(units)) if len(units) == 1 else "steps"
    head = ["run", "task, algorithm", "seed", "state", steps, "wall time", "steps/s", "watched metric", "best", "last"]
    head += ["best checkpoint, fresh episodes", "last checkpoint, fresh episodes"]
    head += ["skipped updates", "quarantined episodes"]
    rows = []
    for run, name in zip(runs, names, strict=True):
        wall = run.wall_s
        speed = next((x for x in reversed(run.series("charts/SPS").values()) if math.isfinite(x)), None)
        last = run.last_evaluation
        task = (
            f"{run.config.get('env', {}).get('id', _NOTHING)}, {run.config.get('algorithm', {}).get('name', _NOTHING)}"
        )
        rows.append(
            [
                f"{_swatch(colours[id(run)])}{escape(name)}",
                escape(task),
                str(run.trainer["seed"]),
                escape(run.state) + (f"<br>{escape(run.lengths)}" if run.lengths else ""),
                _data(run.last_step) + ("" if len(units) == 1 else f" {run.step_name}"),
                _NOTHING if wall is None else _seconds(wall),
                _data(speed),
                f"{escape(run.trainer['best_eval_metric'])} ({escape(run.trainer['best_eval_mode'])})",
                f"{_data(run.best.value)}<br>at&nbsp;{_data(run.best.step)}" if run.best else _NOTHING,
                f"{_data(last[1])}<br>at&nbsp;{_data(last[0])}" if last else _NOTHING,
                *(_fresh(run.fresh("best")), _fresh(run.fresh("last"))),
                _data(run.skipped),
                _data(run.num_quarantined),
            ]
        )
    note = (
        "steps/s is the last <code>charts/SPS</code>: since the program's start, without compilation. The wall time "
        "goes from each start of a run to its end, or to its last line where it was killed; members that one program "
        "trained have the same. The best is the largest of many noisy evaluations, or the smallest; fresh episodes "
        "chose no checkpoint."
    )
    return f'{_table(head, rows, "runs")}<p class="note">{note}</p>'


def _fresh(found: tuple[int, float] | None) -> str:
    return _NOTHING if found is None else f"{_data(found[1])}<br>of&nbsp;{_data(found[0])}"


def _exploits(runs: Sequence[Run], names: Sequence[str]) -> str:
    """Members that copied each other: their values, and whose parameters they have."""
    keys = [*dict.fromkeys(key for run in runs for each in run.exploits for key in each.values)]
    rows = []
    for run, name in zip(runs, names, strict=True):
        if run.member is not None and run.exploits:
            first = {key: value for key in keys if isinstance(value := _at(run.config, key), int | float)}
            texts = value_texts(run.exploits, run.member, run.best.step if run.best else None, first)
            values = [escape(texts.get(key, _NOTHING)) for key in keys]
            rows.append([escape(name), *values, escape(lineage(run.exploits, run.member))])
    return _table(["run", *keys, "parameters of member"], rows, "lineage") if rows else ""


def _at(config: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key; None: there is none."""
    node: Any = config
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def _sweep(groups: Sequence[_Group], names: Sequence[str], runs: Sequence[Run]) -> str:
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
        cells = [f"{_swatch(group.colour)}{escape(group.label)}", _data(middle), _data(low), _data(high)]
        cells += [f"{_data(len(best))} of {_data(len(group.runs))}", *(_value(values[i]) for _, values in keys)]
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
            (_plain(value), found, name_of[id(run)], group.colour)
            for group, value in zip(groups, values, strict=True)
            for run in group.runs
            if (found := figure(run)) is not None
        ]
        if points:
            figures.append(slice_figure(key, points, title))
    grid = f'<h3>{escape(title)}</h3><div class="grid">{"".join(figures)}</div>' if figures else ""
    return _table(head, [cells for _, cells in rows], "sweep") + grid


def _curves(runs: Sequence[Run], groups: Sequence[_Group]) -> str:
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
            curves = [curve_of(group.label, group.colour, found) for group, found in series if found]
            figures.append(curves_figure(tag, curves, steps))
        return f'<div class="grid">{"".join(figures)}</div>'

    parts = [_legend(groups), grid(headlines)]
    for title, some in (("Losses", losses), ("Reward terms", rewards)):
        if some:
            parts.append(f"<h3>{title}</h3>{grid(some)}")
    for name, some in sorted(others.items()):
        parts.append(f"<details><summary>{escape(name)}/… ({len(some)})</summary>{grid(some)}</details>")
    flat = {tag: x for tag, x in constant.items() if tag not in headlines}
    if flat:
        items = "".join(f"<li><code>{escape(tag)}</code> {_data(x)}</li>" for tag, x in sorted(flat.items()))
        parts.append(f"<details><summary>the same throughout ({len(flat)})</summary><ul>{items}</ul></details>")
    return "".join(parts)


def _legend(groups: Sequence[_Group]) -> str:
    items = "".join(f"<span>{_swatch(group.colour)}{escape(group.label)}</span>" for group in groups)
    several = any(len(group.runs) > 1 for group in groups)
    note = (
        "<span class=note>lines: median, bands: quartiles, of runs that differ in the seed only</span>"
        if several
        else ""
    )
    return f'<div class="legend">{items}{note}</div>'


def _differences(runs: Sequence[Run], names: Sequence[str]) -> str:
    if len(runs) < 2:
        return ""
    rows = [
        [f"<code>{escape(key)}</code>", *map(_value, values)] for key, values in differing([r.config for r in runs])
    ]
    if not rows:
        return '<p class="note">They do not.</p>'
    table = _table(["key", *names], rows, "differences")
    if any(run.exploits for run in runs):
        table += '<p class="note">Of members that went on from each other: what they began with.</p>'
    folded = f"<details><summary>{len(rows)} keys</summary>{table}</details>"
    return folded if len(rows) > _MOST_ROWS else table


def _time(runs: Sequence[Run], names: Sequence[str]) -> str:
    rows = []
    members: dict[Path, list[str]] = {}
    for run, name in zip(runs, names, strict=True):
        if run.together is not None:
            members.setdefault(run.together, []).append(name)
    for run, name in zip(runs, names, strict=True):
        if run.together is not None:
            own = members.pop(run.together, None)
            if own is None:
                continue  # its time is shown with the first member's
            with suppress(FactsError, OSError):  # else it is as that member's log says
                run = read_run(run.together)
            name = f"{' … '.join(dict.fromkeys((own[0], own[-1])))}: one program for the whole population"
        wall = run.wall_s
        if wall is None:
            rows.append([escape(name), "the log has no times", "", ""])
            continue
        starts = len(run.sessions)
        known = all(session.start is not None for session in run.sessions)
        text = f"wall time, {starts} start{'s' * (starts != 1)}" + (
            "" if known else "; of one only from its first line on"
        )
        rows.append([escape(name), escape(text), _seconds(wall), _bar(1.0)])
        for part, seconds in run.time_parts():
            rows.append(["", escape(part), _seconds(seconds), _bar(seconds / wall if wall > 0 else 0.0)])
    note = "As far as the log tells: parts may overlap, and what is not listed (updates, mostly) is not measured apart."
    return f'{_table(["run", "part", "time", "of the wall time"], rows, "time")}<p class="note">{note}</p>'


def _evaluations(runs: Sequence[Run], names: Sequence[str]) -> str:
    found = [
        (name, file, facts) for run, name in zip(runs, names, strict=True) for file, facts in run.evaluations.items()
    ]
    if not found:
        return ""
    tags = sorted({tag for *_, facts in found for tag in facts if tag.startswith("eval/")})
    rows = [
        [
            escape(name),
            escape(Path(facts["checkpoint"]).name),
            escape(" ".join(map(str, facts.get("overrides", []))) or _NOTHING),
            escape(str(facts.get("seed", "fresh" if "seeds" in facts else _NOTHING))),
            _data(facts["episodes"]),
            *(_data(facts.get(tag)) for tag in tags),
        ]
        for name, _, facts in found
    ]
    head = ["run", "checkpoint", "changed", "seed", "episodes", *(tag.removeprefix("eval/") for tag in tags)]
    return _table(head, rows, "evaluations")


def _exports(exports: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for path, facts in exports.items():
        versions = ", ".join(f"{library} {version}" for library, version in facts["versions"].items())
        for i, (name, artefact) in enumerate(facts["artefacts"].items()):
            rows.append(
                [
                    escape(path),
                    f"{escape(facts['checkpoint'])}, step {_data(facts['global_step'])}",
                    escape(f"{name}: {artefact.get('file', '')}"),
                    _data(sum(facts["rows"].values())),
                    *(_data(artefact.get(key)) for key in ("max_abs", "max_rel", "of_allowed")),
                    "" if i else escape(versions),
                ]
            )
    if not rows:
        return ""
    head = [
        "export",
        "checkpoint",
        "artefact",
        "rows compared",
        "largest error",
        "relative",
        "of the allowed",
        "versions",
    ]
    note = (
        "From <code>parity.json</code>, as it was when the export was made; <code>interop.verify</code> measures again."
    )
    return f'{_table(head, rows, "exports")}<p class="note">{note}</p>'


def _videos(runs: Sequence[Run], names: Sequence[str], folder: Path) -> str:
    parts, embedded = [], 0
    for run, name in zip(runs, names, strict=True):
        if not run.videos:
            continue
        file = run.videos[0]
        shown = f"{name}/{file.relative_to(run.path).as_posix()}, the newest of {len(run.videos)}"
        try:
            content = read_bytes(file, min(_LARGEST_VIDEO, _LARGEST_VIDEOS - embedded))
            embedded += len(content)
            source = f"data:video/mp4;base64,{base64.b64encode(content).decode()}"
            video = f'<video controls loop muted playsinline src="{source}"></video>'
        except OSError as error:  # it is too large, or cannot be read
            link = quote(os.fsencode(os.path.relpath(file, folder)))
            video = f'<p><a href="{escape(link)}">not embedded</a>: {escape(error.strerror or "")}</p>'
        parts.append(f"<figure><figcaption>{escape(shown)}</figcaption>{video}</figure>")
    return f'<div class="grid">{"".join(parts)}</div>' if parts else ""


def _environment(runs: Sequence[Run], names: Sequence[str]) -> str:
    facts = [_environment_of(run) for run in runs]
    rows = []
    for key in dict.fromkeys(key for each in facts for key in each):
        values = [each.get(key, MISSING) for each in facts]
        if all(value == values[0] for value in values):
            rows.append([escape(key), _value(values[0], columns=len(runs))])
        else:
            rows.append([escape(key), *map(_value, values)])
    return _table(["", *names], rows, "environment") if rows else ""


def _environment_of(run: Run) -> dict[str, Any]:
    """What the run started with, and what its newest checkpoint was made with where that is not the same."""
    facts = {key: value for key, value in run.versions.items() if key != "notes"}
    facts |= {f"note {i}": note for i, note in enumerate(run.versions.get("notes", []), 1)}
    meta = run.meta or {}
    later = meta.get("versions", {}).items()
    facts |= {f"{key}, newest checkpoint": value for key, value in later if run.versions.get(key) != value}
    if meta.get("num_devices"):
        facts["devices"] = meta["num_devices"]
    changed = (
        differing([run.config["trainer"], meta["config"]["trainer"]]) if meta.get("config", {}).get("trainer") else []
    )
    facts |= {f"trainer.{key}, newest checkpoint": now for key, (_, now) in changed}
    return facts


def _only_value(values: Sequence[Sequence[float]]) -> float | None:
    """The one finite value of all; None: there are several, or none."""
    found = {value for each in values for value in each}
    only = found.pop() if len(found) == 1 else math.nan
    return only if math.isfinite(only) else None


def _plain(value: Any) -> object:
    is_drawn = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
    return value if is_drawn else as_text(value)


def _data(value: float | None) -> str:
    """A number for people, and the number itself for programs."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return _NOTHING
    return f'<data value="{value!r}">{number(value)}</data>'


def _seconds(seconds: float) -> str:
    text = f"{seconds:.1f} s" if seconds < 60 else f"{number(seconds)} s"
    if 60 <= seconds < 1e12:
        text = str(datetime.timedelta(seconds=round(seconds)))
    return f'<data value="{seconds!r}">{text}</data>'


def _value(value: Any, *, columns: int = 1) -> str:
    """A value of a config, which may be long. With ``columns`` it stands in a cell of that width."""
    text = as_text(value)
    cell = escape(text)
    if len(text) > _LONG:
        cell = f"<details><summary>{escape(text[: _LONG - 40])}…</summary>{cell}</details>"
    return f'<td colspan="{columns}">{cell}</td>' if columns > 1 else cell


def _swatch(colour: int) -> str:
    dashed = " dashed" if colour // NUM_COLOURS % 2 else ""
    return f'<i class="swatch c{colour % NUM_COLOURS}{dashed}"></i>'


def _bar(share: float) -> str:
    share = min(max(share, 0.0), 1.0)
    return f'<i class="bar" style="width:{share * 8:.2f}em"></i> {share:.0%}'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], name: str) -> str:
    """Cells are HTML already; one that is a whole ``<td>`` stays as it is."""
    top = "".join(f"<th>{escape(cell).replace('.', '.<wbr>')}</th>" for cell in head)
    body = "".join(
        f"<tr>{''.join(cell if cell.startswith('<td') else f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows
    )
    return f'<div class="wide"><table id="{name}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
