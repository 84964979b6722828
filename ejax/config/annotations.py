"""Whether a value from a file is of the type that a parameter or a field is annotated with."""

import inspect
from typing import Any

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError


def mismatch(annotation: Any, value: Any) -> str | None:
    """Why a value from a file is not of the annotated type; None where it is, or where that cannot be known."""
    if annotation is inspect.Parameter.empty:
        return None
    try:
        adapter = TypeAdapter(annotation)
    except PydanticSchemaGenerationError:
        return None
    try:
        adapter.validate_python(value, strict=not isinstance(value, list))
    except ValidationError as error:
        return " or ".join(dict.fromkeys(each["msg"].replace("Input should", "must") for each in error.errors()))
    return None
