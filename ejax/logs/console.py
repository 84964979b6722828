"""A run on the screen: a live view in a terminal or a notebook, plain lines everywhere else.

A terminal has one table that stays in place: rollout, evaluation, train and time, with progress and the best so far.
Plain lines have EmbodiChain's form, ``[train] step=… done=… left=… sps=… avgReward(100)=… avgLength(100)=…``, and then
the update's own metrics as far as a short line has room; at most one a second, in a long run one per hundredth of its
time so far, and always the last. A notebook has the terminal's table as HTML, updated in place, and a curve.
"""

import io
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any, TextIO, TypeVar

from rich.box import HORIZONTALS
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ejax.logs.best import Best
from ejax.schema.messages import duration, number
from ejax.schema.plain_files import read_text

_Item = TypeVar("_Item")
_MAX_ROWS = 12
_HEAD_LINES, _GAP = 5, 3
_COLUMNS = ((150, 4), (70, 2), (0, 1))
"""Least width of a terminal -> blocks beside each other."""
_REFRESH_HZ = 4
_PLAIN_WIDTH = 120  # a log stays readable; metrics.jsonl has everything
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
_ODD = ("skipped_", "nonfinite_episodes", "repeated_episodes", "unfinished_episodes")
"""Counts that are of interest where they are not 0."""
_FIRST = [*SHORT_NAME, "eval/avg_reward", "eval/avg_length", "eval/success_rate"]
"""Tags that a person looks for, beside each other in rollout and evaluation."""
_LAST = "memory/"
BLOCKS = ("rollout", "evaluation", "train", "time")
_BLOCK_OF = {"eval": "evaluation", "train": "train", "time": "time", "memory": "time"}
"""A tag's first part -> its block; all others are of the rollout, as are ``charts/…``, but for the speed."""


class Latest:
    """The progress of a run, and its latest values. Other threads always see whole ones.

    Args:
        watched: tag of the metric that decides which evaluation is the best.
        acts: how evaluations act; discrete actions have no mean.
    """

    def __init__(
        self, title: str, *, total_steps: int, start_step: int = 0, watched: str = "", acts: str = "mean action"
    ) -> None:
        self.title, self.total_steps, self.step = title, total_steps, start_step
        self.watched, self.acts = watched.removeprefix("eval/"), acts
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
        total = {tag: self._values.get(tag, 0.0) + x for tag, x in metrics.items() if tag.startswith("time/")}
        self._values = {**self._values, **metrics, **total}  # a new mapping: a drawing thread has the old one whole
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
        return f"{elapsed}   ETA {self.time_left()}{'' if math.isnan(rate) else f'   {rate:,.0f} steps/s'}"

    def heads(self) -> dict[str, tuple[str, str]]:
        """Return for each block its title and what its numbers are of."""
        at = _at(self._eval_step, " at {:,}")
        acts = {"rollout": "sampled actions", "evaluation": self.acts, "time": "since the start"}
        return {block: (block + at * (block == "evaluation"), acts.get(block, "")) for block in BLOCKS}

    def record(self) -> str:
        """Name the best evaluation so far."""
        if self.best is None:
            return "no evaluation yet"
        return f"best {self.watched} {number(self.best.value)}{_at(self.best.step, ' at step {:,}')}"

    def blocks(self) -> dict[str, dict[str, str]]:
        """Sort the latest values into the blocks of the table: block -> name -> text."""
        found: dict[str, dict[str, str]] = {block: {} for block in BLOCKS}
        values = self._values
        for tag in sorted(values, key=lambda tag: [tag.startswith(_LAST), *(not tag.startswith(x) for x in _FIRST)]):
            value, (group, _, name) = values[tag], tag.partition("/")
            if tag == "charts/SPS" or (value == 0.0 and name.startswith(_ODD)):
                continue
            short = (group in _BLOCK_OF or group == "charts") and not tag.startswith(_LAST)
            name = SHORT_NAME.get(tag, name if short else tag.replace(_LAST, "memory "))
            text = f"{value:.1f} s" if group == "time" else number(value)
            found[_BLOCK_OF.get(group, "rollout")][name.removesuffix("_s").replace("_mib", " [MiB]")] = text
        return found

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


def make_console(
    title: str, *, total_steps: int, file: TextIO | None = None, start_step: int = 0, **shown: str
) -> "NotebookView | LiveView | PlainView":
    """Make the view that fits ``file`` (default: standard output): live in a terminal or a notebook, else plain.

    Args:
        shown: ``watched`` and ``acts`` of ``Latest``.
    """
    latest = Latest(title, total_steps=total_steps, start_step=start_step, **shown)
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


