"""Limits of any value of a config: one rule for files, overrides and gym configs.

Floats are finite, also as float32; integers fit into int32; text can be written. Exceptions are listed here by key.
"""

import argparse
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from ejax.schema.messages import short_repr
from ejax.schema.plain_files import MAX_DIGITS, expanded
from ejax.schema.problems import ConfigError, Problem

MAX_SEED = 2**33 - 1
FLOAT32_MAX = 3.4028234663852886e38
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAY_BE_INFINITE = ("algorithm.cfg.max_grad_norm",)  # infinity: no clipping. The models of some algorithms refuse it
COUNTED_ON_THE_HOST = ("trainer.total_timesteps", "trainer.eval_freq", "trainer.save_freq", "trainer.eval_seed")
"""Integers beyond int32, and likewise every key named ``seed``; the models bound them."""
MAX_COPIED = 10_000  # keys and values that ``plain`` copies
MAX_VALUES = 8_000  # of a whole config: fewer, so that its resolved form, which has the defaults too, can be read again
MAX_DEPTH = 50  # sections and lists inside each other
_CHARACTERS_OF_A_VALUE = 100  # a longer text counts as several
_TOO_LONG = f"got an integer of more than {MAX_DIGITS} digits"
_ODD = re.compile("[\0\ud800-\udfff]")


def whole(least: int, most: int = INT32_MAX) -> Callable[[str], int]:
    """Make a ``type`` for argparse: an integer from ``least`` to ``most``."""

    def read(text: str) -> int:
        if not text.removeprefix("-").isdecimal() or len(text) > MAX_DIGITS or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"got {short_repr(text)}; pass a whole number from {least} to {most}")
        return int(text)

    return read


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the policy of a run: of which member, at which checkpoint."""
    parser.add_argument("--member", type=whole(0), metavar="I", help="member of a population (default: the best)")
    text = "default: best, or latest if there is none"
    parser.add_argument("--checkpoint", type=expanded, metavar="best|latest|PATH", help=text)


def is_number(value: Any) -> bool:
    """Return whether a value is a number; true and false, which are integers to Python, are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_positive(value: Any) -> bool:
    """Return whether a value is a finite number above 0."""
    return is_number(value) and 0 < value < math.inf


def plain(data: Any, most: int = MAX_COPIED) -> Any:
    """Copy a config in memory as what JSON can hold; other objects become their text.

    ConfigError: what could not be written and read again. It is nested too deep (or into itself), has more than
    ``most`` keys and values, each counted wherever it stands, an integer that no message could show, or odd text.
    """
    left = most

    def copied(node: Any, key: str, depth: int) -> Any:
        nonlocal left
        if hasattr(node, "tolist"):  # an array, or a number of NumPy's, JAX's or torch's
            node = node.tolist()
        left -= 1 + (len(node) // _CHARACTERS_OF_A_VALUE if isinstance(node, str) else 0)
        if left < 0:
            raise ConfigError([Problem("", f"has more than {most} keys and values, or as much text, as written out")])
        if depth > MAX_DEPTH:
            raise ConfigError([Problem(key, f"sections and lists are nested deeper than {MAX_DEPTH}")])
        if isinstance(node, int) and abs(node) >= 10**MAX_DIGITS:
            raise ConfigError([Problem(key, _TOO_LONG)])
        for text in (node, key):
            if isinstance(text, str) and _ODD.search(text):  # no name of a file, and not UTF-8
                text = f"got {short_repr(text)}; a text has no null characters and no halves of surrogate pairs"
                raise ConfigError([Problem(key, text)])
        if isinstance(node, Mapping):
            return {str(name): copied(value, f"{key}.{name}".lstrip("."), depth + 1) for name, value in node.items()}
        if isinstance(node, list | tuple):
            return [copied(value, f"{key}.{i}", depth + 1) for i, value in enumerate(node)]
        return node if node is None or isinstance(node, str | int | float) else str(node)

    return copied(data, "", 0)


def number_problems(tree: Any, element: str = ".{}", key: str = "") -> list[Problem]:
    """Find numbers that are wrong for any purpose; ``element`` names a list's: ``[{}]`` in a gym config."""
    if isinstance(tree, Mapping):
        below = [(f"{key}.{name}".lstrip("."), value) for name, value in tree.items()]
    elif isinstance(tree, list | tuple):
        below = [(f"{key}{element.format(i)}".lstrip("."), value) for i, value in enumerate(tree)]
    else:
        text = _of_number(key, tree) if isinstance(tree, int | float) else ""
        return [Problem(key, text)] if text else []
    return [problem for name, value in below for problem in number_problems(value, element, name)]


def _of_number(key: str, value: float) -> str:
    if isinstance(value, bool):
        return ""
    if isinstance(value, int):
        most = INT64_MAX if key in COUNTED_ON_THE_HOST or key.rpartition(".")[2] == "seed" else INT32_MAX
        if abs(value) <= most:
            return ""
        if abs(value) >= 10**MAX_DIGITS:
            return _TOO_LONG
        remedy = f"Where a number may have a fraction, write {value:.1e}"
        return f"got {short_repr(value)}; integers are within ±{most}. {remedy}"
    if value == math.inf and key in MAY_BE_INFINITE:
        return ""
    if not math.isfinite(value):
        return f"got {value}; must be a finite number"
    return "" if abs(value) <= FLOAT32_MAX else f"got {value}; must be within ±3.4e38, where float32 ends"
