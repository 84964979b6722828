"""EmbodiChain's overview of its RL module: its parts, its command."""

import importlib
from pathlib import Path

import pytest

import ejax

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "place",
    [
        "ejax.algorithms.ppo",
        "ejax.collectors.buffer",
        "ejax.policies.actor_critic",
        "ejax.policies.mlp",
        "ejax.run",
        "ejax.config",
        "ejax.train",
    ],
)
def test_each_part_has_a_place(place: str) -> None:
    assert importlib.import_module(place).__doc__


def test_users_inherit_algorithms_and_callbacks_and_policies_follow_a_protocol() -> None:
    assert isinstance(ejax.BaseAlgorithm, type) and isinstance(ejax.Callback, type)
    assert {"init", "apply"} <= set(dir(ejax.Policy))


def test_the_command_reads_the_documents_config(capsys: pytest.CaptureFixture[str]) -> None:
    from ejax.train import main

    file = ROOT / "configs/agents/rl/push_cube/train_config.json"
    assert main(["--config", str(file), "--device", "cpu", "trainer.sead=1"]) == 2
    assert "Did you mean 'seed'?" in capsys.readouterr().err
