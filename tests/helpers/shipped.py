"""The configs of this repository, loaded."""

from pathlib import Path

import pytest

from ejax.config import ConfigError, RunConfig, load_config


def load_shipped(path: Path) -> RunConfig:
    """Skips where a robot's links are in a package that is not installed."""
    try:
        return load_config(path, device="cpu")
    except ConfigError as error:
        if "this robot's model is in the package" in str(error):
            pytest.skip(str(error))
        raise
