"""The config of a run: its models, every way to write it, and what is wrong with it.

Names are resolved at their first use, so that a command line can read its arguments before JAX is imported.
"""

import importlib
from typing import Any

_PLACES = {
    **dict.fromkeys(("load_config", "parse_config"), "ejax.config.load"),
    **dict.fromkeys(("AlgorithmConfig", "EnvConfig", "NetworkBlock", "ObsGroups"), "ejax.config.models"),
    **dict.fromkeys(("PolicyConfig", "TrainerConfig"), "ejax.config.models"),
    **dict.fromkeys(("RunConfig", "bind"), "ejax.config.run_config"),
    **dict.fromkeys(("ConfigError", "KeyNote", "Problem"), "ejax.schema.problems"),
}
__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'ejax.config' has no attribute '{name}'")
    return getattr(importlib.import_module(_PLACES[name]), name)
