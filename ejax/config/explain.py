"""pydantic's validation errors as problems: dotted key, what was given, what is allowed, the nearest name.

They are of a config's sections, and of values for a class's or function's parameters, by their annotations.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from ejax.algorithms.record import find_algorithm
from ejax.optim import OPTIMIZER_KWARGS, SCHEDULE_KWARGS
from ejax.schema.frozen import thaw
from ejax.schema.messages import did_you_mean, short_repr
from ejax.schema.problems import ConfigError, Problem, join_by_key
from ejax.schema.registry import import_entry, is_import_path
from ejax.schema.sections import unknown_key

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")  # a model's and a dataclass's
_MAX_EXPLAINED = 300  # unknown keys with a nearest name, each 0.3 ms to find


def explain_errors(error: ValidationError, tree: Any) -> list[Problem]:
    """Return one problem for each wrong key of ``tree``."""
    problems: list[Problem] = []
    for count, each in enumerate(error.errors()):
        nested = each.get("ctx", {}).get("error")
        if isinstance(nested, ConfigError):
            problems += nested.problems
            continue
        key = _dotted(each["loc"], tree)
        plain = each["type"] in _UNKNOWN and count > _MAX_EXPLAINED
        problems.append(Problem(key, "unknown key" if plain else _text(each, key, tree)))
    return join_by_key(problems, " or ")  # a key of a union has an error for each of its types


def _dotted(location: tuple[int | str, ...], tree: Any) -> str:
    names: list[str] = []
    node = tree
    for part in location:
        if isinstance(node, dict):
            node = node.get(part, {})
        elif isinstance(node, list) and isinstance(part, int):
            node = node[part] if part < len(node) else {}
        else:
            continue  # pydantic's own name of a union's branch
        names.append(str(part))
    return ".".join(names)


def _text(error: Any, key: str, tree: Any) -> str:
    given, kind = thaw(error["input"]), error["type"]
    section, _, name = key.rpartition(".")
    if kind == "missing":
        return "is missing"
    if kind in _UNKNOWN:
        return unknown_key(name, *_allowed(section, tree))
    if kind == "value_error":
        return error["msg"].removeprefix("Value error, ")
    if kind == "literal_error":
        allowed = [name.strip(" '") for name in error["ctx"]["expected"].replace(" or ", ",").split(",")]
        return f"got {short_repr(given)}; allowed: {', '.join(allowed)}{did_you_mean(str(given), allowed)}"
    if kind in ("model_type", "dataclass_type"):
        return f"got {short_repr(given)}; must be a section with the keys {', '.join(_allowed(key, tree)[0])}"
    if kind == "int_type" and isinstance(given, float) and given.is_integer():
        return f"got {short_repr(given)}; must be an integer, such as {given:.0f}"
    return f"got {short_repr(given)}; {_wanted(error)}"


def _allowed(section: str, tree: Any) -> tuple[list[str], list[str]]:
    # their models are chosen by a name next to them, which the schema does not express
    for kind, keywords in (("optimizer", OPTIMIZER_KWARGS), ("lr_scheduler", SCHEDULE_KWARGS)):
        if section == f"algorithm.cfg.{kind}.kwargs":
            name = tree["algorithm"]["cfg"][kind].get("name", "adam").lower()
            return list(keywords[name].model_fields), []
    algorithm = tree.get("algorithm") if isinstance(tree, dict) else None
    name = str(algorithm.get("name") if isinstance(algorithm, dict) else None)
    if section == "algorithm.cfg" and is_import_path("algorithm", name):
        return list(find_algorithm(name).Config.model_fields), []
    return keys_of(section, name.lower())


def keys_of(section: str, algorithm: str) -> tuple[list[str], list[str]]:
    """Return ``ejax.config.schema.allowed_keys``, whose schema of all configs only a refusal needs."""
    return import_entry({"keys": "ejax.config.schema:allowed_keys"}, "keys")(section, algorithm)


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
        return " or ".join(dict.fromkeys(map(_wanted, error.errors())))
    return None


def _wanted(error: Any) -> str:
    if error["type"] == "missing" and error["loc"]:  # of a tuple
        return f"must have more than {error['loc'][-1]} values"
    text: str = error["msg"].replace("Input should", "must").replace("Tuple should", "must")
    # who gave a number, a date or a truth value for text may not know that quotes make text of it
    is_scalar = error["type"] == "string_type" and isinstance(error["input"], int | float | None)
    return text + (": put it in quotes, twice in a shell, KEY='\"TEXT\"'" if is_scalar else "")
