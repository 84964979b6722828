"""``ejax serve RUN-or-EXPORT``: serve a policy over WebSocket, with the protocol of openpi's client."""

from ejax.runtime.process_exit import exit_on_signal, exit_with, refused

if __name__ == "__main__":
    exit_on_signal()  # before the imports, which take seconds

import argparse
import asyncio
import os
import signal
from functools import partial
from typing import Any

from ejax import __version__
from ejax.schema.command_line import CommandParser
from ejax.schema.plain_files import a_path
from ejax.schema.trust import add_trust_option, trust_words
from ejax.schema.values import add_policy_options, whole
from interop.serving import is_loopback

_LEAST_TOKEN = 16


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0 after a signal, 2 for what cannot be served."""
    args = _parser().parse_args(argv)
    trust_words(args.trust)
    try:
        _check(args)
        asyncio.run(_serve(args))
    except (OSError, RuntimeError, ValueError, ImportError) as error:
        return refused("ejax serve", error)
    return 0


async def _serve(args: argparse.Namespace) -> None:
    try:
        from interop.serving.server import serving
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed: pip install -e '.[serve]' in ejax's folder") from None
    from interop.serving.policies import load_served

    policy = load_served(args.policy, checkpoint=args.checkpoint, member=args.member, device=args.device)
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    options: dict[str, Any] = {"host": args.host, "port": args.port, "token": args.token, "max_clients": args.clients}
    facts = {"policy": args.policy.resolve().name, "ejax": __version__}
    async with serving(policy, facts, report=partial(print, flush=True), **options) as server:
        for host, port in {each.getsockname()[:2] for each in server.sockets}:
            print(f"serving {args.policy} by {policy.runtime} on ws://{host}:{port}", flush=True)
        await stopped.wait()


def _check(args: argparse.Namespace) -> None:
    """Refuse what would be unsafe, by ValueError."""
    if args.token is not None and not (len(args.token) >= _LEAST_TOKEN and args.token.isascii()):
        raise ValueError(f"the token must have {_LEAST_TOKEN} ASCII characters or more, such as: openssl rand -hex 16")
    if args.token is None and not is_loopback(args.host):
        raise ValueError(f"got --host {args.host}, which other machines may reach: it needs --token")


def _parser() -> CommandParser:
    parser = CommandParser("ejax serve", description="Serve a policy over WebSocket.")
    parser.add_argument(
        "policy",
        type=a_path,
        metavar="RUN-or-EXPORT",
        help="folder of a run, an export, or LeRobot's pi0 or SmolVLA; or the name of a policy that comes with ejax",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; any but loopback needs --token")
    parser.add_argument("--port", type=whole(0, 65535), default=8000, help="0: any free port")
    parser.add_argument(
        "--token", default=os.environ.get("EJAX_SERVE_TOKEN"), help="for clients to send (default: EJAX_SERVE_TOKEN)"
    )
    parser.add_argument("--clients", type=whole(1, 1024), default=16, metavar="N", help="most clients at a time")
    add_policy_options(parser)
    parser.add_argument("--device", default="cpu", metavar="cpu|cuda|cuda:N", help="of a run's policy")
    add_trust_option(parser)
    return parser


if __name__ == "__main__":
    exit_with(main)
