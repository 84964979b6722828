"""Config files and values of overrides: JSON or YAML's safe subset, as what JSON can hold.

Costs are bounded before parsing begins. Numbers are YAML 1.2's, quoted text stays text, and keys are text as written.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ejax.schema.messages import MAX_VALUE_CHARS, short_repr, shorten
from ejax.schema.plain_files import MAX_DIGITS, read_bytes
from ejax.schema.problems import ConfigError, Problem

MAX_BYTES = {".json": 4 << 20, ".yaml": 1 << 20, ".yml": 1 << 20}
"""Suffix -> bytes of a file. A train config has kilobytes; YAML is parsed in Python, at about 1 MiB/s."""
MAX_VALUES = 10_000  # keys and values of a file, each alias counted as what it stands for
MAX_CHARACTERS = 1 << 20  # characters of all texts in it, likewise
MAX_DEPTH = 60  # sections and lists inside each other

_TAG = "tag:yaml.org,2002:"
_TEXT = (f"{_TAG}str", f"{_TAG}value")  # the second is a lone =
_SCALARS = ("int", "float", "bool", "null")
_ALLOWED_TAGS = "!!str, !!int, !!float, !!bool, !!null, !!seq, !!map"


class UnreadableError(ValueError):
    """Text that holds no config, at a line from 1 on (0: unknown) and a dotted key, as far as it was read."""

    def __init__(self, text: str, line: int = 0, key: str = "") -> None:
        self.text, self.line, self.key = shorten(text), line, key
        super().__init__(f"{key}: {self.text}" if key else self.text)


def read_file(path: Path) -> dict[str, Any]:
    """Read the mapping in a JSON or YAML file.
    Raises ConfigError: another suffix, no file, a syntax error, a key given twice, no mapping, or too much.
    """
    suffix, line, key = path.suffix.lower(), 0, ""
    try:
        if suffix not in MAX_BYTES:
            raise UnreadableError(f"'{path.suffix}' is not the suffix of a config; allowed: {', '.join(MAX_BYTES)}")
        text = _decoded(read_bytes(path, MAX_BYTES[suffix]))
        data = read_json(text) if suffix == ".json" else read_yaml(text)
        if isinstance(data, dict):
            return data
        kind = "nothing" if data is None else f"a {type(data).__name__}"
        problem = f"holds {kind}; must be a mapping with trainer, policy and algorithm"
    except FileNotFoundError:
        problem = f"there is no such file (working directory: {Path.cwd()})"
    except OSError as error:
        problem = error.strerror or str(error)
    except UnreadableError as error:
        problem, line, key = error.text, error.line, error.key
    raise ConfigError([Problem(key, problem)], f"{path}:{line}" if line else str(path))


def is_file(path: Path) -> bool:
    """Return True for a file; False also for what can be no file's name."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def read_yaml(text: str) -> Any:
    """Parse YAML: mappings with text as keys, lists, text, numbers, booleans, None.
    Raises UnreadableError: no YAML, a key given twice, values of other kinds, or more than a config can be.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else _build(loader, node, "")
    except UnreadableError:
        raise
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UnreadableError(str(error.problem), line) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UnreadableError(f"the character {chr(error.character)!a} is not allowed", line) from None
    except (ValueError, OverflowError):
        raise UnreadableError("an escape stands for no character, such as \\UFFFFFFFF", loader.line + 1) from None


def read_json(text: str) -> Any:
    """Parse JSON, with NaN and Infinity as numbers. Raises UnreadableError: as ``read_yaml``."""
    _bound_json(text)

    def integer(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            line = text.count("\n", 0, text.find(digits)) + 1
            raise UnreadableError(_too_long(digits), line)
        return int(digits)

    try:
        return json.loads(text, object_pairs_hook=_unique, parse_int=integer)
    except json.JSONDecodeError as error:
        raise UnreadableError(f"{error.msg} (column {error.colno})", error.lineno) from None


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")  # files of Windows may begin with a byte order mark
    except UnicodeDecodeError as error:
        if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise UnreadableError("it is UTF-16, as PowerShell's > writes it; save it as UTF-8") from None
        line = data.count(b"\n", 0, error.start) + 1
        raise UnreadableError(f"the byte {data[error.start]:#x} is no UTF-8: {error.reason}", line) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    section: dict[str, Any] = {}
    for key, value in pairs:
        if key in section:
            raise UnreadableError(f"the key {short_repr(key)} is given twice in one section")
        section[key] = value
    return section


def _bound_json(text: str) -> None:
    # before it is parsed: the brackets and commas outside of texts bound what there will be
    depth, values = 0, 0
    for match in re.finditer(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{\]},]', text, re.DOTALL):
        token = match[0]
        depth += (token in "[{") - (token in "]}")
        values += token in "[{,"
        if depth > MAX_DEPTH or values > MAX_VALUES:
            raise UnreadableError(_too_much(depth), text.count("\n", 0, match.start()) + 1)


def _too_much(depth: int) -> str:
    if depth > MAX_DEPTH:
        return f"sections and lists are nested deeper than {MAX_DEPTH}"
    return f"has more than {MAX_VALUES} keys and values, or {MAX_CHARACTERS} characters of text, each alias written out"


def _too_long(digits: str) -> str:
    return f"got {shorten(digits, MAX_VALUE_CHARS)}; no number of a config is that long"


class _Measure(NamedTuple):
    values: int
    characters: int
    depth: int


class _Loader(yaml.SafeLoader):
    """Measures each node that it composes, aliases written out: no bomb and no cycle reaches what builds values."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.measures: dict[int, _Measure] = {}  # by ``id`` of a node whose end was read
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        mark, is_alias = self.peek_event().start_mark, self.check_event(yaml.AliasEvent)
        self._depth += 1
        # before it is read on, since PyYAML recurses
        if self._depth > MAX_DEPTH + 1 or len(self.measures) > MAX_VALUES:
            raise UnreadableError(_too_much(self._depth - 1), mark.line + 1)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if not is_alias:
            self.measures[id(node)] = measure = self._measure(node)
            if measure.values > MAX_VALUES or measure.characters > MAX_CHARACTERS or measure.depth > MAX_DEPTH:
                raise UnreadableError(_too_much(measure.depth), mark.line + 1)
        elif id(node) not in self.measures:
            raise UnreadableError("an alias stands inside what it is the alias of", mark.line + 1)
        return node

    def _measure(self, node: Any) -> _Measure:
        if isinstance(node, yaml.ScalarNode):
            return _Measure(1, len(node.value), 0)
        parts = [self.measures[id(each)] for each in _children(node)]  # an alias counts as what it stands for
        return _Measure(
            1 + sum(part.values for part in parts),
            sum(part.characters for part in parts),
            1 + max((part.depth for part in parts), default=0),
        )


