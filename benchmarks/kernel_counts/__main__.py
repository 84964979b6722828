"""``python -m benchmarks.kernel_counts --config FILE``: count what GPUs that are not here would run, loop by loop."""

import argparse
import json
import os
import sys
from pathlib import Path

from ejax.runtime.process_exit import exit_with


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 1 where a budget is exceeded, 2 for what cannot be compiled."""
    args = _parser().parse_intermixed_args(argv)
    os.environ["JAX_PLATFORMS"] = "cpu"  # what is traced must not touch a GPU that is here
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns of missing drivers, which is the point
    from ejax.config import ConfigError

    try:
        return _run(args)
    except (ConfigError, ModuleNotFoundError, OSError, ValueError) as error:
        print(f"kernel_counts: {str(error).removeprefix('ejax preflight: ')}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from ejax.config import ConfigError

    from .budgets import check, rewrite
    from .report import show
    from .run import count_kernels

    config = None if args.config is None else str(args.config)
    if args.rewrite_budgets is not None:
        rewrite(args.rewrite_budgets, config)
        return 0
    if args.budgets is not None:
        exceeded = check(args.budgets, config)
        print("\n".join(exceeded) or f"{args.budgets}: all within their budgets")
        return 1 if exceeded else 0
    if config is None:
        raise ConfigError([], "pass --config FILE, or --budgets FILE to check budgets")
    found = count_kernels(config, args.overrides, target=args.target, gpus=args.gpus, hosts=args.hosts)
    show(found, Console(width=None if sys.stdout.isatty() else 160, soft_wrap=not sys.stdout.isatty(), highlight=False))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.kernel_counts", description=__doc__)
    parser.add_argument("--config", type=Path, metavar="FILE", help="JSON or YAML; see docs/config.md")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="as in ejax train")
    parser.add_argument("--target", default="h100", help="as in ejax preflight (default: %(default)s)")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="cards in each host")
    parser.add_argument("--hosts", type=int, default=1, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, too")
    parser.add_argument(
        "--budgets", type=Path, metavar="FILE", help="instead: check the counts of its configs, or of --config alone"
    )
    parser.add_argument("--rewrite-budgets", type=Path, metavar="FILE", help="instead: rewrite its counts")
    return parser


if __name__ == "__main__":
    exit_with(main)
