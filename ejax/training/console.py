"""What a person sees of a run: a live view in a terminal, plain lines everywhere else.

Plain lines have EmbodiChain's form, ``[train] step=… sps=… avgReward(100)=… avgLength(100)=…``, and then what
the update says of itself. EmbodiChain prints one for each rollout; here at most one a second, and always the last.
All other numbers are in the log.
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

from ejax.training.best import Best

_SHORT_NAME = {
    "charts/SPS": "sps",
    "charts/episode_reward_avg_100": "avgReward(100)",
    "charts/episode_length_avg_100": "avgLength(100)",
    "charts/success_rate_avg_100": "success(100)",
}
_GROUPS = ("charts", "train", "rewards", "metrics", "eval")
_MAX_CELLS = 12
_MAX_NAME = 20
_MIN_VALUE = 10
_REFRESH_HZ = 4
_PLAIN_INTERVAL_S = 1.0


class View(Protocol):
    """One way to show a run. Called from one thread."""

    def write(self, step: int, metrics: Mapping[str, float], best: Best | None) -> None: ...
    def note(self, message: str) -> None: ...
    def close(self) -> None: ...


def make_view(title: str, *, total_steps: int, start_step: int = 0, file: TextIO | None = None) -> View:
    """Make the live view if ``file`` (default: standard output) is a terminal, the plain one otherwise."""
    file = file or sys.stdout
    terminal = Console(file=file)
    # Not `terminal.is_terminal`: FORCE_COLOR turns that on, and cursor movements would fill a log file.
    if file.isatty() and not terminal.is_dumb_terminal:
        return LiveView(terminal, title, total_steps=total_steps, start_step=start_step)
    return PlainView(file)


def summary(facts: Mapping[str, object], file: TextIO | None = None) -> None:
    """Print the final facts of a run, in their order: a table in a terminal, ``[summary]`` lines otherwise.

    Args:
        facts: name -> value. Integers get thousands separators, floats four digits, a ``datetime.timedelta``
            is shown as h:mm:ss, anything else by ``str``.
        file: default: standard output.
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

    def __init__(self, file: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._clock = clock
        self._next_line = -math.inf
        self._pending: dict[str, float] = {}
        self._pending_step = 0

    def write(self, step: int, metrics: Mapping[str, float], best: Best | None) -> None:
        """Print ``metrics``, or keep them for the next line if the last one was less than a second ago."""
        train = {tag: value for tag, value in metrics.items() if not tag.startswith("eval/")}
        if train:
            self._pending.update(train)
            self._pending_step = step
            if self._clock() >= self._next_line:
                self._print_pending()
        if len(train) < len(metrics):
            self._print_pending()
            fields = {tag.removeprefix("eval/"): v for tag, v in metrics.items() if tag not in train}
            self._print("eval", step, fields, f" best={_number(best.value)}{_at(best.step, '@{}')}" if best else "")

    def note(self, message: str) -> None:
        """Print a line of free text."""
        print(message, file=self._file, flush=True)

    def close(self) -> None:
        """Print what has not been printed yet. The file stays open: it belongs to the caller."""
        self._print_pending()

    def _print_pending(self) -> None:
        if not self._pending:
            return
        first = {name: self._pending.pop(tag) for tag, name in _SHORT_NAME.items() if tag in self._pending}
        own = {tag: value for tag, value in self._pending.items() if tag.startswith("train/")}
        rest = {tag.removeprefix("train/"): value for tag, value in own.items() if value != 0.0}  # nothing was skipped
        self._print("train", self._pending_step, first | rest)
        self._pending = {}
        self._next_line = self._clock() + _PLAIN_INTERVAL_S

    def _print(self, label: str, step: int, fields: Mapping[str, float], end: str = "") -> None:
        text = "".join(f" {name}={_number(value)}" for name, value in fields.items())
        print(f"[{label}] step={step}{text}{end}", file=self._file, flush=True)


class LiveView:
    """A progress bar and the latest values, redrawn in place by a thread of rich's.

    ``write`` only rebinds attributes to new objects, so the drawing thread always sees whole ones, and the
    training loop does not wait for the terminal.
    """

    def __init__(self, terminal: Console, title: str, *, total_steps: int, start_step: int = 0) -> None:
        self._terminal = terminal
        self._title = title
        self._total_steps = total_steps
        self._step = start_step
        self._start_time = time.monotonic()
        self._first_write: tuple[int, float] | None = None
        self._last_write_time = self._start_time
        self._latest: dict[str, float] = {}
        self._eval_step: int | None = None
        self._best: Best | None = None
        self._live = Live(console=terminal, get_renderable=self._render, refresh_per_second=_REFRESH_HZ)
        self._live.start()

    def write(self, step: int, metrics: Mapping[str, float], best: Best | None) -> None:
        """Take over ``metrics``; the next redraw shows them."""
        self._last_write_time = time.monotonic()
        if self._first_write is None and step > self._step:
            self._first_write = (step, self._last_write_time)
        self._latest = {**self._latest, **metrics}
        self._step = step
        self._best = best
        if any(tag.startswith("eval/") for tag in metrics):
            self._eval_step = step

    def note(self, message: str) -> None:
        """Print a line above the bar."""
        self._terminal.print(message, markup=False, highlight=False)

    def close(self) -> None:
        """Draw once more and leave that on the screen."""
        self._live.stop()

    def _render(self) -> RenderableType:
        view = Group(self._progress(), self._pace(), self._groups())
        # The echo of ctrl-C must not wrap the last line: the next redraw would be a line too low.
        return Constrain(view, self._terminal.width - len("^C"))

    def _progress(self) -> Table:
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True, overflow="ellipsis", max_width=30)
        row.add_column(ratio=1, min_width=10)
        row.add_column(justify="right", no_wrap=True)
        fraction = min(self._step / max(self._total_steps, 1), 1.0)
        bar = ProgressBar(total=1.0, completed=fraction)
        steps = f"{fraction:4.0%}  {self._step:,}/{self._total_steps:,}"
        row.add_row(Text(self._title, style="bold"), bar, steps)
        return row

    def _pace(self) -> Text:
        elapsed = f"{_duration(time.monotonic() - self._start_time)} elapsed"
        if self._first_write is None:
            return Text(f"{elapsed}, waiting for the first update (compiling)", style="dim")
        rate = self._latest.get("charts/SPS", math.nan)
        pace = "" if math.isnan(rate) else f"  {rate:,.0f} steps/s"
        return Text(f"{elapsed}  {self._time_left()} left{pace}")

    def _time_left(self) -> str:
        """Remaining steps at the rate since the first update: what came before it was compilation."""
        if self._step >= self._total_steps:
            return _duration(0)
        first_step, first_time = self._first_write or (self._step, self._start_time)
        if self._step <= first_step:
            return "-:--:--"
        seconds_per_step = (self._last_write_time - first_time) / (self._step - first_step)
        due = self._last_write_time + (self._total_steps - self._step) * seconds_per_step
        return _duration(max(due - time.monotonic(), 0))

    def _groups(self) -> Table:
        rows = {group: self._fields(group) for group in _GROUPS}
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
            if len(cells) > _MAX_CELLS:
                cells[_MAX_CELLS:] = [Text(f"… {len(cells) - _MAX_CELLS} more", style="dim")]
            if cells:
                table.add_row(group, Columns(cells, width=name_width + 1 + value_width, padding=(0, 2)))
        if self._best is not None:
            table.add_row("best", f"{_number(self._best.value)}{_at(self._best.step, ' at step {:,}')}")
        return table

    def _fields(self, group: str) -> dict[str, str]:
        """The latest values of one group of tags, as text, by their short names."""
        latest = self._latest
        tags = [tag for tag in latest if tag.startswith(group + "/") and tag != "charts/SPS"]
        fields = {_SHORT_NAME.get(tag, tag.removeprefix(group + "/")): _number(latest[tag]) for tag in tags}
        if group == "eval" and self._eval_step is not None:
            return {"at step": f"{self._eval_step:,}", **fields}
        return fields


def what_moved(history: Sequence[Mapping[str, float]]) -> str:
    """One line on a training: its first and last return, length and success, as logged; empty where none is."""
    texts = []
    for tag, name in _SHORT_NAME.items():
        values = [row[tag] for row in history if tag in row]
        if values and tag != "charts/SPS":
            texts.append(f"{name} {_number(values[0])} → {_number(values[-1])}")
    return ", ".join(texts)


def _cell(name: str, value: str, name_width: int, value_width: int) -> Text:
    if len(name) > name_width:
        name = name[: name_width - 1] + "…"
    return Text.assemble((name.ljust(name_width), "cyan"), f" {value:>{value_width}}", no_wrap=True)


def _at(step: int | None, form: str) -> str:
    return "" if step is None else form.format(step)


def _number(value: float) -> str:
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:.4g}"


def _duration(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


def _fact(value: object) -> str:
    match value:
        case bool():
            return str(value)
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
        case datetime.timedelta():
            return _duration(value.total_seconds())
        case _:
            return str(value)
