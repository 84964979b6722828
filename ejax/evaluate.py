"""``ejax evaluate RUN``: play a trained policy, print and write its metrics, record a video; or compare what
it does on several physics engines, late, noisy and with other masses."""

from ejax.runtime.process_exit import exit_on_signal, exit_with, import_late, refused, until_signal

if __name__ == "__main__":
    exit_on_signal()  # before the imports, which take seconds

import argparse
from collections.abc import Iterable
from typing import Any

from ejax.schema.command_line import CommandParser
from ejax.schema.plain_files import a_path, a_target, to_json
from ejax.schema.trust import add_trust_option, trust_words
from ejax.schema.values import MAX_SEED, add_policy_options, whole
from ejax.schema.writing import by_product, replace_file

_SHIFTS = {
    "latency": ("STEPS", "delay actions (with --chunks: chunks); repeat for more values"),
    "noise": ("SIZE", "add noise of this standard deviation to each observed number"),
    "mass": ("SCALE", "scale the mass of everything that moves"),
    "friction": ("SCALE", "scale the friction of all objects, or of the robot if there are none"),
    "drives": ("SCALE", "scale the actuators' stiffness and damping"),
}
"""Differences between a simulation and a robot: option -> its unit, and its help."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 1 if only the video could not be made."""
    args = _parser().parse_intermixed_args(argv)
    import_late("ejax.play.saved_policy")
    return until_signal("ejax evaluate", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    from ejax.envs.host.calls import HostEnvError
    from ejax.store.checkpoint import CheckpointError

    trust_words(args.trust)  # of the command line only: a run's files are not trusted
    shared = ("member", "checkpoint", "num_episodes", "num_envs", "seed", "device")
    options = {name: getattr(args, name) for name in shared}
    options["num_episodes"] = options["num_episodes"] or (3 if args.counterfactual else 100)
    shifts = {name: values for name in _SHIFTS if (values := getattr(args, name))}
    try:
        if args.chunks is None and (args.every is not None or args.hold is not None):
            raise ValueError("--every and --hold go with chunks: pass --chunks sync,async,ensemble,rtc, or one of them")
        if args.counterfactual:
            return _imagine(args, options)
        if args.engine is not None or args.chunks is not None or shifts:
            return _compare(args, options, shifts)
        why = "belongs to a comparison: pass --engine A,B, or a shift such as --mass 1.5"
        _refuse(args, ("explain", "tolerance", "json"), why)
        return _evaluate(args, options)
    except (CheckpointError, HostEnvError, ImportError, OSError, ValueError) as error:
        return refused("ejax evaluate", error)


def _evaluate(args: argparse.Namespace, options: dict[str, Any]) -> int:
    from ejax.logs.console import summary
    from ejax.play.saved_policy import evaluate_run

    options |= {"video": args.video, "choice": args.episode_choice or "fixed", "samples": args.samples}
    metrics = evaluate_run(args.run, args.overrides, shown=summary, gait=not args.no_gait, **options)
    if isinstance(card := metrics.get("gait"), dict):
        from ejax.play.gait import card_text

        print(card_text(card))
    summary({name: x for name, x in metrics.items() if name in ("report", "video", "no video")})
    return 1 if "no video" in metrics else 0


def _compare(args: argparse.Namespace, options: dict[str, Any], shifts: dict[str, list[float]]) -> int:
    from ejax.play.comparison import as_markdown, compare_run

    of_one = ("video", "episode_choice", "samples", "no_gait")
    if args.chunks is None:
        _refuse(args, of_one, "does not go with --engine and shifts: evaluate one condition")
        compared = {"engines": args.engine or ["all"], "shifts": shifts, "explain": args.explain}
        compared |= {} if args.tolerance is None else {"tolerance": args.tolerance}
        result = compare_run(args.run, args.overrides, **compared, **options)
    else:
        from ejax.play.chunks import execute_run

        others = (*of_one, "engine", "explain", "tolerance", *(name for name in _SHIFTS if name != "latency"))
        _refuse(args, others, "does not go with --chunks: evaluate one condition")
        latencies = shifts.get("latency", [0.0])
        if wrong := [each for each in latencies if not each.is_integer()]:
            raise ValueError(f"--latency: got {wrong[0]:g}; must be whole control steps")
        executed = {"methods": args.chunks, "latencies": [*map(int, latencies)], "every": args.every, "hold": args.hold}
        result = execute_run(args.run, args.overrides, **executed, **options)
    print(as_markdown(result))  # first: a file that cannot be written costs nothing
    if args.json is not None:
        with by_product(str(args.json)):
            replace_file(args.json, to_json(result, indent=2) + "\n")
    return 0


def _imagine(args: argparse.Namespace, options: dict[str, Any]) -> int:
    from ejax.play.counterfactual import counterfactual_run

    others = ("chunks", "engine", "explain", "tolerance", "json", "video", "episode_choice", "samples", "no_gait")
    why = "does not go with --counterfactual: it plays each instruction from the same starts"
    _refuse(args, (*others, *_SHIFTS), why)
    options.pop("num_envs")  # each start is a row
    found = counterfactual_run(args.run, args.overrides, sentences=args.counterfactual, **options)
    for sentence, outcomes in zip(found["sentences"], found["outcomes"], strict=True):
        print(f"{sentence}\n    {'; '.join(outcomes)}")
    print(f"report: {found['report']}")
    return 0


def _refuse(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Raise ValueError where one of these options is given."""
    for name in names:
        given = getattr(args, name)
        if given is not None and given is not False:  # a number may be 0
            raise ValueError(f"--{'sample' if name == 'samples' else name.replace('_', '-')} {why}")


def _parser() -> CommandParser:
    parser = CommandParser("ejax evaluate", description="Evaluate a trained policy.")
    text = "folder of a run (without the time in its name: the newest), or a shipped policy, such as push_cube"
    parser.add_argument("run", type=a_path, metavar="RUN", help=text)
    parser.add_argument(
        "overrides", nargs="*", metavar="env.KEY=VALUE", help="change the environment: env.cfg.episode_length=50"
    )
    add_policy_options(parser)
    parser.add_argument("--episodes", type=whole(1), dest="num_episodes", metavar="N", help="(100)")
    parser.add_argument("--num-envs", type=whole(1), default=32, metavar="N", help="episodes to play in parallel")
    parser.add_argument(
        "--episode-choice",
        choices=("fixed", "first_finished"),
        help="which episodes count: fixed numbers per environment, or the first to finish, as in EmbodiChain",
    )
    parser.add_argument("--seed", type=whole(0, MAX_SEED), help="start states (default: the run's eval_seed)")
    text = "sample actions, as in training, instead of taking the deterministic ones"
    parser.add_argument("--sample", dest="samples", action="store_true", help=text)
    parser.add_argument("--device", default="cpu", metavar="cpu|cuda|cuda:N")
    parser.add_argument("--video", type=a_target, metavar="FILE", help="record four episodes, e.g. push.mp4")
    text = "skip the gait card of a legged robot, which takes some seconds; docs/locomotion.md"
    parser.add_argument("--no-gait", action="store_true", help=text)
    text = "compare engines and shifts in a table: any of c (or mujoco), mjx, warp, or all installed; docs/transfer.md"
    parser.add_argument("--engine", type=lambda given: given.split(","), metavar="A,B", help=text)
    for name, (size, what) in _SHIFTS.items():
        parser.add_argument(f"--{name}", type=float, action="append", metavar=size, help=what)
    text = "execute chunks as on a robot, with sync, async, ensemble or rtc, at each --latency; docs/vla.md"
    parser.add_argument("--chunks", type=lambda given: given.split(","), metavar="A,B", help=text)
    text = "with --chunks: steps between chunks (default: half a chunk or the latency; for ensemble 1 or the latency)"
    parser.add_argument("--every", type=whole(1), metavar="STEPS", help=text)
    text = "with --chunks: what to do without an action, zero or last, for all its numbers or one each"
    parser.add_argument("--hold", type=lambda given: given.split(","), metavar="A,B", help=text)
    text = "play every instruction from the same starts (--episodes, 3): a sentence, or a file of them; docs/vla.md"
    parser.add_argument("--counterfactual", action="append", metavar="SENTENCE|FILE", help=text)
    parser.add_argument("--explain", action="store_true", help="name the first difference even where results agree")
    parser.add_argument("--tolerance", type=float, metavar="X", help="of a difference, relative to the range (0.01)")
    parser.add_argument("--json", type=a_target, metavar="FILE", help="write the whole comparison as JSON")
    add_trust_option(parser)
    return parser


if __name__ == "__main__":
    exit_with(main)
