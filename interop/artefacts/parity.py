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

Where actions are choices, a row may differ from JAX's only if the logits tie: the chosen one's logit is no further
below the best one's than two logits may err together. A NaN or infinity has to appear exactly where it does
in JAX's answer.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from interop.plain_files import check_plain, check_unpacked
from interop.twin.kinds import Spec
from interop.twin.spec import MEMORY, NEXT_MEMORY

FloatArray: TypeAlias = NDArray[np.float32]
Arrays: TypeAlias = dict[str, NDArray[Any]]
Run: TypeAlias = Callable[[list[NDArray[Any]]], list[NDArray[Any]]]
"""An artefact: the arrays ``spec.inputs`` [B, ...] in, the arrays ``spec.outputs`` [B, ...] out."""

BATCH_SIZES = (1, 2, 7, 1024)
CONSECUTIVE = "consecutive"
_FLOOR = 2.0**-19


class ParityError(RuntimeError):
    """An artefact that does not answer as JAX does."""


@dataclass(frozen=True)
class Case:
    """Observations of one kind, and JAX's answers to them."""

    name: str
    observation: Arrays
    """``spec.inputs``: [B, F] float32 each, images [B, height, width, channels] uint8."""
    expected: Arrays
    """``spec.outputs``: [B, ...]"""
    allowed: Arrays
    """For each floating-point output: [B, 1], the largest absolute error that passes."""


def allowed_error(expected: FloatArray, sensitivity: NDArray[np.float64]) -> FloatArray:
    """Return the limit of the formula above: [B, 1].

    Args:
        expected: [B, A], JAX's answers.
        sensitivity: [B, A], κ of each number.
    """
    # fmax passes over NaN: where JAX itself gives one, the comparison of NaNs decides
    largest = np.fmax.reduce(sensitivity, axis=-1, keepdims=True, initial=0.0)
    return np.maximum(4.0 * largest, _FLOOR * _scale(expected)).astype(np.float32)


def compare(run: Run, case: Case, spec: Spec) -> dict[str, dict[str, float]]:
    """Measure the largest errors of each output over all rows, in one batch and in batches of ``BATCH_SIZES``.

    Returns:
        ``{output: {"max_abs", "max_rel", "max_ulp", "max_row_ulp", "of_allowed"}}``. ULP: how many float32 numbers
        apart. Tiny numbers lie dense, so ``max_row_ulp`` counts in the spacing at max(1, the row's largest magnitude).
        ``of_allowed`` above 1 is a mismatch.

    Raises:
        ParityError: outputs of other shapes, dtypes or with other NaNs than JAX's.
    """
    worst: dict[str, dict[str, float]] = {}
    loop = case.name == CONSECUTIVE
    for rows in [len(case.expected["action"])] if loop else _batches(case):
        ask = _answer_consecutively if loop else _answer
        answers = ask(run, case, rows, spec)
        if len(answers) != len(spec.outputs):
            raise ParityError(f"{len(answers)} outputs where {spec.outputs} were expected")
        for name, answer in zip(spec.outputs, answers, strict=True):
            errors = _errors(name, np.asarray(answer), case, rows, spec)
            before = worst.setdefault(name, errors)
            worst[name] = {key: max(value, before[key]) for key, value in errors.items()}
    return worst


def _answer(run: Run, case: Case, rows: int, spec: Spec) -> list[NDArray[Any]]:
    return run([case.observation[name][:rows] for name in spec.inputs])


def _answer_consecutively(run: Run, case: Case, rows: int, spec: Spec) -> list[NDArray[Any]]:
    memory, answers = case.observation[MEMORY][:1], []
    for t in range(rows):
        if not case.observation[MEMORY][t].any():  # an episode starts
            memory = np.zeros_like(memory)
        row = {name: case.observation[name][t : t + 1] for name in spec.inputs} | {MEMORY: memory}
        answers.append([np.asarray(y) for y in run([row[name] for name in spec.inputs])])
        memory = answers[-1][spec.outputs.index(NEXT_MEMORY)]
    return [np.concatenate(each) for each in zip(*answers, strict=True)]


def check_repeats(run: Run, case: Case, spec: Spec) -> None:
    """Refuse an artefact that is not deterministic.

    Raises:
        ParityError: the same observations, noise included, gave other bits the second time.
    """
    leaves = [case.observation[name] for name in spec.inputs]
    # bytes, since NaN is not equal to itself
    first, second = ([np.asarray(y).tobytes() for y in run(leaves)] for _ in range(2))
    if first != second:
        raise ParityError(f"the same rows of '{case.name}' gave other bits the second time")


def save_cases(path: Path, cases: list[Case]) -> None:
    arrays = {
        f"{case.name}/{kind}/{name}": x
        for case in cases
        for kind, part in (("observation", case.observation), ("expected", case.expected), ("allowed", case.allowed))
        for name, x in part.items()
    }
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # numpy's stub takes the names for its options


def load_cases(path: Path) -> list[Case]:
    """Load the cases of ``save_cases``.

    Raises:
        ValueError: another file, or a damaged one.
    """
    parts: dict[str, dict[str, Arrays]] = {}
    try:
        check_plain(path)
        with np.load(path, allow_pickle=False) as file:
            check_unpacked(file.zip)
            for key in file.files:
                case, kind, name = key.split("/")
                parts.setdefault(case, {}).setdefault(kind, {})[name] = file[key]
        return [Case(name, **arrays) for name, arrays in parts.items()]
    except Exception as error:  # an invalid archive may fail in zipfile, NumPy or here
        raise ValueError(f"{path} does not hold an export's observations: {repr(error)[:200]}") from error


