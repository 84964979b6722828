"""The config of a run: its models, every way to write it, and what is wrong with it.

Names are resolved at their first use, so that a command line can read its arguments before JAX is imported.
"""

from ejax.schema.lazy_names import lazy_names

_PLACES = {
    "ejax.config.load": ("load_config", "parse_config"),
    "ejax.config.models": (
        *("AlgorithmConfig", "EnvConfig", "NetworkBlock", "ObsGroups", "PolicyConfig", "TrainerConfig"),
    ),
    "ejax.config.run_config": ("RunConfig", "bind"),
    "ejax.schema.problems": ("ConfigError", "KeyNote", "Problem"),
}
__all__ = sorted(name for names in _PLACES.values() for name in names)
__getattr__ = lazy_names("ejax.config", _PLACES)
