"""Config files and values of overrides: JSON or YAML's safe subset, as what JSON can hold.

A file's size is bounded before it is parsed, and the values that it means afterwards. Numbers are YAML 1.2's,
quoted text stays text, and keys are text as written.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ejax.schema.messages import MAX_VALUE_CHARS, short_repr, shorten
from ejax.schema.plain_files import MAX_DIGITS, read_text
from ejax.schema.problems import ConfigError, Problem
from ejax.schema.values import MAX_DEPTH, plain

MAX_BYTES = {".json": 4 << 20, ".yaml": 1 << 20, ".yml": 1 << 20}
"""Suffix -> bytes of a file. A train config has kilobytes; YAML is parsed in Python, at about 1 MiB/s."""

_TAG = "tag:yaml.org,2002:"
_TOO_DEEP = f"sections and lists are nested deeper than {MAX_DEPTH}"


class UnreadableError(Exception):
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
        text = read_text(path, MAX_BYTES[suffix])  # files of Windows may begin with a byte order mark
        data = read_json_text(text) if suffix == ".json" else read_yaml(text)
        if isinstance(data, dict):
            return data
        kind = "nothing" if data is None else f"a {type(data).__name__}"
        problem = f"holds {kind}; must be a mapping with trainer, policy and algorithm"
    except FileNotFoundError:
        problem = f"there is no such file (working directory: {Path.cwd()})"
    except OSError as error:
        problem = error.strerror or str(error)
    except UnicodeDecodeError as error:
        found, problem = error.object, f"the byte {error.object[error.start]:#x} is not UTF-8: {error.reason}"
        line = found.count(b"\n", 0, error.start) + 1
        if found[:2] in (b"\xff\xfe", b"\xfe\xff"):
            problem, line = "it is UTF-16, as PowerShell's > writes it; save it as UTF-8", 0
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
        data = loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        cyclic = "unconstructable recursive" in str(error.problem)
        text = "an alias lies inside its own anchor" if cyclic else str(error.problem)
        raise UnreadableError(text, line) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UnreadableError(f"the character {chr(error.character)!a} is not allowed", line) from None
    except RecursionError:
        raise UnreadableError(_TOO_DEEP, loader.line + 1) from None
    except (ValueError, OverflowError):
        raise UnreadableError("an escape stands for no character, such as \\UFFFFFFFF", loader.line + 1) from None
    return _bounded(data)


def read_json_text(text: str) -> Any:
    """Parse JSON, with NaN and Infinity as numbers. Raises UnreadableError: as ``read_yaml``."""
    try:
        return _bounded(json.loads(text, object_pairs_hook=_unique))
    except json.JSONDecodeError as error:
        raise UnreadableError(f"{error.msg} (column {error.colno})", error.lineno) from None
    except RecursionError:
        raise UnreadableError(_TOO_DEEP) from None
    except ValueError:  # Python's limit for the time that it takes to read one
        raise UnreadableError(f"has an integer of more than {MAX_DIGITS} digits") from None


def _bounded(data: Any) -> Any:
    # aliases written out: a bomb ends here, and no two sections share an object
    try:
        return plain(data)
    except ConfigError as error:
        raise UnreadableError(error.problems[0].text, key=error.problems[0].key) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    section: dict[str, Any] = {}
    for key, value in pairs:
        if key in section:
            raise UnreadableError(_twice(key))
        section[key] = value
    return section


def _twice(key: str) -> str:
    return f"the key {short_repr(key)} is given twice in one section"


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, for what JSON can hold: keys are text, each given once, and merged where << asks for it."""

    # merged as soon as a mapping is read, and each key once: a bomb of merges stays as small as its file
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.tag == f"{_TAG}merge":
                sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
                # one that this is a part of has no end yet
                if not all(isinstance(each, yaml.MappingNode) and each.end_mark for each in sources):
                    raise UnreadableError("<< takes an anchored mapping, or a list of them", line)
                for each in sources:  # earlier ones win
                    merged = {**{name.value: (name, part) for name, part in each.value}, **merged}
            elif not isinstance(key, yaml.ScalarNode):
                raise UnreadableError("a key must be text, got a list or a mapping", line)
            elif key.value in own:  # PyYAML would take the last one, without a word
                raise UnreadableError(_twice(key.value), line)
            else:
                key.tag = f"{_TAG}str"  # 1 and on are keys as they are written
                own[key.value] = key, value
        node.value = list({**merged, **own}.values())
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        return int(text, 0 if re.match("0[ox]", text) else 10)

    def construct_undefined(self, node: yaml.Node) -> NoReturn:
        tag = shorten(node.tag.replace(_TAG, "!!"), MAX_VALUE_CHARS)
        text = f"the tag {tag} is not allowed; allowed: !!str, !!int, !!float, !!bool, !!null, !!seq, !!map"
        raise UnreadableError(text, node.start_mark.line + 1)


def _scalar(kind: str) -> Callable[[_Loader, yaml.Node], Any]:
    def construct(loader: _Loader, node: yaml.Node) -> Any:
        try:
            return getattr(loader, f"construct_yaml_{kind}")(node)
        except (ValueError, LookupError, OverflowError):
            text = f"got {short_repr(node.value)}, which is not a !!{kind}"
            raise UnreadableError(text, node.start_mark.line + 1) from None

    return construct


_Loader.yaml_constructors = {
    **{f"{_TAG}{kind}": _scalar(kind) for kind in ("str", "int", "float", "bool", "null")},
    # deep: a list that holds itself is an error then
    f"{_TAG}seq": lambda loader, node: loader.construct_sequence(node, deep=True),
    f"{_TAG}map": lambda loader, node: loader.construct_mapping(node, deep=True),
    None: _Loader.construct_undefined,
}
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
