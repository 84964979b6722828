"""How close ejax comes to the golden numbers of tests/golden: the largest difference of each file, in Markdown.

The same pairs that ``tests/test_goldens.py`` compares. "Relative" is to the largest entry of an array, since single
entries may be zero.
"""

import argparse
import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import goldens
from golden_pairs import Pair


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    jax.config.update("jax_platforms", "cpu")  # where the golden numbers were made
    print("| golden file | case | what | numbers | largest absolute difference | relative |\n|---|---|---|---|---|---|")
    for (file, case), compare in goldens.COMPARISONS.items():
        groups: dict[str, list[Pair]] = {}
        for pair in compare():
            groups.setdefault(pair.what, []).append(pair)
        for what, pairs in groups.items():
            absolute, relative = zip(*map(difference, pairs), strict=True)
            count = sum(np.size(pair.expected) for pair in pairs)
            print(f"| `{file}` | {case} | {what} | {count} | {max(absolute):.1e} | {max(relative):.1e} |", flush=True)


def difference(pair: Pair) -> tuple[float, float]:
    """The largest difference, and its ratio to the largest entry."""
    expected = np.asarray(pair.expected, np.float64)
    absolute = float(np.abs(np.asarray(pair.got, np.float64) - expected).max(initial=0.0))
    largest = float(np.abs(expected).max(initial=0.0))
    return absolute, absolute / largest if largest else absolute


if __name__ == "__main__":
    main()
