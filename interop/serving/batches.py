"""One computation for the clients that wait: requests that come while a batch is computed are the next batch.

A batch is filled up to a power of two, so that a program compiled for its shape is compiled once, at the start.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ejax.schema.messages import explain
from interop.serving.policies import Leaves, Served

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
        """Compute every size of a batch once, then what is asked."""
        with ThreadPoolExecutor(1, "ejax-serve") as pool:  # one thread: the event loop goes on meanwhile
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
