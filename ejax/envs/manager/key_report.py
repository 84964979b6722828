"""What becomes of each key of a gym config: used, renamed, without effect, or unsupported."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ejax.registry import did_you_mean
from ejax.shorten import shorten, shown
from ejax.values import INT32_MAX

Status = Literal["used", "renamed", "without effect", "unsupported"]


EMPTY = "empty"
"""The text of a key without effect that asks for nothing."""


class KeyNote(NamedTuple):
    """One key."""

    key: str
    """Dotted path in the gym config."""
    status: Status
    text: str = ""
    """Why, where it is not simply used."""


class GymConfigError(ValueError):
    """A gym config that no environment can be built from. ``notes``: all keys that were read."""

    def __init__(self, notes: tuple[KeyNote, ...]) -> None:
        self.notes = notes
        self.refused = tuple(note for note in notes if note.status == "unsupported")
        super().__init__("\n".join(f"{note.key}: {note.text}" for note in self.refused))


@dataclass
class KeyReport:
    """Notes under way, one a key."""

    by_key: dict[str, KeyNote] = field(default_factory=dict)

    @property
    def notes(self) -> tuple[KeyNote, ...]:
        return tuple(self.by_key.values())

    def add(self, key: str, status: Status, text: str = "") -> None:
        """The first reason to refuse a key stays; a mere use gives way."""
        if key not in self.by_key or self.by_key[key].status == "used":
            self.by_key[key] = KeyNote(key, status, shorten(text))

    def refuse(self, key: str, text: str) -> None:
        self.add(key, "unsupported", text)

    def raise_if_refused(self) -> None:
        """Raises GymConfigError: a key is unsupported."""
        if any(note.status == "unsupported" for note in self.notes):
            raise GymConfigError(self.notes)


class Section:
    """A mapping that is read key by key; what nobody reads is refused by ``close``. Used as a context manager.

    Args:
        path: the section's dotted path; "" for the root.
    """

    def __init__(self, data: Any, path: str, report: KeyReport) -> None:
        self.path, self.report = path, report
        self.data: Mapping[str, Any] = {}
        if isinstance(data, Mapping):
            self.data = data
        elif data is not None:
            report.refuse(path, f"got {shown(data)}; must be a mapping")
        self._read: set[str] = set()

    def __enter__(self) -> "Section":
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close()

    def __contains__(self, name: str) -> bool:
        return self.data.get(name) is not None

    def key(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def take(self, name: str, default: Any = None) -> Any:
        """A value that is used."""
        self._read.add(name)
        if name in self.data:
            self.report.add(self.key(name), "used")
        value = self.data.get(name)
        return default if value is None else value

    def number(self, name: str, default: float, *, above: float = -math.inf, at_least: float = -math.inf) -> float:
        value = self.take(name, default)
        wrong = isinstance(value, bool) or not isinstance(value, int | float)
        if wrong or not (value > above and value >= at_least):
            bound = f" > {above:g}" if above > -math.inf else f" >= {at_least:g}" if at_least > -math.inf else ""
            self.report.refuse(self.key(name), f"got {shown(value)}; must be a number{bound}")
            return default
        return float(value)

    def integer(self, name: str, default: int, *, at_least: int | None = None) -> int:
        value = self.take(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        least = -INT32_MAX if at_least is None else at_least
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= INT32_MAX:
            bound = "" if at_least is None else f" >= {at_least}"
            if isinstance(value, int) and abs(value) > INT32_MAX:
                bound = f" within ±{INT32_MAX}"
            self.report.refuse(self.key(name), f"got {shown(value)}; must be an integer{bound}")
            return default
        return value

    def numbers(self, name: str, default: tuple[float, ...], count: int | None = None) -> tuple[float, ...]:
        """A list of ``count`` numbers; any count if None."""
        value = self.take(name, default)
        fits = isinstance(value, list | tuple) and all(
            isinstance(x, int | float) and not isinstance(x, bool) for x in value
        )
        if not fits or (count is not None and len(value) != count):
            wanted = "numbers" if count is None else f"{count} numbers"
            self.report.refuse(self.key(name), f"got {shown(value)}; must be a list of {wanted}")
            return default
        return tuple(float(x) for x in value)

    def open(self, name: str) -> "Section":
        """A section below. It must be closed too."""
        self._read.add(name)
        return Section(self.data.get(name), self.key(name), self.report)

    def items(self) -> Iterator[tuple[str, Any]]:
        """Every entry, all taken as read: for sections whose keys are names."""
        self._read |= set(self.data)
        yield from self.data.items()

    def ignore(self, name: str, text: str) -> None:
        """A key without effect."""
        self._read.add(name)
        if name in self.data:
            self.report.add(self.key(name), "without effect", EMPTY if self._is_empty(name) else text)

    def refuse(self, name: str, text: str) -> None:
        """A key that must be empty."""
        if name not in self.data or name in self._read:
            self._read.add(name)
        elif self._is_empty(name):
            self.ignore(name, text)
        else:
            self._read.add(name)
            self.report.refuse(self.key(name), text)

    def skip(self, text: str) -> None:
        """All that is left is unsupported, because what it belongs to is."""
        for name in [name for name in self.data if name not in self._read]:
            self.refuse(str(name), text)

    def _is_empty(self, name: str) -> bool:
        value = self.data[name]
        return value is None or (isinstance(value, Mapping | list | tuple) and not value)

    def close(self) -> None:
        for name in self.data:
            if name not in self._read:
                allowed = sorted(self._read)
                text = f"unknown key; allowed: {', '.join(allowed)}{did_you_mean(str(name), allowed)}"
                self.report.refuse(self.key(name), text)
