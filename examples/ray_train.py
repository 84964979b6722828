"""Train in several processes that Ray starts: on a cluster's GPUs, or with --cpu on this machine to try it.

    pip install 'ray[train]'
    python examples/ray_train.py configs/point_mass/ppo.yaml --workers 2 --cpu trainer.iterations=4

Ray's JaxTrainer joins the processes before it calls ``work``; from there on it is ``ejax.run.train`` in each of them.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer


def work(settings: dict[str, Any]) -> None:
    """In each process: process 0 decides, writes and speaks, the others follow it."""
    from ejax.config import load_config
    from ejax.run import train
    from ejax.runtime.device import prepare_jax

    config = load_config(settings["config"], [*settings["overrides"], "trainer.distributed=true"])
    prepare_jax(config.trainer.device)
    run = Path(settings["run"])
    # Ray restarts the processes after a failure
    train(config, run_dir=run, resume="latest" if run.exists() else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes, of one GPU each")
    parser.add_argument("--run", type=Path, default=Path("outputs/ray"), help="the run's folder; all machines see it")
    parser.add_argument("--cpu", action="store_true", help="processes of one CPU device each, on this machine")
    args = parser.parse_intermixed_args()
    if args.cpu:  # JaxTrainer joins processes of GPUs and TPUs only: let Ray take CPUs for such
        os.environ["JAX_PLATFORMS"] = "cpu"
        ray.init(num_gpus=args.workers)
    settings = {
        "config": str(args.config.absolute()),
        "overrides": [*args.overrides, f"trainer.device={'cpu' if args.cpu else 'cuda'}"],
        "run": str(args.run.absolute()),
    }
    trainer = JaxTrainer(
        work,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=True, resources_per_worker={"GPU": 1}),
        run_config=RunConfig(
            storage_path=str(args.run.absolute().parent), failure_config=FailureConfig(max_failures=3)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
