"""Ask a policy server for actions. Needs websockets, msgpack and numpy; no jax, no ejax.

ejax serve exported                 # or a run's folder
python examples/serve_client.py --steps 100   # from anywhere else: --url ws://HOST:8000 --token TOKEN

``openpi_client.websocket_client_policy.WebsocketClientPolicy("127.0.0.1", 8000)`` does the same. Of a policy in chunks,
``--chunks rtc --latency 2`` plays single actions by ``chunk_player.py``.
"""

import argparse
import time
from contextlib import ExitStack
from typing import Any

import msgpack
import numpy as np
from websockets.sync.client import connect


class Client:
    """A connection, which is also the memory of one robot."""

    def __init__(self, url: str, token: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else None
        self._open = ExitStack()
        opening = connect(url, additional_headers=headers, compression=None, max_size=None)
        self._connection = self._open.enter_context(opening)
        self.metadata = msgpack.unpackb(self._connection.recv(), object_hook=_to_array)

    def infer(self, obs: dict[str, Any]) -> dict[str, Any]:
        """Send one observation, arrays and texts by the contract's names; ``actions`` [K, A] come back."""
        self._connection.send(msgpack.packb(obs, default=_from_array))
        answer = self._connection.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"the server refused the observation: {answer}")
        return msgpack.unpackb(answer, object_hook=_to_array)

    def infer_chunk(self, obs: dict[str, Any], plan: Any = None, weights: Any = None) -> Any:
        """Ask for a chunk [K, A]; of a policy that can do so, one that goes on as ``plan``. See ``ChunkPlayer``."""
        goes_on = {} if plan is None else {"continue": {"actions": plan, "weights": weights}}
        return self.infer({**obs, **goes_on})["actions"]

    def close(self) -> None:
        self._open.close()


def _from_array(x: np.ndarray) -> Any:
    return {b"__ndarray__": True, b"data": x.tobytes(), b"dtype": x.dtype.str, b"shape": x.shape}


def _to_array(x: dict[Any, Any]) -> Any:
    return np.ndarray(x[b"shape"], np.dtype(x[b"dtype"]), x[b"data"]) if b"__ndarray__" in x else x


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Ask a policy server for actions, for observations of zeros.")
    parser.add_argument("--url", default="ws://127.0.0.1:8000")
    parser.add_argument("--token")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--chunks", metavar="METHOD", help="play single actions: sync, async, ensemble or rtc")
    parser.add_argument("--latency", type=int, default=0, metavar="STEPS", help="until a chunk is used, at least")
    args = parser.parse_args()
    client, start = Client(args.url, args.token), time.perf_counter()
    entries = [entry for entry in client.metadata["contract"]["observation"] if entry["name"] != "memory"]
    obs = {entry["name"]: np.zeros(entry["shape"][1:], entry.get("dtype", "float32")) for entry in entries}
    if args.chunks is None:
        for step in range(args.steps):
            actions = client.infer({**obs, "reset": step == 0})["actions"]
        more = ""
    else:
        from chunk_player import ChunkPlayer, Execution

        horizon, action = client.metadata["action_horizon"], client.metadata["contract"]["action"]
        bounds = [action[name][: len(action[name]) // horizon] for name in ("low", "high")]
        with ChunkPlayer(Execution(args.chunks, horizon, args.latency), client.infer_chunk, *bounds) as player:
            for _ in range(args.steps):
                actions = player(obs)
        more = f"; the largest jump at a seam is {player.largest_jump:.3f} of the range"
    took = 1e3 * (time.perf_counter() - start) / args.steps
    print(f"{args.steps} steps, {took:.2f} ms each; the last: {actions}{more}")
