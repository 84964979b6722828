"""Descriptions of errors in one line."""

import re
from pathlib import Path

import pytest
from case_tables import cases

from ejax.schema.messages import MAX_VALUE_CHARS, explain, noting, short_repr, shorten

ROOT = Path(__file__).parents[2]


class Silent(Exception):
    """An error of a user's, whose text is empty."""

    def __str__(self) -> str:
        return ""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError


def raised(error: BaseException) -> BaseException:
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


@cases(
    "error found",
    (AssertionError(), "AssertionError"),
    (KeyError("x"), "KeyError: 'x'"),
    (StopIteration(), "StopIteration"),
    (NotImplementedError(), "NotImplementedError"),
    (MemoryError(), "MemoryError"),
    (ValueError("  "), "ValueError"),
    (OSError(), "OSError"),
    (Silent(), "Silent"),
    (Unspeakable(), "Unspeakable"),
    (RuntimeError(3), "RuntimeError: 3"),
    ids=repr,
)
def test_an_error_that_says_nothing_is_shown_with_its_type_and_place(error: BaseException, found: str) -> None:
    assert re.fullmatch(re.escape(found) + r" \(in raised, .*test_messages\.py:\d+\)", explain(raised(error)))
    assert explain(error.with_traceback(None)) == found


def test_an_error_that_speaks_is_shown_as_it_is() -> None:
    error = raised(ValueError("the arm is bent"))
    assert explain(error) == "the arm is bent" and explain(error, typed=True) == "ValueError: the arm is bent"


def test_what_goes_wrong_afterwards_is_a_note_of_the_first_error() -> None:
    first = ValueError("the arm is bent")
    with noting(first, "closing it"):
        raise KeyError("x")
    assert explain(first).startswith("the arm is bent\nwhile closing it: KeyError: 'x' (in ")
    silent = raised(Silent())
    with noting(silent, "closing it"):
        raise first
    assert explain(silent).startswith("Silent (in ") and "\nwhile closing it: the arm is bent" in explain(silent)
    with pytest.raises(KeyError), noting(None, "closing it"):
        raise KeyError("x")


@pytest.mark.parametrize("package", ["ejax", "interop"])
def test_every_command_describes_its_errors_so(package: str) -> None:
    printed = re.compile(r"print\(\s*f\"[^\"]*: \{error\}")
    assert not [path for path in (ROOT / package).rglob("*.py") if printed.search(path.read_text())]


def test_long_and_odd_texts_are_cut_and_escaped() -> None:
    assert len(short_repr("x" * 10**6)) <= MAX_VALUE_CHARS
    cut = shorten("a" * 500 + "end", 100)
    assert cut.startswith("aaa") and cut.endswith("end") and "(503 characters)" in cut
    assert shorten("\x1b[31m \ud800") == "\\x1b[31m \\ud800"
