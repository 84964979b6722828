"""JSON Schema of a train config in all its spellings: for editors, and for error messages."""

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from ejax.algorithms.record import find_algorithm
from ejax.config.embodichain.spellings import COMPAT, MOVED, TABLES, WITHOUT_EFFECT
from ejax.config.run_config import RunConfig
from ejax.schema.configclass import ConfigClass
from ejax.schema.plain_files import to_json
from ejax.schema.registry import ALGORITHMS


@functools.cache
def make_schema() -> dict[str, Any]:
    """Make the canonical form's schema, with other spellings next to each key."""
    schema = RunConfig.model_json_schema()
    for options in _algorithm_configs().values():
        own = options.model_json_schema(ref_template="#/$defs/{model}")
        schema["$defs"] |= own.pop("$defs", {}) | {options.__name__: own}
    for model in _models(ConfigClass):
        node = schema if model is RunConfig else schema["$defs"].get(model.__name__, {})
        for field, text in _docstrings(model).items():
            name = (issubclass(model, BaseModel) and model.model_fields[field].alias) or field
            if name in node.get("properties", ()):  # sorted, as pydantic's own schemas are
                node["properties"][name] = dict(sorted({**node["properties"][name], "description": text}.items()))
    algorithm = schema["$defs"]["AlgorithmConfig"]
    algorithm["properties"]["cfg"] = {"type": "object", "description": algorithm["properties"]["cfg"]["description"]}
    # the options depend on the name; its pattern is that of any case
    algorithm["allOf"] = [
        {
            "if": {"properties": {"name": {"pattern": f"^(?i:{name})$"}}},
            "then": {"properties": {"cfg": {"$ref": f"#/$defs/{options.__name__}"}}},
        }
        for name, options in _algorithm_configs().items()
    ]
    schema["title"] = "ejax train config"
    schema["properties"]["compat"] = {"enum": list(COMPAT), "description": "Compute as this EmbodiChain release does."}
    del schema["properties"]["notices"]
    schema["required"] = ["policy", "algorithm"]
    for key, others in TABLES["schema"].items():
        _sections(schema, key)[0]["properties"] |= others
    # a key in another spelling is checked like the one that it means
    for old, new in MOVED.items():
        section, _, name = new.rpartition(".")
        nodes = [node for node in _sections(schema, section) if name in node["properties"]]
        _add(schema, old, {**nodes[0]["properties"][name], "description": f"The same as {new}."})
        for node in nodes:  # what another spelling can give is not required here
            if name in node.get("required", ()):
                node["required"].remove(name)
    for key, text in WITHOUT_EFFECT.items():
        _add(schema, key, {"description": text})
    for name, options in _algorithm_configs().items():
        for key in find_algorithm(name).ignored_options:
            properties = schema["$defs"][options.__name__]["properties"]
            properties[key] = {"description": f"no effect on {name}"}
    for name in ("exp_name", "eval_seed"):  # filled in from other keys
        _sections(schema, "trainer")[0]["required"].remove(name)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_plain(schema)}


def allowed_keys(section: str, algorithm: str) -> tuple[list[str], list[str]]:
    """Return a dotted section's keys: the canonical ones, and those in other spellings or without effect."""
    keys = [name for node in _sections(make_schema(), section, algorithm) for name in node.get("properties", ())]
    options = find_algorithm(algorithm).ignored_options if algorithm in ALGORITHMS else ()
    ignored = [f"algorithm.cfg.{key}" for key in options]
    hidden = [key for key in keys if f"{section}.{key}".lstrip(".") in {*MOVED, *WITHOUT_EFFECT, *ignored}]
    return [key for key in keys if key not in hidden], hidden


def schema_text() -> str:
    """Return the text of ``ejax/config.schema.json``."""
    return to_json(make_schema(), indent=1, ensure_ascii=False) + "\n"


def _models(model: type[ConfigClass]) -> Iterator[type[ConfigClass]]:
    if model.__module__.startswith("ejax."):  # a notebook's class has no source
        yield model
    for each in model.__subclasses__():
        yield from _models(each)


def _docstrings(model: type[ConfigClass]) -> dict[str, str]:
    """Return the strings below the fields of a class, and of those that it inherits from."""
    texts: dict[str, str] = {}
    for each in reversed(model.__mro__[: model.__mro__.index(ConfigClass)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0].body  # type: ignore[attr-defined]
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                texts[ast.unparse(field.target)] = inspect.cleandoc(str(text.value.value))
    return texts


@functools.cache
def _algorithm_configs() -> dict[str, type[BaseModel]]:
    return {name: find_algorithm(name).Config for name in ALGORITHMS}


def _plain(node: Any) -> Any:
    if isinstance(node, list):
        return [_plain(each) for each in node]
    if not isinstance(node, dict):
        return node
    plain = {name: _plain(each) for name, each in node.items()}
    if isinstance(node.get("description"), str):  # not a key of this name
        plain["description"] = " ".join(node["description"].replace("``", "`").split())
    return plain


def _add(schema: dict[str, Any], key: str, description: dict[str, Any]) -> None:
    section, _, name = key.rpartition(".")
    for node in _sections(schema, section):
        node.setdefault("properties", {})[name] = description


def _sections(schema: dict[str, Any], key: str, algorithm: str | None = None) -> list[dict[str, Any]]:
    """Return the object schemas of a dotted section, below ``algorithm.cfg`` of each algorithm or the named one."""
    nodes = [schema]
    for name in filter(None, key.split(".")):
        if nodes and nodes[0] is schema["$defs"].get("AlgorithmConfig") and name == "cfg":
            configs = _algorithm_configs()
            names = [algorithm] if algorithm in configs else list(configs)
            nodes = [schema["$defs"][configs[each].__name__] for each in names]
            continue
        other = "items" if name.isdigit() else "additionalProperties"
        below = [node.get("properties", {}).get(name, node.get(other)) for node in nodes]
        nodes = [_target(schema, each) for each in below if isinstance(each, dict)]
    return list({id(node): node for node in nodes}.values())


def _target(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    node = next((each for each in node.get("anyOf", ()) if each.get("type") != "null"), node)
    return schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
