"""``python -m ejax.train --config FILE``: train, or go on with a run."""

from ejax.runtime.interrupt import leave_at_once, until_signal

if __name__ == "__main__":
    leave_at_once()  # before the imports, which take seconds

import argparse
import datetime
import errno
import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ejax.runtime.process_exit import leave
from ejax.schema.trust import UntrustedCodeError, add_trust_option, trust_words

if TYPE_CHECKING:
    from ejax.config import RunConfig

_PATH_ERRORS = (FileExistsError, FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
_OF_THE_DISK = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "; make room, or give another trainer.output_dir"),
    errno.EROFS: "; give another trainer.output_dir",
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ELOOP), ""),
}
"""What a disk refuses and Python has no exception of its own for, and what to do about it."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: 0 also after SIGTERM, SIGHUP or Ctrl-C, once the state is saved; 130, 143 or 129 where a signal
        ended it before or without that; 2 for what could not be started; 3 for a training that broke on numbers that
        are not finite.
    """
    return run_command("train", argv)


def run_command(name: str, argv: list[str] | None = None) -> int:
    """``main`` under the name of one of the two modules that train."""
    args = _parser(name).parse_intermixed_args(argv)
    importlib.import_module(
        "ejax.run"
    )  # takes seconds: after --help, and while a signal still ends the process at once
    return until_signal(f"ejax.{name}", lambda: _run(name, args))