@contextmanager
def working(what: str, total: int | None = None) -> Iterator[Callable[[], object]]:
    """Show on a terminal, on standard error, that work of seconds is under way, and for how long. Elsewhere nothing.

    Args:
        total: parts of the work, or the most of them. None: it has none.

    Yields:
        A function to call when a part is done.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    terminal = Console(stderr=True)
    hidden = not sys.stderr.isatty() or terminal.is_dumb_terminal
    parts = () if total is None else (BarColumn(), MofNCompleteColumn())
    columns = (SpinnerColumn(), TextColumn("{task.description}"), *parts, TimeElapsedColumn())
    # a line that is printed meanwhile stands above; what goes into a file must stay there
    with Progress(
        *columns, console=terminal, transient=True, disable=hidden, redirect_stdout=sys.stdout.isatty()
    ) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


def followed(items: Iterable[_Item], what: str, total: int | None = None) -> Iterator[_Item]:
    """Yield the items, as parts of ``working``."""
    with working(what, total) as advance:
        for item in items:
            yield item
            advance()


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
        self._clock, self._began = clock, clock()
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
            end = f" best={number(best.value)}{_at(best.step, '@{}')}" if best else ""
            self._print(f"[eval] step={step} {self._latest.acts}:", fields, end)

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
        progress = f"done={self._latest.fraction:.0%} left={self._latest.time_left()}"
        self._print(f"[train] step={self._pending_step} {progress}", first | rest)
        self._pending = {}
        now = self._clock()
        self._next_line = now + max(_PLAIN_INTERVAL_S, (now - self._began) / 100)

    def _print(self, line: str, fields: Mapping[str, float], end: str = "") -> None:
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
        return _picture(self._latest, self._terminal.width - len("^C"), self._terminal.height)


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
        return _page(
            _as_html(_picture(self._latest, _HTML_WIDTH)),
            _figure(self._rows),
            f"<pre>{escape(chr(10).join(notes))}</pre>",
        )


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


def _picture(latest: Latest, width: int, height: int = 1000) -> RenderableType:
    progress = Table.grid(padding=(0, 1))
    progress.add_column(no_wrap=True, overflow="ellipsis", max_width=30)
    progress.add_column(ratio=1, min_width=10)
    progress.add_column(justify="right", no_wrap=True)
    bar = ProgressBar(total=1.0, completed=latest.fraction)
    done = f"{latest.fraction:4.0%}  {latest.step:,}/{latest.total_steps:,}"
    progress.add_row(Text(latest.title, style="bold"), bar, done)
    count = next(columns for least, columns in _COLUMNS if width >= least)
    # a terminal has few rows, and one more would make the table scroll
    rows = min(_MAX_ROWS, max(2, (height - _HEAD_LINES) // (len(BLOCKS) // count) - 2))
    heads = latest.heads()
    blocks = [_block(*heads[name], fields, rows) for name, fields in latest.blocks().items()]
    table = Table.grid(padding=(0, _GAP, 0, 0), pad_edge=False)
    for _ in range(count):  # all of one width: nothing jumps when a digit or a sign comes or goes
        table.add_column(width=(width + _GAP) // count - _GAP)
    for first in range(0, len(blocks), count):
        table.add_row(*blocks[first : first + count])
    progress.width = width
    pace = Text(latest.pace(), style="" if latest.has_begun else "dim", no_wrap=True, overflow="ellipsis")
    return Group(progress, pace, Text(latest.record(), style="bold" if latest.best else "dim"), table)


def _block(title: str, acts: str, fields: Mapping[str, str], rows: int) -> Table:
    block = Table(box=HORIZONTALS, show_edge=False, expand=True, padding=0, header_style="bold", border_style="dim")
    block.add_column(title, style="cyan", no_wrap=True, overflow="ellipsis", ratio=1)
    block.add_column(Text(acts, style="dim"), justify="right", no_wrap=True, min_width=1)
    shown = list(fields.items())
    if len(shown) > rows:
        shown[rows - 1 :] = [(f"… {len(shown) - rows + 1} more", "")]
    for field in shown or [("–", "")]:
        block.add_row(*field)
    return block


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


def _fact(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return f"{value:,}" if type(value) is int else str(value)
