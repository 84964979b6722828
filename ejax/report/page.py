"""The page: tables, figures and videos of runs in one HTML file that loads nothing.

All text is escaped, and the page forbids itself everything but its own style and its one script.
"""

import base64
import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ejax.logs.json_records import FactsError
from ejax.population.lineage import lineage, value_texts
from ejax.report.cells import NOTHING, bar, duration_cell, number_cell, swatch, table, value_cell
from ejax.report.curves import Group, curves, groups_of, sweep
from ejax.report.reading import read_run
from ejax.report.runs import MISSING, Run, differing
from ejax.schema.plain_files import read_bytes

_LARGEST_VIDEO = 4_000_000
_LARGEST_VIDEOS = 24_000_000
"""Bytes that are embedded, of one video and of all."""
_MAX_ROWS = 25
"""Keys in which configs differ that are shown at once."""


def render(
    runs: Sequence[Run], exports: Mapping[str, dict[str, Any]], folder: Path, left_out: Sequence[str] = ()
) -> str:
    """Render the page.

    Args:
        exports: path -> content of a ``parity.json``, beside those that are in the runs' folders.
        folder: where the page will be, which links to videos start from.
        left_out: a line for each run that cannot be read.
    """
    runs = _named(runs)
    groups = groups_of(runs)
    found = {f"{run.name}/{path}": facts for run in runs for path, facts in run.exports.items()}
    sections = {
        "": _problems(runs, left_out),
        "Runs": _runs(runs, groups),
        "Sweep": sweep(groups),
        "Who went on from whom": _exploits(runs),
        "Curves": curves(groups),
        "Where the configs differ": _differences(runs),
        "Where the time goes": _time(runs),
        "Evaluations of checkpoints": _evaluations(runs),
        "Exports": _exports({**found, **exports}),
        "Videos": _videos(runs, folder),
        "Environment and versions": _environment(runs),
    }
    body = "".join(
        f"<section>{f'<h2>{title}</h2>' if title else ''}{content}</section>"
        for title, content in sections.items()
        if content
    )
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
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


def _named(runs: Sequence[Run]) -> list[Run]:
    """Name runs after their folders, with as many parents as distinguish them."""
    parts = [run.path.resolve().parts for run in runs]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
    return [replace(run, name=str(run.path)) for run in runs]


def _problems(runs: Sequence[Run], left_out: Sequence[str]) -> str:
    texts = [escape(text) for text in left_out]
    texts += [f"<b>{escape(run.name)}</b>: {escape(text)}" for run in runs for text in run.problems]
    items = "".join(f"<li>{text}</li>" for text in texts)
    return f'<div class="problems"><b>Problems of the logs</b><ul>{items}</ul></div>' if texts else ""


def _runs(runs: Sequence[Run], groups: Sequence[Group]) -> str:
    colours = {id(run): group.colour for group in groups for run in group.runs}
    units = dict.fromkeys(run.step_name for run in runs)
    steps = next(iter(units)) if len(units) == 1 else "steps"
    head = ["run", "task, algorithm", "seed", "state", steps, "wall time", "steps/s", "watched metric", "best", "last"]
    head += ["best checkpoint, fresh episodes", "last checkpoint, fresh episodes"]
    head += ["skipped updates", "quarantined episodes"]
    rows = []
    for run in runs:
        speed = next((x for x in reversed(run.series("charts/SPS").values()) if math.isfinite(x)), None)
        task = f"{run.config.get('env', {}).get('id', NOTHING)}, {run.config.get('algorithm', {}).get('name', NOTHING)}"
        last = run.last_evaluation
        rows.append(
            [
                f"{swatch(colours[id(run)])}{escape(run.name)}",
                escape(task),
                str(run.trainer["seed"]),
                escape(run.state) + (f"<br>{escape(run.lengths)}" if run.lengths else ""),
                number_cell(run.last_step) + ("" if len(units) == 1 else f" {run.step_name}"),
                NOTHING if run.wall_s is None else duration_cell(run.wall_s),
                number_cell(speed),
                f"{escape(run.trainer['best_eval_metric'])} ({escape(run.trainer['best_eval_mode'])})",
                _pair("at", (run.best.step, run.best.value) if run.best else None),
                _pair("at", last),
                _pair("of", run.fresh("best")),
                _pair("of", run.fresh("last")),
                number_cell(run.skipped),
                number_cell(run.num_quarantined),
            ]
        )
    note = (
        "steps/s is the last <code>charts/SPS</code>: since the program's start, without compilation. The wall time "
        "goes from each start of a run to its end, or to its last line where it was killed; members that one program "
        "trained have the same. The best is the largest of many noisy evaluations, or the smallest; fresh episodes "
        "chose no checkpoint."
    )
    return f'{table(head, rows, "runs")}<p class="note">{note}</p>'


def _pair(word: str, found: tuple[int | None, float] | None) -> str:
    return NOTHING if found is None else f"{number_cell(found[1])}<br>{word}&nbsp;{number_cell(found[0])}"


def _exploits(runs: Sequence[Run]) -> str:
    keys = [*dict.fromkeys(key for run in runs for each in run.exploits for key in each.values)]
    rows = []
    for run in runs:
        if run.member is not None and run.exploits:
            first = {key: value for key in keys if isinstance(value := _at(run.config, key), int | float)}
            texts = value_texts(run.exploits, run.member, run.best.step if run.best else None, first)
            values = [escape(texts.get(key, NOTHING)) for key in keys]
            rows.append([escape(run.name), *values, escape(lineage(run.exploits, run.member))])
    return table(["run", *keys, "parameters of member"], rows, "lineage") if rows else ""