def check_cases(cases: list[Case], spec: Spec, rows: Mapping[str, int]) -> None:
    """Refuse cases that an artefact could not fail.

    Args:
        rows: of each case.

    Raises:
        ValueError: arrays that are missing or of other shapes than the spec's, or errors of any size allowed.
    """
    if {case.name: len(case.expected.get("action", ())) for case in cases} != rows or "environment" not in rows:
        raise ValueError(f"observations.npz does not have the cases and rows that parity.json lists: {rows}")
    for case in cases:
        batch = (rows[case.name],)
        wanted = {f"observation/{name}": (*batch, *spec.input_shape(name)) for name in spec.inputs}
        wanted |= {f"expected/{name}": (*batch, *spec.output_shape(name)) for name in spec.outputs}
        numbers = [name for name in spec.outputs if spec.continuous or name != "action"]
        wanted |= {f"allowed/{name}": (*batch, 1) for name in numbers}
        kinds = {"observation": case.observation, "expected": case.expected, "allowed": case.allowed}
        given = {f"{kind}/{name}": x.shape for kind, arrays in kinds.items() for name, x in arrays.items()}
        if given != wanted:
            names = sorted(name for name in given.keys() | wanted.keys() if given.get(name) != wanted.get(name))
            shown = ", ".join(f"{name} is {given.get(name)}, must be {wanted.get(name)}" for name in names)
            raise ValueError(f"observations.npz: in case '{case.name}' {shown}")
        for name, x in case.allowed.items():
            overflows = ~np.isfinite(case.expected[name]).all(axis=-1, keepdims=True)
            if not ((x > 0) & (np.isfinite(x) | overflows)).all():
                raise ValueError(
                    f"observations.npz: what is allowed of {name} in '{case.name}' must be finite, above 0"
                )


def _batches(case: Case) -> Iterator[int]:
    rows = len(next(iter(case.observation.values())))
    yield rows
    yield from (size for size in BATCH_SIZES if size < rows)


def _errors(name: str, answer: NDArray[Any], case: Case, rows: int, spec: Spec) -> dict[str, float]:
    expected = case.expected[name][:rows]
    if (answer.shape, answer.dtype) != (expected.shape, expected.dtype):
        raise ParityError(
            f"{name} is {answer.dtype}{list(answer.shape)} in a batch of {rows}, "
            f"JAX gives {expected.dtype}{list(expected.shape)}"
        )
    if name == "action" and not spec.continuous:
        return _choice_errors(answer, expected, case, rows, spec)
    # infinities must be the same ones; no distance is taken between them
    infinite = np.isinf(answer) | np.isinf(expected)
    unlike = (np.isnan(answer) != np.isnan(expected)) | (infinite & (answer != expected))
    if unlike.any():
        row = int(np.argwhere(unlike)[0][0])
        raise ParityError(f"{name} is {answer[row]} in row {row} of '{case.name}', JAX gives {expected[row]}")
    error = np.abs(answer.astype(np.float64) - np.where(infinite, np.nan, expected))
    scale = _scale(expected)
    relative = error / np.maximum(np.abs(expected), np.finfo(np.float32).tiny)
    return {
        "max_abs": _largest(error),
        "max_rel": _largest(relative),
        "max_ulp": _largest(np.where(np.isnan(error), np.nan, np.abs(_steps(answer) - _steps(expected)))),
        "max_row_ulp": _largest(error / np.spacing(scale.astype(np.float32))),
        "of_allowed": _largest(error / case.allowed[name][:rows]),
    }


def _choice_errors(answer: NDArray[Any], expected: NDArray[Any], case: Case, rows: int, spec: Spec) -> dict[str, float]:
    """Errors of choices: by how much the chosen logit is below the best one."""
    logits = case.expected["logits"][:rows]
    scale = _scale(logits)[..., 0]
    parts = np.split(logits, np.cumsum(spec.sizes)[:-1], axis=-1)
    regret = np.zeros(rows)
    for part, choice in zip(parts, answer.reshape(rows, -1).T, strict=True):
        chosen = np.take_along_axis(part, np.clip(choice, 0, part.shape[-1] - 1)[:, None], axis=-1)[:, 0]
        inside = (choice >= 0) & (choice < part.shape[-1])
        regret = np.maximum(regret, np.where(inside, part.max(axis=-1) - chosen, np.inf))
    difference = np.abs(answer.astype(np.int64) - expected)
    return {
        "max_abs": _largest(difference),
        "max_rel": _largest(regret / scale),
        "max_ulp": _largest(difference),
        "max_row_ulp": _largest(regret / np.spacing(scale.astype(np.float32))),
        "of_allowed": _largest(regret / (2.0 * case.allowed["logits"][:rows, 0])),
    }


def _scale(expected: NDArray[Any]) -> NDArray[np.float64]:
    """[B, 1]: the row's largest magnitude, at least 1."""
    return np.fmax.reduce(np.abs(expected.astype(np.float64)), axis=-1, keepdims=True, initial=1.0)


def _steps(x: NDArray[Any]) -> NDArray[np.int64]:
    """Return the place of each float32 in the ordered list of all of them: differences count ULPs."""
    bits = np.ascontiguousarray(x).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(2**31) - bits, bits)


def _largest(x: NDArray[Any]) -> float:
    finite = x[~np.isnan(x)]
    return float(finite.max()) if finite.size else 0.0
