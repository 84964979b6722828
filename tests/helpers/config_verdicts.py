"""The fate that a broken config must have: a property, for a test and a benchmark.

A mutant is either refused by one ``ConfigError`` with short texts, or accepted: then every number in it is finite, and
its resolved form reads back as the same config. Neither takes long.
"""

import json
import math
import re
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax
from config_mutants import Mutant

from ejax.config import ConfigError, RunConfig, load_config, parse_config
from ejax.config.embodichain.check import check, verdict_table
from ejax.training.build import build

MAX_SECONDS = 5.0
"""CPU seconds of this process, on all cores: what others run on the machine does not count."""
MAX_MESSAGE = 20_000
"""Characters of a whole error, with all its problems."""
MAX_PROBLEM = 2_500
"""Characters of one problem's or notice's key and text."""
MAY_BE_INFINITE = re.compile(r"algorithm\.cfg\.max_grad_norm")
"""Keys for which infinity means something: no clipping."""


class Verdict(NamedTuple):
    """The fate of a mutant."""

    outcome: str
    """``refused``, ``accepted``, or what is wrong: ``traceback``, ``non-finite``, ``no round trip``, ``long``,
    ``slow``."""
    seconds: float
    text: str
    config: RunConfig | None = None


class TooSlow(BaseException):
    """A mutant took several times what it may."""


def judge(mutant: Mutant, folder: Path) -> Verdict:
    """Load a mutant and check it, as ``ejax train`` and ``ejax config check`` would."""
    for name, data in mutant.files.items():
        (folder / name).write_bytes(data)
    file = folder / next(iter(mutant.files))
    started = time.process_time()
    previous = signal.signal(signal.SIGPROF, _give_up)
    signal.setitimer(signal.ITIMER_PROF, 4 * MAX_SECONDS)
    try:
        verdict = _load(file, mutant.overrides, started)
        if verdict.outcome in ("refused", "accepted"):
            wrong = _check(file, mutant.overrides, verdict.outcome)
            verdict = verdict if wrong is None else Verdict(*wrong)
    except TooSlow:
        verdict = Verdict("slow", time.process_time() - started, "given up")
    except Exception as error:  # the very thing that is looked for
        verdict = Verdict("traceback", time.process_time() - started, _place(error))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, previous)
    return verdict


def judge_build(verdict: Verdict) -> Verdict:
    """Build the run of an accepted config, and the shapes of its first state: nothing is computed.

    A ``ConfigError`` is as good as a run here: not all can be known before.
    """
    config, started = verdict.config, time.process_time()
    if config is None or config.data is not None or ":" in config.env.id:  # their builds start workers, or libraries
        return verdict
    try:
        jax.eval_shape(lambda: build(config).state)
    except ConfigError as error:
        if len(str(error)) > MAX_MESSAGE:
            return Verdict("long", time.process_time() - started, str(error)[:200])
    except Exception as error:  # as above
        return Verdict("traceback", time.process_time() - started, f"build: {_place(error)}")
    return verdict


def _load(file: Path, overrides: tuple[str, ...], started: float) -> Verdict:
    try:
        config = load_config(file, overrides, device="cpu")
    except ConfigError as error:
        seconds = time.process_time() - started
        longest = max((len(key) + len(text) for key, text in error.problems), default=0)
        if len(str(error)) > MAX_MESSAGE or longest > MAX_PROBLEM:
            return Verdict("long", seconds, f"{len(str(error))} characters, one problem {longest}: {str(error)[:200]}")
        return Verdict("slow" if seconds > MAX_SECONDS else "refused", seconds, str(error))
    seconds = time.process_time() - started
    if seconds > MAX_SECONDS:
        return Verdict("slow", seconds, "accepted")
    longest = max((len(notice.key) + len(notice.text) for notice in config.notices), default=0)
    if longest > MAX_PROBLEM:
        return Verdict("long", seconds, f"a notice of {longest} characters")
    written = config.to_dict()
    if key := next(_not_finite(written), None):
        return Verdict("non-finite", seconds, key)
    try:
        again = parse_config(json.loads(json.dumps(written)))
    except ConfigError as error:
        return Verdict("no round trip", seconds, str(error))
    if again != config or hash(again) != hash(config) or again.to_dict() != written:
        return Verdict("no round trip", seconds, "reads back as another config")
    return Verdict("accepted", seconds, "", config)


def _check(file: Path, overrides: tuple[str, ...], outcome: str) -> tuple[str, float, str] | None:
    """``config check`` on the same files: it too ends in a ConfigError or a table, and it agrees."""
    started = time.process_time()
    try:
        notes = check(file, [*overrides, "trainer.device=cpu"])
    except ConfigError:
        return None if outcome == "refused" else ("no round trip", 0.0, "check refuses what loads")
    seconds = time.process_time() - started
    if seconds > MAX_SECONDS:
        return "slow", seconds, "check"
    longest = max((len(note.key) + len(note.text) for note in notes), default=0)
    if longest > MAX_PROBLEM:
        return "long", seconds, f"check: a note of {longest} characters"
    verdict_table(notes)
    # an environment outside ejax is built by the check alone, and may lack its package
    refused = any(note.status == "unsupported" and "cannot be built" not in note.text for note in notes)
    if refused and outcome == "accepted":
        return "no round trip", seconds, "check calls unsupported what loads"
    return None


def _give_up(signum: int, frame: FrameType | None) -> None:
    raise TooSlow


def _place(error: BaseException) -> str:
    """Type and text of an error, and the innermost lines of ejax on its way."""
    lines, trace = [], error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if "ejax" in code.co_filename:
            lines.append(f"{Path(code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return f"{type(error).__name__} at {' < '.join(lines[::-1][:4])}: {str(error)[:200]}"


def _not_finite(node: Any, key: str = "") -> Iterator[str]:
    """Keys of numbers that are not finite as float32, or integers that no int64 holds."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _not_finite(value, f"{key}.{name}".lstrip("."))
    elif isinstance(node, list | tuple):
        for i, value in enumerate(node):
            yield from _not_finite(value, f"{key}.{i}")
    elif isinstance(node, float) and not abs(node) <= 3.4028234663852886e38:
        if math.isnan(node) or not MAY_BE_INFINITE.fullmatch(key):
            yield key
    elif isinstance(node, int) and abs(node) >= 2**63:
        yield key
