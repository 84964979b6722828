"""Reports of users as small inputs: run a folder of them, and print a table of verdicts.

python benchmarks/reports.py                                          # tests/reports, all
python benchmarks/reports.py tests/reports odd_arrays old_gym         # some
python benchmarks/reports.py FOLDER --json now.json --before was.json # beside the verdicts of an earlier state

Each is a folder with ``repro.py`` or ``run.sh``, run in a process whose path begins with ``_common`` beside it, whose
``$OUT`` is an empty folder, ``$PY`` the interpreter, ``$EJAX`` this repository. A line ``VERDICT: RIGHT``, ``REFUSED``,
``INFO`` or ``WRONG``, with words behind it, says what came out; of several the worst counts. Exit status 1: one is
WRONG, or ended without a verdict. How to add one: tests/reports/README.md.
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
WORST_FIRST = ("NONE", "WRONG", "REFUSED", "INFO", "RIGHT")
"""NONE: no verdict was printed, or the process failed or ran out of time after it."""


class Outcome(NamedTuple):
    name: str
    verdict: str
    text: str
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "tests" / "reports")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument(
        "--before", type=Path, metavar="FILE", help="verdicts of an earlier state, as --json writes them"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts, {name: verdict}")
    parser.add_argument("--limit", type=float, default=400.0, metavar="SECONDS", help="of each report (400)")
    args = parser.parse_args()
    outcomes = []
    for name in args.names or names_in(args.folder):
        outcomes.append(run_apart(args.folder, name, args.limit))
        print(f"{name}: {outcomes[-1].verdict} {outcomes[-1].text}", file=sys.stderr, flush=True)
    before = {} if args.before is None else json.loads(args.before.read_text())
    print(as_markdown(outcomes, before))
    if args.json is not None:
        args.json.write_text(json.dumps({each.name: each.verdict for each in outcomes}, indent=1) + "\n")
    return int(any(each.verdict in ("NONE", "WRONG") for each in outcomes))


def names_in(folder: Path) -> list[str]:
    return sorted(path.parent.name for kind in ("repro.py", "run.sh") for path in folder.glob(f"[!_]*/{kind}"))


def run_apart(folder: Path, name: str, limit: float) -> Outcome:
    """Run a report in a process, for at most ``limit`` seconds."""
    case, start = (folder / name).resolve(), time.monotonic()
    command = ["bash", "run.sh"] if (case / "run.sh").exists() else [sys.executable, "repro.py"]
    path = os.pathsep.join(map(str, (ROOT, case.parent / "_common", case)))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as out:
        environ = {**os.environ, "PYTHONPATH": path, "OUT": out, "PY": sys.executable, "EJAX": str(ROOT)}
        try:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            done = subprocess.run(command, cwd=case, env=environ, timeout=limit, errors="replace", **pipes)
            verdict, text = verdict_of(done.stdout, done.returncode)
        except subprocess.TimeoutExpired:
            verdict, text = "NONE", f"ran for {limit:g} s"
    return Outcome(name, verdict, text, time.monotonic() - start)


def run_here(folder: Path, name: str, out: Path) -> Outcome:
    """Run the function ``report`` of a ``repro.py`` in this process, which has imported ejax already."""
    path, modules, start = list(sys.path), set(sys.modules), time.monotonic()
    sys.path[:0] = [str(folder / "_common"), str(folder / name)]
    importlib.invalidate_caches()
    os.environ["OUT"] = str(out)
    try:
        verdict, text = verdict_of(f"VERDICT: {importlib.import_module('repro').report()}", 0)
    finally:
        sys.path[:] = path
        del os.environ["OUT"]
        for module in set(sys.modules) - modules:
            if str(getattr(sys.modules[module], "__file__", "")).startswith((str(folder), str(out))):
                del sys.modules[module]
    return Outcome(name, verdict, text, time.monotonic() - start)


def verdict_of(printed: str, code: int) -> tuple[str, str]:
    """Find the worst verdict, and its words; without one, the last line."""
    lines = printed.strip().splitlines() or [""]
    found = re.findall(rf"^VERDICT: ({'|'.join(WORST_FIRST[1:])})\b ?(.*)$", printed, re.MULTILINE)
    if code or not found:
        return "NONE", f"exit status {code}: {lines[-1]}"
    return min(found, key=lambda each: WORST_FIRST.index(each[0]))


def as_markdown(outcomes: Sequence[Outcome], before: Mapping[str, str]) -> str:
    rows = [("report", "before", "now", "seconds")]
    rows += [(each.name, before.get(each.name, "–"), each.verdict, f"{each.seconds:.1f}") for each in outcomes]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * width for width in widths))
    lines = [f"| {' | '.join(cell.ljust(n) for cell, n in zip(row, widths, strict=True))} |" for row in rows]
    counts = {verdict: sum(each.verdict == verdict for each in outcomes) for verdict in reversed(WORST_FIRST)}
    return "\n".join([*lines, "", ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)])


if __name__ == "__main__":
    sys.exit(main())
