"""JSON Schema of a train config in all its spellings: for editors, and for error messages."""

import functools
import json
from typing import Any

from ejax.algorithms.ppo import PPOConfig
from ejax.config.models import RunConfig
from ejax.config.spellings import MOVED, WITHOUT_EFFECT

_OTHER_KEYS = {
    "trainer": {
        "gym_config": {"type": "string", "description": "Path of an EmbodiChain gym config."},
        "events": {"type": "object"},
        "distributed": {"type": "boolean"},
        "cuda": {"type": "boolean", "description": "Instead of device."},
    },
    "policy": {
        "initial_action_std": {"type": "number", "exclusiveMinimum": 0},
        "action_std_range": {
            "type": "array",
            "items": {"type": "number", "exclusiveMinimum": 0},
            "minItems": 2,
        },
    },
}
"""Keys that ``spellings`` reads besides those in its tables."""


@functools.cache
def make_schema() -> dict[str, Any]:
    """The schema: the canonical form's, and beside each key its other spellings."""
    schema = RunConfig.model_json_schema()
    ppo = PPOConfig.model_json_schema(ref_template="#/$defs/{model}")
    schema["$defs"] |= ppo.pop("$defs") | {"PPOConfig": ppo}
    schema["$defs"]["AlgorithmConfig"]["properties"]["cfg"] = {"$ref": "#/$defs/PPOConfig"}
    schema["title"] = "ejax train config"
    del schema["properties"]["notices"]
    schema["required"] = ["policy", "algorithm"]
    for key in ("trainer", "policy"):
        _section(schema, key)["properties"] |= _OTHER_KEYS[key]
    for old, new in MOVED.items():
        section, _, name = old.rpartition(".")
        moved = dict(_node(schema, new))
        moved["description"] = f"The same as {new}."
        _section(schema, section)["properties"][name] = moved
    for key, text in WITHOUT_EFFECT.items():
        section, _, name = key.rpartition(".")
        _section(schema, section).setdefault("properties", {})[name] = {"description": text}
    for old in MOVED:  # what another spelling can give is not required here
        section, _, name = MOVED[old].rpartition(".")
        required = _section(schema, section).get("required", [])
        if name in required:
            required.remove(name)
    for name in ("exp_name", "eval_seed"):  # filled in from other keys
        _section(schema, "trainer")["required"].remove(name)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def allowed_keys(section: str) -> tuple[list[str], list[str]]:
    """The keys of a dotted section: the canonical ones, and those in other spellings or without effect."""
    try:
        keys = list(_section(make_schema(), section).get("properties", ()))
    except KeyError:
        return [], []
    hidden = [key for key in keys if f"{section}.{key}".lstrip(".") in MOVED | WITHOUT_EFFECT]
    return [key for key in keys if key not in hidden], hidden


def schema_text() -> str:
    """The schema as the file ``ejax/config.schema.json`` holds it."""
    return json.dumps(make_schema(), indent=1, ensure_ascii=False) + "\n"


def _node(schema: dict[str, Any], key: str) -> dict[str, Any]:
    section, _, name = key.rpartition(".")
    return _section(schema, section)["properties"][name]


def _section(schema: dict[str, Any], key: str) -> dict[str, Any]:
    """The object schema of a dotted section, through references and optional values."""
    node = schema
    for name in filter(None, key.split(".")):
        node = node["properties"][name]
        node = next((each for each in node.get("anyOf", ()) if each.get("type") != "null"), node)
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    return node
