"""``ejax check FILE_OR_TASK``: a robot's MJCF with its units, its actuators and what commonly goes wrong; a task, by
its name or its config, is played as well."""

import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ejax.config.load import load_config, parse_untrusted
from ejax.config.shipped import shipped_names
from ejax.envs.check import check_env
from ejax.envs.mujoco.drawing import asset_of
from ejax.envs.task.inspection import inspect_model
from ejax.envs.tasks.mujoco_task import MuJoCoTask
from ejax.envs.wrappers.wrapper import innermost
from ejax.logs.console import summary
from ejax.runtime.process_exit import exit_with, refused
from ejax.schema.command_line import CommandParser
from ejax.schema.messages import explain
from ejax.schema.plain_files import a_path
from ejax.schema.trust import add_trust_option, trust_words
from ejax.training.environments import build_env


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 2 for a model or a task that cannot be used."""
    parser = CommandParser("ejax check", description="Check a robot's file or a task: docs/robots.md.")
    text = "an MJCF or URDF; a train config; or a task's name, such as package.module:Name"
    parser.add_argument("what", metavar="FILE_OR_TASK", type=a_path, help=text)
    parser.add_argument("overrides", nargs="*", metavar="env.KEY=VALUE", help="of a task, as in ejax train")
    parser.add_argument("--keyframe", default="", metavar="NAME", help="of a file: where episodes start")
    add_trust_option(parser)
    args = parser.parse_intermixed_args(argv)
    trust_words([*args.trust, *args.overrides, str(args.what)])
    try:
        if args.what.suffix.lower() not in (".xml", ".mjcf", ".urdf"):
            return _check_task(str(args.what), args.overrides)
        if args.overrides:
            raise ValueError(f"{args.overrides[0]}: a robot's file has no options; name a task, or leave it out")
        return _check_model(str(args.what.resolve()), args.keyframe)
    except (ImportError, OSError, ValueError) as error:
        return refused("ejax check", explain(error))


def _check_task(name: str, overrides: list[str]) -> int:
    network = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "tanh"}}
    policy = {"name": "actor_critic", "actor": network, "critic": network}
    raw: Any = {"trainer": {}, "env": {"id": name}, "policy": policy}  # of a run that could train in it
    raw |= {"algorithm": {"name": "ppo", "cfg": {"learning_rate": 3e-4, "gamma": 0.99}}}
    is_config = Path(name).suffix in (".yaml", ".yml", ".json") or name in shipped_names()
    config = load_config(name, overrides) if is_config else parse_untrusted(raw, overrides, source=name)
    env: Any = build_env(config, num_envs=1)
    code, inner = 0, innermost(env)
    if (asset := asset_of(env)) is not None:
        code = _check_model(asset, inner.keyframe if isinstance(inner, MuJoCoTask) else "")
    print(f"\n{check_env(env)}")
    return code


def _check_model(asset: str, keyframe: str | int) -> int:
    found = inspect_model(asset, keyframe)
    console = Console(width=None if sys.stdout.isatty() else 160, soft_wrap=not sys.stdout.isatty(), highlight=False)
    summary({"model": asset if not asset.lstrip().startswith("<") else "MJCF as text", **found.facts})
    for columns, rows in found.tables:
        table = Table(*columns, box=None, pad_edge=False, header_style="dim")
        for row in rows:
            table.add_row(*map(escape, row))
        console.print("", table)
    for kind, texts in (("warning", found.warnings), ("error", found.errors)):
        for text in texts:
            console.print(f"{kind}: {text}", markup=False)
    return 2 if found.errors else 0


if __name__ == "__main__":
    exit_with(main)
