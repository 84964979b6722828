"""Seconds from the command to the first finished update, without compiled programs and with those of an earlier run."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TextIO, cast

COMPILED, UPDATED = "built and compiled", "[train] step="


def main() -> None:
    args = _parser().parse_args()
    times: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as cache:
            times["cold"].append(_start(args.config, args.overrides, cache))
            times["warm"].append(_start(args.config, args.overrides, cache))
    print("| compilation cache | compiled after, s | first update after, s |\n|---|---|---|")
    for name, runs in times.items():
        print(f"| {name} | {' | '.join(f'{median(run[what] for run in runs):.2f}' for what in (COMPILED, UPDATED))} |")
    if args.json:
        args.json.write_text(json.dumps({"config": str(args.config), "seconds": times}, indent=2))


def _start(config: Path, overrides: list[str], cache: str) -> dict[str, float]:
    """Start one training, wait for the two lines that show its progress, end it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ejax.train", "--config", str(config), *overrides]
        command += [f"trainer.output_dir={folder}", "trainer.console=true", "trainer.updates_per_dispatch=1"]
        start = time.perf_counter()
        seconds: dict[str, float] = {}
        with subprocess.Popen(
            command, env={**os.environ, "JAX_COMPILATION_CACHE_DIR": cache}, stdout=subprocess.PIPE, text=True
        ) as process:
            for line in cast(TextIO, process.stdout):  # it is a pipe
                for what in (COMPILED, UPDATED):
                    if what in line:
                        seconds.setdefault(what, time.perf_counter() - start)
                if UPDATED in seconds:
                    break
            process.kill()
    if UPDATED not in seconds:
        raise SystemExit(f"the training ended before its first update (exit code {process.returncode})")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="as for ejax train")
    parser.add_argument("--repeats", type=int, default=3, help="cold and warm starts; medians (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all timings there")
    return parser


if __name__ == "__main__":
    main()
