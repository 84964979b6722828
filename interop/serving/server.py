"""The policy server: openpi's protocol over WebSocket, health and metadata over HTTP, on one port.

On connection the server sends its metadata. Then each binary message is an observation, answered by ``{"actions": [K,
A], "server_timing": …}``: K actions in a row, 1 of most policies. A client's fault is answered by a text, and closes
its connection with 1011. A client's memory is its connection's: ``reset: true`` in an observation begins an episode.
"""

import asyncio
import contextlib
import hmac
import json
import logging
import math
import re
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import msgpack
import numpy as np
from numpy.typing import NDArray
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from ejax.schema.messages import explain
from interop.serving import is_loopback
from interop.serving.policies import PLAN, Leaves, Served

_DTYPE = re.compile(r"[<>|=]?[biuf]\d")
_MAX_AXES = 8


def pack(message: Mapping[str, Any]) -> bytes:
    return msgpack.packb(message, default=_pack_array)


def _pack_array(x: Any) -> Any:
    if isinstance(x, np.ndarray) and x.dtype.kind in "biuf":
        return {b"__ndarray__": True, b"data": x.tobytes(), b"dtype": x.dtype.str, b"shape": x.shape}
    raise TypeError(f"cannot send {type(x).__name__}")


def unpack(data: bytes | str) -> dict[str, Any]:
    """Read an observation: its arrays and texts by dotted path. Raises ValueError: it is none; the text names the part
    that cannot be read."""
    try:
        message = msgpack.unpackb(data)  # a text is a TypeError
        pairs = list(_parts(message, "")) if isinstance(message, dict) else None
    except (TypeError, ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ValueError(f"the message cannot be read: {str(error)[:300] or type(error).__name__}") from None
    if pairs is None:
        raise ValueError(f"the message is {type(message).__name__} in msgpack; must be a map of an observation's parts")
    parts = dict(pairs)
    if len(parts) < len(pairs):
        raise ValueError("a part is given twice, by its path and in a map")
    return parts


def _parts(message: dict[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, x in message.items():
        path = f"{prefix}{name}"
        if isinstance(x, dict) and not x.keys() & {b"__ndarray__", b"__npgeneric__"}:
            yield from _parts(x, f"{path}.")
            continue
        try:
            yield path, x if isinstance(x, str) else _read(x)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise ValueError(f"'{path[:100]}': {str(error)[:200]}") from None


def _read(x: Any) -> Any:
    if not isinstance(x, dict) or b"__npgeneric__" in x:
        array = np.asarray(x[b"data"], _dtype(x)) if isinstance(x, dict) else np.asarray(x)
        if array.dtype.kind not in "biuf":
            raise ValueError(f"it is {repr(x)[:60]}; send an array of numbers, or a text")
        return array
    dtype, data, shape = _dtype(x), x[b"data"], x[b"shape"]
    sizes = [n for n in shape if type(n) is int and n >= 0]
    if len(sizes) < len(shape) or len(sizes) > _MAX_AXES or len(data) != math.prod(sizes) * dtype.itemsize:
        raise ValueError(f"its {len(data)} bytes are not {dtype}{repr(shape)[:60]}")
    return np.ndarray(sizes, dtype, data)


def _dtype(x: dict[Any, Any]) -> np.dtype[Any]:
    name = str(x[b"dtype"])
    if not _DTYPE.fullmatch(name):
        raise ValueError(f"its dtype is {name[:60]}; allowed are truth values, integers and real numbers")
    return np.dtype(name)


Answer: TypeAlias = tuple[NDArray[Any], Leaves, float]
"""The action, the memory [1, ...] after it, and the milliseconds that its batch took."""


class _Request(NamedTuple):
    leaves: Leaves
    memory: Leaves
    answer: "asyncio.Future[Answer]"


class Batches:
    def __init__(self, policy: Served, max_rows: int) -> None:
        self._policy, self._max_rows = policy, max_rows
        self._waiting: deque[_Request] = deque()
        self._some = asyncio.Event()

    async def ask(self, leaves: Leaves, memory: Leaves) -> Answer:
        """Answer one observation. RuntimeError: the policy failed, or gave no finite action."""
        request = _Request(leaves, memory, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._some.set()
        return await request.answer

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Compute each batch size once, then answer requests."""
        with ThreadPoolExecutor(1, "ejax-serve") as pool:  # one thread: the event loop continues meanwhile
            example = _Request(self._policy.example, self._policy.first_memory, asyncio.Future())
            for exponent in range((self._max_rows - 1).bit_length() + 1):
                self._act([example] * 2**exponent)
            task = asyncio.create_task(self._work(pool))
            try:
                yield
            finally:
                task.cancel()
                await asyncio.wait([task])

    async def _work(self, pool: ThreadPoolExecutor) -> None:
        while True:
            await self._some.wait()
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._max_rows))]
            if not self._waiting:
                self._some.clear()
            start = time.perf_counter()
            try:
                actions, memory = await asyncio.get_running_loop().run_in_executor(pool, self._act, batch)
            except Exception as error:  # of any kind: the next batch may succeed
                failure = RuntimeError(f"the policy failed: {explain(error, typed=True)}")
                actions, memory = [failure] * len(batch), []
            infer_ms = 1e3 * (time.perf_counter() - start)
            for i, (request, action) in enumerate(zip(batch, actions, strict=False)):
                if request.answer.done():  # cancelled: who asked is gone
                    continue
                if isinstance(action, np.ndarray | np.generic) and not np.isfinite(action).all():
                    action = RuntimeError("the policy's action is not finite")
                if isinstance(action, RuntimeError):
                    request.answer.set_exception(action)
                else:
                    request.answer.set_result((action, [x[i : i + 1] for x in memory], infer_ms))

    def _act(self, batch: list[_Request]) -> tuple[Any, Leaves]:
        rows = [*batch, *[batch[0]] * ((1 << (len(batch) - 1).bit_length()) - len(batch))]
        leaves, memory = ([np.concatenate(x) for x in zip(*(row[i] for row in rows), strict=True)] for i in (0, 1))
        return self._policy.act(leaves, memory)


RESET = "reset"
_KEPT = 10_000  # requests that the percentiles are of
_REPORT_EVERY_S = 10.0
_QUIET = logging.getLogger("interop.serving.connections")
_QUIET.setLevel(logging.CRITICAL + 1)  # whoever connects could fill the log


@contextlib.asynccontextmanager
async def serving(
    policy: Served,
    facts: Mapping[str, Any],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    max_clients: int = 16,
    report: Callable[[str], None] = print,
) -> AsyncIterator[Server]:
    """Serve a policy until the end of the context.

    Args:
        facts: for the metadata, besides those of the policy.
        port: 0: any that is free.
        token: that clients must send. None: all are served.
        max_clients: connections at a time; others are refused with status 503.
        report: takes a line about the requests, every 10 s that has some.
    """
    batches, latencies, counts = Batches(policy, max_clients), deque[float](maxlen=_KEPT), Counter[str]()
    chunk = policy.contract["action"].get("chunk", {"shape": [1]})["shape"][0]
    metadata = {
        **facts,
        "runtime": policy.runtime,
        "action_horizon": chunk,
        "continues": PLAN in policy.shapes,
        "remembers": bool(policy.first_memory),
        "max_message_bytes": policy.max_bytes,
        "max_clients": max_clients,
        "contract": policy.contract,
    }

    def percentiles() -> dict[str, float]:
        times = list(latencies)
        return {f"p{q}": round(float(np.percentile(times, q)), 2) for q in (50, 90, 99)} if times else {}

    def answer_http(connection: ServerConnection, request: Request) -> Response | None:
        """Answer plain HTTP, and refuse clients; None: let the WebSocket open."""
        is_meant = token is not None or _is_meant(request, host)
        if request.path == "/healthz" and is_meant:
            return connection.respond(HTTPStatus.OK, "OK\n")
        num_clients = len(server.connections)
        if not is_meant:
            status, text = HTTPStatus.FORBIDDEN, f"connect to {host}: no other Host is served, and no Origin\n"
        elif token is not None and not _has_token(request, token):
            status, text = HTTPStatus.UNAUTHORIZED, "send the server's --token as Authorization: Bearer TOKEN\n"
        elif request.path == "/metadata":
            now = {"latency_ms": percentiles(), "clients": num_clients, **counts}
            response = connection.respond(HTTPStatus.OK, json.dumps({**metadata, **now}, indent=2) + "\n")
            del response.headers["Content-Type"]
            response.headers["Content-Type"] = "application/json"
            return response
        elif num_clients >= max_clients:
            status, text = (
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"there are {num_clients} clients, all that --clients allows\n",
            )
        else:
            return None
        counts["refused"] += 1
        return connection.respond(status, text)

    async def handle(connection: ServerConnection) -> None:
        memory = policy.first_memory
        with contextlib.suppress(ConnectionClosed):
            await connection.send(pack(metadata))
            async for message in connection:
                start = time.perf_counter()
                try:
                    packed, memory = await answer(message, memory)
                except (ValueError, RuntimeError) as error:
                    counts["errors"] += 1
                    await connection.send(str(error))
                    await connection.close(1011, "an error, which the text before this names")
                    return
                latencies.append(1e3 * (time.perf_counter() - start))
                counts["requests"] += 1
                await connection.send(packed)

    async def answer(message: bytes | str, memory: Leaves) -> tuple[bytes, Leaves]:
        parts = unpack(message)
        starts = parts.pop(RESET, False) if RESET not in policy.shapes else False
        if np.shape(starts) != () or np.asarray(starts).dtype != bool:
            raise ValueError(f"'{RESET}' must be true or false")
        action, after, infer_ms = await batches.ask(policy.leaves(parts), policy.first_memory if starts else memory)
        actions = action[None] if chunk == 1 else action.reshape(chunk, -1)
        return pack({"actions": np.asarray(actions), "server_timing": {"infer_ms": infer_ms}}), after

    async def report_now_and_then() -> None:
        while True:
            before = counts["requests"]
            await asyncio.sleep(_REPORT_EVERY_S)
            if rate := (counts["requests"] - before) / _REPORT_EVERY_S:
                times = ", ".join(f"{name} {value} ms" for name, value in percentiles().items())
                report(f"{rate:.1f} requests/s of {len(server.connections)} clients: {times}")

    limits: dict[str, Any] = {"max_size": policy.max_bytes, "max_queue": 1, "compression": None, "logger": _QUIET}
    # also with a token, no page of a browser may connect: those send an origin
    listening = serve(handle, host, port, process_request=answer_http, origins=[None], **limits)
    async with batches.running(), listening as server:
        reporting = asyncio.create_task(report_now_and_then())
        try:
            yield server
        finally:
            reporting.cancel()


def _is_meant(request: Request, host: str) -> bool:
    """Return True if a program asks by this machine's name: a page's owner can let their server's name lead here."""
    try:
        (name,) = (urlsplit(f"//{each}").hostname or "" for each in request.headers.get_all("Host"))
    except ValueError:  # none or two of them, or one that is not a name
        return False
    return "Origin" not in request.headers and (name == host.lower() or is_loopback(name))


def _has_token(request: Request, token: str) -> bool:
    """Return whether it sends ``Bearer TOKEN``, or ``Api-Key TOKEN`` as openpi's client sends it."""
    kind, _, given = request.headers.get("Authorization", "").partition(" ")
    return kind.lower() in ("bearer", "api-key") and hmac.compare_digest(given.encode(), token.encode())
