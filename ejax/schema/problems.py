"""The vocabulary of every config: problems, all in one error, and what becomes of each key."""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ejax.schema.messages import MAX_VALUE_CHARS, shorten

Status = Literal["used", "renamed", "without effect", "unsupported"]

MAX_MESSAGE_CHARS = 16_000  # characters of a ConfigError's problems; those that come after them are counted
EMPTY = "empty"  # the text of a key without effect that requests nothing


class Problem(NamedTuple):
    """Something that keeps a run from starting."""

    key: str
    """Dotted path of the key, as the user spells it."""
    text: str
    """The value, the allowed ones, the remedy."""


class KeyNote(NamedTuple):
    key: str
    status: Status
    text: str = ""


_REPEATED = 2
"""More keys with the same text than the first, from which they share one line."""


class ConfigError(ValueError):
    """A config that cannot be run. ``problems`` holds all that was found, not only the first.

    Keys and texts are short and printable, even if those of the file are not. ``notes``: what becomes of each key.
    """

    def __init__(self, problems: Iterable[Problem], source: str = "config", notes: tuple[KeyNote, ...] = ()) -> None:
        self.problems = tuple(Problem(shorten(key, MAX_VALUE_CHARS), shorten(text)) for key, text in problems)
        self.notes = notes
        count = {0: "", 1: ": 1 problem"}.get(len(self.problems), f": {len(self.problems)} problems")
        keys: dict[str, list[str]] = {}
        for key, text in self.problems:
            keys.setdefault(text, []).append(key)
        lines = []
        for key, text in self.problems:
            more_keys = len(keys[text]) - 1
            if more_keys < _REPEATED or key == keys[text][0]:  # one slip, such as in a name, is met at every use of it
                also = f" (and {more_keys} more keys)" if more_keys >= _REPEATED else ""
                lines.append(f"  {key}{also}: {text}" if key else f"  {text}")
        shown = sum(length <= MAX_MESSAGE_CHARS for length in itertools.accumulate(len(line) for line in lines))
        more = [f"  … and {len(lines) - shown} more"] if shown < len(lines) else []
        super().__init__("\n".join([f"{shorten(source)}{count}", *lines[:shown], *more]))


@dataclass
class KeyReport:
    """Notes on the keys of a config that is being read, one a key."""

    by_key: dict[str, KeyNote] = field(default_factory=dict)

    @property
    def notes(self) -> tuple[KeyNote, ...]:
        return tuple(self.by_key.values())

    @property
    def notices(self) -> tuple[KeyNote, ...]:
        """Notes to announce: keys that the run ignores, or reads in a way worth knowing."""
        return tuple(note for note in self.notes if note.text not in ("", EMPTY) and note.status != "unsupported")

    @property
    def problems(self) -> list[Problem]:
        return [Problem(note.key, note.text) for note in self.notes if note.status == "unsupported"]

    def add(self, key: str, status: Status, text: str = "") -> None:
        """Note a key: any note replaces a mere use, and a refusal any other; else the first one stays."""
        known = self.by_key[key].status if key in self.by_key else "used"
        if known == "used" or (status == "unsupported" and known != status):
            self.by_key[key] = KeyNote(key, status, shorten(text))

    def refuse(self, key: str, text: str) -> None:
        self.add(key, "unsupported", text)

    def refuses(self, key: str) -> bool:
        return key in self.by_key and self.by_key[key].status == "unsupported"

    def raise_if_refused(self, source: str) -> None:
        if problems := self.problems:
            raise ConfigError(problems, source, self.notes)


def join_by_key(problems: Iterable[Problem], separator: str) -> list[Problem]:
    """Make one problem of those of each key, with each text once."""
    texts: dict[str, dict[str, None]] = {}
    for key, text in problems:
        texts.setdefault(key, {})[text] = None
    return [Problem(key, separator.join(each)) for key, each in texts.items()]


def with_sections(key: str) -> list[str]:
    """List a dotted key, and before it the sections and lists that it is in."""
    return [*(key[: match.start()] for match in re.finditer(r"[.\[]", key)), key]
