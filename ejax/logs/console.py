"""A run on the screen: a live view in a terminal or a notebook, plain lines everywhere else.

Plain lines have EmbodiChain's form, ``[train] step=… done=… left=… sps=… avgReward(100)=… avgLength(100)=…``, and then
the update's own metrics as far as the line has room; at most one a second, and always the last.
"""

import datetime
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TextIO

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ejax.logs.best import Best
from ejax.logs.latest import GROUPS, SHORT_NAME, Latest, at, duration, number

_MAX_CELLS = 12
_MAX_NAME = 20
_MIN_VALUE = 10
_REFRESH_HZ = 4
_PLAIN_WIDTH = 160  # a log stays readable; metrics.jsonl has everything
_PLAIN_INTERVAL_S = 1.0  # a log file of millions of updates stays readable


class View(Protocol):
    """One way to show a run. Called from one thread."""

    def write(self, step: int, metrics: Mapping[str, float], best: Best | None) -> None: ...
    def note(self, message: str) -> None: ...
    def close(self) -> None: ...


def make_console(title: str, *, total_steps: int, start_step: int = 0, file: TextIO | None = None) -> View:
    """Make the view that fits ``file`` (default: standard output): live in a terminal or a notebook, else plain."""
    if file is None and in_notebook():
        from ejax.logs.notebook import NotebookView  # draws curves

        return NotebookView(title, total_steps=total_steps, start_step=start_step)
    file = file or sys.stdout
    terminal = Console(file=file)
    # Not `terminal.is_terminal`: FORCE_COLOR turns that on, and cursor movements would fill a log file.
    if file.isatty() and not terminal.is_dumb_terminal:
        return LiveView(terminal, title, total_steps=total_steps, start_step=start_step)
    return PlainView(file, Latest(title, total_steps=total_steps, start_step=start_step))


def in_notebook() -> bool:
    """Return whether this process runs a notebook's cells."""
    # not imported: whoever runs a notebook has
    ipython, kernels = sys.modules.get("IPython"), sys.modules.get("ipykernel.zmqshell")
    return (
        ipython is not None and kernels is not None and isinstance(ipython.get_ipython(), kernels.ZMQInteractiveShell)
    )


def summary(facts: Mapping[str, object], file: TextIO | None = None) -> None:
    """Print the final facts of a run, in their order: a table in a terminal, ``[summary]`` lines otherwise.

    Integers get thousands separators, floats four digits, a ``datetime.timedelta`` is shown as h:mm:ss.
    """
    file = file or sys.stdout
    if not file.isatty():
        for name, value in facts.items():
            print(f"[summary] {name}: {_fact(value)}", file=file, flush=True)
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")  # a long path stays whole, and can be copied
    for name, value in facts.items():
        table.add_row(name, Text(_fact(value)))
    terminal = Console(file=file)
    terminal.rule("summary", style="dim")
    terminal.print(table)


