"""``ejax train --config FILE``: train, or continue a run.

``ejax pretrain`` clones demonstrations, whose frames are its steps, and ``ejax distill`` teaches a policy what
``teacher=RUN`` does: by the same loop, with the same options.
"""

from ejax.runtime.process_exit import exit_on_signal, exit_with, import_late, refused, until_signal

if __name__ == "__main__":
    exit_on_signal()  # before the imports, which take seconds

import argparse
import sys
from functools import partial

from ejax.schema.command_line import CommandParser
from ejax.schema.plain_files import a_folder, a_path, expanded
from ejax.schema.trust import add_trust_option


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
    import_late("ejax.training.command")
    return until_signal(f"ejax {name}", lambda: _run(name, args))


def _run(name: str, args: argparse.Namespace) -> int:
    run, command = import_late("ejax.run"), import_late("ejax.training.command")
    failure: int
    try:
        config = command.load(args)
        if args.first is not None:  # after the config that it is for, whose errors would come too late
            before = command.load_first(args, config)
            result = run.train(before)
            if failure := command.print_summary(name, before, result):
                return failure
            if not result.finished:
                return int(args.stopped_exit_code)
            with_value = import_late("ejax.schema.frozen").with_value
            config = with_value(config, "policy.init_from", str(result.latest_checkpoint_path))
        if config.population is None:
            result = run.train(config, resume=args.resume, run_dir=args.run, fork=args.fork)
            failure = command.print_summary(name, config, result)
        else:
            result = import_late("ejax.population").train_population(config, resume=args.resume, run_dir=args.run)
            failure = import_late("ejax.population.lanes").print_population(name, config, result)
        return failure or (0 if result.finished else args.stopped_exit_code)
    except Exception as error:
        code, text = command.exit_code_of(error)
        if code is None:
            raise
        return refused(f"ejax {name}", text, code)


def _parser(name: str) -> CommandParser:
    parser = CommandParser(f"ejax {name}", description="Train a policy from a config file.")
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
    parser.add_argument("--run", type=a_folder, metavar="DIR", help="the run's folder (default: a new one)")
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
