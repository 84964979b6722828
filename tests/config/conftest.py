from dataclasses import dataclass

import pytest

from ejax.schema import registry


@dataclass(frozen=True)
class Task:
    """A task of EmbodiChain's first releases, as the registry knows one."""

    episode_length: int = 50
    action_scale: float = 0.2
    sim_steps_per_control: int = 4
    obs_mode: str = "state"


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register ``TaskRL``."""
    monkeypatch.setitem(registry.ENVS, "TaskRL", Task)
