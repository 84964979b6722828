"""The argument by which an environment takes the length of its episodes, in control steps."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

LIMITS = ("max_episode_steps", "episode_length")


def limit_argument(make: Callable[..., Any]) -> str | None:
    """Name it. None: there is none."""
    parameters = inspect.signature(make).parameters
    return next((name for name in LIMITS if name in parameters), None)


def with_limit(make: Any, num_steps: int) -> Any:
    """Return an environment's class, or a function, whose default limit is another; of a class a subclass of its name.

    Raises ValueError: it has no such argument, or the limit is not a positive integer.
    """
    name = getattr(make, "__name__", str(make))
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
        raise ValueError(f"{name}: max_episode_steps must be an integer >= 1, got {num_steps!r}")
    if isinstance(make, str):
        raise ValueError(f"max_episode_steps needs the class of '{make}', not its place; pass register_env the class")
    limit = limit_argument(make)
    if limit is None and "default_limit" in dir(make):
        return _subclass(make, {"default_limit": num_steps})
    if limit is None:
        text = f"max_episode_steps={num_steps} would change nothing: {name} takes neither {' nor '.join(LIMITS)}"
        raise ValueError(f"{text}; add such a field, or leave max_episode_steps out")
    if not is_dataclass(make):
        return partial(make, **{limit: num_steps})
    was = next(each for each in fields(make) if each.name == limit)
    default = field(default=num_steps, kw_only=was.kw_only)
    made = _subclass(make, {"__annotations__": {limit: was.type}, limit: default})
    if "__dataclass_fields__" in vars(made):  # MuJoCoTask makes one of every subclass
        return made
    options = made.__dataclass_params__
    return dataclass(frozen=options.frozen, eq=options.eq)(made)


def _subclass(kind: Any, own: dict[str, Any]) -> Any:
    about = {each: getattr(kind, each) for each in ("__module__", "__qualname__", "__doc__")}
    return type(kind)(kind.__name__, (kind,), {**about, **own})
