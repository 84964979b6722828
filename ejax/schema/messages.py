"""Values and texts in messages: short and printable, however long or odd what they come from is."""

import datetime
import difflib
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

MAX_VALUE_CHARS = 200
_MAX_NAME_CHARS = 100  # difflib's time grows with the square of the length
MAX_TEXT_CHARS = 2000  # characters of one message: the longest lists of allowed keys fit
_OURS = Path(__file__).parents[1]
_REMEDY_IN_A_TRACE = {
    "TracerBoolConversionError": "uses Python's if, and, or, not on an array; use jnp.where, &, |, ~",
    "TracerArrayConversionError": "gives an array to NumPy; use jax.numpy",
    "TracerIntegerConversionError": "uses an array where Python wants an integer; index with jnp, or jax.lax",
    "ConcretizationTypeError": "needs an array's value while it is traced; use jnp.where, or jax.lax",
    "UnexpectedTracerError": "uses an array that an earlier trace left behind; keep nothing outside the state",
    "NonConcreteBooleanIndexError": "picks by a mask, which makes an array of unknown size; use jnp.where",
    "KeyReuseError": "uses a key twice; split it",
}


def short_repr(value: Any) -> str:
    return shorten(repr(value), MAX_VALUE_CHARS)


def explain(error: BaseException, *, typed: bool = False) -> str:
    """Describe an error: its text and notes; where those are empty or a single word, or ``typed``, also its type.

    The place where it was raised follows a text that says nothing alone.
    """
    name = said = type(error).__name__
    with suppress(Exception):  # the text of an error is its own code
        said = str(error).strip() or name
    speaks = " " in said
    if said != name and (typed or not speaks):
        said = f"{name}: {said}"
    return "\n".join([said if speaks else said + place(error), *getattr(error, "__notes__", ())])


def describe_error(error: Exception) -> str:
    """Name the fault and its line in code of a user's that JAX traces, without JAX's own words and frames."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not Path(frame.filename).is_relative_to(_OURS) and "site-packages" not in Path(frame.filename).parts
    ]
    where = f"{frames[-1].filename}, line {frames[-1].lineno}: " if frames else ""
    remedy = next((text for kind in type(error).__mro__ if (text := _REMEDY_IN_A_TRACE.get(kind.__name__))), None)
    if remedy is not None:
        line = f" ({frames[-1].line})" if frames and frames[-1].line else ""
        return f"{where}{remedy}{line}"
    text = " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__  # JAX adds more after an empty line
    return f"{where}{text}" if isinstance(error, ValueError) else f"{where}{type(error).__name__}: {text}"


@contextmanager
def noting(error: BaseException | None, doing: str) -> Iterator[None]:
    """Make what goes wrong inside, such as in a ``close``, a note of ``error``, the first cause; None: raise it."""
    try:
        yield
    except Exception as late:
        if error is None:
            raise
        error.add_note(f"while {doing}: {explain(late)}")


def place(error: BaseException) -> str:
    """Return `` (in function, file:line)``, where it was raised; empty where it was not."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" (in {frames[-1].name}, {frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def shorten(text: str, most: int = MAX_TEXT_CHARS) -> str:
    """Cut the middle out of a text beyond ``most`` characters, and name its length.

    Characters that a terminal would act on, or cannot encode, are escaped; newlines stay.
    """
    short = _cut(text, most, len(text))
    if short.isprintable():
        return short
    escaped = (c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in short)
    return _cut("".join(escaped), most, len(text))


def _cut(text: str, most: int, length: int) -> str:
    if len(text) <= most:
        return text
    left_out = f" … ({length} characters) … "
    end = (most - len(left_out)) // 3
    return text[: most - len(left_out) - end] + left_out + text[-end:]


def did_you_mean(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``". Did you mean 'x'?"`` with the nearest candidate; ``cutoff`` 0: anything, 1: the same. Else ""."""
    if len(name) > _MAX_NAME_CHARS:
        return ""
    by_fold = {candidate.casefold(): candidate for candidate in candidates}
    near = difflib.get_close_matches(name.casefold(), by_fold, n=1, cutoff=cutoff)
    return f". Did you mean '{by_fold[near[0]]}'?" if near else ""


def number(value: float) -> str:
    """Write a number with four digits, or as a whole one."""
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:.4g}"


def duration(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))
