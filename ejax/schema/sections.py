"""Read a section of a config key by key, so that nothing in it goes unread."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ejax.schema.frozen import freeze, thaw
from ejax.schema.messages import did_you_mean, short_repr
from ejax.schema.problems import EMPTY, KeyReport, Status
from ejax.schema.values import INT32_MAX, is_number


def unknown_key(name: str, allowed: Iterable[str], hidden: Iterable[str] = ()) -> str:
    """Word an unknown key; ``hidden`` keys are accepted too, but only named where they are the nearest."""
    listed = sorted(allowed)
    return f"unknown key; allowed: {', '.join(listed) or 'none'}{did_you_mean(name, [*listed, *hidden])}"


class Section:
    """A mapping that is read key by key; what nobody reads is refused by ``close``. Used as a context manager.

    ``path``: dotted; "" for the root, and ``<file>:`` for a file's.
    """

    def __init__(self, data: Any, path: str, report: KeyReport) -> None:
        self.path, self.report = path, report
        self.data: Mapping[str, Any] = {}
        if isinstance(data, Mapping):
            self.data = data
        elif data is not None:
            report.refuse(path, f"got {short_repr(data)}; must be a mapping")
        self._read: set[str] = set()

    def __enter__(self) -> "Section":
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close()

    def __contains__(self, name: str) -> bool:
        return self.data.get(name) is not None

    def key(self, name: str) -> str:
        return f"{self.path}{'' if self.path.endswith(':') else '.'}{name}" if self.path else name

    def problem(self, name: str, text: str) -> None:
        self.report.refuse(self.key(name), text)

    def note(self, name: str, text: str, status: Status = "used") -> None:
        self.report.add(self.key(name), status, text)

    def take(self, name: str, default: Any = None) -> Any:
        """Read a value, as used."""
        self._read.add(name)
        if name in self.data:
            self.report.add(self.key(name), "used")
        value = self.data.get(name)
        return default if value is None else value

    def number(self, name: str, default: float, *, above: float = -math.inf, at_least: float = -math.inf) -> float:
        value = self.take(name, default)
        bound = f" > {above:g}" if above > -math.inf else f" >= {at_least:g}" if at_least > -math.inf else ""
        fits = is_number(value) and value > above and value >= at_least
        return float(self._fitting(name, value, fits, f"a number{bound}", default))

    def integer(self, name: str, default: int, *, at_least: int | None = None) -> int:
        value = self.take(name, default)
        least = -INT32_MAX if at_least is None else at_least
        fits = is_number(value) and value == value // 1 and least <= value <= INT32_MAX
        too_large = is_number(value) and abs(value) > INT32_MAX
        bound = f" within ±{INT32_MAX}" if too_large else "" if at_least is None else f" >= {at_least}"
        return int(self._fitting(name, value, fits, f"an integer{bound}", default))

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name, default)
        return bool(self._fitting(name, value, isinstance(value, bool), "true or false", default))

    def choice(self, name: str, allowed: Iterable[str], default: Any = None) -> Any:
        """Read one of some names; another one, which is a problem, is returned as it is."""
        value, allowed = self.take(name, default), list(allowed)
        if value not in allowed:
            near = did_you_mean(str(value), allowed)
            self.problem(name, f"got {short_repr(value)}; allowed: {', '.join(allowed)}{near}")
        return value

    def expect(self, name: str, wanted: Any, text: str) -> None:
        """Read a key that may be left out, or set to what holds anyway."""
        value = self.take(name, wanted)
        if freeze(value) != freeze(wanted) or isinstance(value, bool) != isinstance(wanted, bool):
            self.problem(name, f"got {short_repr(value)}; {text}")

    def numbers(self, name: str, default: tuple[float, ...], count: int | None = None) -> tuple[float, ...]:
        """Read a list of ``count`` numbers; any count if None."""
        value = self.take(name, default)
        fits = isinstance(value, list | tuple) and all(map(is_number, value)) and count in (None, len(value))
        wanted = "numbers" if count is None else f"{count} numbers"
        return tuple(map(float, self._fitting(name, value, fits, f"a list of {wanted}", default)))

    def _fitting(self, name: str, value: Any, fits: bool, wanted: str, default: Any) -> Any:
        """Return the value, or report one that does not fit and return the default."""
        if fits:
            return value
        self.problem(name, f"got {short_repr(value)}; must be {wanted}")
        return default

    def open(self, name: str) -> "Section":
        """Open a section below, which must be closed too."""
        self._read.add(name)
        return Section(self.data.get(name), self.key(name), self.report)

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield every entry, all taken as read: for sections whose keys are names."""
        self._read |= set(self.data)
        yield from self.data.items()

    def sections(self) -> Iterator[tuple[str, "Section"]]:
        """Yield every entry as a section, by its name; each is closed before the next."""
        for name, data in self.items():
            with Section(data, self.key(str(name)), self.report) as section:
                yield str(name), section

    def listed(self, name: str) -> Iterator["Section"]:
        """Yield the entries of a list as sections; each is closed before the next."""
        entries = self.take(name, ())
        if not isinstance(entries, list | tuple):
            self.problem(name, f"got {short_repr(thaw(entries))}; must be a list")
            entries = ()
        for i, data in enumerate(entries):
            with Section(data, self.key(f"{name}[{i}]"), self.report) as section:
                yield section

    def ignore(self, name: str, text: str) -> None:
        """Note a key without effect."""
        self._read.add(name)
        if name in self.data:
            self.note(name, EMPTY if is_empty(self.data[name]) else text, "without effect")

    def ignore_all(self, reasons: Mapping[str, str]) -> None:
        """Note keys without effect: name -> why."""
        for name, text in reasons.items():
            self.ignore(name, text)

    def refuse(self, name: str, text: str) -> None:
        """Refuse a key that must be empty."""
        if name in self._read:
            return
        if is_empty(self.data.get(name)):
            self.ignore(name, text)
        else:
            self._read.add(name)
            self.problem(name, text)

    def skip(self, text: str) -> None:
        """Refuse all that is left, because what it belongs to is unsupported."""
        for name in [name for name in self.data if name not in self._read]:
            self.refuse(str(name), text)

    def close(self) -> None:
        for name in self.data:
            if name not in self._read:
                self.problem(name, unknown_key(str(name), self._read))


def is_empty(value: Any) -> bool:
    """Return whether a value requests nothing: null, or an empty section or list."""
    return value is None or (isinstance(value, Mapping | list | tuple) and not value)
