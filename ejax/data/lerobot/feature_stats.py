"""Statistics of the features of a recording: over an episode, and of several episodes together.

Per entry of the feature: min, max, mean μ, standard deviation σ (of the population), and the number of frames n.
Two parts together (Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances",
1979), with n = n₁ + n₂ and δ = μ₂ - μ₁:

    μ  = μ₁ + δ·n₂/n
    σ² = (n₁σ₁² + n₂σ₂²)/n + δ²·n₁n₂/n²

Images: per channel, of values in [0, 1], shape [3, 1, 1]; a scalar feature has shape [1]. This is LeRobot's form.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Stats: TypeAlias = dict[str, NDArray[Any]]
STATS = ("min", "max", "mean", "std", "count")


def feature_stats(values: NDArray[Any], *, image: bool = False) -> Stats:
    """Statistics of the frames [T, ...] of one episode, T ≥ 1; images are uint8 [T, H, W, 3].

    >>> {name: value.tolist() for name, value in feature_stats(np.array([1.0, 3.0])).items()}
    {'min': [1.0], 'max': [3.0], 'mean': [2.0], 'std': [1.0], 'count': [2]}
    """
    axes = (0, 1, 2) if image else (0,)
    shape = (3, 1, 1) if image else values.shape[1:] or (1,)
    scale = 255.0 if image else 1.0
    made = {name: getattr(np, name)(values, axis=axes) for name in ("min", "max")}
    made |= {name: getattr(np, name)(values, axis=axes, dtype=np.float64) for name in ("mean", "std")}
    stats = {name: np.asarray(value, np.float64).reshape(shape) / scale for name, value in made.items()}
    return stats | {"count": np.array([len(values)])}


def combine_stats(first: Mapping[str, Any], second: Mapping[str, Any]) -> Stats:
    """Statistics of all frames of two parts together."""
    (n1,), (n2,) = first["count"], second["count"]
    delta, share = second["mean"] - first["mean"], n2 / (n1 + n2)
    variance = (1 - share) * first["std"] ** 2 + share * second["std"] ** 2 + delta**2 * share * (1 - share)
    return {
        "min": np.minimum(first["min"], second["min"]),
        "max": np.maximum(first["max"], second["max"]),
        "mean": first["mean"] + delta * share,
        "std": np.sqrt(variance),
        "count": np.array([n1 + n2]),
    }
