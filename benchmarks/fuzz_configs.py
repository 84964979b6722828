"""Break configs, gym configs and overrides in seeded ways, and count what becomes of them.

Each mutant must be refused by one short ``ConfigError``, or be accepted, finite, and the same when its resolved form
is read again, within 5 s (see ``tests/config_verdicts.py``). Of some of the accepted ones the run is built too, with
shapes only. Exit code 1 if any mutant is neither.
"""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

import config_mutants
import config_verdicts
from config_verdicts import Verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=10_000, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="judge this one alone, and print it")
    parser.add_argument("--build-every", type=int, default=10, metavar="N", help="of the accepted ones; 0: none")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    found = config_mutants.bases()
    outcomes: Counter[str] = Counter()
    slowest = Verdict("", 0.0, "none")
    slowest_label = ""
    with tempfile.TemporaryDirectory() as folder:
        for number in [args.only] if args.only is not None else range(args.mutants):
            mutant = config_mutants.mutant(found, args.seed, number)
            verdict = config_verdicts.judge(mutant, Path(folder))
            if verdict.config is not None and args.build_every and outcomes["accepted"] % args.build_every == 0:
                outcomes["built too"] += 1
                verdict = config_verdicts.judge_build(verdict)
            outcomes[verdict.outcome] += 1
            if verdict.seconds > slowest.seconds:
                slowest, slowest_label = verdict, mutant.label
            if verdict.outcome not in ("refused", "accepted") or args.only is not None:
                print(f"{verdict.outcome} ({verdict.seconds:.1f} s) {mutant.label}\n    {verdict.text}", flush=True)
    print(f"seed {args.seed}: {dict(outcomes)}; slowest {slowest.seconds:.1f} s: {slowest_label}")
    return int(bool(outcomes.keys() - {"refused", "accepted", "built too"}))


if __name__ == "__main__":
    sys.exit(main())
