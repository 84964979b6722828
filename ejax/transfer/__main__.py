"""``python -m ejax.transfer RUN``: a trained policy on each physics engine, also late, noisy and with other masses."""

from ejax.runtime.process_exit import exit_on_signal, exit_with, import_late, refused, until_signal
from ejax.schema.plain_files import to_json

if __name__ == "__main__":
    exit_on_signal()  # before the imports, which take seconds

import argparse
from typing import Any

from ejax.schema.plain_files import a_path
from ejax.schema.trust import add_trust_option, trust_words
from ejax.schema.values import MAX_SEED, add_policy_options, whole
from ejax.schema.writing import by_product, replace_file


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    args = _parser().parse_intermixed_args(argv)
    import_late("ejax.transfer.engines")
    return until_signal("ejax.transfer", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    from ejax.store.checkpoint import CheckpointError
    from ejax.transfer.engines import transfer_run
    from ejax.transfer.shifts import SHIFTS
    from ejax.transfer.table import as_markdown

    trust_words([*args.trust, *args.overrides])
    options = {name: x for name, x in vars(args).items() if name not in ("trust", "json", *SHIFTS)}
    try:
        result = transfer_run(**options, shifts={name: getattr(args, name) for name in SHIFTS})
        print(as_markdown(result))  # first: a file that cannot be written costs nothing
        if args.json is not None:
            with by_product(str(args.json)):
                replace_file(args.json, to_json(result, indent=2) + "\n")
    except (CheckpointError, ImportError, OSError, ValueError) as error:
        return refused("ejax.transfer", error)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m ejax.transfer", description="Compare engines: docs/transfer.md.")
    parser.add_argument("run", type=a_path, metavar="RUN", help="the run's folder; without its time the newest")
    parser.add_argument("overrides", nargs="*", metavar="env.KEY=VALUE", help="as in ejax.evaluate")
    text = "of c (or mujoco), mjx, warp; the first is what the others are compared with (default: all installed)"
    parser.add_argument("--engines", type=lambda given: given.split(","), metavar="A,B", help=text)
    several: dict[str, Any] = {"type": float, "action": "append", "default": []}
    parser.add_argument("--latency", **several, metavar="STEPS", help="late actions; again for another value")
    parser.add_argument("--noise", **several, metavar="SIZE", help="standard deviation, on each observed number")
    parser.add_argument("--mass", **several, metavar="SCALE", help="of everything that moves")
    parser.add_argument("--friction", **several, metavar="SCALE", help="of all objects; without any, of the robot")
    parser.add_argument("--drives", **several, metavar="SCALE", help="the drives' stiffness and damping")
    parser.add_argument("--episodes", type=whole(2), default=100, dest="num_episodes", metavar="N")
    parser.add_argument("--num-envs", type=whole(1), default=32, metavar="N", help="episodes played at a time")
    parser.add_argument("--explain", action="store_true", help="name the first difference even where results agree")
    parser.add_argument("--tolerance", type=float, default=0.01, metavar="X", help="over a number's range (0.01)")
    add_policy_options(parser)
    parser.add_argument("--seed", type=whole(0, MAX_SEED), help="of the start states (default: the run's eval_seed)")
    parser.add_argument("--device", default="cpu", metavar="cpu|cuda|cuda:N")
    parser.add_argument("--json", type=a_path, metavar="FILE", help="everything, for programs")
    add_trust_option(parser)
    return parser


if __name__ == "__main__":
    exit_with(main)
