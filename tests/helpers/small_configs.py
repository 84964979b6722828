"""Configs of a small run, by section."""

import copy
import json
from pathlib import Path
from typing import Any

from ejax.config import RunConfig, load_config, parse_config

ROOT = Path(__file__).parents[2]

BASE = {
    "trainer": {"learning_env": "PointMassRL", "num_envs": 8, "buffer_size": 16},
    "policy": {
        "name": "actor_critic",
        "actor": {"type": "mlp", "network_cfg": {"hidden_sizes": [8, 8], "activation": "relu"}},
        "critic": {"type": "mlp", "network_cfg": {"hidden_sizes": [8, 8], "activation": "relu"}},
    },
    "algorithm": {"name": "ppo", "cfg": {"batch_size": 32}},
}


def make(*overrides: str, **sections: Any) -> RunConfig:
    """Return BASE with sections replaced, then overrides."""
    return parse_config({**copy.deepcopy(BASE), **sections}, overrides)


def of(given: Any) -> RunConfig:
    """Make a config of a row of a table: overrides in a list, or sections."""
    return make(*given) if isinstance(given, list) else make(**given)


def trainer(**keys: Any) -> dict[str, Any]:
    return {**BASE["trainer"], **keys}


def gym(tmp_path: Path, data: dict[str, Any], **keys: int) -> RunConfig:
    """Load the config of a train file whose gym config holds ``data``."""
    (tmp_path / "gym.json").write_text(json.dumps(data))
    section = {"gym_config": "gym.json", **keys}
    train = {**BASE, "trainer": section}
    (tmp_path / "train.json").write_text(json.dumps(train))
    return load_config(tmp_path / "train.json")
