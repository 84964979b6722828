"""Distance of ejax from the golden numbers of tests/golden: the largest difference of each file, in Markdown.

The same pairs that ``tests/test_goldens.py`` compares. "Relative" is to the largest entry of an array, since single
entries may be zero.
"""

import argparse
import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

import goldens
from golden_pairs import Pair


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    jax.config.update("jax_platforms", "cpu")  # where the golden numbers were made
    print(
        "| golden file | cases | what | numbers | largest absolute difference | relative |\n|---|---|---|---|---|---|"
    )
    for file in dict.fromkeys(file for file, _ in goldens.COMPARISONS):
        groups: dict[str, list[tuple[str, Pair]]] = {}
        for (of, case), compare in goldens.COMPARISONS.items():
            for pair in compare() if of == file else ():
                groups.setdefault(pair.what, []).append((case, pair))
        for what, members in groups.items():
            absolute, relative = zip(*(difference(pair) for _, pair in members), strict=True)
            cases = len({case for case, _ in members})
            count = sum(np.size(pair.expected) for _, pair in members)
            print(f"| `{file}` | {cases} | {what} | {count} | {max(absolute):.1e} | {max(relative):.1e} |", flush=True)


def difference(pair: Pair) -> tuple[float, float]:
    """Return the largest difference, and its ratio to the largest entry."""
    expected = np.asarray(pair.expected, np.float64)
    absolute = float(np.abs(np.asarray(pair.got, np.float64) - expected).max(initial=0.0))
    largest = float(np.abs(expected).max(initial=0.0))
    return absolute, absolute / largest if largest else absolute


if __name__ == "__main__":
    main()
