"""``ejax record --task package.module:Name --episodes 100 --to DIR``: keep what a task demonstrates.

The task runs in this process and gets the seeds that an ``OnlineDataEngine`` of the same ``--seed`` would give it, so
both make the same episodes. A recording that was stopped continues with ``--append``, without the seeds of which it has
episodes already, and ends as one that was not.
"""

import argparse
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, NamedTuple, get_args

import numpy as np

from ejax.data.checks import check_count, check_seed
from ejax.data.engine import OnlineDataEngine
from ejax.data.engine_config import FROM_GYM_CONFIG
from ejax.data.lerobot.format import Images, policy_names
from ejax.data.lerobot.write import EpisodeWriter
from ejax.data.samplers import attempt_seeds
from ejax.data.task import DemonstrationTask, Episode, TimedTask, attempts, flatten
from ejax.runtime.process_exit import exit_with, refused
from ejax.schema.command_line import CommandParser
from ejax.schema.messages import noting
from ejax.schema.plain_files import a_folder, expanded
from ejax.schema.trust import add_trust_option, import_trusted, trust, trust_strings, trust_words

_DEFAULT_FPS = 30


class Tally(NamedTuple):
    kept: int
    failed: int
    """Attempts, or outcomes of an attempt, that gave no episode."""


def record(
    task: DemonstrationTask,
    writer: EpisodeWriter,
    num_episodes: int,
    *,
    seed: int = 0,
    instruction: str | None = None,
    max_attempts: int = 100,
    on_episode: Callable[[int], object] = lambda index: None,
) -> Tally:
    """Let ``task``, opened by the caller, demonstrate until ``writer`` has kept ``num_episodes`` more.

    Args:
        seed: attempt k gets the k-th seed of this one. Attempts of which the writer has episodes are not repeated,
            except the last, which may have been cut off between two of its outcomes.
        instruction: of every episode. None: the episode's field ``instruction``, else the name of the task's class.
        max_attempts: in a row without a success, after which it gives up.
        on_episode: called with each index that is kept.

    Raises:
        RuntimeError: ``max_attempts`` attempts in a row without a success.
        ValueError: an episode that the writer refuses.
        OSError: the episode could not be written.
        Exception: the task's own error.
    """
    for name, value in (("num_episodes", num_episodes), ("max_attempts", max_attempts)):
        check_count(name, value)
    there = Counter(writer.seeds)
    last = writer.seeds[-1] if writer.seeds else -1
    kept = failed = 0
    # the last attempt that is there may have been cut off between two of its outcomes
    seeds = ((k, number) for k, number in attempt_seeds(check_seed(seed)) if number not in there or number == last)
    for origin, episodes, failures in attempts(task.generate, seeds, max_attempts):
        for episode in episodes[there[origin.seed] :][: num_episodes - kept]:  # without those that are kept already
            text = _instruction(instruction, episode, type(task).__name__)
            on_episode(writer.append(episode, text, origin=origin))
            kept += 1
        failed += failures
        if kept == num_episodes:
            break
    return Tally(kept, failed)


def record_stream(
    engine: OnlineDataEngine,
    writer: EpisodeWriter,
    num_episodes: int,
    *,
    instruction: str | None = None,
    on_episode: Callable[[int], object] = lambda index: None,
) -> None:
    """Keep ``num_episodes`` episodes of a READY engine while others draw from it; arguments as of ``record``. Episodes
    made faster than they can be written are left out. Raises as ``record``, and ``engine``'s own errors."""
    check_count("num_episodes", num_episodes)
    name = str(engine.cfg.named().task).partition(":")[2]
    for taken in itertools.islice(engine.episodes(), num_episodes):
        text = _instruction(instruction, taken.episode, name)
        on_episode(writer.append(taken.episode, text, origin=taken.origin))


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        tally, total = _run(args)
    except (OSError, ValueError, TypeError, RuntimeError, ImportError, AttributeError) as error:
        return refused("ejax record", error, 1)
    except KeyboardInterrupt:
        return refused("ejax record", f"stopped; what was kept is in {args.to}, continue with --append", 130)
    print(f"{tally.kept} episodes kept, {tally.failed} attempts failed; {args.to} has {total} episodes")
    return 0


