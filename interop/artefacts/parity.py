"""The distance of an artefact's answers from JAX's, and its limit.

For each row r of a case and each output y

    |y − y_JAX|  ≤  max(4·κ_r, 2⁻¹⁹·s_r),      s_r = max(1, ‖y_JAX‖∞)

where κ_r is how much JAX's answer in that row depends on rounding: the largest change of its float64 answer when every
weight and every number of the observation is off by a relative 2⁻²², in either direction at random, and the distance of
its float32 answer from its float64 one. Pixels are whole numbers x that the policy turns into x/127.5 − 1: they are off
by 2⁻²² of x or of |x − 127.5|, whichever is more, each on its own. That is backward stability: an artefact may answer
as the exact policy would to numbers that are off by a few units in the last place, as another order of summation makes
them. The floor is 16 steps of float32, for rows that are insensitive by luck. Right artefacts of random policies, of
every activation and with weights up to ±3, came up to half of what is allowed; GELU by its tanh approximation is a
hundred times beyond it.

The case ``consecutive`` of a policy with memory is answered step by step, each with the memory that the artefact itself
gave at the step before: κ is then of the whole way from the episode's start.

Where actions are choices, a row may differ from JAX's only if the logits tie: the chosen one's logit is not further
below the best one's than two logits may err together. A NaN or infinity has to appear exactly where it does
in JAX's answer. ``interop.standalone_verify`` measures by this rule.
"""

from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from interop.standalone_verify import CONSECUTIVE, Case, largest_magnitude

FloatArray: TypeAlias = NDArray[np.float32]
_FLOOR = 2.0**-19


class ConversionError(ValueError):
    """A policy that has no form in a format, though others of its kind have."""


def allowed_error(expected: FloatArray, sensitivity: NDArray[np.float64]) -> FloatArray:
    """Return the limit of the formula above: [B, 1].

    Args:
        expected: [B, A], JAX's answers.
        sensitivity: [B, A], κ of each number.
    """
    # fmax passes over NaN: where JAX itself gives one, the comparison of NaNs decides
    largest = np.fmax.reduce(sensitivity, axis=-1, keepdims=True, initial=0.0)
    return np.maximum(4.0 * largest, _FLOOR * largest_magnitude(expected)).astype(np.float32)


def without_ties(case: Case) -> Case:
    """Leave out rows whose whole numbers lie between two by less than they may be off, where either is right; of
    ``consecutive`` all from the first on."""
    tied = case.allowed["action"][:, 0] >= 1.0
    keep = np.arange(tied.argmax()) if case.name == CONSECUTIVE and tied.any() else np.flatnonzero(~tied)
    parts = (case.observation, case.expected, case.allowed)
    return Case(case.name, *({name: x[keep] for name, x in part.items()} for part in parts))


def save_cases(path: Path, cases: list[Case]) -> None:
    arrays = {
        f"{case.name}/{kind}/{name}": x
        for case in cases
        for kind, part in (("observation", case.observation), ("expected", case.expected), ("allowed", case.allowed))
        for name, x in part.items()
    }
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # numpy's stub takes the names for its options
