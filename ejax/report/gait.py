"""Gait cards of legged robots as figures: contacts of feet over time, errors over the commands. ``ejax evaluate`` makes
the cards (``ejax.play.gait``)."""

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from pydantic import BaseModel

from ejax.logs.charts import number_text

_LEFT, _WIDTH, _ROW, _CELL = 60, 380, 12, 20
_FULL = 0.5
"""Error that has the full colour, m/s or rad/s."""
COLUMNS = (
    *("velocity_error", "yaw_error", "falls", "asymmetry", "all_down_standing", "slip", "air_time", "torque"),
    *("action_rate", "survive_pushes"),
)
"""Averages of a card in the page's table."""


class Gait(BaseModel):
    """The part of a gait card that is drawn."""

    feet: list[str]
    control_period: float
    commands: list[list[float]]
    columns: dict[str, list[float | None]]
    contacts: dict[str, list[str]]
    summary: dict[str, float | None]


def gait_figures(card: Mapping[str, Any]) -> str:
    contacts = [_contacts(name, rows, card) for name, rows in card["contacts"].items()]
    errors = {"velocity_error": "velocity off, m/s", "yaw_error": "yaw rate off, rad/s"}
    maps = [_heat_map(text, card["columns"].get(name, []), card["commands"]) for name, text in errors.items()]
    return f'<div class="grid">{"".join([*maps, *contacts])}</div>'


def _figure(title: str, height: int, parts: Sequence[str]) -> str:
    drawn = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{escape(title)}</figcaption>{drawn}</figure>"


def _contacts(name: str, rows: Sequence[str], card: Mapping[str, Any]) -> str:
    """Draw when each foot is on the ground: a bar."""
    parts, num_steps = list[str](), max(map(len, rows), default=1)
    size = (_WIDTH - _LEFT - 4) / max(num_steps, 1)
    for i, (foot, touching) in enumerate(zip(card["feet"], rows, strict=False)):
        y = i * (_ROW + 4)
        parts.append(f'<text x="{_LEFT - 5}" y="{y + _ROW - 2}" text-anchor="end">{escape(foot.split("_")[0])}</text>')
        for found in re.finditer("1+", touching):
            place = f'x="{_LEFT + found.start() * size:.1f}" y="{y}" width="{len(found[0]) * size:.1f}" height="{_ROW}"'
            parts.append(f'<rect class="fill c{i % 8}" {place}/>')
    height = len(rows) * (_ROW + 4) + 14
    seconds = number_text(num_steps * card["control_period"])
    parts.append(f'<text x="{_WIDTH - 4}" y="{height - 4}" text-anchor="end">{seconds} s</text>')
    return _figure(f"{name}: feet on the ground", height, parts)


def _heat_map(title: str, errors: Sequence[float | None], commands: Sequence[Sequence[float]]) -> str:
    """Draw an error over the commands: x upwards, y to the left, as the robot sees them; a panel for each yaw rate."""
    xs, ys, yaws = (sorted({command[i] for command in commands}, reverse=True) for i in range(3))
    step_x = (_WIDTH - 40) / max(len(yaws) * (len(ys) + 0.5), 1.0)
    parts = []
    for command, error in zip(commands, errors, strict=False):
        panel, column, row = yaws.index(command[2]), ys.index(command[1]), xs.index(command[0])
        left, top = 40 + (panel * (len(ys) + 0.5) + column) * step_x, 14 + row * _CELL
        share = 1.0 if error is None else min(max(error, 0.0) / _FULL, 1.0)
        place = f'x="{left:.1f}" y="{top}" width="{step_x - 1:.1f}" height="{_CELL - 1}"'
        parts.append(f'<rect class="fill c1" {place} opacity="{0.08 + 0.82 * share:.2f}"/>')
        text = "–" if error is None else f"{error:.1f}" if error >= 0.995 else f"{error:.2f}".removeprefix("0")
        middle = f'x="{left + step_x / 2:.1f}" y="{top + 13}" text-anchor="middle"'
        parts.append(f'<text class="cell" {middle}>{text}</text>')
    for i, yaw in enumerate(yaws):
        x = 40 + (i * (len(ys) + 0.5) + len(ys) / 2) * step_x
        parts.append(f'<text x="{x:.1f}" y="9" text-anchor="middle">{yaw:+g} rad/s</text>')
    height = 14 + len(xs) * _CELL + 14
    parts += [f'<text x="36" y="{27 + i * _CELL}" text-anchor="end">{x:+g}</text>' for i, x in enumerate(xs)]
    ends = f"left {ys[0]:+g} … {ys[-1]:+g} m/s in each panel, forward upwards" if ys else ""
    parts.append(f'<text x="40" y="{height - 3}">{ends}</text>')
    return _figure(f"{title}: full colour from {_FULL:g}", height, parts)
