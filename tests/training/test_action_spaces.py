"""Actions that an algorithm learns: each with each kind of space and of environment, before it is built."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases
from gymnasium import spaces

from ejax.algorithms.record import find_algorithm
from ejax.config import ConfigError, parse_config
from ejax.config.embodichain.check import check
from ejax.config.schema import schema_text
from ejax.schema.registry import names
from ejax.training.build import build
from ejax.types import Timestep

SPACES = {
    "box": spaces.Box(-1.0, 1.0, (2,)),
    "discrete": spaces.Discrete(3),
    "multi": spaces.MultiDiscrete([2, 3]),
    "binary": spaces.MultiBinary(3),
    "dict": spaces.Dict({"a": spaces.Box(-1.0, 1.0, (1,))}),
    "tuple": spaces.Tuple([spaces.Discrete(2)]),
    "text": spaces.Text(3),
    "empty": spaces.Box(-1.0, 1.0, (0,)),
    "one_sided": spaces.Box(np.array([0.0, -1.0], np.float32), np.array([np.inf, 1.0], np.float32)),
}
NETWORK = {"type": "mlp", "network_cfg": {"hidden_sizes": [4]}}
ACTOR, BOTH = {"name": "actor_only", "actor": NETWORK}, {"actor": NETWORK, "critic": NETWORK}
SMALL = {"actor_width": 8, "critic_width": 8, "num_blocks": 1}
SQUASHED = {"name": "actor_q", "squash_actions": True, **BOTH}
ALGORITHMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ppo": ({"name": "actor_critic", **BOTH}, {"batch_size": 8}),
    "grpo": (ACTOR, {"batch_size": 8, "group_size": 2}),
    "apg": (ACTOR, {}),
    "shac": ({"name": "actor_critic", **BOTH}, {"segment_length": 4}),
    "model_shac": (
        {"name": "actor_critic", "squash_actions": True, **BOTH},
        {"segment_length": 4, "learning_starts": 8, "batch_size": 8, "replay": {"capacity": 64}},
    ),
    "sac": (SQUASHED, {"learning_starts": 8, "batch_size": 8, "replay": {"capacity": 64}}),
    "flash_sac": (
        {"name": "flash_q", "squash_actions": True, "cfg": SMALL},
        {"learning_starts": 8, "batch_size": 8, "replay": {"capacity": 64}},
    ),
    "reppo": (SQUASHED | {"cfg": {"num_bins": 11, "initial_kl_coef": 0.01, "num_critics": 1}}, {"batch_size": 8}),
    "bc": (ACTOR, {"batch_size": 4}),
    "distill": (ACTOR, {"batch_size": 8, "teacher": "nowhere"}),
}
INSIDE = ("apg", "shac", "distill")
OF_A_BOX = ("apg", "shac", "model_shac", "sac", "flash_sac", "reppo")


@dataclass(frozen=True)
class Pure:
    space: str = "box"
    max_episode_steps: int = 5
    observation_space = spaces.Box(-1.0, 1.0, (3,))

    @property
    def action_space(self) -> Any:
        return SPACES[self.space]

    def reset(self, key: Any) -> Any:
        return jnp.zeros((), jnp.int32), jnp.zeros(3)

    def step(self, state: Any, action: Any, key: Any) -> Any:
        ended = jnp.zeros((), bool)
        reward = jnp.sum(jnp.asarray(action, jnp.float32))
        return state + 1, Timestep(obs=jnp.zeros(3), reward=reward, terminated=ended, truncated=ended, info={})


class Host(gymnasium.Env[Any, Any]):
    observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)

    def __init__(self, space: str) -> None:
        self.action_space = SPACES[space]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(3, np.float32), {}


def config(algorithm: str, space: str, kind: str, **policy: Any) -> dict[str, Any]:
    own, options = ALGORITHMS[algorithm]
    data = {"data": {"source": "engine", "task": "PushCubeExpert"}} if algorithm == "bc" else {}
    return data | {
        "env": {"id": f"{__name__}:{kind}", "cfg": {"space": space}},
        "trainer": {"num_envs": 4, "buffer_size": 4, "iterations": 4, "console": False},
        "policy": own | policy,
        "algorithm": {"name": algorithm, "cfg": options},
    }


def refused(algorithm: str, space: str, kind: str) -> set[str]:
    """Keys of which one is refused; empty: it is built."""
    if space in ("binary", "dict", "tuple", "text", "empty"):
        return {"env", "env.id", *(["algorithm.name"] if kind == "Host" and algorithm in INSIDE else [])}
    if (space in ("discrete", "multi") and algorithm in OF_A_BOX) or (kind == "Host" and algorithm in INSIDE):
        return {"algorithm.name"}
    if space == "one_sided" and algorithm in ("model_shac", "sac", "flash_sac", "reppo"):
        return {"policy.squash_actions"}
    return {"algorithm.cfg.teacher"} if algorithm == "distill" else set()


def test_the_table_has_every_algorithm() -> None:
    assert set(ALGORITHMS) == set(names("algorithm"))
    for name in ALGORITHMS:
        kinds = (spaces.Box,) if name in OF_A_BOX else (spaces.Box, spaces.Discrete, spaces.MultiDiscrete)
        assert find_algorithm(name).actions == kinds


@pytest.mark.parametrize("kind", ["Pure", "Host"])
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm_takes_an_action_space_or_refuses_it_by_name(algorithm: str, space: str, kind: str) -> None:
    keys = refused(algorithm, space, kind)
    if not keys:
        build(parse_config(config(algorithm, space, kind)), absent=jax.devices()[:1] if kind == "Pure" else None)
        return
    with pytest.raises(ConfigError) as error:
        build(parse_config(config(algorithm, space, kind)))
    assert error.value.problems[0].key in keys, error.value


def test_the_manual_and_the_schema_list_every_algorithm() -> None:
    page = (Path(__file__).parents[2] / "docs" / "config.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith("| `algorithm` |")]
    description = json.loads(schema_text())["$defs"]["AlgorithmConfig"]["properties"]["name"]["description"]
    for text in (row.split("|")[2], description):
        assert set(re.findall(r"`+([a-z_]+)`+", text)) == set(names("algorithm"))


def test_choices_are_not_squashed() -> None:
    with pytest.raises(ConfigError, match=r"policy\.squash_actions: squashed actions are of a Box, got Discrete"):
        build(parse_config(config("ppo", "discrete", "Pure", squash_actions=True)))


@cases(
    "env unsupported",
    ("gymnax:CartPole-v1", ["algorithm.name"]),
    ("gymnasium:CartPole-v1", ["algorithm.name"]),
    ("gymnasium:Pendulum-v1", []),
    ("gymnasium:Nowhere-v1", ["env.id"]),
)
def test_a_check_asks_an_environment_for_its_space(tmp_path: Path, env: str, unsupported: list[str]) -> None:
    if env.startswith("gymnax"):
        pytest.importorskip("gymnax")
    (tmp_path / "train.json").write_text(json.dumps(config("sac", "box", "Pure") | {"env": {"id": env}}))
    notes = [note.key for note in check(tmp_path / "train.json") if note.status == "unsupported"]
    assert notes == unsupported
