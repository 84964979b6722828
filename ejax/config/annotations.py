"""Values from a file against the parameters that they are for: their names, and the types of their annotations."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from ejax.schema.messages import short_repr
from ejax.schema.problems import Problem
from ejax.schema.sections import unknown_key


def argument_problems(
    make: Callable[..., Any], cfg: Mapping[str, Any], key: str, given: Collection[str] = ()
) -> list[Problem]:
    """Collect arguments that ``make`` does not take, or takes of another type; ``given`` are filled by ejax.

    Raises TypeError, ValueError: ``make`` has no signature.
    """
    try:
        parameters = inspect.signature(make, eval_str=True).parameters
    except NameError:  # annotations that only a type checker can resolve
        parameters = inspect.signature(make).parameters
    taken = {name: each for name, each in parameters.items() if name not in given}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    problems = []
    for name, value in cfg.items():
        if name in taken and (text := mismatch(taken[name].annotation, value)):
            problems.append(Problem(f"{key}.{name}", f"got {short_repr(value)}; {text}"))
        elif name not in taken and not takes_any:
            problems.append(Problem(f"{key}.{name}", unknown_key(name, taken)))
    return problems


def mismatch(annotation: Any, value: Any) -> str | None:
    """Explain why a value is not of the annotated type; None where it is, or that cannot be known."""
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):
        return None
    try:
        adapter = TypeAdapter(annotation)
    except PydanticSchemaGenerationError:  # an array's class, or any other that pydantic does not know
        return None
    try:
        # strict: neither True nor "1" is a number; but a list in JSON may be a tuple
        adapter.validate_python(value, strict=not isinstance(value, list))
    except ValidationError as error:
        return " or ".join(dict.fromkeys(map(_text, error.errors())))
    return None


def _text(error: Any) -> str:
    if error["type"] == "missing" and error["loc"]:  # of a tuple
        return f"must have more than {error['loc'][-1]} values"
    return error["msg"].replace("Input should", "must").replace("Tuple should", "must") + quotes(error)


def quotes(error: Any) -> str:
    """Remind who gave a number, a date or a truth value for text that quotes make text of it."""
    is_scalar = error["type"] == "string_type" and isinstance(error["input"], int | float | None)
    return ": put it in quotes, twice in a shell, KEY='\"TEXT\"'" if is_scalar else ""
