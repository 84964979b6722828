"""Options that are numbers of the program, as in a run, or arrays in it, as of a population's members."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax

F = TypeVar("F", bound=Callable[..., Any])


def is_array(option: Any) -> bool:
    return isinstance(option, jax.Array)


def is_active(coefficient: Any) -> bool:
    """Test that the term of a coefficient has a part in the program: unless it is the number 0."""
    return is_array(coefficient) or coefficient > 0.0


def unjit_for_traced(function: F, *options: Any) -> F:
    """Return a function that is jitted with static options; where one of them is an array, the function inside."""
    return inspect.unwrap(function) if any(map(is_array, options)) else function
