"""A run in a notebook: progress, the latest values and curves, in one output that is updated in place.

HTML of our own and not rich's Live, which the terminal has: Live draws no curves.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from ejax.logs.best import Best
from ejax.logs.charts import curve_of, curves_figure
from ejax.logs.latest import GROUPS, Latest
from ejax.schema.plain_files import read_text

_INTERVAL_S = 0.5  # each drawing goes through the kernel's socket
_MAX_NOTES = 6
_CURVES = {
    "charts/episode_reward_avg_100": "return, mean of 100 episodes",
    "charts/success_rate_avg_100": "success, mean of 100 episodes",
    "eval/avg_reward": "return of evaluations",
    "eval/success_rate": "success of evaluations",
}
_OF_MEMBERS = "/median"
"""The end of the tags of a population's summaries."""


class NotebookView:
    """Progress and curves in a cell's output. Redrawn at a bounded rate, and always in the end."""

    def __init__(
        self,
        title: str,
        *,
        total_steps: int,
        start_step: int = 0,
        show: Callable[[str], Callable[[str], object]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Show HTML by ``show``, which gives what replaces it by another. None: IPython's display."""
        self._latest = Latest(title, total_steps=total_steps, start_step=start_step)
        self._history: dict[str, dict[int, float]] = {}
        self._notes: list[str] = []
        self._clock = clock
        self._next = clock() + _INTERVAL_S
        self._replace = (show or _display)(self._html())

    def write(self, step: int, metrics: Mapping[str, float], best: Best | None) -> None:
        self._latest.take(step, metrics, best)
        _remember(self._history, step, metrics)
        if self._clock() >= self._next:
            self._draw()

    def note(self, message: str) -> None:
        """Show a line of free text below the curves; the last few stay."""
        self._notes.append(message)
        self._draw()

    def close(self) -> None:
        self._draw()

    def _draw(self) -> None:
        self._replace(self._html())
        self._next = self._clock() + _INTERVAL_S

    def _html(self) -> str:
        latest, hidden = self._latest, len(self._notes) - _MAX_NOTES
        rows = {group: " · ".join(f"{name} {x}" for name, x in latest.fields(group).items()) for group in GROUPS}
        rows["best"] = latest.best_text()
        notes = [*([f"… {hidden} more before"] if hidden > 0 else []), *self._notes[-_MAX_NOTES:]]
        head = f"<b>{escape(latest.title)}</b> {latest.progress}"
        bar = f'<div class=bar><div style="width:{100 * latest.fraction:.1f}%"></div></div>'
        pace = f"<div class=dim>{escape(latest.pace())}</div>"
        text = f"<pre>{escape(chr(10).join(notes))}</pre>" if notes else ""
        return _page(head, bar, pace, _figures(self._history), _table(rows), text)


def result_html(facts: Mapping[str, str], rows: Iterable[Mapping[str, float]]) -> str:
    """Show a run's end as HTML: facts, and curves of ``rows``, which have a ``global_step`` and metrics each."""
    history: dict[str, dict[int, float]] = {}
    for row in rows:
        _remember(history, int(row["global_step"]), row)
    return _page(_figures(history), _table(facts))


def _page(*parts: str) -> str:
    style = read_text(Path(__file__).with_suffix(".css"))
    return f"<div class=ejax-run><style>{style}</style>{''.join(parts)}</div>"


def _remember(history: dict[str, dict[int, float]], step: int, metrics: Mapping[str, float]) -> None:
    for tag in _CURVES:
        value = metrics.get(tag, metrics.get(tag + _OF_MEMBERS, math.nan))  # of a population the median
        if math.isfinite(value):
            history.setdefault(tag, {})[step] = value


def _figures(history: Mapping[str, Mapping[int, float]]) -> str:
    figures = [
        curves_figure(name, [curve_of(name, 0, [history[tag]])], "steps")
        for tag, name in _CURVES.items()
        if tag in history
    ]
    return f"<div class=curves-of>{''.join(figures)}</div>" if figures else ""


def _table(rows: Mapping[str, str]) -> str:
    cells = [
        f"<tr><td class=dim>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in rows.items() if text
    ]
    return f"<table>{''.join(cells)}</table>" if cells else ""


def _display(html: str) -> Callable[[str], object]:
    from IPython.display import HTML, display

    handle: Any = display(HTML(html), display_id=True)
    return lambda html: handle.update(HTML(html))
