"""``ejax report RUN…``: runs as one HTML page that opens anywhere."""

from ejax.runtime.process_exit import exit_on_signal, exit_with, import_late, refused, until_signal
from ejax.schema.command_line import CommandParser
from ejax.schema.messages import explain
from ejax.schema.plain_files import a_path, a_target
from ejax.schema.writing import replace_file

if __name__ == "__main__":
    exit_on_signal()  # before the imports, which take seconds

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 1 where runs were left out, 2 without a page."""
    args = _parser().parse_args(argv)
    import_late("ejax.report.runs")
    return until_signal("ejax report", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    from ejax.logs.console import working
    from ejax.logs.json_records import FactsError
    from ejax.report.page import render_page
    from ejax.report.runs import Run, read_parity, runs_in
    from ejax.store.checkpoint import CheckpointError

    left_out: list[str] = []

    def attempt(read: Callable[[Path], list[Any]], path: Path) -> list[Any]:
        try:
            return read(path)
        except (CheckpointError, OSError, ValueError) as error:  # FactsError among them
            left_out.append(f"left out: {path}: {explain(error)}")
            print(f"ejax report: {left_out[-1]}", file=sys.stderr)
            return []

    try:
        if args.to.suffix.lower() not in (".html", ".htm") or "\0" in str(args.to):
            raise FactsError(f"--to {args.to}: a page is written as .html; pass --to FILE.html")
        paths = [path for given in args.run for path in attempt(runs_in, given)]
        runs = [run for path in paths for run in attempt(lambda path: [Run(path)], path)]
        if not runs:
            return 2
        for i, run in enumerate(runs):
            if any(run.path.resolve() == other.path.resolve() for other in runs[:i]):
                raise FactsError(f"{run.path} is given twice; name each run once")
        exports = {str(path): read_parity(path) for path in args.parity}
        with working(f"drawing {len(runs)} runs"):
            page = render_page(runs, exports, args.to.parent, left_out)
        replace_file(args.to, page.encode("utf-8", "backslashreplace"))  # names may be no text
    except (FactsError, OSError) as error:
        return refused("ejax report", error)
    count = sum(len(run.problems) for run in runs)
    noted = f"; {count} problem{'s' * (count != 1)} of the logs, at its top" if count else ""
    to = os.fsencode(args.to).decode(errors="backslashreplace")
    print(f"{to}: {len(runs)} run{'s' * (len(runs) != 1)}, {args.to.stat().st_size / 1e6:.1f} MB{noted}")
    return 1 if left_out else 0


def _parser() -> CommandParser:
    about = "Write an HTML page about runs: curves, tables, videos. It needs no network."
    parser = CommandParser("ejax report", description=about)
    text = "folder of a run or of a population (all members); without the time in its name: the newest"
    parser.add_argument("run", type=a_path, nargs="+", metavar="RUN", help=text)
    parser.add_argument("--to", type=a_target, default=Path("report.html"), metavar="FILE.html", help="(report.html)")
    text = "also show parity.json of these exports; those in a run's folder are always shown"
    several: dict[str, Any] = {"type": a_path, "nargs": "+", "action": "extend", "default": []}
    parser.add_argument("--parity", **several, metavar="EXPORT", help=text)
    return parser


if __name__ == "__main__":
    exit_with(main)
