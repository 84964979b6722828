"""What a config can be told: problems, all in one error, and notices."""

from collections.abc import Iterable
from typing import Literal, NamedTuple


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
    """A config that cannot be run. ``problems`` holds all that was found, not only the first."""

    def __init__(self, problems: Iterable[Problem], source: str = "config") -> None:
        self.problems = tuple(problems)
        count = {0: "", 1: ": 1 problem"}.get(len(self.problems), f": {len(self.problems)} problems")
        lines = [f"  {key}: {text}" if key else f"  {text}" for key, text in self.problems]
        super().__init__("\n".join([f"{source}{count}", *lines]))
