"""A population in one program beside as many runs: wall and CPU seconds, and whether the numbers are equal.

    python benchmarks/population.py --config configs/point_mass/ppo.yaml --seeds 16 trainer.iterations=20

Each side is what a user types, from the command on, with a folder of compiled programs that is empty at first: of the
runs, one after the other, all but the first find theirs there.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def main() -> None:
    args = _parser().parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        whole = _train(
            args.config, [f"population.seeds={args.seeds}", *args.overrides], out / "all", out / "compiled_all"
        )
        count = len(list((out / "all" / "members").iterdir()))
        members = [out / "all" / "members" / str(i) for i in range(count)]
        singles = [
            _train(member / "configs" / "resolved.json", [], out / f"one_{i}", out / "compiled")
            for i, member in enumerate(members)
        ]
        equal = sum(_lines(member) == _lines(out / f"one_{i}") for i, member in enumerate(members))
    runs = {kind: sum(single[kind] for single in singles) for kind in whole}
    print("| | wall, s | CPU, s |\n|---|---|---|")
    print(f"| {count} runs, one after the other | {runs['wall']:.0f} | {runs['cpu']:.0f} |")
    print(f"| one population of {count} | {whole['wall']:.0f} | {whole['cpu']:.0f} |")
    print(f"| part of it | {whole['wall'] / runs['wall']:.2f} | {whole['cpu'] / runs['cpu']:.2f} |")
    print(f"\n{equal} of {count} members have the metrics of their run, bit for bit")
    if args.json:
        args.json.write_text(json.dumps({"population": whole, "runs": singles, "equal": equal}, indent=2))


def _train(config: Path, overrides: list[str], run: Path, compiled: Path) -> dict[str, float]:
    """Train in its own process; the seconds it took."""
    command = [sys.executable, "-m", "ejax.train", "--config", str(config), "--run", str(run), *overrides]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [*command, "trainer.console=false"],
        env={**os.environ, "JAX_COMPILATION_CACHE_DIR": str(compiled)},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": time.perf_counter() - start, "cpu": cpu}


_OF_TIMING = ("time", "charts/SPS", "memory/")


def _lines(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "logs" / "metrics.jsonl").read_text().splitlines())
    return [{tag: x for tag, x in line.items() if not tag.startswith(_OF_TIMING)} for line in lines]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="as for ejax train")
    parser.add_argument("--seeds", type=int, default=16, metavar="N", help="of each combination (default: 16)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all timings there")
    return parser


if __name__ == "__main__":
    main()
