"""What becomes of each key of a gym config: used, renamed, without effect, or unsupported."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ejax.registry import did_you_mean

Status = Literal["used", "renamed", "without effect", "unsupported"]


class KeyNote(NamedTuple):
    """One key."""

    key: str
    """Dotted path in the gym config."""
    status: Status
    text: str = ""
    """Why, where it is not simply used."""


class GymConfigError(ValueError):
    """A gym config that no environment can be built from. ``notes``: the unsupported keys, all of them."""

    def __init__(self, notes: tuple[KeyNote, ...]) -> None:
        self.notes = notes
        super().__init__("\n".join(f"{note.key}: {note.text}" for note in notes))


@dataclass
class KeyReport:
    """Notes under way."""

    notes: list[KeyNote] = field(default_factory=list)

    def add(self, key: str, status: Status, text: str = "") -> None:
        self.notes.append(KeyNote(key, status, text))

    def refuse(self, key: str, text: str) -> None:
        self.add(key, "unsupported", text)

    def raise_if_refused(self) -> None:
        """Raises GymConfigError: a key is unsupported."""
        refused = tuple(note for note in self.notes if note.status == "unsupported")
        if refused:
            raise GymConfigError(refused)


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
            report.refuse(path, f"got {data!r}; must be a mapping")
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

    def number(self, name: str, default: float, *, above: float | None = None) -> float:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or (above is not None and not value > above):
            wanted = "a number" if above is None else f"a number above {above:g}"
            self.report.refuse(self.key(name), f"got {value!r}; must be {wanted}")
            return default
        return float(value)

    def numbers(self, name: str, default: tuple[float, ...], count: int | None = None) -> tuple[float, ...]:
        """A list of ``count`` numbers; any count if None."""
        value = self.take(name, default)
        fits = isinstance(value, list | tuple) and all(
            isinstance(x, int | float) and not isinstance(x, bool) for x in value
        )
        if not fits or (count is not None and len(value) != count):
            wanted = "numbers" if count is None else f"{count} numbers"
            self.report.refuse(self.key(name), f"got {value!r}; must be a list of {wanted}")
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
        """A key without effect; nothing is said of one that is empty."""
        self._read.add(name)
        if self.data.get(name) not in (None, {}, [], (), False):
            self.report.add(self.key(name), "without effect", text)

    def refuse(self, name: str, text: str) -> None:
        """A key that must be empty."""
        self._read.add(name)
        if self.data.get(name) not in (None, {}, [], ()):
            self.report.refuse(self.key(name), text)

    def close(self) -> None:
        for name in self.data:
            if name not in self._read:
                allowed = sorted(self._read)
                text = f"unknown key; allowed: {', '.join(allowed)}{did_you_mean(str(name), allowed)}"
                self.report.refuse(self.key(name), text)