class PlainView:
    """Lines for log files and pipes: ``[train]`` at a bounded rate and always the last, ``[eval]`` always."""

    def __init__(
        self, file: TextIO, latest: Latest | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file, self._latest = file, latest
        self._clock = clock
        self._next_line = -math.inf
        self._pending: dict[str, float] = {}
        self._pending_step = 0

    def write(self, step: int, metrics: Mapping[str, float], best: Best | None) -> None:
        if self._latest is not None:
            self._latest.take(step, metrics, best)
        train = {tag: value for tag, value in metrics.items() if not tag.startswith("eval/")}
        if train:
            self._pending.update(train)  # values of skipped lines stay until they are shown
            self._pending_step = step
            if self._clock() >= self._next_line:
                self._print_pending()
        if len(train) < len(metrics):  # an evaluation: what came before it is shown first
            self._print_pending()
            fields = {tag.removeprefix("eval/"): v for tag, v in metrics.items() if tag not in train}
            self._print("eval", step, fields, f" best={number(best.value)}{at(best.step, '@{}')}" if best else "")

    def note(self, message: str) -> None:
        print(message, file=self._file, flush=True)

    def close(self) -> None:
        """Print what has not been printed yet. The file stays open."""
        self._print_pending()

    def _print_pending(self) -> None:
        if not self._pending:
            return
        first = {name: self._pending.pop(tag) for tag, name in SHORT_NAME.items() if tag in self._pending}
        own = {tag: value for tag, value in self._pending.items() if tag.startswith("train/")}
        rest = {tag.removeprefix("train/"): value for tag, value in own.items() if value != 0.0}  # nothing was skipped
        self._print("train", self._pending_step, first | rest)
        self._pending = {}
        self._next_line = self._clock() + _PLAIN_INTERVAL_S

    def _print(self, label: str, step: int, fields: Mapping[str, float], end: str = "") -> None:
        line = f"[{label}] step={step}"
        if self._latest is not None and label == "train":
            line += f" done={self._latest.fraction:.0%} left={self._latest.time_left()}"
        for i, (name, value) in enumerate(fields.items()):
            field, rest = f" {name}={number(value)}", f" … {len(fields) - i} more"
            if len(line + field + end) + (len(rest) if i < len(fields) - 1 else 0) > _PLAIN_WIDTH:
                line += rest
                break
            line += field
        print(line + end, file=self._file, flush=True)


class LiveView:
    """A progress bar and the latest values, redrawn in place by a thread: training does not wait for the terminal."""

    def __init__(self, terminal: Console, title: str, *, total_steps: int, start_step: int = 0) -> None:
        self._terminal = terminal
        self._latest = Latest(title, total_steps=total_steps, start_step=start_step)
        self._live = Live(console=terminal, get_renderable=self._render, refresh_per_second=_REFRESH_HZ)
        self._live.start()  # a thread redraws from here on

    def write(self, step: int, metrics: Mapping[str, float], best: Best | None) -> None:
        self._latest.take(step, metrics, best)

    def note(self, message: str) -> None:
        self._terminal.print(message, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        pace = Text(self._latest.pace(), style="" if self._latest.has_begun else "dim")
        view = Group(self._progress(), pace, self._groups())
        # The echo of ctrl-C must not wrap the last line: the next redraw would be a line too low.
        return Constrain(view, self._terminal.width - len("^C"))

    def _progress(self) -> Table:
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True, overflow="ellipsis", max_width=30)
        row.add_column(ratio=1, min_width=10)
        row.add_column(justify="right", no_wrap=True)
        bar = ProgressBar(total=1.0, completed=self._latest.fraction)
        row.add_row(Text(self._latest.title, style="bold"), bar, self._latest.progress)
        return row

    def _groups(self) -> Table:
        rows = {group: self._latest.fields(group) for group in GROUPS}
        names = [name for fields in rows.values() for name in fields]
        values = [value for fields in rows.values() for value in fields.values()]
        # One width for all cells: the rows align, and nothing jumps when a digit or a sign comes or goes.
        name_width = min(max(map(len, names), default=0), _MAX_NAME)
        value_width = max([_MIN_VALUE, *map(len, values)])
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(style="dim", no_wrap=True)
        table.add_column(ratio=1)
        for group, fields in rows.items():
            cells = [_cell(name, value, name_width, value_width) for name, value in fields.items()]
            if len(cells) > _MAX_CELLS:  # a terminal has few rows
                cells[_MAX_CELLS:] = [Text(f"… {len(cells) - _MAX_CELLS} more", style="dim")]
            if cells:
                table.add_row(group, Columns(cells, width=name_width + 1 + value_width, padding=(0, 2)))
        if best := self._latest.best_text():
            table.add_row("best", best)
        return table


def what_moved(history: Sequence[Mapping[str, float]]) -> str:
    """Give the first and last return, length and success of a training, as logged, in one line."""
    texts = []
    for tag, name in SHORT_NAME.items():
        values = [row[tag] for row in history if tag in row]
        if values and tag != "charts/SPS":  # speed is in the summary already
            texts.append(f"{name} {number(values[0])} → {number(values[-1])}")
    return ", ".join(texts)


def _cell(name: str, value: str, name_width: int, value_width: int) -> Text:
    if len(name) > name_width:
        name = name[: name_width - 1] + "…"
    return Text.assemble((name.ljust(name_width), "cyan"), f" {value:>{value_width}}", no_wrap=True)


def _fact(value: object) -> str:
    match value:
        case bool():
            return str(value)
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
        case datetime.timedelta():
            return duration(value.total_seconds())
        case _:
            return str(value)
