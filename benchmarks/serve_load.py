"""Load a policy server: C clients at R Hz, first alone, then beside clients that stall, die or lie.

python benchmarks/serve_load.py exported --clients 8 --hz 50 --seconds 60

A deadline is lost where the answer to an observation comes later than the next observation is due. Server, polite
clients and rude clients are a process each; they share this machine's cores, so that the times are the machine's too.
"""

import argparse
import asyncio
import json
import os
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import msgpack
import numpy as np
from websockets.asyncio.client import connect as connect_asyncio
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

HUGE = 64 << 20
LISTED = ("requests", "lost", "p50_ms", "p90_ms", "p99_ms", "max_ms")


def main() -> None:
    parser = argparse.ArgumentParser(description="Load a policy server, beside rude clients too.")
    parser.add_argument("policy", metavar="RUN-or-EXPORT")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--hz", type=float, default=50.0, help="observations a second of each client")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of the two measurements")
    parser.add_argument("--rude", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rude:
        be_rude(int(args.policy))
    with ExitStack() as stack:
        port = stack.enter_context(served(args.policy, args.clients + 8))
        obs = example(metadata(port))
        for beside in ("alone", "beside rude clients"):
            before = metadata(port).get("errors", 0)
            if beside != "alone":
                command = [sys.executable, __file__, str(port), "--rude"]
                stack.callback(subprocess.Popen(command).kill)
            facts = asyncio.run(measure(f"ws://127.0.0.1:{port}", obs, args.clients, args.hz, args.seconds))
            refused = metadata(port).get("errors", 0) - before
            print(f"{beside}: {'  '.join(f'{name} {facts[name]:g}' for name in LISTED)}  refused messages {refused}")
        print(f"the server's own: {metadata(port)['latency_ms']} ms, load of the machine {os.getloadavg()[0]:.1f}")


@contextmanager
def served(policy: str, num_clients: int) -> Iterator[int]:
    """Serve in its own process, until the end of the context."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--port", str(port), "--clients", str(num_clients)]
    server = subprocess.Popen([sys.executable, "-m", "ejax", "serve", policy, *options])
    try:
        while server.poll() is None:
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz")
                break
            time.sleep(0.1)
        if server.poll() is not None:
            raise SystemExit("the server has ended; its message is above")
        yield port
    finally:
        server.terminate()
        server.wait()


def metadata(port: int) -> dict[str, Any]:
    return json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/metadata"))


def example(facts: dict[str, Any]) -> bytes:
    entries = [entry for entry in facts["contract"]["observation"] if entry["name"] != "memory"]
    arrays = {entry["name"]: np.zeros(entry["shape"][1:], entry.get("dtype", "float32")) for entry in entries}
    return msgpack.packb({name: packed(x) for name, x in arrays.items()})


def packed(x: np.ndarray, **wrong: Any) -> dict[bytes, Any]:
    array = {"__ndarray__": True, "data": x.tobytes(), "dtype": x.dtype.str, "shape": x.shape}
    return {name.encode(): value for name, value in (array | wrong).items()}


async def measure(url: str, obs: bytes, clients: int, hz: float, seconds: float) -> dict[str, float]:
    """Count answers and lost deadlines of all clients, and take the percentiles of their times."""
    start = time.perf_counter() + 0.5
    phases = start + np.arange(clients) / (hz * clients)
    results = await asyncio.gather(*(one_client(url, obs, hz, seconds, phase) for phase in phases))
    times = 1e3 * np.concatenate([each for each, _ in results])
    percentiles = {f"p{q}_ms": round(float(np.percentile(times, q)), 2) for q in (50, 90, 99)}
    lost = sum(count for _, count in results)
    return {"requests": len(times), "lost": lost, **percentiles, "max_ms": round(float(times.max()), 2)}


async def one_client(url: str, obs: bytes, hz: float, seconds: float, start: float) -> tuple[list[float], int]:
    times, lost, tick = list[float](), 0, 0
    async with connect_asyncio(url, compression=None, max_size=None) as connection:
        await connection.recv()
        while tick < hz * seconds:
            due = start + tick / hz
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            sent = time.perf_counter()
            await connection.send(obs)
            if isinstance(answer := await connection.recv(), str):
                raise RuntimeError(answer)
            end = time.perf_counter()
            times.append(end - sent)
            # a client that is late itself has lost what was due meanwhile
            missed = int((end - due) * hz)
            lost, tick = lost + missed, tick + 1 + missed
    return times, lost


def be_rude(port: int) -> None:
    """Stall, die and lie, several times a second, until the process is killed."""
    url, obs = f"ws://127.0.0.1:{port}", example(metadata(port))
    head = b"\x82\xfe" + struct.pack(">H", 1000) + b"\0\0\0\0"
    stalls = [head + b"0" * 10, frame(obs) * 100]  # the rest of a message never comes; no answer is ever read
    liars = [b"\xc1", b"\x81" * 5000, "text", b"0" * HUGE, msgpack.packb({"obs": packed(np.zeros(999))})]
    liars += [msgpack.packb({"obs": packed(np.zeros(2), **wrong)}) for wrong in ({"dtype": "|O"}, {"shape": [9]})]
    stalled = [raw_connection(port) for _ in stalls]
    while True:
        for i, data in enumerate(stalls):
            try:
                stalled[i].send(data)
            except BlockingIOError:  # full of what nobody reads
                pass
            except OSError:  # the server has ended it
                stalled[i] = raw_connection(port)
        for message in liars:
            with suppress(ConnectionClosed, OSError), connect(url, compression=None) as connection:
                connection.send(message)
                while True:
                    connection.recv(timeout=2.0)
        with raw_connection(port) as dying:
            dying.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            dying.send(head)  # and a reset in the middle of the message
        time.sleep(0.1)


def raw_connection(port: int) -> socket.socket:
    raw = socket.create_connection(("127.0.0.1", port))
    upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    raw.sendall(f"GET / HTTP/1.1\r\nHost: here\r\n{upgrade}Sec-WebSocket-Key: {'A' * 22}==\r\n\r\n".encode())
    raw.setblocking(False)
    return raw


def frame(message: bytes) -> bytes:
    """Pack a binary message of 126 bytes to 64 KiB as a client's frame, masked with zeros."""
    return b"\x82\xfe" + struct.pack(">H", len(message)) + b"\0\0\0\0" + message


if __name__ == "__main__":
    main()
