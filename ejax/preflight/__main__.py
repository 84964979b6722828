"""``python -m ejax.preflight --config FILE``: compile for GPUs that are not here, and count what would run."""

import argparse
import os
import sys
from pathlib import Path

from ejax.runtime.process_exit import exit_with
from ejax.schema.plain_files import to_json
from ejax.schema.trust import add_trust_option, trust_words


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 1 where a budget is exceeded, 2 for what cannot be compiled."""
    args = _parser().parse_intermixed_args(argv)
    os.environ["JAX_PLATFORMS"] = "cpu"  # what is traced must not touch a GPU that is here
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns of missing drivers, which is the point
    from ejax.config import ConfigError
    from ejax.envs.host.calls import HostEnvError
    from ejax.schema.trust import UntrustedCodeError

    trust_words([*args.trust, *args.overrides], remember=True)
    try:
        return _run(args)
    except (ConfigError, HostEnvError, UntrustedCodeError, ModuleNotFoundError, OSError, ValueError) as error:
        print(
            f"ejax.preflight: {str(error).removeprefix('ejax.preflight: ')}", file=sys.stderr
        )  # a ConfigError's source
        return 2


def _run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from ejax.config import ConfigError
    from ejax.preflight.budgets import check, rewrite
    from ejax.preflight.report import show
    from ejax.preflight.run import preflight

    config = None if args.config is None else str(args.config)
    if args.rewrite_budgets is not None:
        rewrite(args.rewrite_budgets, config)
        return 0
    if args.budgets is not None:
        exceeded = check(args.budgets, config)
        print("\n".join(exceeded) or f"{args.budgets}: all within their budgets")
        return 1 if exceeded else 0
    if config is None:
        raise ConfigError([], "give --config FILE, or --budgets FILE to check budgets")
    found = preflight(config, args.overrides, target=args.target, gpus=args.gpus, hosts=args.hosts, fit=args.fit)
    console = Console(width=None if sys.stdout.isatty() else 160, soft_wrap=not sys.stdout.isatty(), highlight=False)
    show(found, console)
    if args.json is not None:
        args.json.write_text(to_json(found, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m ejax.preflight",
        description="Compile a config for GPUs that are not here, and count what it would do.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="JSON or YAML; see docs/config.md")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="as in ejax.train")
    parser.add_argument(
        "--target",
        default="h100",
        metavar="h100|h200|a100|l40s|rtx4090|b200|FILE",
        help="the card, or a file with XLA's GpuTargetConfigProto as text (default: %(default)s)",
    )
    parser.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="cards in each host, which share the environments"
    )
    parser.add_argument("--hosts", type=int, default=1, metavar="N")
    parser.add_argument(
        "--fit", action="store_true", help="compile at several sizes for the largest num_envs that fits"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, too")
    parser.add_argument(
        "--budgets", type=Path, metavar="FILE", help="instead: check the counts of its configs, or of --config alone"
    )
    parser.add_argument("--rewrite-budgets", type=Path, metavar="FILE", help="instead: rewrite its counts")
    add_trust_option(parser)
    return parser


if __name__ == "__main__":
    exit_with(main)
