"""EmbodiChain's methods of config classes: ``replace``, ``copy``, ``to_dict``, ``validate``."""

import json
import warnings
from typing import Any

import pytest
from case_tables import refused

from ejax.algorithms.grpo import GRPOConfig
from ejax.algorithms.ppo import PPOConfig
from ejax.data import OnlineDataEngineCfg

CONFIGS = [PPOConfig(n_epochs=3), OnlineDataEngineCfg("reach:Reach", buffer_size=3)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("method", ["replace", "copy"])
def test_a_copy_has_other_values_in_the_named_fields(config: Any, method: str) -> None:
    name, value = ("gamma", 0.5) if isinstance(config, PPOConfig) else ("seed", 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # pydantic's copy and validate are deprecated
        changed = getattr(config, method)(**{name: value})
    assert getattr(changed, name) == value
    assert changed != config == getattr(changed, method)(**{name: getattr(config, name)})
    assert config.validate("cfg.") == []


@pytest.mark.parametrize("changes", [{"gama": 0.5}, {"gamma": 1.5}], ids=["no such field", "out of range"])
def test_options_are_checked_again(changes: dict[str, float]) -> None:
    refused(lambda: PPOConfig().replace(**changes), match=next(iter(changes)))


@pytest.mark.parametrize("changes", [{"buffer": 3}, {"buffer_size": 0}], ids=["no such field", "out of range"])
def test_engine_options_are_checked_again(changes: dict[str, int]) -> None:
    refused(lambda: OnlineDataEngineCfg("reach:Reach").replace(**changes), match=next(iter(changes)))


def test_a_default_that_follows_another_field_follows_its_new_value() -> None:
    assert GRPOConfig().shared_start
    assert not GRPOConfig().replace(reset_every_rollout=False).shared_start


@pytest.mark.parametrize("config", CONFIGS, ids=lambda x: type(x).__name__)
def test_a_dictionary_makes_an_equal_config(config: Any) -> None:
    data = json.loads(json.dumps(config.to_dict()))
    assert type(config)(**data) == config
