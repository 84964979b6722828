"""``ejax preflight --config FILE``: memory and work on GPUs that are not here."""

import argparse
import os
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from ejax.runtime.process_exit import exit_with, refused
from ejax.schema.command_line import CommandParser
from ejax.schema.messages import explain
from ejax.schema.plain_files import a_path, a_target, expanded, to_json
from ejax.schema.trust import add_trust_option, trust_words
from ejax.schema.writing import by_product, replace_file


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 2 for what cannot be compiled."""
    args = _parser().parse_intermixed_args(argv)
    os.environ["JAX_PLATFORMS"] = "cpu"  # what is traced must not touch a GPU that is here
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns of missing drivers, which is the point
    from ejax.envs.host.calls import HostEnvError

    trust_words([*args.trust, *args.overrides])
    try:
        return _run(args)
    except (HostEnvError, ModuleNotFoundError, OSError, ValueError) as error:
        return refused("ejax preflight", explain(error).removeprefix("ejax preflight: "))  # a ConfigError's source


def _run(args: argparse.Namespace) -> int:
    from ejax.logs.console import working
    from ejax.preflight.run import preflight

    options = {name: getattr(args, name) for name in ("target", "gpus", "hosts")}
    with working(f"compiling {args.config}"):
        found = preflight(str(args.config), args.overrides, **options)
    show(found, Console(width=None if sys.stdout.isatty() else 160, soft_wrap=not sys.stdout.isatty(), highlight=False))
    if args.json is not None:
        with by_product(str(args.json)):
            replace_file(args.json, to_json(found, indent=1) + "\n")
    return 0


def show(found: dict[str, Any], console: Console) -> None:
    """Print what ``preflight`` found."""
    where = f"{found['hosts']} x {found['gpus']}" if found["hosts"] > 1 else str(found["gpus"])
    console.print(
        f"{found['config']}: {where} x {found['card']['name']}, {found['num_envs']} environments on each, "
        f"{found['env_steps_per_update']:,} steps an update, "
        f"compiled in {found['seconds']['wall']:.0f} s ({found['seconds']['cpu']:.0f} s of CPU time)"
    )
    for text in found["notes"]:
        console.print(text)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("on each GPU", no_wrap=True)
    for column in ("peak memory", "of the card", "product FLOPs", "other ops", "bytes", "at least"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("limited by", no_wrap=True)
    for name, each in found["programs"].items():
        memory, flops, limit = each["memory"], sum(each["product_flops"].values()), each["limited_by"]
        table.add_row(
            "an evaluation" if name == "evaluate" else "an update",
            *(_size(memory["peak"]), f"{memory['fraction_of_card']:.2%}"),
            *(_scaled(flops), _scaled(each["element_ops"]), _size(each["bytes"])),
            *(f"{each['bounds_s'][limit] * 1e6:,.3g} µs", limit),
        )
    console.print(table)
    if fit := found["largest_num_envs"]:
        console.print(f"\nLargest num_envs on each GPU: {fit['num_envs']:,} ({fit['method']})")
    if replay := found["replay"]:
        rows = f"{replay['capacity']:,} transitions of {replay['row_bytes']:,} bytes, {_size(replay['bytes'])}"
        console.print(f"\nReplay buffer: {rows} on each GPU; the largest that fits: {replay['largest_capacity']:,}")
    for title, key in (("Assumed", "assumptions"), ("Not known", "not_known")):
        console.print(f"\n{title}:")
        for text in found[key]:
            console.print(f"- {text}")


def _size(number: float) -> str:
    return _scaled(number, 1024, ("B", "KiB", "MiB", "GiB"))


def _scaled(number: float, factor: int = 1000, units: tuple[str, ...] = ("", "k", "M", "G", "T")) -> str:
    power = 0
    while number >= factor and power < len(units) - 1:
        number, power = number / factor, power + 1
    return f"{number:.4g} {units[power]}".rstrip()


def _parser() -> CommandParser:
    about = "Compile a config for GPUs that are not here: its memory on each, and the work of an update."
    parser = CommandParser("ejax preflight", description=about)
    parser.add_argument("--config", type=a_path, required=True, metavar="FILE", help="JSON or YAML; see docs/config.md")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="as in ejax train")
    cards, text = ("h100|h200|a100|l40s|rtx4090|b200|FILE", "GPU, or a file with XLA's GpuTargetConfigProto as text")
    parser.add_argument("--target", type=expanded, default="h100", metavar=cards, help=f"{text} (default: %(default)s)")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs per host, which share the environments")
    parser.add_argument("--hosts", type=int, default=1, metavar="N")
    parser.add_argument("--json", type=a_target, metavar="FILE", help="also write all results")
    add_trust_option(parser)
    return parser


if __name__ == "__main__":
    exit_with(main)