# YAML 1.2's core schema: 010 is ten, 1e3 a number; yes, 1:30, 1_000 and dates are text. PyYAML has YAML 1.1's
_Loader.yaml_implicit_resolvers = {"<": yaml.SafeLoader.yaml_implicit_resolvers["<"]}
for _kind, _pattern, _first in (
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", "[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    ("null", "~|null|Null|NULL|", ("~", "n", "N", "")),
):
    _Loader.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(f"(?:{_pattern})$"), list(_first))


def _children(node: Any) -> Iterator[yaml.Node]:
    for each in node.value:
        yield from each if isinstance(each, tuple) else (each,)


def _build(loader: _Loader, node: yaml.Node, key: str) -> Any:
    """Build a node's value, a new one each time, so that nothing is shared between two sections."""
    if isinstance(node, yaml.ScalarNode):
        return _scalar(loader, node, key)
    if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
        return [_build(loader, each, f"{key}.{i}") for i, each in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
        pairs = _pairs(node, key)
        return {name: _build(loader, value, f"{key}.{name}".lstrip(".")) for name, value in pairs.items()}
    raise _wrong_tag(node, key)


def _pairs(node: yaml.MappingNode, key: str) -> dict[str, yaml.Node]:
    own: dict[str, yaml.Node] = {}
    merged: dict[str, yaml.Node] = {}  # by <<; own keys win over it, and earlier sources over later ones
    for name, value in node.value:
        line = name.start_mark.line + 1
        if name.tag == f"{_TAG}merge":
            sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
            if not all(isinstance(each, yaml.MappingNode) for each in sources):
                raise UnreadableError("<< takes a mapping, or a list of mappings", line, key)
            for each in sources:
                merged = {**_pairs(each, key), **merged}
        elif not isinstance(name, yaml.ScalarNode):
            raise UnreadableError("a key must be text, got a list or a mapping", line, key)
        elif name.value in own:  # PyYAML would take the last one, without a word
            raise UnreadableError(f"the key {short_repr(name.value)} is given twice in one section", line)
        else:
            own[name.value] = value
    return {**merged, **own}


def _scalar(loader: _Loader, node: yaml.ScalarNode, key: str) -> Any:
    if node.tag in _TEXT:
        return node.value
    kind, line = node.tag.removeprefix(_TAG), node.start_mark.line + 1
    if kind not in _SCALARS:
        raise _wrong_tag(node, key)
    if kind == "int" and len(node.value) > MAX_DIGITS:
        raise UnreadableError(_too_long(node.value), line, key)
    try:
        if kind == "int":
            return int(node.value, 0 if re.match("0[ox]", node.value) else 10)
        return getattr(loader, f"construct_yaml_{kind}")(node)
    except (ValueError, LookupError, OverflowError):
        raise UnreadableError(f"got {short_repr(node.value)}, which is no !!{kind}", line, key) from None


def _wrong_tag(node: yaml.Node, key: str) -> UnreadableError:
    tag = shorten(node.tag.replace(_TAG, "!!"), MAX_VALUE_CHARS)
    kind = {yaml.ScalarNode: "text", yaml.SequenceNode: "a list", yaml.MappingNode: "a mapping"}[type(node)]
    text = f"the tag {tag} does not fit {kind}; allowed: {_ALLOWED_TAGS}, each on its own kind"
    return UnreadableError(text, node.start_mark.line + 1, key)
