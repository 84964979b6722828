"""The page: tables, figures and videos of runs in one HTML file that loads nothing.

All text is escaped, and the page forbids itself everything but its own style and its one script.
"""

import base64
import hashlib
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

from ejax.logs.json_records import FactsError
from ejax.population.lineage import lineage, value_texts
from ejax.report.curves import (
    EMPTY_CELL,
    MISSING,
    NAMES,
    CurveGroup,
    bar,
    curves,
    differing,
    duration_cell,
    groups_of,
    number_cell,
    swatch,
    sweep,
    table,
    value_cell,
    value_text,
)
from ejax.report.gait import COLUMNS, gait_figures
from ejax.report.runs import Run
from ejax.schema.paths import find
from ejax.schema.plain_files import read_bytes
from ejax.schema.tables import tables_beside

_TEXTS = tables_beside(__file__)
"""Texts of each section, which are HTML."""
_LARGEST_VIDEO = 4_000_000
_LARGEST_VIDEOS = 24_000_000
"""Bytes that are embedded, of one video and of all."""
_MAX_ROWS = 25
"""Keys in which configs differ that are shown at once."""
_MAX_KEYS_OF_A_NAME = 3
"""Keys in which members differ that fit into their names."""


def render_page(
    runs: Sequence[Run], exports: Mapping[str, dict[str, Any]], folder: Path, left_out: Sequence[str] = ()
) -> str:
    """Render the page.

    Args:
        exports: path -> content of a ``parity.json``, besides those in the runs' folders.
        folder: where the page will be, which links to videos start from.
        left_out: a line for each run that cannot be read.
    """
    _name(runs)
    groups = groups_of(runs)
    found = {f"{run.name}/{path}": facts for run in runs for path, facts in run.exports.items()}
    contents = {
        "problems": _problems(runs, left_out),
        "runs": _runs(runs, groups),
        "sweep": sweep(groups),
        "lineage": _exploits(runs),
        "curves": curves(groups),
        "differences": _differences(runs),
        "time": _time(runs),
        "evaluations": _evaluations(runs),
        "gait": _gait(runs),
        "counterfactual": _counterfactual(runs),
        "exports": _exports({**found, **exports}),
        "videos": _videos(runs, folder),
        "environment": _environment(runs),
    }
    sections = [f"<section>{_TEXTS[name]['title']}{html}</section>" for name, html in contents.items() if html]
    names = ("page.html", "page.css", "page.js")
    page, style, script = (Path(__file__).with_name(name).read_text("utf-8") for name in names)
    return Template(page).substitute(
        title=escape(runs[0].name if len(runs) == 1 else f"{len(runs)} runs"),
        style=style,
        body="".join(sections),
        script=script,
        # the page's policy admits this one script
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _section(name: str, rows: Sequence[Sequence[str]], *more: str) -> str:
    """Make a section's table, with ``more`` columns than ``page.toml`` has, and its note; empty without rows."""
    texts = _TEXTS[name]
    return table([*texts.get("head", ()), *more], rows, name) + texts.get("note", "") if rows else ""


def _name(runs: Sequence[Run]) -> None:
    """Name runs after their folders, with as many parents as distinguish them."""
    parts = [run.path.resolve().parts for run in runs]
    for count in range(1, max(map(len, parts)) + 1):  # as few as do
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            own = _values(runs)
            for run, name in zip(runs, names, strict=True):
                run.name = f"{name}{own[run.path]}"
            return


def _values(runs: Sequence[Run]) -> dict[Path, str]:
    """Return the values in which a population's members differ, as a suffix of their names; empty for other runs.

    Values that exploits change are left out: a name would show those at the start.
    """
    texts, populations = dict.fromkeys((run.path for run in runs), ""), defaultdict[Path, list[Run]](list)
    for run in runs:
        if run.member is not None:
            populations[run.path.resolve().parent].append(run)
    for members in populations.values():
        unnamed = NAMES | {"trainer.eval_seed"}  # which follows the seed
        unnamed |= {key for run in members for each in run.exploits for key in each.values}
        found = [(key, values) for key, values in differing([run.config for run in members]) if key not in unnamed]
        if 0 < len(found) <= _MAX_KEYS_OF_A_NAME:
            for i, run in enumerate(members):
                parts = ", ".join(f"{key.rpartition('.')[2]}={value_text(values[i])}" for key, values in found)
                texts[run.path] = f" ({parts})"
    return texts


def _problems(runs: Sequence[Run], left_out: Sequence[str]) -> str:
    texts = [escape(text) for text in left_out]
    texts += [f"<b>{escape(run.name)}</b>: {escape(text)}" for run in runs for text in run.problems]
    items = "".join(f"<li>{text}</li>" for text in texts)
    return f'<div class="problems"><b>Log problems</b><ul>{items}</ul></div>' if texts else ""


def _runs(runs: Sequence[Run], groups: Sequence[CurveGroup]) -> str:
    colours = {id(run): group.colour for group in groups for run in group.runs}
    rows = []
    for run in runs:
        # the newest one that was measured
        speed = next((x for x in reversed(run.series("charts/SPS").values()) if math.isfinite(x)), None)
        env, algorithm = (run.config.get(section, {}) for section in ("env", "algorithm"))
        task = f"{env.get('id', EMPTY_CELL)}, {algorithm.get('name', EMPTY_CELL)}"
        rows.append(
            [
                f"{swatch(colours[id(run)])}{escape(run.name)}{' <b>best</b>' * run.is_best_member}",
                escape(task),
                str(run.trainer.seed),
                escape(run.state) + (f"<br>{escape(run.lengths)}" if run.lengths else ""),
                f"{number_cell(run.last_step)} {run.step_name}",
                EMPTY_CELL if run.wall_s is None else duration_cell(run.wall_s),
                number_cell(speed),
                f"{escape(run.trainer.best_eval_metric)} ({escape(run.trainer.best_eval_mode)})",
                _pair("at", (run.best.step, run.best.value) if run.best else None),
                _pair("at", run.last_evaluation),
                _pair("of", run.fresh("best")),
                _pair("of", run.fresh("last")),
                number_cell(run.skipped),
                number_cell(run.num_quarantined),
            ]
        )
    return _section("runs", rows)


def _pair(word: str, found: tuple[int | None, float] | None) -> str:
    return EMPTY_CELL if found is None else f"{number_cell(found[1])}<br>{word}&nbsp;{number_cell(found[0])}"


def _exploits(runs: Sequence[Run]) -> str:
    keys = [*dict.fromkeys(key for run in runs for each in run.exploits for key in each.values)]
    rows = []
    for run in runs:
        if run.member is not None and run.exploits:
            first = {key: value for key in keys if isinstance(value := find(run.config, key, ".", None), int | float)}
            texts = value_texts(run.exploits, run.member, run.best.step if run.best else None, first)
            values = [escape(texts.get(key, EMPTY_CELL)) for key in keys]
            rows.append([escape(run.name), *values, escape(lineage(run.exploits, run.member))])
    return _section("lineage", rows, "run", *keys, "parameters of member")


def _differences(runs: Sequence[Run]) -> str:
    if len(runs) < 2:
        return ""
    found = differing([run.config for run in runs])
    rows = [[f"<code>{escape(key)}</code>", *map(value_cell, values)] for key, values in found]
    if not rows:
        return str(_TEXTS["differences"]["none"])
    text = _section("differences", rows, "key", *(run.name for run in runs))
    if any(run.exploits for run in runs):
        text += _TEXTS["differences"]["of_members"]
    return f"<details><summary>{len(rows)} keys</summary>{text}</details>" if len(rows) > _MAX_ROWS else text


def _time(runs: Sequence[Run]) -> str:
    rows, shown = [], set[Path]()
    for run in runs:
        name = run.name
        if run.together is not None:
            if run.together in shown:
                continue  # its time is shown with the first member's
            # its parts are those of one program: shown once, they add up
            shown.add(run.together)
            own = [each.name for each in runs if each.together == run.together]
            with suppress(FactsError, OSError):  # else the member's own log has to do
                run = Run(run.together)
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
    return _section("time", rows)


def _evaluations(runs: Sequence[Run]) -> str:
    found = [(run.name, facts) for run in runs for facts in run.evaluations.values() if not facts.get("counterfactual")]
    tags = sorted({tag for _, facts in found for tag in facts if tag.startswith("eval/")})
    rows = [
        [
            escape(name),
            escape(Path(facts["checkpoint"]).name),
            escape(" ".join(map(str, facts.get("overrides", []))) or EMPTY_CELL),
            escape(str(facts.get("seed", "fresh" if "seeds" in facts else EMPTY_CELL))),
            number_cell(facts["episodes"]),
            *(number_cell(facts.get(tag)) for tag in tags),
        ]
        for name, facts in found
    ]
    return _section("evaluations", rows, *(tag.removeprefix("eval/") for tag in tags))


def _counterfactual(runs: Sequence[Run]) -> str:
    """Draw a row for each instruction and a column for each start, which is above it."""

    def cell(picture: str, text: str) -> str:
        return f'<img alt="" src="data:image/png;base64,{escape(picture)}"><br>{escape(text)}'

    parts = []
    for run in runs:
        for facts in run.evaluations.values():
            if not (shown := facts.get("counterfactual")):
                continue
            rows = [["", *(cell(picture, "at the start") for picture in shown["starts"])]]
            for sentence, pictures, outcomes in zip(shown["sentences"], shown["ends"], shown["outcomes"], strict=True):
                rows.append([escape(sentence), *map(cell, pictures, outcomes)])
            head = ["instruction", *(f"start {i + 1}" for i in range(len(shown["starts"])))]
            name = f"{run.name}, {Path(facts['checkpoint']).name}"
            parts.append(f"<h3>{escape(name)}</h3>{table(head, rows, 'counterfactual')}")
    return "".join(parts)


def _gait(runs: Sequence[Run]) -> str:
    rows, drawn = [], []
    found = [(run.name, facts) for run in runs for facts in run.evaluations.values() if facts.get("gait")]
    for name, facts in found:
        names, card = (escape(name), escape(Path(facts["checkpoint"]).name)), facts["gait"]
        rows.append([*names, *(number_cell(card["summary"].get(column)) for column in COLUMNS)])
        is_open, summary = " open" * (len(found) == 1), f"<summary>{', '.join(names)}</summary>"
        drawn.append(f"<details{is_open}>{summary}{gait_figures(card)}</details>")
    return _section("gait", rows) + "".join(drawn)


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
    return _section("exports", rows)


def _videos(runs: Sequence[Run], folder: Path) -> str:
    parts, embedded = [], 0
    for run in runs:
        if not run.videos:
            continue
        file = run.videos[0]
        shown = f"{run.name}/{file.relative_to(run.path).as_posix()}, the newest of {len(run.videos)}"
        try:
            # so that a page can be sent by mail
            content = read_bytes(file, min(_LARGEST_VIDEO, _LARGEST_VIDEOS - embedded))
            embedded += len(content)
            source = f"data:video/mp4;base64,{base64.b64encode(content).decode()}"
            video = f'<video controls loop muted playsinline src="{source}"></video>'
        except OSError as error:  # it is too large, or cannot be read
            link = quote(os.fsencode(os.path.relpath(file, folder)))  # names of files need not be text
            video = f'<p><a href="{escape(link)}">not embedded</a>: {escape(error.strerror or "")}</p>'
        parts.append(f"<figure><figcaption>{escape(shown)}</figcaption>{video}</figure>")
    return f'<div class="grid">{"".join(parts)}</div>' if parts else ""


def _environment(runs: Sequence[Run]) -> str:
    facts, rows = [_environment_of(run) for run in runs], []
    for key in dict.fromkeys(key for each in facts for key in each):
        values = [each.get(key, MISSING) for each in facts]
        # one wide cell where all runs agree: what differs stands out
        is_same = all(value == values[0] for value in values)
        cells = [value_cell(values[0], columns=len(runs))] if is_same else map(value_cell, values)
        rows.append([escape(key), *cells])
    return _section("environment", rows, "", *(run.name for run in runs))


def _environment_of(run: Run) -> dict[str, Any]:
    meta, facts = run.meta or {}, {key: value for key, value in run.versions.items() if key != "notes"}
    facts |= {f"note {i}": note for i, note in enumerate(run.versions.get("notes", []), 1)}
    later = {key: value for key, value in meta.get("versions", {}).items() if run.versions.get(key) != value}
    if trainer := meta.get("config", {}).get("trainer"):
        later |= {f"trainer.{key}": now for key, (_, now) in differing([run.config["trainer"], trainer])}
    facts |= {f"{key}, newest checkpoint": value for key, value in later.items()}
    return facts | ({"devices": meta["num_devices"]} if meta.get("num_devices") else {})
