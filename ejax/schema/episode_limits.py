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

    Raises ValueError: it has no such argument, or the limit is no positive integer.
    """
    name = getattr(make, "__name__", str(make))
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
        raise ValueError(f"{name}: max_episode_steps must be an integer >= 1, got {num_steps!r}")
    if isinstance(make, str):
        raise ValueError(f"max_episode_steps needs the class of '{make}', not its place; give register_env the class")
    limit = limit_argument(make)
    if limit is None:
        text = (
            f"{name} takes neither {' nor '.join(LIMITS)}, so that max_episode_steps={num_steps} would change nothing"
        )
        remedy = "give it such a field, or leave max_episode_steps out"
        if "gym_config" in inspect.signature(make).parameters:
            remedy = "its gym config has the key max_episode_steps"
        raise ValueError(f"{text}; {remedy}")
    return _subclass(make, limit, num_steps) if is_dataclass(make) else partial(make, **{limit: num_steps})


def _subclass(kind: Any, limit: str, num_steps: int) -> Any:
    was = next(each for each in fields(kind) if each.name == limit)
    own = {"__annotations__": {limit: was.type}, limit: field(default=num_steps, kw_only=was.kw_only)}
    about = {each: getattr(kind, each) for each in ("__module__", "__qualname__", "__doc__")}
    made = type(kind)(kind.__name__, (kind,), {**about, **own})
    if "__dataclass_fields__" in vars(made):  # MuJoCoTask makes one of every subclass
        return made
    options = kind.__dataclass_params__
    return dataclass(frozen=options.frozen, eq=options.eq)(made)
