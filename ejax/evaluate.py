"""``python -m ejax.evaluate RUN``: play a trained policy, print and write its metrics, record a video."""

from ejax.runtime.process_exit import exit_on_signal, exit_with, import_late, refused, until_signal

if __name__ == "__main__":
    exit_on_signal()  # before the imports, which take seconds

import argparse

from ejax.schema.plain_files import a_path
from ejax.schema.trust import add_trust_option, trust_words
from ejax.schema.values import MAX_SEED, add_policy_options, whole


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 1 if only the video could not be made."""
    args = _parser().parse_intermixed_args(argv)
    import_late("ejax.play.saved_policy")
    return until_signal("ejax.evaluate", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    from ejax.envs.host.calls import HostEnvError
    from ejax.logs.console import summary
    from ejax.play.saved_policy import evaluate_run
    from ejax.store.checkpoint import CheckpointError

    trust_words(args.trust)  # of the command line only: a run's files are not trusted
    try:
        metrics = evaluate_run(
            args.run,
            args.overrides,
            member=args.member,
            checkpoint=args.checkpoint,
            num_episodes=args.episodes,
            num_envs=args.num_envs,
            choice=args.episode_choice,
            seed=args.seed,
            device=args.device,
            video=args.video,
            shown=summary,
        )
    except (CheckpointError, HostEnvError, ImportError, OSError, ValueError) as error:
        return refused("ejax.evaluate", error)
    summary({name: x for name, x in metrics.items() if name in ("report", "video", "no video")})
    return 1 if "no video" in metrics else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m ejax.evaluate", description="Evaluate a trained policy.")
    parser.add_argument("run", type=a_path, metavar="RUN", help="the run's folder; without its time the newest")
    parser.add_argument(
        "overrides", nargs="*", metavar="env.KEY=VALUE", help="evaluate elsewhere, e.g. env.cfg.episode_length=50"
    )
    add_policy_options(parser)
    parser.add_argument("--episodes", type=whole(1), default=100, metavar="N")
    parser.add_argument("--num-envs", type=whole(1), default=32, metavar="N", help="episodes played at a time")
    parser.add_argument(
        "--episode-choice",
        choices=("fixed", "first_finished"),
        default="fixed",
        help="which episodes count: each slot's share, or the first to finish, as EmbodiChain counts",
    )
    parser.add_argument("--seed", type=whole(0, MAX_SEED), help="of the start states (default: the run's eval_seed)")
    parser.add_argument("--device", default="cpu", metavar="cpu|cuda|cuda:N")
    parser.add_argument("--video", type=a_path, metavar="FILE", help="record four episodes, e.g. push.mp4")
    add_trust_option(parser)
    return parser


if __name__ == "__main__":
    exit_with(main)
