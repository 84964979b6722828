"""The config of a run: its models, every way to write it, and what is wrong with it."""

from ejax.config.load import load_config, parse_config
from ejax.config.models import AlgorithmConfig, EnvConfig, NetworkBlock, ObsGroups, PolicyConfig, TrainerConfig
from ejax.config.run_config import RunConfig, bind
from ejax.schema.problems import ConfigError, KeyNote, Problem

__all__ = [
    "AlgorithmConfig",
    "ConfigError",
    "EnvConfig",
    "KeyNote",
    "NetworkBlock",
    "ObsGroups",
    "PolicyConfig",
    "Problem",
    "RunConfig",
    "TrainerConfig",
    "bind",
    "load_config",
    "parse_config",
]
