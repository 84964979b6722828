"""Trees of arrays as text."""

from collections import UserDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejax.runtime.tree_text import describe_tree, print_tree
from ejax.types import Rollout


def rollout() -> Rollout:
    x, flag = jnp.zeros((3, 2)), jnp.zeros((3, 2), bool)
    obs = {"robot": {"qpos": jnp.zeros((3, 2, 7))}, "camera": jnp.zeros((3, 2, 8, 8, 3), jnp.uint8)}
    numbers = dict.fromkeys(("log_prob", "value", "next_value", "reward"), x)
    return Rollout(obs=obs, action=x[..., None], terminated=flag, truncated=flag, info={"success": flag}, **numbers)


def test_every_array_has_its_path_type_and_shape_and_nothing_else_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_tree(rollout())
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert dict(lines) == {
        "obs.camera": "uint8[3, 2, 8, 8, 3]",
        "obs.robot.qpos": "float32[3, 2, 7]",
        "action": "float32[3, 2, 1]",
        **dict.fromkeys(("log_prob", "value", "next_value", "reward"), "float32[3, 2]"),
        **dict.fromkeys(("terminated", "truncated", "info.success"), "bool[3, 2]"),
    }


def test_mappings_that_jax_does_not_know_are_described_inside() -> None:
    tree = UserDict({"next": UserDict({"reward": np.zeros((2, 1))}), "name": "push", "gamma": 0.9})
    assert describe_tree(tree).splitlines() == [
        "gamma        float 0.9",
        "name         str 'push'",
        "next.reward  float64[2, 1]",
    ]
    assert describe_tree([tree]).splitlines()[0] == "0.gamma        float 0.9"


def test_a_tensordict_is_described_as_a_dict() -> None:
    torch, tensordict = pytest.importorskip("torch"), pytest.importorskip("tensordict")
    tree = tensordict.TensorDict({"obs": {"state": torch.zeros(4, 3)}, "done": torch.zeros(4, dtype=torch.bool)}, [4])
    assert sorted(describe_tree(tree).splitlines()) == ["done       bool[4]", "obs.state  float32[4, 3]"]


def test_shapes_are_shown_where_a_program_is_traced_and_nothing_is_no_error() -> None:
    seen = []
    jax.jit(lambda x: seen.append(describe_tree({"x": x})))(jnp.zeros(3))
    assert seen == ["x  float32[3]"]
    assert describe_tree({"memory": None}) == "no arrays"
