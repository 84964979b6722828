"""``ejax COMMAND …``, or ``python -m ejax COMMAND …``: the command lines under one name."""

import runpy
import sys

from ejax import __version__
from ejax.runtime.streams import keep_streams
from ejax.schema.messages import did_you_mean

GROUPS = {
    "Train": {
        "train": ("ejax.train", "train a policy from a config file, or continue a run"),
        "pretrain": ("ejax.train", "clone the behaviour of demonstrations"),
        "distill": ("ejax.train", "train a student policy to act like a teacher"),
        "configs": ("ejax.config.shipped", "list the configs that come with ejax, or copy one to edit"),
        "check": ("ejax.preflight.check", "check a robot's file, its units and actuators; try your task"),
        "config": ("ejax.config.__main__", "check a config file, or print the schema"),
        "preflight": ("ejax.preflight.__main__", "compile a config for GPUs that you do not have: memory and work"),
    },
    "Look": {
        "play": ("ejax.play.__main__", "watch a policy in MuJoCo's viewer or a video; command and push it"),
        "evaluate": ("ejax.evaluate", "evaluate a policy: metrics, video, other engines and physics"),
        "report": ("ejax.report.__main__", "write an HTML page about runs: curves, tables, videos"),
        "replay": ("ejax.play.replay", "play a quarantined episode again"),
    },
    "Leave": {
        "export": ("interop.export", "export a policy to torch, ONNX or StableHLO, verified"),
        "verify": ("interop.verify", "verify an export"),
        "serve": ("interop.serving.__main__", "serve a policy over WebSocket, with openpi's protocol"),
        "embodichain": ("interop.embodichain", "convert EmbodiChain's checkpoints, both ways"),
    },
    "Data": {"record": ("ejax.data.record", "record demonstrations as a LeRobot data set")},
}
"""Purpose of commands -> name -> module, and what it does."""
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


def main(argv: list[str] | None = None) -> int:
    """Run one command, just as ``python -m`` runs its module. Returns the exit code of what ends here."""
    keep_streams()
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"ejax {__version__}")
        return 0
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS)  # a slip of the finger
        print(f"ejax: no command '{name}'; there is {', '.join(COMMANDS)}{hint}", file=sys.stderr)
        return 2
    module, _ = COMMANDS[name]
    sys.argv = [f"ejax {name}", *rest]  # what its usage line shows
    # as ``python -m`` does, imports and signals included
    runpy.run_module(module, {"COMMAND": name}, run_name="__main__", alter_sys=True)
    return 0


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: ejax COMMAND …   (ejax COMMAND --help: its options)"]
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:", *(f"  {name:<{width}}  {what}" for name, (_, what) in commands.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
