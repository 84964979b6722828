"""Train a config once for each seed and combination of values, as runs by themselves: any key may differ.

    python examples/sweep.py configs/point_mass/dial.yaml trainer.iterations=40 --seeds 2 \\
        --vary 'algorithm.cfg.gradient_steps=[4, 16]' --vary 'algorithm.cfg.replay.capacity=[256, 8192]'

Each run has a folder in ``--to``; the same command goes on with those that are not finished. ``--ray``: on a cluster,
each a task with a GPU (``--device cpu``: a CPU), which starts again from its last checkpoint where its worker is lost.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from ejax.train import main as train

MAX_FAILURES = 3
STOPPED = 75  # exit code of a run that a signal stopped


def train_member(words: list[str], run: Path) -> int:
    words = [*words, f"--run={run}", f"--stopped-exit-code={STOPPED}"]
    return train([*words, *(["--resume=latest"] if (run / "configs").exists() else [])])


def on_ray(device: str, members: list[tuple[list[str], Path]]) -> Iterable[int]:
    import ray

    ray.init()
    # a worker ends with its member (max_calls), so that the GPU's memory is free
    task = ray.remote(max_calls=1, max_retries=MAX_FAILURES, num_gpus=int(device == "cuda"))(train_member)
    return map(ray.get, [task.remote(*member) for member in members])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("words", nargs="*", metavar="WORD", help="section.key=value, as in ejax train")
    parser.add_argument("--vary", action="append", default=[], metavar="KEY=[VALUE, …]")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="values of trainer.seed, from 1 on")
    parser.add_argument("--to", type=Path, default=Path("outputs/sweep"), metavar="DIR")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cpu")
    parser.add_argument("--trust", action="append", default=[], metavar="NAME", help="as in ejax train")
    parser.add_argument("--ray", action="store_true", help="on the Ray cluster of this machine; all see DIR")
    args = parser.parse_intermixed_args()
    lists = {key: json.loads(values) for key, _, values in (each.partition("=") for each in args.vary)}
    lists["trainer.seed"] = list(range(1, args.seeds + 1))
    shared = [f"--config={args.config}", f"--device={args.device}", *(f"--trust={name}" for name in args.trust)]
    members = []
    for values in itertools.product(*lists.values()):
        own = [f"{key}={json.dumps(value)}" for key, value in zip(lists, values, strict=True)]
        name = "-".join(f"{key.rpartition('.')[2]}_{value}" for key, value in zip(lists, values, strict=True))
        members.append(([*shared, *args.words, *own], args.to.absolute() / name))
    worst = 0
    for code in on_ray(args.device, members) if args.ray else itertools.starmap(train_member, members):
        worst = max(worst, code)
        if code == STOPPED:  # the others wait for the same command
            break
    return worst


if __name__ == "__main__":
    sys.exit(main())
