"""Read a config file: JSON or YAML's safe subset, with the line of whatever cannot be read."""

import json
from pathlib import Path
from typing import Any

import yaml

from ejax.config.errors import ConfigError, Problem

SUFFIXES = (".json", ".yaml", ".yml")


def read_file(path: Path) -> dict[str, Any]:
    """The mapping in a JSON or YAML file.

    Raises:
        ConfigError: another suffix, no file, a syntax error or a key given twice, no mapping.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise _error(path, f"'{path.suffix}' is not the suffix of a config; allowed: {', '.join(SUFFIXES)}")
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text, object_pairs_hook=_unique) if suffix == ".json" else read_yaml(text)
    except FileNotFoundError:
        raise _error(path, f"there is no such file (working directory: {Path.cwd()})") from None
    except json.JSONDecodeError as error:
        raise _error(f"{path}:{error.lineno}", f"{error.msg} (column {error.colno})") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise _error(f"{path}:{line}", str(error.problem)) from None
    except (OSError, UnicodeDecodeError, DuplicateKeyError, yaml.YAMLError) as error:
        raise _error(path, str(error)) from None
    if not isinstance(data, dict):
        kind = "nothing" if data is None else f"a {type(data).__name__}"
        raise _error(path, f"holds {kind}; must be a mapping with trainer, policy and algorithm")
    return data


def read_yaml(text: str) -> Any:
    """What a YAML text stands for.

    Raises:
        yaml.YAMLError: it is not YAML, or gives a key twice.
    """
    return yaml.load(text, _Loader)


class DuplicateKeyError(ValueError):
    """JSON gives a key twice in one section."""


def _error(source: str | Path, text: str) -> ConfigError:
    return ConfigError([Problem("", text)], str(source))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    section: dict[str, Any] = {}
    for key, value in pairs:
        if key in section:
            raise DuplicateKeyError(f"the key '{key}' is given twice in one section")
        section[key] = value
    return section


class _Loader(yaml.SafeLoader):
    """A key given twice in one mapping is an error, where PyYAML keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            if key.value in seen:
                text = f"the key '{key.value}' is given twice in one section"
                raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)