def _at(config: Mapping[str, Any], key: str) -> Any:
    node: Any = config
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def _differences(runs: Sequence[Run]) -> str:
    if len(runs) < 2:
        return ""
    found = differing([run.config for run in runs])
    rows = [[f"<code>{escape(key)}</code>", *map(value_cell, values)] for key, values in found]
    if not rows:
        return '<p class="note">They do not.</p>'
    text = table(["key", *(run.name for run in runs)], rows, "differences")
    if any(run.exploits for run in runs):
        text += '<p class="note">Of members that went on from each other: what they began with.</p>'
    return f"<details><summary>{len(rows)} keys</summary>{text}</details>" if len(rows) > _MAX_ROWS else text


def _time(runs: Sequence[Run]) -> str:
    rows = []
    members: dict[Path, list[str]] = {}
    for run in runs:
        if run.together is not None:
            members.setdefault(run.together, []).append(run.name)
    for run in runs:
        name = run.name
        if run.together is not None:
            own = members.pop(run.together, None)
            if own is None:
                continue  # its time is shown with the first member's
            with suppress(FactsError, OSError):  # else the member's own log has to do
                run = read_run(run.together)
            name = f"{' … '.join(dict.fromkeys((own[0], own[-1])))}: one program for the whole population"
        wall = run.wall_s
        if wall is None:
            rows.append([escape(name), "the log has no times", "", ""])
            continue
        starts = len(run.sessions)
        text = f"wall time, {starts} start{'s' * (starts != 1)}"
        text += "; of one only from its first line on" * any(not session.is_from_start for session in run.sessions)
        rows.append([escape(name), escape(text), duration_cell(wall), bar(1.0)])
        for part, seconds in run.time_parts():
            rows.append(["", escape(part), duration_cell(seconds), bar(seconds / wall if wall > 0 else 0.0)])
    note = "As far as logged: parts may overlap, and what is not listed (updates, mostly) is not measured apart."
    return f'{table(["run", "part", "time", "of the wall time"], rows, "time")}<p class="note">{note}</p>'


def _evaluations(runs: Sequence[Run]) -> str:
    found = [(run.name, facts) for run in runs for facts in run.evaluations.values()]
    tags = sorted({tag for _, facts in found for tag in facts if tag.startswith("eval/")})
    rows = [
        [
            escape(name),
            escape(Path(facts["checkpoint"]).name),
            escape(" ".join(map(str, facts.get("overrides", []))) or NOTHING),
            escape(str(facts.get("seed", "fresh" if "seeds" in facts else NOTHING))),
            number_cell(facts["episodes"]),
            *(number_cell(facts.get(tag)) for tag in tags),
        ]
        for name, facts in found
    ]
    head = ["run", "checkpoint", "changed", "seed", "episodes", *(tag.removeprefix("eval/") for tag in tags)]
    return table(head, rows, "evaluations") if rows else ""


def _exports(exports: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for path, facts in exports.items():
        versions = ", ".join(f"{library} {version}" for library, version in facts["versions"].items())
        for i, (name, artefact) in enumerate(facts["artefacts"].items()):
            rows.append(
                [
                    escape(path),
                    f"{escape(facts['checkpoint'])}, step {number_cell(facts['global_step'])}",
                    escape(f"{name}: {artefact.get('file', '')}"),
                    number_cell(sum(facts["rows"].values())),
                    *(number_cell(artefact.get(key)) for key in ("max_abs", "max_rel", "of_allowed")),
                    "" if i else escape(versions),
                ]
            )
    if not rows:
        return ""
    head = ["export", "checkpoint", "artefact", "rows compared", "largest error", "relative", "of the allowed"]
    note = (
        "From <code>parity.json</code>, as it was when the export was made; <code>interop.verify</code> measures again."
    )
    return f'{table([*head, "versions"], rows, "exports")}<p class="note">{note}</p>'


def _videos(runs: Sequence[Run], folder: Path) -> str:
    parts, embedded = [], 0
    for run in runs:
        if not run.videos:
            continue
        file = run.videos[0]
        shown = f"{run.name}/{file.relative_to(run.path).as_posix()}, the newest of {len(run.videos)}"
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


def _environment(runs: Sequence[Run]) -> str:
    facts = [_environment_of(run) for run in runs]
    rows = []
    for key in dict.fromkeys(key for each in facts for key in each):
        values = [each.get(key, MISSING) for each in facts]
        same = all(value == values[0] for value in values)
        cells = [value_cell(values[0], columns=len(runs))] if same else map(value_cell, values)
        rows.append([escape(key), *cells])
    return table(["", *(run.name for run in runs)], rows, "environment") if rows else ""


def _environment_of(run: Run) -> dict[str, Any]:
    facts = {key: value for key, value in run.versions.items() if key != "notes"}
    facts |= {f"note {i}": note for i, note in enumerate(run.versions.get("notes", []), 1)}
    meta = run.meta or {}
    later = meta.get("versions", {}).items()
    facts |= {f"{key}, newest checkpoint": value for key, value in later if run.versions.get(key) != value}
    if meta.get("num_devices"):
        facts["devices"] = meta["num_devices"]
    if trainer := meta.get("config", {}).get("trainer"):
        changed = differing([run.config["trainer"], trainer])
        facts |= {f"trainer.{key}, newest checkpoint": now for key, (_, now) in changed}
    return facts
