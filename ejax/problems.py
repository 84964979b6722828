"""What a config can be told: problems, all in one error, and notices."""

import itertools
import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

from ejax.shorten import MOST_OF_VALUE, shorten

MOST_OF_MESSAGE = 16_000
"""Characters of a ``ConfigError``'s problems; those that come after them are counted."""


class Problem(NamedTuple):
    """Something that keeps a run from starting."""

    key: str
    """Dotted path of the key, as the user spells it."""
    text: str
    """What was given, what is allowed, what to do."""


class Notice(NamedTuple):
    """A key that the run goes without, or reads in a way worth telling."""

    key: str
    text: str
    status: Literal["remark", "renamed", "without effect", "unsupported"] = "remark"


class ConfigError(ValueError):
    """A config that cannot be run. ``problems`` holds all that was found, not only the first.

    Keys and texts are short and printable, whatever was in the file.
    """

    def __init__(self, problems: Iterable[Problem], source: str = "config") -> None:
        self.problems = tuple(Problem(shorten(key, MOST_OF_VALUE), shorten(text)) for key, text in problems)
        count = {0: "", 1: ": 1 problem"}.get(len(self.problems), f": {len(self.problems)} problems")
        lines = [f"  {key}: {text}" if key else f"  {text}" for key, text in self.problems]
        told = sum(length <= MOST_OF_MESSAGE for length in itertools.accumulate(len(line) for line in lines))
        more = [f"  … and {len(lines) - told} more"] if told < len(lines) else []
        super().__init__("\n".join([f"{shorten(source)}{count}", *lines[:told], *more]))


def with_sections(key: str) -> list[str]:
    """A dotted key, and before it the sections and lists that it is in."""
    return [*(key[: match.start()] for match in re.finditer(r"[.\[]", key)), key]
