"""``ejax train --config FILE``: train, or continue a run.

``ejax pretrain`` clones demonstrations, whose frames are its steps, and ``ejax distill`` teaches a policy what
``teacher=RUN`` does: by the same loop, with the same options.
"""

from ejax.runtime.process_exit import exit_on_signal, exit_with, import_late, refused, until_signal

if __name__ == "__main__":
    exit_on_signal()  # before the imports, which take seconds

import argparse
import errno
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ejax.schema.messages import explain
from ejax.schema.plain_files import a_path, expanded
from ejax.schema.trust import UntrustedCodeError, add_trust_option, trust_words

if TYPE_CHECKING:
    from ejax.config import RunConfig
    from ejax.population.lanes import PopulationResult
    from ejax.run import RunResult

_PATH_ERRORS = (FileExistsError, FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
_DISK_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "; make room, or give another trainer.output_dir"),
    errno.EROFS: "; give another trainer.output_dir",
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ELOOP), ""),
}
"""Refusals of a disk for which Python has no exception, and remedies."""


def main(argv: list[str] | None = None, name: str = "train") -> int:
    """Run the command line of ``ejax train``, ``pretrain`` or ``distill``.

    Returns:
        0; ``--stopped-exit-code`` after SIGTERM, SIGHUP or Ctrl-C, once the state is saved; 130, 143 or 129 where a
        signal ended it before or without that; 2 for what could not be started; 3 for numbers that are not finite.
    """
    words = sys.argv[1:] if argv is None else argv
    if name == "distill":  # the one key that every such command has
        words = [f"algorithm.cfg.{word}" if word.startswith("teacher=") else word for word in words]
    args = _parser(name).parse_intermixed_args(words)
    import_late("ejax.run")
    return until_signal(f"ejax {name}", lambda: _run(name, args))


def _run(name: str, args: argparse.Namespace) -> int:
    try:
        config = _load(args)
        if args.first is not None:  # after the config that it is for, whose errors would come too late
            config, code = _train_first(name, config, args)
            if code is not None:
                return code
        if config.population is None:
            result = import_late("ejax.run").train(config, resume=args.resume, run_dir=args.run, fork=args.fork)
            failure = print_summary(name, config, result)
        else:
            result = import_late("ejax.population").train_population(config, resume=args.resume, run_dir=args.run)
            failure = print_population(name, config, result)
        return failure or (0 if result.finished else args.stopped_exit_code)
    except Exception as error:
        code, text = exit_code_of(error)
        if code is None:
            raise
        return refused(f"ejax {name}", text, code)


def _train_first(name: str, config: "RunConfig", args: argparse.Namespace) -> tuple["RunConfig", int | None]:
    """Train by ``--first`` and let ``config`` start from its policy; and an exit code, where it ended early."""
    from ejax.config import ConfigError, Problem, load_config

    unfit = {"--resume": args.resume, "--fork": args.fork, "policy.init_from": config.policy.init_from}
    if given := [option for option, value in unfit.items() if value is not None]:
        raise ConfigError([Problem("--first", f"trains the policy that a new run starts from; leave out {given[0]}")])
    before = load_config(args.first, device=args.device)
    if before.population is not None or config.trainer.distributed:
        raise ConfigError([Problem("--first", "is one run of one process; train it by itself, and give init_from")])
    result = import_late("ejax.run").train(before)
    code = print_summary(name, before, result) or (None if result.finished else args.stopped_exit_code)
    policy = config.policy.model_copy(update={"init_from": str(result.latest_checkpoint_path)})
    return config.model_copy(update={"policy": policy}), code


def exit_code_of(error: Exception) -> tuple[int | None, str]:
    """Return the exit code for an error of a training, and the line that explains it. None: the traceback has to."""
    from ejax.config import ConfigError
    from ejax.runtime.processes import ProcessesError
    from ejax.store.checkpoint import CheckpointError
    from ejax.training.reporter import NonFiniteUpdateError

    if isinstance(error, (ConfigError, CheckpointError, UntrustedCodeError, ModuleNotFoundError, *_PATH_ERRORS)):
        return 2, explain(error)
    if isinstance(error, OSError) and error.errno in _DISK_REMEDIES:
        return 2, f"{error}{_DISK_REMEDIES[error.errno]}"  # no traceback: it is the user's disk
    if isinstance(error, NonFiniteUpdateError):
        return 3, explain(error)
    return (1 if isinstance(error, ProcessesError) else None), explain(error)


