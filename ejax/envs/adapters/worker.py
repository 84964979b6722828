"""A Gymnasium environment in a worker process: all that it raises arrives at its owner, as an error."""

import os
import pickle
import signal
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import gymnasium

from ejax.envs.host.calls import described

P = ParamSpec("P")
R = TypeVar("R")


def make_in_worker(make_one: Callable[[], Any], owner: int) -> "Contained":
    """Make one in a process of its own, which leaves Ctrl-C to the owner, who ends the run in order."""
    if os.getpid() != owner:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return Contained(_arriving(make_one))


class Contained(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment whose owner hears of exits too, and of exceptions that Gymnasium's workers cannot send."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return _arriving(self.env.reset, seed=seed, options=options)

    def step(self, action: Any) -> Any:
        return _arriving(self.env.step, action)

    def close(self) -> None:
        _arriving(self.env.close)


def _arriving(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call the function; raise Python's own exceptions as they are, any other as a ``RuntimeError`` with its text."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        if _arrives(error):
            raise
        raise RuntimeError(described(error)) from error
    except BaseException as error:
        text = f"{described(error)}, which ends a process and must not leave an environment"
        raise RuntimeError(text) from error


def _arrives(error: Exception) -> bool:
    try:
        return type(error).__module__ == "builtins" and bool(type(error)(pickle.loads(pickle.dumps(error))))
    except Exception:
        return False
