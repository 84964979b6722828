"""Make the policies that come with ejax, in ``ejax/shipped``: train them, keep the policy alone, and certify it.

    python benchmarks/ship.py NAME …     # of benchmarks/shipped.yaml

A policy is the last checkpoint of its run, which no evaluation chose. ``certificate.json`` has what it was made from,
commit included, and what it reaches in 1,000 episodes that neither training nor evaluation has seen, by the mode of its
distribution and by samples. Numbers depend on the machine in their last digits, and so do episodes in the end. A
training that was stopped goes on, if the commit is still the same; its run is ``outputs/ship/NAME_COMMIT``.
"""

import argparse
import json
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ejax.config import RunConfig, load_config
from ejax.config.shipped import POLICIES
from ejax.play.saved_policy import evaluate_run
from ejax.run import train
from ejax.runtime.device import prepare_jax
from ejax.schema.plain_files import read_json, to_json
from ejax.store.arrays import read_arrays
from ejax.store.checkpoint import library_versions, save_arrays, save_checkpoint, verify_checkpoint
from ejax.store.digests import write_digests
from ejax.store.run_dir import VERSIONS, RunDirectory, create_run_directory, open_run_directory
from ejax.training.evaluators import fresh_seeds
from ejax.types import PyTree

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("shipped.yaml")
EPISODES = 1000
MOST_BYTES = 200_000
"""The most that one policy takes, with all its files."""
_KEPT = ("global_step", "num_updates", "config", "last_eval_metrics", "versions")
_TAGS = (
    "eval/success_rate",
    "eval/avg_reward",
    "eval/avg_length",
    "eval/metrics/linear_velocity_error",
    "eval/metrics/yaw_rate_error",
)


def main() -> None:
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="+", choices=table, metavar="NAME", help=", ".join(table))
    names = parser.parse_args().names
    # the policies are what this makes: those that were made a minute ago are not committed yet
    if changed := git("status", "--porcelain", "--", ".", ":!ejax/shipped"):
        raise SystemExit(f"a certificate names a commit, and these files are of none; commit them first:\n{changed}")
    prepare_jax("cpu")
    for name in names:
        print(json.dumps(ship(name, **table[name]), indent=1), flush=True)


def ship(name: str, config: str, seed: int, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """Train, write ``ejax/shipped/<name>`` and return its certificate."""
    commit = git("rev-parse", "HEAD")
    run = ROOT / "outputs" / "ship" / f"{name}_{commit[:12]}"
    wanted = load_config(config, [f"trainer.seed={seed}", *overrides], device="cpu")
    train(wanted, resume="latest" if run.exists() else None, run_dir=run)
    directory, trained = open_run_directory(run)
    meta = keep_policy(directory, trained, POLICIES / name)
    seed_of_episodes = fresh_seeds(trained.trainer.model_copy(update={"final_eval_episodes": 1}))[0]
    certificate = {
        "config": config,
        "overrides": list(overrides),
        "seed": seed,
        "commit": commit,
        "env_steps": meta["global_step"],
        "episodes": EPISODES,
        "evaluation_seed": seed_of_episodes,
        "mode": certified(POLICIES / name, seed_of_episodes, samples=False),
        "samples": certified(POLICIES / name, seed_of_episodes, samples=True),
        "versions": library_versions(),
    }
    (POLICIES / name / "certificate.json").write_text(to_json(certificate, indent=1) + "\n", encoding="utf-8")
    size = sum(file.stat().st_size for file in (POLICIES / name).rglob("*") if file.is_file())
    if size > MOST_BYTES:
        raise SystemExit(f"{name} has {size:,} bytes; a policy that ships has at most {MOST_BYTES:,}")
    return certificate | {"bytes": size}


def keep_policy(run: RunDirectory, config: RunConfig, to: Path) -> Mapping[str, Any]:
    """Write a run with the parameters alone of its last checkpoint, in place of what is there, and return its meta."""
    if to.exists():
        shutil.rmtree(to)
    source = run.find("latest", print)
    found = verify_checkpoint(source)
    forms = {name: x for name, x in read_arrays(source, None).items() if name.startswith("train.params.")}
    meta = {key: found[key] for key in _KEPT if key in found} | {"policy_only": True}
    kept = create_run_directory(config, to)
    # of the machine what may matter to numbers, and neither its kernel's build nor its folders
    configs, versions = kept.config_file.parent, kept.versions()
    versions["platform"] = f"{platform.system()}-{platform.machine()}"
    (configs / VERSIONS).write_text(to_json(versions, indent=2), encoding="utf-8")
    write_digests(configs)
    save_checkpoint(kept.checkpoints, source.name, read_arrays(source, forms), meta, _save_without_path)
    return meta


def _save_without_path(folder: Path, state: PyTree) -> None:
    """Save arrays without orbax's note on which path they were saved to, which it reads in a bucket only."""
    save_arrays(folder, state)
    (folder / "commit_success.txt").unlink()


def certified(policy: Path, seed: int, *, samples: bool) -> dict[str, float]:
    """Evaluate what ships: means over the episodes, and the standard deviation of their returns."""
    facts = evaluate_run(policy, num_episodes=EPISODES, num_envs=64, seed=seed, samples=samples)
    returns = read_json(facts["report"])["per_episode"]["return"]
    return {tag: round(facts[tag], 4) for tag in _TAGS if tag in facts} | {"std_of_returns": round(np.std(returns), 4)}


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
