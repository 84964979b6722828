"""``ejax play RUN``: watch a trained policy, in MuJoCo's viewer or in a video, and see what it stands."""

from ejax.runtime.process_exit import exit_on_signal, exit_with, import_late, refused, until_signal

if __name__ == "__main__":
    exit_on_signal()  # before the imports, which take seconds

import argparse
from typing import Any

from ejax.schema.command_line import CommandParser
from ejax.schema.plain_files import a_path, a_target
from ejax.schema.trust import add_trust_option, trust_words
from ejax.schema.values import MAX_SEED, add_policy_options, whole

_NOT_SHOWN = ("run", "overrides", "trust", "web", "wasm")
"""Arguments that are not options of a ``Viewer``."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    args = _parser().parse_intermixed_args(argv)
    import_late("ejax.play.show")
    return until_signal("ejax play", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    from ejax.logs.console import summary
    from ejax.play.show import Viewer, play_run

    trust_words([*args.trust, *args.overrides])
    options = {name: value for name, value in vars(args).items() if name not in _NOT_SHOWN}
    try:
        if args.web is not None:
            summary(_write_page(args, options))
            return 0
        if args.wasm is not None:
            raise ValueError("--wasm goes with --web FILE.html")
        facts = play_run(args.run, args.overrides, Viewer(**options), lambda text: print(text, flush=True))
    except (ImportError, OSError, RuntimeError, ValueError) as error:  # ejax's own among them
        return refused("ejax play", error)
    summary(facts)
    return 0


def _write_page(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, object]:
    from ejax.logs.console import working

    taken = {name: options.pop(name) for name in ("member", "checkpoint", "device", "seed")}
    unheeded = [f"--{name.replace('_', '-')}" for name, x in options.items() if x != _parser().get_default(name)]
    if unheeded:
        raise ValueError(f"--web takes no {', '.join(unheeded)}: the page has keys and the mouse for its visitor")
    page = import_late("interop.web.page")  # by its name: ejax imports nothing of interop
    with working(f"playing for {args.web}"):
        facts: dict[str, object] = page.write_page(args.run, args.web, args.wasm, args.overrides, taken)
    return facts


def _parser() -> CommandParser:
    parser = CommandParser("ejax play", description="Watch a trained policy: docs/play.md.")
    text = "folder of a run (without the time in its name: the newest), or a shipped policy, such as push_cube"
    parser.add_argument("run", type=a_path, metavar="RUN", help=text)
    parser.add_argument("overrides", nargs="*", metavar="env.KEY=VALUE", help="as in ejax evaluate")
    parser.add_argument("--video", type=a_target, metavar="FILE", help="write a video, e.g. walk.mp4")
    parser.add_argument("--web", type=a_target, metavar="FILE", help="write a page for a browser, e.g. walk.html")
    parser.add_argument("--wasm", type=a_path, metavar="FOLDER", help="with npm's @mujoco/mujoco, for --web")
    add_policy_options(parser)
    parser.add_argument("--device", default="cpu", metavar="cpu|cuda|cuda:N")
    parser.add_argument(
        "--seed", type=whole(0, MAX_SEED), help="start states and events (default: the run's eval_seed)"
    )
    parser.add_argument("--episodes", type=whole(1), metavar="N", help="end after N episodes (default for videos: 1)")
    parser.add_argument("--seconds", type=float, metavar="S", help="end after S simulated seconds")
    parser.add_argument("--speed", type=float, default=1.0, metavar="X", help="simulated seconds per second")
    parser.add_argument(
        "--sample", dest="samples", action="store_true", help="sample actions instead of deterministic ones"
    )
    parser.add_argument("--randomize", action="store_true", help="apply trainer.events.train")
    parser.add_argument(
        "--command", type=_velocity, metavar="X,Y,YAW", help="m/s, m/s, rad/s, e.g. 1.0,0,0.5; --command=-1,0,0"
    )
    parser.add_argument("--push", type=float, metavar="M/S", help="push the first free body by this velocity")
    parser.add_argument("--push-every", type=float, default=3.0, metavar="S", help="time between pushes")
    add_trust_option(parser)
    return parser


def _velocity(text: str) -> tuple[float, float, float]:
    try:
        forward, left, turn = map(float, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got '{text}'; pass forward, left and turning, such as 1.0,0,0.5") from None
    return forward, left, turn


if __name__ == "__main__":
    exit_with(main)
