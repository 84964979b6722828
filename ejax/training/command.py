"""The work of ``ejax train`` besides training: the config that its words name, the facts and errors at its end."""

import argparse
import errno
import json
from pathlib import Path
from typing import Any

from ejax.config import ConfigError, Problem, RunConfig, load_config
from ejax.config.run_config import idle_notes
from ejax.logs.console import summary, what_moved
from ejax.runtime.device import prepare_jax
from ejax.runtime.process_exit import refused
from ejax.runtime.processes import ProcessesError, join_group
from ejax.runtime.sharding import is_main_process
from ejax.schema.messages import duration, explain, number
from ejax.schema.registry import Kind, names
from ejax.schema.trust import UntrustedCodeError, trust_words
from ejax.store.checkpoint import CheckpointError
from ejax.store.run_dir import open_policy_run, open_run_directory
from ejax.training.callbacks import RunResult
from ejax.training.reporter import PAIRS, NonFiniteUpdateError, breakdown, mostly_skipped_text

_PATH_ERRORS = (FileExistsError, FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
_DISK_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "; make room, or choose another trainer.output_dir"),
    errno.EROFS: "; choose another trainer.output_dir",
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ELOOP), ""),
}
"""Refusals of a disk for which Python has no exception, and remedies."""


def exit_code_of(error: Exception) -> tuple[int | None, str]:
    """Return the exit code for an error of a training, and the line that explains it. None: the traceback has to."""
    if isinstance(error, (ConfigError, CheckpointError, UntrustedCodeError, ModuleNotFoundError, *_PATH_ERRORS)):
        return 2, explain(error)
    if isinstance(error, OSError) and error.errno in _DISK_REMEDIES:
        return 2, f"{error}{_DISK_REMEDIES[error.errno]}"  # no traceback: it is the user's disk
    if isinstance(error, NonFiniteUpdateError):
        return 3, explain(error)
    return (1 if isinstance(error, ProcessesError) else None), explain(error)


def load(args: argparse.Namespace) -> RunConfig:
    """Read the config that the words name, join other processes and prepare JAX."""
    # ``ejax train push_cube/ppo``: an override has an =
    if args.config is None and args.overrides and "=" not in args.overrides[0]:
        args.config = args.overrides.pop(0)
    # what a person types is trusted
    trust_words([*args.trust, *args.overrides])
    file = args.config
    if file is None:  # a run knows its own config
        if args.run is None and args.fork is None:
            raise ConfigError([], "pass --config FILE, --run DIR with --resume to continue a run, or --fork RUN")
        if args.fork is None:
            file = open_run_directory(args.run)[0].config_file
        else:
            file, name_of_fork = _config_of(args.fork)
            args.overrides.insert(0, f"trainer.exp_name={json.dumps(name_of_fork)}")  # another one wins
    if args.distributed is not None:
        # as an override, so that the config says what was run
        args.overrides.append(f"trainer.distributed={str(args.distributed).lower()}")
    config = load_config(file, args.overrides, device=args.device)
    address = args.coordinator, args.num_processes, args.process_id
    if config.trainer.distributed:
        join_group(*address)  # before JAX looks for devices
    elif address != (None, None, None):
        text = (
            "got false, but the address of other processes is given, with which it would not train; add --distributed"
        )
        raise ConfigError([Problem("trainer.distributed", text)])
    if config.population is not None and args.fork is not None:
        raise ConfigError([Problem("population", "is several runs, and a fork is one; leave one of them out")])
    prepare_jax(config.trainer.device)
    for notice in config.notices:
        print(f"[config] {notice.key}: {notice.text}", flush=True)
    if args.verbose:
        kinds: tuple[Kind, ...] = ("env", "policy", "algorithm")
        for kind, name in zip(kinds, (config.env.id, config.policy.name, config.algorithm.name), strict=True):
            print(f"[config] {kind}: {name} (registered: {', '.join(names(kind))})")
        trainer = config.trainer
        steps = trainer.num_updates * trainer.buffer_size * trainer.num_envs
        of_each = " on each device" if trainer.distributed else ""
        print(f"[config] {steps:,} {config.step_name}{of_each} in {trainer.num_updates:,} updates", flush=True)
    return config


