"""``embodichain.data_pipeline.engine``: ejax's engine, with EmbodiChain's worker, a mock, in place of its process.

EmbodiChain's tests make an engine without its constructor, set its private fields, and look at them again. Here these
fields are the outside of a real engine of ejax's, with its own shared memory, control words and supervisor:

    _init_signal            a thread begins ejax's filling of the buffer, with the rows of ``shared_buffer``
    _lock_index             rows that are being written
    _worker_error_buffer    a failure of ejax's, published to its control words
    _sim_process            asked to end, and killed, as ejax's supervisor does it
    _fill_signal            set when ejax's filling begins again
"""

import fcntl
import os
import pickle
import struct
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from upstream_words import translated

import ejax.data
from ejax.data import EngineState as OnlineDataEngineState
from ejax.data import Episode, EpisodeSpec, OnlineDataWorkerError
from ejax.data import engine as ejax_engine
from ejax.data import supervisor as ejax_supervisor
from ejax.data.buffer import BufferLayout, TrajectoryBuffer, create
from ejax.data.control import BUFFER, CAPACITY, LIFE, Control, pack_failure, raise_failure
from ejax.data.supervisor import Supervisor
from ejax.data.worker import SPEC, _Filler
from interop.dataset import chunks_to_tensordict

__all__ = ["OnlineDataEngine", "OnlineDataEngineCfg", "OnlineDataEngineState", "OnlineDataWorkerError"]

_ERROR_BUFFER_SIZE = CAPACITY
_STATE_TO_CODE = {state: code for code, state in enumerate(OnlineDataEngineState)}
_TASK = "upstream_engine:the_rows_of_shared_buffer"


class OnlineDataEngineCfg(ejax.data.OnlineDataEngineCfg):
    """ejax's, which EmbodiChain checks later, when an engine is made of it, and allows to be changed."""

    def __init__(self, task: Any = _TASK, **fields: Any) -> None:
        # ejax's engine needs neither: the rows are those of ``shared_buffer``
        given = {name: value for name, value in fields.items() if name not in ("gym_config", "state_dim")}
        made = ejax.data.OnlineDataEngineCfg(task)
        vars(self).update({**vars(made), **given})

    __setattr__ = object.__setattr__


class OnlineDataEngine(ejax.data.OnlineDataEngine):
    shared_buffer: Any = None
    buffer_size: Any = None
    device: Any = None
    _cleanup_complete = property(
        lambda self: self._supervisor is None or self._supervisor._closed, lambda self, _: None
    )

    def __init__(self, cfg: OnlineDataEngineCfg) -> None:
        super().__init__(ejax.data.OnlineDataEngineCfg(**vars(cfg)))

    def __setattr__(self, name: str, value: Any) -> None:
        """Make the engine behind the fields, once the last of them is set."""
        super().__setattr__(name, value)
        if name == "_sim_process" and "_phase" not in vars(self):
            fields = dict(vars(self))
            ejax.data.OnlineDataEngine.__init__(self, self.cfg)
            vars(self).update(fields)
        if name == "_sim_process" and value is not None and self._supervisor is None and self._init_signal.is_set():
            with _worker_of(self, is_new=False):
                super().start()
            version = self._consume().buffer.version
            first, behind = self._lock_index
            version[max(first, 0) : max(behind, 0)] |= 1

    def start(self) -> None:
        with translated(), _worker_of(self, is_new=True):
            super().start()

    def stop(self) -> None:
        self._exchange()
        with translated():
            super().stop()

    def sample_batch(self, batch_size: int, chunk_size: int, sampling_mode: Any = "episode", *, rng: Any = None) -> Any:
        self._exchange()
        if os.getpid() == self._owner_pid and "_worker" in vars(self):
            self._worker.poll()  # a process that died has no lock from then on
        with translated():
            chunks = super().sample_batch(batch_size, chunk_size, sampling_mode, rng=rng)
        return chunks_to_tensordict(chunks) if rng is None else chunks

    def _draw(self, *args: Any) -> Any:
        made = super()._draw(*args)
        self._let_the_worker_look()
        return made

    def _trigger_refill_if_needed(self, count: int) -> None:
        self._consume().control.count_samples(count)
        self._let_the_worker_look()

    def _let_the_worker_look(self) -> None:
        """Wait until the thread that fills the buffer has seen how much was drawn."""
        control, worker = self._consume().control, vars(self).get("_worker")
        beat = control["beat"]
        while worker is not None and worker.filling.is_alive() and control["beat"] < beat + 2:
            time.sleep(1e-3)

    def _exchange(self) -> None:
        """Carry a failure from EmbodiChain's field to ejax's words, or the other way, and rows that a test changed."""
        if (self._ticket is None and self._supervisor is None) or "_worker_error_length" not in vars(self):
            return
        with suppress(FileNotFoundError):  # a consumer's: the owner has stopped
            mine = os.getpid() == self._owner_pid and self._supervisor is not None
            control = self._supervisor.control if mine else Control(self._ticket.folder, self.cfg)
            if size := self._worker_error_length.value:
                control.publish_failure(bytes(self._worker_error_buffer[:size]))
            elif control["failure_size"]:
                self._worker_failed_signal.set()
            if mine and self._ticket is not None:
                self._worker.write_again(self._consume().buffer)

    def _record_worker_error(self, error: BaseException) -> None:
        fields = (self._worker_error_buffer, self._worker_error_length, self._worker_failed_signal, self._state_value)
        _publish_worker_error(*fields, error)

    def _receive_worker_error(self) -> BaseException | None:
        try:
            raise_failure(bytes(self._worker_error_buffer[: self._worker_error_length.value]))
        except Exception as error:
            return error

    def _set_state(self, state: OnlineDataEngineState) -> None:
        self._phase = state

    def _shutdown_worker(self) -> None:
        Supervisor.close(self._supervisor)

    def __del__(self) -> None:
        if vars(self).get("_supervisor") is not None:
            ejax_engine._abandon(self._supervisor, self._owner_pid)