def _load(args: argparse.Namespace) -> "RunConfig":
    """Read the config that the words name, join other processes and prepare JAX."""
    from ejax.config import ConfigError, Problem, load_config
    from ejax.runtime.device import prepare_jax
    from ejax.runtime.processes import Address, join_group
    from ejax.store.run_dir import open_run_directory

    # ``ejax train push_cube/ppo``: an override has an =
    if args.config is None and args.overrides and "=" not in args.overrides[0]:
        args.config = args.overrides.pop(0)
    # what a person types is trusted
    trust_words([*args.trust, *args.overrides])
    file = args.config
    if file is None:  # a run knows its own config
        if args.run is None and args.fork is None:
            raise ConfigError([], "give --config FILE, --run DIR with --resume to continue a run, or --fork RUN")
        if args.fork is None:
            file = open_run_directory(args.run)[0].config_file
        else:
            file, name_of_fork = _config_of(args.fork)
            args.overrides.insert(0, f"trainer.exp_name={json.dumps(name_of_fork)}")  # another one wins
    if args.distributed is not None:
        # as an override, so that the config says what was run
        args.overrides.append(f"trainer.distributed={str(args.distributed).lower()}")
    config = load_config(file, args.overrides, device=args.device)
    address = Address(args.coordinator, args.num_processes, args.process_id)
    if config.trainer.distributed:
        join_group(address)  # before JAX looks for devices
    elif address != Address():
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
        _list_registered(config)
    return config


def _list_registered(config: "RunConfig") -> None:
    from ejax.schema.registry import Kind, names

    chosen: dict[Kind, str] = {"env": config.env.id, "policy": config.policy.name, "algorithm": config.algorithm.name}
    for kind, name in chosen.items():
        print(f"[config] {kind}: {name} (registered: {', '.join(names(kind))})")
    trainer = config.trainer
    steps = trainer.num_updates * trainer.buffer_size * trainer.num_envs
    of_each = " on each device" if trainer.distributed else ""
    print(f"[config] {steps:,} {config.step_name}{of_each} in {trainer.num_updates:,} updates", flush=True)


def _config_of(fork: Path) -> tuple[Path, str]:
    """Find the config of what is forked, and a name other than its own: ``NAME_fork``, ``NAME_fork2``, …"""
    from ejax.store.run_dir import open_policy_run

    directory = open_policy_run(fork.absolute().parents[1] if (fork / "meta.json").is_file() else fork)[0]
    name, _, number = directory.exp_name.rpartition("_fork")  # a fork of a fork counts on
    if not name or not (number.isdecimal() or not number):
        return directory.config_file, f"{directory.exp_name}_fork"
    return directory.config_file, f"{name}_fork{int(number or 1) + 1}"