def _config_of(fork: Path) -> tuple[Path, str]:
    """Find the config of what is forked, and a name other than its own: ``NAME_fork``, ``NAME_fork2``, …"""
    directory = open_policy_run(fork.absolute().parents[1] if (fork / "meta.json").is_file() else fork)[0]
    name, _, number = directory.exp_name.rpartition("_fork")  # a fork of a fork counts on
    if not name or not (number.isdecimal() or not number):
        return directory.config_file, f"{directory.exp_name}_fork"
    return directory.config_file, f"{name}_fork{int(number or 1) + 1}"


def load_first(args: argparse.Namespace, config: RunConfig) -> RunConfig:
    """Read the config of ``--first``, which trains the policy that ``config`` starts from."""
    unfit = {"--resume": args.resume, "--fork": args.fork, "policy.init_from": config.policy.init_from}
    if given := [option for option, value in unfit.items() if value is not None]:
        raise ConfigError([Problem("--first", f"trains the policy that a new run starts from; leave out {given[0]}")])
    before = load_config(args.first, device=args.device)
    if before.population is not None or config.trainer.distributed:
        raise ConfigError([Problem("--first", "is one run of one process; train it by itself, and set init_from")])
    return before


def print_summary(name: str, config: RunConfig, result: RunResult) -> int:
    """Print the facts of a run that has ended. Returns the exit code."""
    if not is_main_process():
        return 0
    last = result.last_train_metrics
    # under the tags of evaluations, which are by the mean action
    sampled = ", ".join(f"{mode} {number(last[tag])}" for tag, mode in PAIRS.values() if tag in last)
    skipped = f"{result.skipped_updates:.4g} of {result.num_updates}, not finite"
    facts = {
        "time by part": breakdown(result.seconds),
        "first to last": what_moved(result.train_history) or None,
        **last_evaluation(result.last_eval_metrics),
        f"best {config.trainer.best_eval_metric}": result.best_eval_value,
        **of_fresh_episodes(result.fresh_eval_metrics, config.trainer.best_eval_metric),
        "sampled actions, last 100 training episodes": sampled or None,
        "skipped updates": skipped if result.skipped_updates else None,
        "without effect": "; ".join(idle_notes(config, result.global_step // max(result.num_updates, 1))) or None,
        "best checkpoint": result.best_checkpoint_path or "none",
        "latest checkpoint": result.latest_checkpoint_path or "none",
    }
    print_facts(config, result, facts)
    if result.finished and result.skipped_updates > 0.5 * result.num_updates:
        return refused(f"ejax {name}", mostly_skipped_text(result.skipped_updates, result.num_updates), 3)
    return 0


def print_facts(config: RunConfig, result: Any, facts: dict[str, Any], of_each: str = "", of_all: str = "") -> None:
    shared = {
        "run": result.run_dir,
        "members": len(result.members) if of_each else None,  # None is left out
        f"{config.step_name}{of_each}": result.global_step,
        "wall time": duration(result.elapsed_time_sec),
        f"{config.step_name.removeprefix('env ')}/s{of_all}": result.training_fps,
    }
    # the last line that is seen
    last = {"interrupted": None if result.finished else "yes; continue with --resume latest"}
    summary({key: value for key, value in (shared | facts | last).items() if value is not None})


def last_evaluation(metrics: dict[str, float]) -> dict[str, str | None]:
    """Write the last evaluation in one line, as the training stands in another."""
    odd = ("nonfinite_episodes", "repeated_episodes", "unfinished_episodes")
    shown = {tag.removeprefix("eval/"): value for tag, value in metrics.items() if "/metrics/" not in tag}
    texts = [f"{name} {number(value)}" for name, value in shown.items() if value or not name.startswith(odd)]
    return {"last evaluation": ", ".join(texts) or None}


def of_fresh_episodes(fresh: dict[str, dict[str, Any]], tag: str) -> dict[str, str]:
    """Write each checkpoint's value of the watched metric over its fresh episodes, for a summary."""
    return {
        f"{which} checkpoint over {facts['episodes']:,} fresh episodes": f"{tag} {number(facts[tag])}"
        for which, facts in fresh.items()
        if tag in facts
    }