class _Worker:
    """EmbodiChain's process, which a test may replace, in the role of ejax's ``subprocess.Popen``."""

    def __init__(self, engine: OnlineDataEngine, folder: Path, is_new: bool) -> None:
        self.engine, self.control, self.written = engine, Control(folder, engine.cfg), None
        rows = {name: x for name, x in engine.shared_buffer.items() if name not in ("valid", "segment_id")}
        spec = EpisodeSpec({name: (tuple(x.shape[2:]), str(x.numpy().dtype)) for name, x in rows.items()})
        layout = BufferLayout(engine.cfg.buffer_size, engine.cfg.max_episode_steps, spec)
        create(folder / BUFFER, layout.arrays())
        (folder / SPEC).write_bytes(pickle.dumps(spec))
        order = SimpleNamespace(run_id=engine.run_id, cfg=engine.cfg)  # all of it that is read there
        self.filler = _Thread(order, _Rows(self), TrajectoryBuffer(folder / BUFFER, layout), self.control)
        self.filling = threading.Thread(target=self.filler.run_until_stopped, daemon=True)
        # of the open file, not of the process: consumers in this process find it locked too
        self.life = (folder / LIFE).open("w")
        fcntl.fcntl(self.life, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        if is_new:
            engine._sim_process = engine._mp_ctx.Process()
            engine._sim_process.start()
            engine._fill_signal.set()
        self.poll()
        if not is_new:
            while not self.control["fills"]:
                time.sleep(1e-3)

    @property
    def pid(self) -> Any:
        return self.engine._sim_process.pid

    def poll(self) -> int | None:
        if self.engine._init_signal.is_set() and self.filling.ident is None:
            self.filling.start()
        self.engine._exchange()
        if self.engine._sim_process.is_alive():
            return None
        self.life.close()
        self.filler.stopped.set()
        code = self.engine._sim_process.exitcode
        return code if isinstance(code, int) else 0

    def terminate(self) -> None:
        self.engine._close_signal.set()

    def wait(self, timeout: float) -> int:
        self.engine._sim_process.join(timeout=timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("worker", timeout)
        return code

    def kill(self) -> None:
        self.engine._sim_process.terminate()
        self.engine._sim_process.kill()

    def write_again(self, buffer: TrajectoryBuffer) -> None:
        """Write the rows of ``shared_buffer`` that a test has changed since the last time."""
        held, self.written = self.written, self.engine.shared_buffer.clone()
        if held is None:
            return
        first, behind = self.engine._lock_index
        for row, episode in enumerate(self.episodes()):
            if not first <= row < behind and (held[row] != self.written[row]).any():
                buffer.write(row, episode, _ORIGIN, index=row, written_at=0.0)

    def episodes(self) -> list[Episode]:
        return [_episode(row) for row in self.engine.shared_buffer]


class _Rows:
    """ejax's task: it demonstrates the rows of ``shared_buffer``."""

    def __init__(self, worker: _Worker) -> None:
        self.worker, self.calls = worker, 0

    def generate(self, seed: int) -> list[Episode]:
        del seed
        self.calls += 1
        if self.calls > 1:
            self.worker.engine._fill_signal.set()
        self.worker.written = self.worker.engine.shared_buffer.clone()
        return self.worker.episodes()


class _Thread(_Filler):
    """ejax's loop of a worker, which ends where the process would."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stopped = threading.Event()

    def run_until_stopped(self) -> None:
        with suppress(SystemExit):
            self.run()

    def _wait(self) -> None:
        if self.stopped.is_set():
            raise SystemExit
        super()._wait()


_ORIGIN = ejax.data.Origin(0, 0, 1, 0)


def _episode(row: Any) -> Episode:
    length = int(row["valid"].sum())
    arrays = {name: x[:length].numpy() for name, x in row.items() if name != "valid"}
    return Episode(arrays, segment_id=np.asarray(arrays.pop("segment_id")))


@contextmanager
def _worker_of(engine: OnlineDataEngine, *, is_new: bool) -> Any:
    """Let the next ``Supervisor`` have EmbodiChain's process."""

    class Closing(Supervisor):
        def close(self) -> None:
            engine._supervisor = self
            engine._shutdown_worker()
            engine._exchange()

    def spawn(folder: Path) -> _Worker:
        engine._worker = _Worker(engine, folder, is_new)
        return engine._worker

    with patch.object(ejax_engine, "Supervisor", Closing), patch.object(ejax_supervisor, "_spawn", spawn):
        yield


def _run_sim_worker(*args: Any) -> None:
    raise NotImplementedError("EmbodiChain's worker runs a simulator")


def _sim_worker_fn(*args: Any) -> None:
    try:
        _run_sim_worker(*args)
    except BaseException as error:
        _publish_worker_error(*args[-4:], error)
        raise


def _publish_worker_error(buffer: Any, length: Any, failed: Any, state: Any, error: BaseException) -> bool:
    packed = pack_failure(error)
    buffer[: len(packed)] = packed
    length.value = len(packed)
    failed.set()
    return True
