"""Observations that are hard to answer identically: at the ends of their ranges, huge, not a number, noise."""

import numpy as np
from numpy.typing import NDArray

from interop.standalone_verify import Arrays
from interop.twin.kinds import Spec

_NUM_ROWS = 256
_NUM_ROWS_WITH_IMAGES = 64
"""Noise does not compress: each row takes as many bytes as its images."""


def adversarial_observations(
    seen: Arrays, ranges: dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]], spec: Spec
) -> dict[str, Arrays]:
    """Make observations of each adversarial kind, by the names that ``interop.artefacts.cases`` explains.

    Args:
        seen: observations of the environment, [B, ...] each.
        ranges: (low, high) [F] of each array of numbers.
    """
    rng = np.random.default_rng(0)
    rows = _NUM_ROWS_WITH_IMAGES if spec.images else _NUM_ROWS
    numbers = {name: x for name, x in seen.items() if name not in spec.images}
    kinds: dict[str, Arrays] = {
        "edges": {name: _vertices(rng, rows, *ranges[name]) for name in numbers},
        "zeros": {name: np.zeros_like(x[:1]) for name, x in numbers.items()},
        "huge": {name: _huge(rng, rows, x.shape[-1]) for name, x in numbers.items()},
    }
    if spec.continuous and spec.numbers:  # the best choice among NaNs is undefined
        kinds["not_a_number"] = _with_one_nan(rng, rows, numbers, spec)
    if not spec.images:
        return kinds
    kinds["noise"] = {name: _some(x, rows) for name, x in numbers.items()}
    for name, shape in spec.images.items():
        kinds["edges"][name] = _patterns(rng, rows, shape)
        kinds["zeros"][name] = np.zeros((1, *shape), np.uint8)
        kinds["noise"][name] = rng.integers(256, size=(rows, *shape), dtype=np.uint8)
        for kind in {"huge", "not_a_number"} & set(kinds):
            of_numbers = next(iter(kinds[kind].values()), None)
            kinds[kind][name] = _some(seen[name], rows if of_numbers is None else len(of_numbers))
    return kinds


def _some(x: NDArray[np.generic], rows: int) -> NDArray[np.generic]:
    return np.take(x, np.arange(rows), axis=0, mode="wrap")


def _vertices(
    rng: np.random.Generator, rows: int, low: NDArray[np.float32], high: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Random corners of the box, and the two extreme ones."""
    at_high = rng.random((rows, low.size)) < 0.5
    at_high[0], at_high[1] = False, True
    return np.where(at_high, high, low).astype(np.float32)


def _huge(rng: np.random.Generator, rows: int, width: int) -> NDArray[np.float32]:
    exponent = rng.uniform(2.0, 6.0, (rows, width))
    return (rng.choice((-1.0, 1.0), exponent.shape) * 10.0**exponent).astype(np.float32)


def _with_one_nan(rng: np.random.Generator, rows: int, numbers: Arrays, spec: Spec) -> Arrays:
    rows = min(rows, len(next(iter(numbers.values()))))
    spoilt = {name: x[:rows].copy() for name, x in numbers.items()}
    features = [(name, i) for name in spec.numbers for i in spec.read(name)]
    for row, pick in enumerate(rng.integers(len(features), size=rows)):
        name, i = features[pick]
        spoilt[name][row, i] = np.nan
    return spoilt


def _patterns(rng: np.random.Generator, rows: int, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Black, white, one colour, edges, a frame, corners, checkerboards; the rest are random bytes of 0 and 255."""
    height, width, channels = shape
    row, column = np.indices((height, width))
    frame = (row == 0) | (row == height - 1) | (column == 0) | (column == width - 1)
    corners = [(row == i) & (column == j) for i in (0, height - 1) for j in (0, width - 1)]
    boards = [(row // size + column // size) % 2 == 0 for size in (1, 2, 3, 4)]
    grey = [row < 0, row >= 0, row < height // 2, column < width // 2, frame, *corners, *boards]
    # grey pictures and pure channels: swapped colours and a transposed image both show
    drawn = [np.repeat(mask[..., None], channels, axis=-1) for mask in grey]
    drawn += [np.broadcast_to(np.arange(channels) == c, shape) for c in range(channels)]
    noise = rng.random((max(rows - len(drawn), 0), *shape)) < 0.5
    return np.where(np.concatenate([np.stack(drawn)[:rows], noise]), 255, 0).astype(np.uint8)
