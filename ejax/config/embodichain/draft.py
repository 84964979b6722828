"""A train config on its way to the canonical form."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ejax.schema.messages import short_repr
from ejax.schema.paths import find
from ejax.schema.problems import EMPTY, KeyReport
from ejax.schema.sections import Section, is_empty

OVERRIDE = " (override)"  # ends the spelling of a key that an override gives


class Draft(Section):
    """The root section of a train config, edited in place. Its keys are dotted, and canonical once they are moved.

    ``folder``: where a relative ``gym_config`` is looked up first. ``device`` wins over ``trainer.device``.
    """

    def __init__(
        self, tree: dict[str, Any], folder: Path | None = None, overrides: Sequence[str] = (), device: str | None = None
    ) -> None:
        super().__init__(tree, "", KeyReport())
        self.tree, self.folder = tree, folder
        self.overrides, self.device = overrides, device
        self.seed_spelling = False  # the file is in the spelling of EmbodiChain's first release
        self.no_sections: list[str] = []  # sections that were none; problems below them have no place in the file
        self.spelled: dict[str, str] = {}  # canonical key -> the key that the user wrote
        self.gym_config: tuple[str, Path] | None = None  # its name, and the file that it was read from

    def get(self, key: str) -> Any:
        return find(self.tree, key, ".", None)

    def has(self, key: str) -> bool:
        section, _, name = key.rpartition(".")
        node = self.get(section) if section else self.tree
        return isinstance(node, Mapping) and name in node

    def pop(self, key: str) -> Any:
        section, _, name = key.rpartition(".")
        return (self.get(section) if section else self.tree).pop(name)

    def put(self, key: str, value: Any) -> None:
        """Set a value, making the sections above it; of a list of ``{name: section}``, the name. Raises TypeError: one
        of them holds a value already, or the list has no such name."""
        *sections, name = key.split(".")
        node: Any = self.tree
        for depth, section in enumerate(sections, 1):
            if isinstance(node, list):
                node = next((each for each in node if isinstance(each, dict) and section in each), None)
                if node is None:
                    raise TypeError(f"{'.'.join(sections[: depth - 1])} has no {section}; set the whole list")
            if node.get(section) is None:
                node[section] = {}
            node = node[section]
            if not isinstance(node, dict) and (not isinstance(node, list) or depth == len(sections)):
                raise TypeError(f"{'.'.join(sections[:depth])} is {short_repr(node)}, not a section")
        node[name] = value

    def key(self, name: str) -> str:
        """Return a canonical key as the user spells it."""
        # the longest prefix that was spelled otherwise; what is below it is spelled alike
        above = [known for known in self.spelled if name == known or name.startswith(f"{known}.")]
        if not above:
            return name
        nearest = max(above, key=len)
        below, spelled = name[len(nearest) :], self.spelled[nearest]
        if spelled.endswith(":"):  # a file as a whole
            return spelled + below.removeprefix(".")
        return spelled.removesuffix(OVERRIDE if below else "") + below

    def reject(self, name: str, text: str) -> None:
        """Take out a key that must not be given."""
        if self.has(name):
            self.pop(name)
            self.problem(name, text)

    def ignore(self, name: str, text: str) -> None:
        """Take out a key without effect."""
        if self.has(name):
            self.note(name, EMPTY if is_empty(self.get(name)) else text, "without effect")
            self.pop(name)
