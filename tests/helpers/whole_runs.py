"""Checks of whole runs that the tests of several algorithms make."""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from ejax.algorithms.step import RunState
from ejax.config import ConfigError, parse_config
from ejax.run import train
from ejax.store.checkpoint import load_checkpoint
from ejax.training.build import build


def assert_goes_on_with_the_same_bits(raw: dict[str, Any], folder: Path) -> RunState:
    """Train the config at once, and again with a stop after half of its updates. Returns the state at the end."""
    config, whole_run, parts_run = parse_config(raw), folder / "whole", folder / "parts"
    whole = train(config, run_dir=whole_run)
    half = {"iterations": config.trainer.num_updates // 2}
    train(parse_config(raw | {"trainer": raw["trainer"] | half}), run_dir=parts_run)
    parts = train(config, resume="latest", run_dir=parts_run)
    like = build(config).state
    ends = [load_checkpoint(Path(str(each.latest_checkpoint_path)), like)[0] for each in (whole, parts)]
    for one, other in zip(*map(jax.tree.leaves, ends), strict=True):
        is_key = jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key)
        np.testing.assert_array_equal(*(jax.random.key_data(x) if is_key else x for x in (one, other)))
    end: RunState = ends[0]
    return end


def assert_refused(raw: dict[str, Any], changes: list[str], key: str, text: str) -> None:
    """Require a ConfigError that names ``key`` and has ``text`` behind it."""
    with pytest.raises(ConfigError) as caught:
        build(parse_config(raw, changes))
    assert re.search(rf"{re.escape(key)}.*{re.escape(text)}", str(caught.value)), caught.value