def _run(args: argparse.Namespace) -> tuple[Tally, int]:
    place, arguments = args.task, args.task_cfg
    if args.gym_config is not None:
        place, arguments = FROM_GYM_CONFIG, {"gym_config": args.gym_config, "action_config": args.action_config}
        trust(place)
    if args.task_cfg if args.task is None else args.action_config:
        raise ValueError("--task-cfg holds arguments of --task, --action-config those of the expert in --gym-config")
    module, _, name = place.partition(":")
    if not module or not name:
        raise ValueError(f"--task is '{args.task}'; write it as package.module:Name")
    # before the task is imported, which runs its code
    trust_words([args.task or "", *args.trust])
    trust_strings([args.task_cfg, args.action_config])
    with ExitStack() as to_close:
        task: Any = getattr(import_trusted(place), name)(**arguments)
        if isinstance(task, AbstractContextManager):
            to_close.push(partial(_leave, task))
            task = task.__enter__()
        options = {name: getattr(args, name) for name in ("robot_type", "images", "append")}
        spec, fps = task.spec(), args.fps
        if fps is None:
            period = task.control_period if isinstance(task, TimedTask) else None
            fps = max(1, round(1.0 / period)) if period else _DEFAULT_FPS
        options |= {"fps": fps, "names": policy_names(spec, args.names)}
        writer = to_close.enter_context(EpisodeWriter(args.to, spec, **options))
        total = writer.num_episodes + args.episodes

        def show(index: int) -> None:
            if sys.stderr.isatty():
                print(f"\repisode {index + 1} of {total}", end="\n" if index + 1 == total else "", file=sys.stderr)

        tally = record(task, writer, args.episodes, seed=args.seed, instruction=args.instruction, on_episode=show)
        return tally, writer.num_episodes


def _leave(task: AbstractContextManager[Any], kind: Any, error: BaseException | None, traceback: Any) -> bool | None:
    with noting(error, "closing the task"):
        return task.__exit__(kind, error, traceback)


def _instruction(given: str | None, episode: Episode, otherwise: str) -> str:
    text = flatten(episode.fields).get("instruction", otherwise) if given is None else given
    item = np.asarray(text).item()
    return item.decode() if isinstance(item, bytes) else str(item)


def _parser() -> CommandParser:
    parser = CommandParser("ejax record", description="Record a task's demonstrations.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--task", metavar="package.module:Name", help="the demonstrating task")
    what.add_argument("--gym-config", type=expanded, metavar="FILE", help="EmbodiChain's config to demonstrate in")
    parser.add_argument("--task-cfg", type=_mapping, default={}, metavar="JSON", help="arguments of --task")
    parser.add_argument("--action-config", type=_mapping, default={}, metavar="JSON", help="arguments for --gym-config")
    parser.add_argument("--episodes", type=int, required=True, metavar="N", help="number of episodes to record")
    parser.add_argument("--to", type=a_folder, required=True, metavar="DIR", help="the LeRobot v3.0 data set")
    parser.add_argument("--append", action="store_true", help="append to the episodes in DIR")
    parser.add_argument("--seed", type=int, default=0, help="seed of the attempts (default: 0)")
    parser.add_argument("--fps", type=int, help="frames/s (default: the task's rate, or 30)")
    parser.add_argument("--instruction", help="for every episode (default: its instruction)")
    parser.add_argument("--robot-type", help="robot_type in info.json")
    parser.add_argument(
        "--names", type=_mapping, default={}, metavar="JSON", help="feature names by field path; default: LeRobot's"
    )
    add_trust_option(parser)
    parser.add_argument("--images", choices=get_args(Images), default="video", help="format of images")
    return parser


def _mapping(text: str) -> dict[str, Any]:
    made = json.loads(text)
    if not isinstance(made, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return made


if __name__ == "__main__":
    exit_with(main)
