"""Weights and inputs of the small models of ``golden/vla_models.npz``, drawn alike for lerobot and for ejax."""

import math
import zlib

import numpy as np

STEPS, CHUNK, ROWS, LENGTH = 3, 4, 2, 5


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw a weight from its name: float64, small enough that float32 holds 1e-5."""
    draw = np.random.RandomState(zlib.crc32(name.encode())).uniform(-1.0, 1.0, shape)
    fan = math.prod(shape[1:]) if len(shape) > 1 else 25.0
    return (draw * math.sqrt(3.0 / fan)).astype(np.float32).astype(np.float64)  # both types have these numbers


def inputs() -> dict[str, np.ndarray]:
    """Draw what the models are given."""
    draw = np.random.RandomState(7)
    given = {
        "top": draw.randint(0, 256, (ROWS, 12, 16, 3)).astype(np.uint8),
        "wrist": draw.randint(0, 256, (ROWS, 8, 8, 3)).astype(np.uint8),
        "state": draw.uniform(-2.0, 2.0, (ROWS, 3)).astype(np.float32),
        "noise": draw.normal(size=(ROWS, CHUNK, 6)).astype(np.float32),
        "token": draw.randint(3, 40, (ROWS, LENGTH)),
        "present": np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], bool),
        "time": np.array([0.9, 0.3], np.float32),
    }
    for name, size in (("observation.state", 3), ("action", 2)):
        given[f"stats/{name}.mean"] = draw.uniform(-1.0, 1.0, size).astype(np.float32)
        given[f"stats/{name}.std"] = draw.uniform(0.5, 2.0, size).astype(np.float32)
    return given
