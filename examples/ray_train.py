"""Train one run on a Ray cluster, in several processes; ``examples/sweep.py --ray`` trains many runs.

    pip install -e '.[ray]'
    python examples/ray_train.py configs/point_mass/ppo.yaml --workers 2 --device cpu trainer.iterations=4

Ray gives each process a place and a GPU. When one is lost, all start again from the last checkpoint.
"""

import argparse
import socket
import sys
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ejax.config import load_config
from ejax.schema.trust import add_trust_option, trust_words
from ejax.train import main as train_by_words

MAX_FAILURES = 3
LOST, STOPPED = 1, 75  # exit codes of a process that lost another, and of one that a signal stopped
# a worker sees one GPU, its own; without this JAX would go by SLURM's variables where Ray runs under SLURM
ONE_DEVICE = {"env_vars": {"JAX_LOCAL_DEVICE_IDS": "0"}}


class Process:
    """One of a run's processes: the command line ``ejax train``."""

    def address(self) -> str:
        with socket.socket() as free:
            free.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def train(self, *words: str) -> int:
        return train_by_words([*words])


def train_run(num_workers: int, resources: dict[str, Any], run: Path, words: list[str]) -> int:
    group = placement_group([{"CPU": 1, "GPU": resources["num_gpus"]}] * num_workers)  # all of them start, or none
    code = LOST
    for _ in range(1 + MAX_FAILURES):
        ray.get(group.ready())
        places = [PlacementGroupSchedulingStrategy(group, i) for i in range(num_workers)]
        workers = [ray.remote(Process).options(scheduling_strategy=place, **resources).remote() for place in places]
        shared = [*words, f"--run={run}", "--distributed", f"--num-processes={num_workers}"]
        shared += [f"--stopped-exit-code={STOPPED}", *(["--resume=latest"] if run.exists() else [])]
        try:
            shared.append(f"--coordinator={ray.get(workers[0].address.remote())}")
            code = max(ray.get([each.train.remote(*shared, f"--process-id={i}") for i, each in enumerate(workers)]))
        except ray.exceptions.RayActorError as error:
            print(f"ray_train: a worker is lost: {error}", flush=True)
        if code not in (LOST, STOPPED):
            break
        for worker in workers:
            ray.kill(worker)
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes of a run, one device each")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--run", type=Path, default=Path("outputs/ray"), help="the run's folder; all machines see it")
    add_trust_option(parser)
    args = parser.parse_intermixed_args()
    trust_words(args.trust)
    run = args.run.absolute()
    load_config(args.config, args.overrides, device=args.device)  # a wrong one is refused before there are workers
    ray.init()  # the cluster of this machine, if it has one
    resources = {"num_cpus": 1, "num_gpus": int(args.device == "cuda"), "runtime_env": ONE_DEVICE}
    words = [f"--config={args.config}", f"--device={args.device}", *(f"--trust={name}" for name in args.trust)]
    return train_run(args.workers, resources, run, [*words, *args.overrides])


if __name__ == "__main__":
    sys.exit(main())
