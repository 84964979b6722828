"""Kills at a chosen call, in this process."""

import pytest


class Killed(BaseException):
    """In place of a SIGKILL: nothing that handles errors handles it."""


def kill_at(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, count: int) -> None:
    """Kill the run at the ``count``-th call of ``owner.name``, before it does anything."""
    real, calls = getattr(owner, name), []

    def call(*args: object, **kwargs: object) -> object:
        calls.append(name)
        if len(calls) == count:
            raise Killed
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