def print_summary(name: str, config: "RunConfig", result: "RunResult") -> int:
    """Print the facts of a run that has ended. Returns the exit code."""
    from ejax.config.run_config import idle_notes
    from ejax.logs.console import what_moved
    from ejax.runtime.sharding import is_main_process
    from ejax.schema.messages import number
    from ejax.training.reporter import PAIRS, breakdown, mostly_skipped_text

    if not is_main_process():
        return 0
    last = result.last_train_metrics
    # under the tags of evaluations, which are by the mean action
    sampled = ", ".join(f"{mode} {number(last[tag])}" for tag, mode in PAIRS.values() if tag in last)
    skipped = f"{result.skipped_updates:.4g} of {result.num_updates}, not finite"
    facts = {
        "time by part": breakdown(result.seconds),
        "first to last": what_moved(result.train_history) or None,
        **_evaluation(result.last_eval_metrics),
        f"best {config.trainer.best_eval_metric}": result.best_eval_value,
        **_of_fresh_episodes(result.fresh_eval_metrics, config.trainer.best_eval_metric),
        "sampled actions, last 100 training episodes": sampled or None,
        "skipped updates": skipped if result.skipped_updates else None,
        "without effect": "; ".join(idle_notes(config, result.global_step // max(result.num_updates, 1))) or None,
        "best checkpoint": result.best_checkpoint_path or "none",
        "latest checkpoint": result.latest_checkpoint_path or "none",
    }
    _print_facts(config, result, facts)
    if result.finished and result.skipped_updates > 0.5 * result.num_updates:
        return refused(f"ejax {name}", mostly_skipped_text(result.skipped_updates, result.num_updates), 3)
    return 0


def _print_facts(config: "RunConfig", result: Any, facts: dict[str, Any], of_each: str = "", of_all: str = "") -> None:
    from ejax.logs.console import summary
    from ejax.schema.messages import duration

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


def _evaluation(metrics: dict[str, float]) -> dict[str, str | None]:
    """Write the last evaluation in one line, as the training stands in another."""
    from ejax.schema.messages import number

    odd = ("nonfinite_episodes", "repeated_episodes", "unfinished_episodes")
    shown = {tag.removeprefix("eval/"): value for tag, value in metrics.items() if "/metrics/" not in tag}
    texts = [f"{name} {number(value)}" for name, value in shown.items() if value or not name.startswith(odd)]
    return {"last evaluation": ", ".join(texts) or None}


def _of_fresh_episodes(fresh: dict[str, dict[str, Any]], tag: str) -> dict[str, str]:
    """Write each checkpoint's value of the watched metric over its fresh episodes, for a summary."""
    from ejax.schema.messages import number

    return {
        f"{which} checkpoint over {facts['episodes']:,} fresh episodes": f"{tag} {number(facts[tag])}"
        for which, facts in fresh.items()
        if tag in facts
    }


def print_population(name: str, config: "RunConfig", result: "PopulationResult") -> int:
    """Print the facts of a population that has ended. Returns the exit code."""
    from ejax.population.lineage import EXPLOITS, lineage, read_exploits, value_texts
    from ejax.training.evaluators import read_fresh

    best, tag = result.best_member, config.trainer.best_eval_metric
    broken = [i for i, alive in enumerate(result.alive) if not alive]
    skipping = [i for i, skipped in enumerate(result.skipped_updates) if skipped > 0.5 * result.num_updates]
    of_best: dict[str, str] = {}
    if best is not None:
        exploits, at = read_exploits(result.run_dir), result.best_eval_steps[best]
        of_best = value_texts(exploits, best, at, result.members[best].values)
        if exploits:
            of_best["its lineage"] = lineage(exploits, best)
            of_best["exploits"] = f"{len(exploits)}: {result.run_dir / EXPLOITS}"
        of_best[f"its best {tag}"] = str(result.best_eval_values[best])
        of_best |= _of_fresh_episodes(read_fresh(result.run_dir / "members" / str(best)), tag)
    facts = {
        **_evaluation(result.last_eval_metrics),
        "best member": "none" if best is None else f"{best}: seed {result.members[best].seed}",
        **of_best,
        "broken members": ", ".join(map(str, broken)) or None,
        "members that skipped most updates": ", ".join(map(str, skipping)) or None,
        "latest checkpoint": result.latest_checkpoint_path or "each member's own",
    }
    _print_facts(config, result, facts, " of each", " of all")
    if len(broken) == len(result.members):  # some that broke are a result, all are a failure
        return refused(f"ejax {name}", "every member broke; lower algorithm.cfg.optimizer.learning_rate", 3)
    return 0


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"ejax {name}", description="Train a policy from a config file.")
    parser.add_argument(
        "--config", type=expanded, metavar="FILE|NAME", help="JSON, YAML or a shipped config (ejax configs)"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="NAME section.key=value",
        help="the config, unless --config names it, and overrides, e.g. trainer.seed=3",
    )
    parser.add_argument("--device", metavar="cpu|cuda|cuda:N", help="override trainer.device")
    parser.add_argument(
        "--distributed",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="train on all devices of this machine, or of all processes; overrides trainer.distributed",
    )
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, if no scheduler provides it")
    parser.add_argument("--num-processes", type=int, metavar="N", help="number of processes")
    parser.add_argument("--process-id", type=int, metavar="I", help="this process, from 0")
    parser.add_argument(
        "--resume",
        type=expanded,
        metavar="latest|best|PATH",
        help="continue from a checkpoint of --run or of the newest run; from EmbodiChain's FILE.pt in a new run",
    )
    parser.add_argument(
        "--fork",
        type=a_path,
        metavar="RUN|CHECKPOINT",
        help="start a new run from the whole state of another (its best checkpoint); config: --config, or its own",
    )
    text = "train with this config first, such as push_cube/bc, and start from its last policy"
    parser.add_argument("--first", type=expanded, metavar="FILE|NAME", help=text)
    parser.add_argument("--run", type=a_path, metavar="DIR", help="the run's folder (default: a new one)")
    parser.add_argument(
        "--stopped-exit-code",
        type=int,
        default=0,
        metavar="N",
        help="exit code after a signal stopped and saved the run (default 0), for schedulers that restart failed jobs",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="print registered names and total steps")
    add_trust_option(parser)
    return parser


if __name__ == "__main__":
    exit_with(partial(main, name=globals().get("COMMAND", "train")))  # as ``ejax.__main__`` runs it
