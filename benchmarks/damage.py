"""Damage every file of a run's folder in every way, and go on with the run: is it reported, are the bits the same?

    python benchmarks/damage.py

An asynchronous run of a few updates is damaged, one file and one way at a time, and resumed. Right is a message and an
end, or a message and the same final bits from the checkpoint before. A file that is not read by ``--resume latest`` is
damaged where it is: the best checkpoint by ``--resume best``, an older one with the newer ones gone.
"""

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from damages import DAMAGES, asynchronous_run, damage, outcome, what_is_left

from ejax.config import parse_config
from ejax.logs.metric_log import SESSIONS
from ejax.run import train
from ejax.store.run_dir import RunDirectory

_FAULTS = ("raw", "unnoticed", "other bits")


def main() -> int:
    args = _parser().parse_args()
    jax.config.update("jax_platforms", "cpu")
    verdicts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        raw = asynchronous_run(Path(folder))
        train(parse_config(raw), run_dir=Path(folder) / "whole")
        expected = what_is_left(Path(folder) / "whole", "tiny")
        short = {**raw, "trainer": {**raw["trainer"], "iterations": 6}}
        base = train(parse_config(short), run_dir=Path(folder) / "base").run_dir
        config = parse_config(raw)
        for number, (name, resume, how) in enumerate(_cases(base)):
            if number % args.every != args.first:
                continue
            run = Path(folder) / "run"
            shutil.copytree(base, run)
            _make_newest(run, name)
            if damage(run / name, how):
                verdict, text = outcome(config, run, resume, expected)
                verdicts.setdefault(how, Counter())[verdict] += 1
                if verdict in _FAULTS or args.verbose:
                    print(f"{verdict}: {name}, {how}: {text}", flush=True)
            shutil.rmtree(run)
    return _report(verdicts)


def _cases(base: Path) -> Iterator[tuple[str, str, str]]:
    """``(file, what is resumed, way)`` for all files that ejax reads; it writes the others for people."""
    for path in sorted(path for path in base.rglob("*") if path.is_file()):
        name = str(path.relative_to(base))
        if "tfevents" not in name and path.name != SESSIONS:
            for how in DAMAGES:
                yield name, "best" if "_best_" in name else "latest", how


def _make_newest(run: Path, name: str) -> None:
    """Remove the checkpoints that would be used before the one that ``name`` is in."""
    parts = Path(name).parts
    if parts[0] == "checkpoints" and "_best_" not in name:
        for newer in RunDirectory(run, "tiny").periodic():
            if newer.name == parts[1]:
                return
            shutil.rmtree(newer)


def _report(verdicts: dict[str, Counter[str]]) -> int:
    kinds = ["reported", "refused", *_FAULTS]
    print("| damage | reported, same bits | reported, refused | raw error | unnoticed, same bits | other bits |")
    print("|---|---|---|---|---|---|")
    for how, counts in verdicts.items():
        print(f"| {how} | {' | '.join(str(counts[kind]) for kind in kinds)} |")
    total = sum(verdicts.values(), Counter[str]())
    print(f"| all {total.total()} | {' | '.join(str(total[kind]) for kind in kinds)} |")
    return int(any(total[kind] for kind in _FAULTS))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each N-th case (default: all)")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="of those, the K-th to begin with")
    parser.add_argument("--verbose", action="store_true", help="print the report of each")
    return parser


if __name__ == "__main__":
    sys.exit(main())
