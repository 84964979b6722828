"""Facts in JSON files: read under a stated schema, or refused with the file and the reason."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ejax.schema.plain_files import parse_json, read_text

_SHOWN = 60
"""Characters of a wrong value that an error shows."""


class FactsError(ValueError):
    """A file of facts that cannot be used; the text names it and the reason."""


def read_facts(file: Path, schema: type[BaseModel]) -> dict[str, Any]:
    """Read the mapping in a JSON file; keys that the schema does not have are kept. Nothing is converted.
    Raises FactsError: no such file, no JSON, no mapping, or one that lacks a key or holds another type."""
    try:
        return check_facts(parse_json(read_text(file)), schema)
    except FactsError as error:
        raise FactsError(f"{file} {error}") from None
    except OSError as error:
        raise FactsError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise FactsError(f"{file} is not text in UTF-8") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise FactsError(f"{file} is not JSON, or was cut short: {error.msg} ({where})") from None
    except ValueError as error:
        raise FactsError(f"{file} cannot be read: {error}") from None


def check_facts(facts: Any, schema: type[BaseModel]) -> dict[str, Any]:
    """Return ``facts``. FactsError: they are not a mapping of the schema's form."""
    if not isinstance(facts, dict):
        raise FactsError(f"holds a {type(facts).__name__}; it must be a mapping")
    try:
        schema.model_validate(facts, strict=True)  # strict: no text passes for a number
    except ValidationError as error:
        first = error.errors()[0]  # one reason is enough to refuse a file
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise FactsError(f"lacks the key '{key}'") from None
        given = repr(first["input"])
        given = given if len(given) <= _SHOWN else f"{given[:_SHOWN]}…"
        raise FactsError(f"has a wrong '{key}': {first['msg']}, got {given}") from None
    return facts
