"""A run on the screen: a live view in a terminal or a notebook, plain lines everywhere else.

Plain lines have EmbodiChain's form, ``[train] step=… done=… left=… sps=… avgReward(100)=… avgLength(100)=…``, and then
the update's own metrics as far as the line has room; at most one a second, and always the last. A notebook has the
terminal's tables as HTML, in one output that is updated in place, and a curve.
"""

import io
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ejax.logs.best import Best
from ejax.schema.messages import duration, number
from ejax.schema.plain_files import read_text

_MAX_CELLS = 12
_MAX_NAME = 20
_MIN_VALUE = 10
_REFRESH_HZ = 4
_PLAIN_WIDTH = 160  # a log stays readable; metrics.jsonl has everything
_PLAIN_INTERVAL_S = 1.0  # a log file of millions of updates stays readable
_HTML_WIDTH = 110
_HTML_INTERVAL_S = 0.5  # each drawing goes through the kernel's socket
_MAX_NOTES = 6
_RETURNS = {"charts/episode_reward_avg_100": "training, mean of 100 episodes", "eval/avg_reward": "evaluations"}
"""Tags that a notebook draws; of a population their medians."""
SHORT_NAME = {
    "charts/SPS": "sps",
    "charts/episode_reward_avg_100": "avgReward(100)",
    "charts/episode_length_avg_100": "avgLength(100)",
    "charts/success_rate_avg_100": "success(100)",
}
"""EmbodiChain's."""
GROUPS = ("charts", "train", "rewards", "metrics", "eval")


class Latest:
    """The progress of a run, and its latest values. Other threads always see whole ones."""

    def __init__(self, title: str, *, total_steps: int, start_step: int = 0) -> None:
        self.title, self.total_steps, self.step = title, total_steps, start_step
        self.best: Best | None = None
        self._start_time = time.monotonic()
        self._first_write: tuple[int, float] | None = None
        self._last_write_time = self._start_time
        self._values: dict[str, float] = {}
        self._eval_step: int | None = None

    def take(self, step: int, metrics: Mapping[str, float], best: Best | None) -> None:
        self._last_write_time = time.monotonic()
        if self._first_write is None and step > self.step:
            self._first_write = (step, self._last_write_time)
        self._values = {**self._values, **metrics}  # a new mapping: a drawing thread has the old one whole
        self.step = step
        self.best = best
        if any(tag.startswith("eval/") for tag in metrics):
            self._eval_step = step

    @property
    def fraction(self) -> float:
        return min(self.step / max(self.total_steps, 1), 1.0)

    @property
    def has_begun(self) -> bool:
        return self._first_write is not None

    def pace(self) -> str:
        elapsed = f"{duration(time.monotonic() - self._start_time)} elapsed"
        if not self.has_begun:
            return f"{elapsed}, waiting for the first update (compiling)"
        rate = self._values.get("charts/SPS", math.nan)
        return f"{elapsed}  {self.time_left()} left{'' if math.isnan(rate) else f'  {rate:,.0f} steps/s'}"

    def fields(self, group: str) -> dict[str, str]:
        tags = [tag for tag in self._values if tag.startswith(group + "/") and tag != "charts/SPS"]
        fields = {SHORT_NAME.get(tag, tag.removeprefix(group + "/")): number(self._values[tag]) for tag in tags}
        if group == "eval" and self._eval_step is not None:
            return {"at step": f"{self._eval_step:,}", **fields}
        return fields

    def time_left(self) -> str:
        """Return the time for the remaining steps at the rate since the first update, to leave compilation out."""
        if self.step >= self.total_steps:
            return duration(0)
        # without compilation, which comes once
        first_step, first_time = self._first_write or (self.step, self._start_time)
        if self.step <= first_step:  # no rate is known yet
            return "-:--:--"
        seconds_per_step = (self._last_write_time - first_time) / (self.step - first_step)
        due = self._last_write_time + (self.total_steps - self.step) * seconds_per_step
        return duration(max(due - time.monotonic(), 0))


