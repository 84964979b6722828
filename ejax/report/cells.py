"""Cells and tables of the page: each number in a ``<data value=…>`` that holds it exactly, each text escaped."""

import datetime
import json
from collections.abc import Sequence
from html import escape
from typing import Any

from ejax.logs.charts import NUM_COLOURS, number_text

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
        text = str(datetime.timedelta(seconds=round(seconds)))
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
    return (
        EMPTY_CELL if value is MISSING else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    )