def _run(name: str, args: argparse.Namespace) -> int:
    from ejax.config import ConfigError, Problem, load_config
    from ejax.logs.console import summary, what_moved
    from ejax.logs.usage import breakdown
    from ejax.run import train
    from ejax.runtime.device import prepare_jax
    from ejax.runtime.processes import Address, ProcessesError, join, leads
    from ejax.store.checkpoint import CheckpointError
    from ejax.store.run_dir import open_run_directory
    from ejax.training.fresh import fresh_facts
    from ejax.training.skipped import NonFiniteUpdateError, mostly_skipped_text

    trust_words([*args.trust, *args.overrides], remember=True)
    try:
        file = args.config
        if file is None:
            if args.run is None and args.fork is None:
                raise ConfigError([], "give --config FILE, --run DIR with --resume to go on with a run, or --fork RUN")
            if args.fork is None:
                file = open_run_directory(args.run)[0].config_file
            else:
                file, name_of_fork = _config_of(args.fork)
                args.overrides.insert(0, f"trainer.exp_name={json.dumps(name_of_fork)}")  # another one wins
        if args.distributed is not None:
            args.overrides.append(f"trainer.distributed={str(args.distributed).lower()}")
        config = load_config(file, args.overrides, device=args.device)
        address = Address(args.coordinator, args.num_processes, args.process_id)
        if config.trainer.distributed:
            join(address)  # before JAX looks for devices
        elif address.given:
            text = "got false beside the address of other processes, with which it would not train; add --distributed"
            raise ConfigError([Problem("trainer.distributed", text)])
        prepare_jax(config.trainer.device)
        for notice in config.notices:
            print(f"[config] {notice.key}: {notice.text}", flush=True)
        if config.population is not None:
            if args.fork is not None:
                raise ConfigError([Problem("population", "is several runs, and a fork is one; leave one of them out")])
            return _train_population(name, config, args)
        result = train(config, resume=args.resume, run_dir=args.run, fork=args.fork)
    except (ConfigError, CheckpointError, UntrustedCodeError, ModuleNotFoundError, *_PATH_ERRORS) as error:
        print(f"ejax.{name}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in _OF_THE_DISK:
            raise
        print(f"ejax.{name}: {error}{_OF_THE_DISK[error.errno]}", file=sys.stderr)
        return 2
    except NonFiniteUpdateError as error:
        print(f"ejax.{name}: {error}", file=sys.stderr)
        return 3
    except ProcessesError as error:
        print(f"ejax.{name}: {error}", file=sys.stderr)
        return 1
    if not leads():
        return 0
    skipped = f"{result.skipped_updates:.4g} of {result.num_updates}, not finite"
    summary(
        {
            "run": result.run_dir,
            config.step_name: result.global_step,
            "wall time": datetime.timedelta(seconds=round(result.elapsed_time_sec)),
            f"{config.step_name.removeprefix('env ')}/s": result.training_fps,
            "of which": breakdown(result.seconds),
            **({"from first to last": moved} if (moved := what_moved(result.train_history)) else {}),
            **{name: value for name, value in result.last_eval_metrics.items() if "/metrics/" not in name},
            **(
                {}
                if result.best_eval_value is None
                else {f"best {config.trainer.best_eval_metric}": result.best_eval_value}
            ),
            **fresh_facts(result.fresh_eval_metrics, config.trainer.best_eval_metric),
            **({"skipped updates": skipped} if result.skipped_updates else {}),
            "best checkpoint": result.best_checkpoint_path or "none",
            "latest checkpoint": result.latest_checkpoint_path or "none",
            **({} if result.finished else {"interrupted": "yes; go on with --resume latest"}),
        }
    )
    if result.finished and result.mostly_skipped:
        print(f"ejax.{name}: {mostly_skipped_text(result.skipped_updates, result.num_updates)}", file=sys.stderr)
        return 3
    return 0


def _config_of(fork: Path) -> tuple[Path, str]:
    """The config of what is forked, and a name other than its own: ``NAME_fork``, ``NAME_fork2``, …"""
    from ejax.store.run_dir import open_policy_run

    directory = open_policy_run(fork.absolute().parents[1] if (fork / "meta.json").is_file() else fork)[0]
    name, _, number = directory.exp_name.rpartition("_fork")
    if not name or not (number.isdecimal() or not number):
        return directory.config_file, f"{directory.exp_name}_fork"
    return directory.config_file, f"{name}_fork{int(number or 1) + 1}"


def _train_population(name: str, config: "RunConfig", args: argparse.Namespace) -> int:
    from ejax.logs.console import summary
    from ejax.population.loop import train_population
    from ejax.training.fresh import fresh_facts, read_fresh
    from ejax.training.lineage import EXPLOITS, lineage, read_exploits, value_texts

    result = train_population(config, resume=args.resume, run_dir=args.run)
    best, tag = result.best_member, config.trainer.best_eval_metric
    broken = [i for i, alive in enumerate(result.alive) if not alive]
    of_best: dict[str, str] = {}
    if best is not None:
        exploits, at = read_exploits(result.run_dir), result.best_eval_steps[best]
        of_best = value_texts(exploits, best, at, result.members[best].values)
        if exploits:
            of_best["its lineage"] = lineage(exploits, best)
            of_best["exploits"] = f"{len(exploits)}: {result.run_dir / EXPLOITS}"
        of_best[f"its best {tag}"] = str(result.best_eval_values[best])
        of_best |= fresh_facts(read_fresh(result.run_dir / "members" / str(best)), tag)
    skipping = [i for i, skipped in enumerate(result.skipped_updates) if skipped > 0.5 * result.num_updates]
    summary(
        {
            "run": result.run_dir,
            "members": len(result.members),
            f"{config.step_name} of each": result.global_step,
            "wall time": datetime.timedelta(seconds=round(result.elapsed_time_sec)),
            f"{config.step_name.removeprefix('env ')}/s of all": result.training_fps,
            **{name: value for name, value in result.last_eval_metrics.items() if "/metrics/" not in name},
            "best member": "none" if best is None else f"{best}: seed {result.members[best].seed}",
            **of_best,
            **({"broken members": ", ".join(map(str, broken))} if broken else {}),
            **({"members that skipped most updates": ", ".join(map(str, skipping))} if skipping else {}),
            "latest checkpoint": result.latest_checkpoint_path or "each member's own",
            **({} if result.finished else {"interrupted": "yes; go on with --resume latest"}),
        }
    )
    if len(broken) == len(result.members):
        print(f"ejax.{name}: every member broke; lower algorithm.cfg.optimizer.learning_rate", file=sys.stderr)
        return 3
    return 0


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"python -m ejax.{name}", description="Train a policy from a config file.")
    parser.add_argument("--config", type=Path, metavar="FILE", help="JSON or YAML; see docs/config.md")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="e.g. trainer.seed=3 algorithm.cfg.gamma=0.98"
    )
    parser.add_argument("--device", metavar="cpu|cuda|cuda:N", help="instead of trainer.device")
    parser.add_argument(
        "--distributed",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="train on all devices of this machine, or of all processes, instead of trainer.distributed",
    )
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, where no scheduler tells it")
    parser.add_argument("--num-processes", type=int, metavar="N", help="that train together")
    parser.add_argument("--process-id", type=int, metavar="I", help="of this one, from 0")
    parser.add_argument(
        "--resume",
        metavar="latest|best|PATH",
        help="go on from a checkpoint, of --run or of the newest run; EmbodiChain's FILE.pt: in a new run",
    )
    parser.add_argument(
        "--fork",
        type=Path,
        metavar="RUN|CHECKPOINT",
        help="a new run from the whole state of another, its best checkpoint; without --config by its config",
    )
    parser.add_argument("--run", type=Path, metavar="DIR", help="the run's folder (default: a new one, named by time)")
    add_trust_option(parser)
    return parser


if __name__ == "__main__":
    leave(main)
