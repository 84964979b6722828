"""ejax gives the numbers of the systems that it reimplements: golden/README.md."""

from collections.abc import Callable
from typing import Any

import goldens
import numpy as np
import pytest
from golden_pairs import GOLDEN, load


@pytest.mark.slow_cases(
    "sampled",
    "segmented",
    "adjoint",
    "complete",
    "deterministic",
    "per_mini_batch",
    "adaptive",
    "normalization",
    "grpo_kl]",
    "grpo_adamw_linear",
    "ppo_adamw_linear",
    "ppo_layernorm",
    "FlashSAC",
    "float64",
)
@pytest.mark.parametrize("compare", goldens.COMPARISONS.values(), ids=[" ".join(key) for key in goldens.COMPARISONS])
def test_the_recorded_numbers_are_ours(compare: Callable[..., Any]) -> None:
    pairs = list(compare())
    assert pairs
    for pair in pairs:
        np.testing.assert_allclose(
            pair.got, pair.expected, rtol=pair.rtol, atol=pair.atol, err_msg=f"{pair.what}: {pair.name}"
        )


def test_every_file_of_numbers_is_compared() -> None:
    elsewhere = {
        "embodichain_0_3_point_mass.npz",  # follows from a torch checkpoint: test_interop_embodichain.py
        "env_steps.npz",  # ejax's own numbers: test_env_steps.py
    }
    files = {path.name for path in GOLDEN.glob("*.npz")}
    assert {file for file, _ in goldens.COMPARISONS} | elsewhere == files


def test_the_recorded_steps_hold_a_success_and_a_collision() -> None:
    golden = load("head_point_mass_steps.npz")
    assert golden["t0/terminated"].sum() == 6
    assert sum((golden[f"t{t}/post/collision_count"] > golden[f"t{t}/pre/collision_count"]).sum() for t in range(4)) > 0


def test_the_recorded_episodes_of_apg_end_in_both_ways_and_in_both_segments() -> None:
    """Otherwise neither the discount's restart nor its way across segments would be compared."""
    golden = load("embodichain_0_3_apg.npz")
    for ends in (golden["segmented/terminated"], golden["segmented/truncated"]):
        assert ends[:4].any()
        assert not ends.all(axis=1).any()
    assert golden["segmented/truncated"][4:].any()