class View(Protocol):
    """One way to show a run. Called from one thread."""

    def write(self, step: int, metrics: Mapping[str, float], best: Best | None) -> None: ...
    def note(self, message: str) -> None: ...
    def close(self) -> None: ...


def make_console(title: str, *, total_steps: int, start_step: int = 0, file: TextIO | None = None) -> View:
    """Make the view that fits ``file`` (default: standard output): live in a terminal or a notebook, else plain."""
    latest = Latest(title, total_steps=total_steps, start_step=start_step)
    if file is None and in_notebook():
        return NotebookView(latest)
    file = file or sys.stdout
    terminal = Console(file=file)
    # Not `terminal.is_terminal`: FORCE_COLOR turns that on, and cursor movements would fill a log file.
    if file.isatty() and not terminal.is_dumb_terminal:
        return LiveView(terminal, latest)
    return PlainView(file, latest)


def in_notebook() -> bool:
    """Return whether this process runs a notebook's cells."""
    # not imported: whoever runs a notebook has
    ipython, kernels = sys.modules.get("IPython"), sys.modules.get("ipykernel.zmqshell")
    return (
        ipython is not None and kernels is not None and isinstance(ipython.get_ipython(), kernels.ZMQInteractiveShell)
    )


def summary(facts: Mapping[str, object], file: TextIO | None = None) -> None:
    """Print the final facts of a run, in their order: a table in a terminal, ``[summary]`` lines otherwise.

    Integers get thousands separators, floats four digits.
    """
    file = file or sys.stdout
    if not file.isatty():
        for name, value in facts.items():
            print(f"[summary] {name}: {_fact(value)}", file=file, flush=True)
        return
    terminal = Console(file=file)
    terminal.rule("summary", style="dim")
    terminal.print(_facts_table(facts))


def _facts_table(facts: Mapping[str, object]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")  # a long path stays whole, and can be copied
    for name, value in facts.items():
        table.add_row(name, Text(_fact(value)))
    return table


class PlainView:
    """Lines for log files and pipes: ``[train]`` at a bounded rate and always the last, ``[eval]`` always."""

    def __init__(self, file: TextIO, latest: Latest, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._latest = file, latest
        self._clock = clock
        self._next_line = -math.inf
        self._pending: dict[str, float] = {}
        self._pending_step = 0

    def write(self, step: int, metrics: Mapping[str, float], best: Best | None) -> None:
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
            self._print("eval", step, fields, f" best={number(best.value)}{_at(best.step, '@{}')}" if best else "")

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
        if label == "train":
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

    def __init__(self, terminal: Console, latest: Latest) -> None:
        self._terminal, self._latest = terminal, latest
        self._live = Live(console=terminal, get_renderable=self._render, refresh_per_second=_REFRESH_HZ)
        self._live.start()  # a thread redraws from here on

    def write(self, step: int, metrics: Mapping[str, float], best: Best | None) -> None:
        self._latest.take(step, metrics, best)

    def note(self, message: str) -> None:
        self._terminal.print(message, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        # The echo of ctrl-C must not wrap the last line: the next redraw would be a line too low.
        return Constrain(_picture(self._latest), self._terminal.width - len("^C"))


class NotebookView:
    """The live view's tables and the returns in a cell's output. Redrawn at a bounded rate, and always in the end.

    Args:
        show: shows HTML, and returns what replaces it by another. None: IPython's display.
    """

    def __init__(
        self,
        latest: Latest,
        *,
        show: Callable[[str], Callable[[str], object]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._latest, self._clock = latest, clock
        self._rows: list[dict[str, float]] = []
        self._notes: list[str] = []
        self._next = clock() + _HTML_INTERVAL_S
        self._replace = (show or _display)(self._html())

    def write(self, step: int, metrics: Mapping[str, float], best: Best | None) -> None:
        self._latest.take(step, metrics, best)
        # of a population the median
        drawn = {tag: metrics.get(tag, metrics.get(f"{tag}/median", math.nan)) for tag in _RETURNS}
        self._rows.append({"global_step": step, **drawn})
        if self._clock() >= self._next:
            self.close()

    def note(self, message: str) -> None:
        """Show a line of free text below the curves; the last few stay."""
        self._notes.append(message)
        self.close()

    def close(self) -> None:
        """Draw what has not been drawn yet."""
        self._replace(self._html())
        self._next = self._clock() + _HTML_INTERVAL_S

    def _html(self) -> str:
        hidden = len(self._notes) - _MAX_NOTES
        notes = [*([f"… {hidden} more before"] if hidden > 0 else []), *self._notes[-_MAX_NOTES:]]
        return _page(_as_html(_picture(self._latest)), _figure(self._rows), f"<pre>{escape(chr(10).join(notes))}</pre>")


def result_html(facts: Mapping[str, object], rows: Iterable[Mapping[str, float]]) -> str:
    """Show a run's end as HTML: facts, and the returns in ``rows``, which have a ``global_step`` and metrics each."""
    return _page(_figure(rows), _as_html(_facts_table(facts)))


def _page(*parts: str) -> str:
    style = read_text(Path(__file__).with_suffix(".css"))
    return f"<div class=ejax-run><style>{style}</style>{''.join(parts)}</div>"


def _as_html(shown: RenderableType) -> str:
    page = Console(file=io.StringIO(), record=True, width=_HTML_WIDTH, force_jupyter=False)
    page.print(shown)
    return page.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def _figure(rows: Iterable[Mapping[str, float]]) -> str:
    from ejax.logs.charts import NUM_COLOURS, curve_of, curves_figure  # which most runs need not wait for

    history: dict[str, dict[int, float]] = {}
    for row in rows:
        for tag in _RETURNS:
            if math.isfinite(value := row.get(tag, math.nan)):
                history.setdefault(tag, {})[int(row["global_step"])] = value
    # of evaluations: dashed
    curves = [
        curve_of(name, i * NUM_COLOURS, [history[tag]])
        for i, (tag, name) in enumerate(_RETURNS.items())
        if tag in history
    ]
    return curves_figure("return in training, and of evaluations (dashed)", curves, "steps") if curves else ""


def _display(html: str) -> Callable[[str], object]:
    from IPython.display import HTML, display

    handle: Any = display(HTML(html), display_id=True)
    return lambda html: handle.update(HTML(html))


def _picture(latest: Latest) -> RenderableType:
    pace = Text(latest.pace(), style="" if latest.has_begun else "dim")
    progress = Table.grid(padding=(0, 1), expand=True)
    progress.add_column(no_wrap=True, overflow="ellipsis", max_width=30)
    progress.add_column(ratio=1, min_width=10)
    progress.add_column(justify="right", no_wrap=True)
    bar = ProgressBar(total=1.0, completed=latest.fraction)
    done = f"{latest.fraction:4.0%}  {latest.step:,}/{latest.total_steps:,}"
    progress.add_row(Text(latest.title, style="bold"), bar, done)
    return Group(progress, pace, _groups(latest))


def _groups(latest: Latest) -> Table:
    rows = {group: latest.fields(group) for group in GROUPS}
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
    if latest.best is not None:
        table.add_row("best", number(latest.best.value) + _at(latest.best.step, " at step {:,}"))
    return table


def what_moved(history: Sequence[Mapping[str, float]]) -> str:
    """Return the first and last return, length and success of a training, as logged, in one line."""
    texts = []
    for tag, name in SHORT_NAME.items():
        values = [row[tag] for row in history if tag in row]
        if values and tag != "charts/SPS":  # speed is in the summary already
            texts.append(f"{name} {number(values[0])} → {number(values[-1])}")
    return ", ".join(texts)


def _at(step: int | None, form: str) -> str:
    return "" if step is None else form.format(step)


def _cell(name: str, value: str, name_width: int, value_width: int) -> Text:
    if len(name) > name_width:
        name = name[: name_width - 1] + "…"
    return Text.assemble((name.ljust(name_width), "cyan"), f" {value:>{value_width}}", no_wrap=True)


def _fact(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return f"{value:,}" if type(value) is int else str(value)
