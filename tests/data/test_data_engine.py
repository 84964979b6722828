"""The engine's life, its failures, and what they leave behind: nothing, checked after every test."""

import gc
import itertools
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import data_tasks
import numpy as np
import pytest
from case_tables import cases, refused
from data_tasks import SimulationError

from ejax.data import (
    DataBudgetExhaustedError,
    EngineState,
    OnlineDataEngine,
    OnlineDataEngineCfg,
    OnlineDataWorkerError,
    supervisor,
)
from ejax.data.control import CAPACITY, pack_failure, raise_failure
from ejax.data.engine_config import embodichain_field

TASKS = str(Path(__file__).parents[1] / "helpers")
BOUND_S = 120.0
"""No test waits longer for what should come at once."""


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Return the folder of all runs. After each test it is empty, so there is no shared memory, and no worker."""
    folder, before = tmp_path / "runs", workers()
    folder.mkdir()
    monkeypatch.setattr(supervisor, "PLACE", folder)
    yield folder
    assert list(folder.iterdir()) == [] and workers() <= before


def workers(owner: int | None = None) -> set[int]:
    """Find the running workers of a process, by default this one."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            is_child = state != "Z" and int(parent) == (owner or os.getpid())
            found |= (
                {int(folder.name)} if is_child and "ejax.data.worker" in (folder / "cmdline").read_text() else set()
            )
    return found


def is_running(pid: int) -> bool:
    """Return False for a process that is dead and not yet reaped, too."""
    try:
        dead = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        # its other threads may end later, and before them it cannot be reaped
        return not dead or len([*Path(f"/proc/{pid}/task").iterdir()]) > 1
    except FileNotFoundError:
        return False


def cfg(task: Any = "data_tasks:Toy", **options: Any) -> OnlineDataEngineCfg:
    """Make a config; options of ``Toy`` are passed on to it."""
    own = {name: options.pop(name) for name in list(options) if name not in OnlineDataEngineCfg.__dataclass_fields__}
    defaults = {"buffer_size": 8, "max_episode_steps": 50, "initialization_timeout": 60.0}
    return OnlineDataEngineCfg(task, own, **(defaults | options))


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


def draw_while_refilled(engine: OnlineDataEngine, draw: Callable[[], Any], more: int = 3) -> int:
    """Draw until all rows were refilled ``more`` times; return how often."""
    end = engine.stats()["data/fills"] + more
    drawn = itertools.count(1)
    wait_until(lambda: draw() or next(drawn) < 0 or engine.stats()["data/fills"] >= end)
    return next(drawn) - 1


def draw_until_it_fails(engine: OnlineDataEngine, size: int = 1) -> None:
    """Draw until the engine raises; nothing else ends this but the bound."""
    wait_until(lambda: is_whole(engine.sample_batch(size, 5)))


def is_whole(chunks: dict[str, Any]) -> None:
    """Check that all numbers of chunks, or windows, belong to one episode, and continue without a gap."""
    valid, marks = chunks["valid"], np.where(chunks["valid"], chunks["episode"]["mark"][:, None], 0)
    assert (chunks["obs"]["robot"]["qpos"] == marks[..., None]).all() and (chunks["actions"] == marks[..., None]).all()
    assert (chunks["rewards"] == np.where(valid, chunks["episode_step"], 0)).all()
    assert (np.diff(chunks["rewards"], axis=1)[valid[:, 1:] & valid[:, :-1]] == 1).all()


def consumer(script: str, engine: OnlineDataEngine, tmp_path: Path, **popen: Any) -> subprocess.Popen[str]:
    """Start a process that has ``engine`` as a pickled copy, and neither test nor task modules on its path."""
    path = tmp_path / f"engine{time.monotonic_ns()}.pickle"
    path.write_bytes(pickle.dumps(engine))
    code = f"import pathlib, pickle, sys\nengine = pickle.loads(pathlib.Path({str(path)!r}).read_bytes())\n{script}"
    return subprocess.Popen([sys.executable, "-W", "error", "-c", code], stdout=subprocess.PIPE, text=True, **popen)


def said_by(*processes: subprocess.Popen[str]) -> list[str]:
    return [process.communicate(timeout=BOUND_S)[0] for process in processes]


class Walk:
    """An engine and a model of it: its state, the fillings of its buffer, draws and events."""

    def __init__(self, seed: int) -> None:
        self.chance, self.began = random.Random(seed), time.monotonic_ns()
        self.budget, self.log = self.chance.choice([None, 6]), self.chance.choice([0, 16])
        options = {"refill_policy": "manual", "lifecycle_event_capacity": self.log}
        self.engine = OnlineDataEngine(cfg(buffer_size=4, episode_sample_budget=self.budget, **options))
        self.copies, self.events = [self.engine], []
        self.state, self.fills, self.samples, self.left = "CREATED", 0, 0, 0

    def step(self, name: str) -> None:
        """Take a step, which is refused in another state than it needs."""
        if self.state == ("CREATED" if name == "start" else "READY"):
            getattr(self, name)()
        else:
            with pytest.raises(RuntimeError, match=f"{self.state}.*(has no buffer|cannot be handed)?"):
                getattr(self, name)()
        assert self.engine.state.name == self.state and self.engine.is_init == (self.state == "READY")

    def start(self) -> None:
        self.engine.start()
        self.state, self.fills, self.left = "READY", 1, 4 * (self.budget or 0)

    def draw(self) -> None:
        size, engine = self.chance.randint(1, 8), self.chance.choice(self.copies)
        if self.state == "READY" and self.budget is not None and size > self.left:
            refused(engine.sample_batch, size, 5, match=f"{self.left} more chunks", error=DataBudgetExhaustedError)
            return
        is_whole(engine.sample_batch(size, self.chance.randint(1, 20)))
        self.samples, self.left = self.samples + size, self.left - size

    def refill(self) -> None:
        assert self.engine.request_refill() == self.fills + 1
        self.drain()  # a full log would hold the worker up
        self.engine.wait_for_generation(self.fills + 1, BOUND_S)
        self.fills, self.left = self.fills + 1, 4 * (self.budget or 0)

    def copy(self) -> None:
        copy = pickle.loads(pickle.dumps(self.engine))
        assert copy.is_init
        for act in (copy.start, copy.stop, copy.request_refill, copy.drain_lifecycle_events):
            refused(act, match="is for the process that made the engine", error=RuntimeError)
        self.copies.append(copy)

    def look(self) -> None:
        stats = self.engine.stats()
        assert (stats["data/fill"], stats["data/fills"], stats["data/samples"]) == (1.0, self.fills, self.samples)
        assert stats["data/episodes"] == 4 * self.fills and stats.get("data/chunks_left", self.left) == self.left

    def buffer(self) -> None:
        assert set(self.engine.shared_buffer["episode"]["generation"]) == {self.fills}

    def kill(self) -> None:
        os.kill(*workers(), signal.SIGKILL)
        wait_until(lambda: self.engine.state is EngineState.FAILED)
        for engine in self.copies:
            refused(engine.sample_batch, 1, 5, match="SIGKILL", error=OnlineDataWorkerError)
        self.stop("FAILED")

    def stop(self, state: str = "STOPPED") -> None:
        self.engine.stop()
        self.state, self.copies = state, [self.engine] if state == "FAILED" else self.copies

    def drain(self) -> None:
        self.events += self.engine.drain_lifecycle_events()
        assert [each.sequence for each in self.events] == list(range(len(self.events)))
        times = [each.monotonic_ns for each in self.events]
        assert times == sorted(times) and (not times or (self.began < times[0] and times[-1] < time.monotonic_ns()))


@pytest.mark.parametrize("seed", range(12))
def test_any_history_keeps_the_rules(seed: int) -> None:
    walk = Walk(seed)
    for step in range(30):
        if walk.state == "READY" and step > 20 and walk.chance.random() < 0.2:
            walk.chance.choice([walk.stop, walk.kill])()
        walk.step(walk.chance.choice(["start", "draw", "draw", "refill", "copy", "look", "buffer"]))
        walk.drain()
    for _ in range(2):
        walk.stop("FAILED" if walk.state == "FAILED" else "STOPPED")
        walk.step("draw")
    walk.drain()
    if walk.state == "STOPPED":
        came = [each.index for each in walk.events if each.kind == "published"]
        assert came == (list(range(4 * walk.fills)) if walk.log else [])
        assert len(walk.events) == (max(0, 8 * walk.fills - 4) if walk.log else 0)


OF_EMBODICHAIN = {
    "buffer_size": 8,
    "max_episode_steps": 50,
    "refill_threshold": 7,
    "max_generation_attempts": 4,
    "initialization_timeout": 60.0,
    "refill_policy": "manual",
    "episode_sample_budget": 3,
    "episode_sample_hard_limit": 9,
    "lifecycle_event_capacity": 16,
    "shutdown_timeout": 30.0,
    "include_provenance": False,
    "language_buffer_bytes": 1024,
    "buffer_device": "cpu",
}
"""Fields of EmbodiChain 0.3.2's class. The others are refused."""


def test_fields_of_embodichain_mean_here_what_they_mean_there() -> None:
    made = OnlineDataEngineCfg.from_embodichain(OF_EMBODICHAIN, "data_tasks:Toy", seed=3)
    kept = [name for name in OF_EMBODICHAIN if embodichain_field(name, OF_EMBODICHAIN[name])[0] == "used"]
    assert kept == [*list(OF_EMBODICHAIN)[:10], "buffer_device"] and made.seed == 3
    assert {name: getattr(made, name) for name in kept} == {name: OF_EMBODICHAIN[name] for name in kept}


@cases(
    "wrong reason",
    ({"initialization_timeout": float("nan")}, "must be finite and above 0 s, got nan"),
    ({"worker_timeout": float("inf")}, "worker_timeout must be finite"),
    ({"shutdown_timeout": 0.0}, "shutdown_timeout must be finite and above 0"),
    ({"max_generation_attempts": 0}, "max_generation_attempts must be at least 1"),
    ({"refill_threshold": 0}, "refill_threshold must be at least 1, got 0"),
    ({"buffer_size": 0, "lifecycle_event_capacity": 0}, "buffer_size must be at least 1"),
    ({"seed": -1}, "seed must be an int of at least 0"),
    ({"refill_policy": "never"}, "no refill_policy 'never'; there is sample_threshold, manual"),
    ({"episode_sample_budget": 0}, "episode_sample_budget must be at least 1, got 0"),
    ({"episode_sample_hard_limit": 2}, "is 2, below episode_sample_budget, 3"),
    ({"episode_sample_budget": None}, "is 9, without episode_sample_budget; set both"),
    ({"lifecycle_event_capacity": 15}, "must be 0 or at least 2 · buffer_size, 16: .*; got 15"),
    ({"lifecycle_event_capacity": -1}, "lifecycle_event_capacity must be at least 1, got -1"),
    ({"state_dim": 0}, "state_dim must be at least 1, got 0"),
    ({"gym_config": {"id": "PushCubeRL"}}, "set either task or gym_config; got both"),
    ({"action_config": {"noise": 0.1}}, "action_config holds the arguments of a gym_config's expert"),
    ({"buffer_device": "cuda:0"}, "buffer_device is 'cuda:0', but the buffer is in memory that processes share"),
    ({"action_semantics": "policy_request"}, "action_semantics: .* names its fields of actions"),
    ({"action_contracts": ("eef_pose.relative@1",)}, "action_contracts: .* names its fields of actions"),
    ({"bufer_size": 3}, "bufer_size: EmbodiChain's OnlineDataEngineCfg has no such field"),
)
def test_options_that_cannot_be_honoured_are_refused_with_a_reason(wrong: dict[str, Any], reason: str) -> None:
    refused(OnlineDataEngineCfg.from_embodichain, {**OF_EMBODICHAIN, **wrong}, "data_tasks:Toy", match=reason)


def test_chunks_have_their_shape_and_the_memory_comes_back(runs: Path) -> None:
    engine = OnlineDataEngine(cfg(lengths=[40]))
    assert (engine.buffer_size, engine.device, engine.max_episode_steps) == (8, "cpu", 50)
    with engine:
        chunks = engine.sample_batch(3, 10)
        assert chunks["obs"]["robot"]["qpos"].shape == (3, 10, 10) and chunks["rewards"].shape == (3, 10)
        assert chunks["episode"]["seed"].shape == (3,) and set(chunks["episode"]["instruction"]) == {b"push the cube"}
        (folder,), buffer = runs.iterdir(), engine.shared_buffer
        assert folder.stat().st_mode & 0o777 == 0o700 and str(folder) in Path("/proc/self/maps").read_text()
        assert buffer["obs"]["robot"]["qpos"].shape == (8, 50, 10)
        np.testing.assert_array_equal(buffer["valid"].sum(axis=1), buffer["episode"]["length"])
        with pytest.raises(ValueError, match="read-only"):
            buffer["rewards"][0, 0] = 1.0
        del buffer
    gc.collect()
    assert str(folder) not in Path("/proc/self/maps").read_text()


def test_the_same_seed_makes_the_same_episodes_and_each_says_where_it_comes_from() -> None:
    """Attempts 0 and 3 fail; the others have three outcomes each."""
    made = []
    for seed in (5, 5, 6):
        options = {"several": 3, "at": {0: "fail", 3: "fail"}, "refill_policy": "manual"}
        with OnlineDataEngine(cfg(seed=seed, **options)) as engine:
            first = engine.sample_batch(200, 5)["episode"]
            engine.wait_for_generation(engine.request_refill(), BOUND_S)
            second = engine.sample_batch(200, 5)["episode"]
        assert set(first["run_id"]) == set(second["run_id"]) == {engine.run_id}
        assert set(first["generation"]) == {1} and set(second["generation"]) == {2}
        made.append((engine.run_id, dict(zip(first["attempt"].tolist(), first["seed"].tolist(), strict=True))))
    attempt_of = dict(zip(first["index"].tolist(), first["attempt"].tolist(), strict=True))
    assert attempt_of == {1: 1, 2: 1, 3: 2, 4: 2, 5: 2, 6: 4, 7: 4, 8: 4}  # 0 was overwritten in the same filling
    assert set(second["attempt"]) == {5, 6, 7}
    (run, seeds), (again, same), (_, other) = made
    assert run != again and seeds == same and not set(seeds.values()) & set(other.values())


def test_draws_of_all_consumers_count_together_for_the_threshold_and_the_budget(tmp_path: Path) -> None:
    with OnlineDataEngine(cfg(refill_threshold=2, episode_sample_budget=5)) as engine:
        assert said_by(*(consumer("engine.sample_batch(5, 5)", engine, tmp_path) for _ in range(3))) == [""] * 3
        wait_until(lambda: engine.stats()["data/samples"] == 15.0)
        time.sleep(0.2)  # ten looks of the worker
        assert engine.stats()["data/fills"] == 1.0 and engine.stats()["data/chunks_left"] == 25.0
        engine.sample_batch(1, 5)
        wait_until(lambda: engine.stats()["data/fills"] == 2.0)
        time.sleep(0.2)
        assert engine.stats()["data/fills"] == 2.0 and engine.stats()["data/episodes"] == 16.0
        assert np.bincount(engine.sample_batch_with_context(40, 2, 3)["episode"]["index"])[8:].tolist() == [5] * 8


def test_a_manual_refill_comes_when_the_owner_asks_and_else_never(tmp_path: Path) -> None:
    with OnlineDataEngine(cfg(refill_policy="manual", refill_threshold=1, delay=0.05)) as engine:
        engine.sample_batch(32, 5)
        time.sleep(0.2)
        assert engine.stats()["data/fills"] == 1.0
        refused(engine.wait_for_generation, 2, match=r"generation 2 was not requested, 1 have been made")
        assert [engine.request_refill() for _ in range(3)] == [2, 2, 2]  # while it is made
        with pytest.raises(TimeoutError, match=r"generation 2 was not complete after 0\.01 s; 1 are"):
            engine.wait_for_generation(2, 0.01)
        assert said_by(consumer("print(engine.wait_for_generation(2))", engine, tmp_path)) == ["None\n"]
        for generation, timeout, error in ((0, 1.0, ValueError), (1.5, 1.0, TypeError), (1, 0.0, ValueError)):
            with pytest.raises(error, match=r"generation must be|timeout must be finite and above 0 s"):
                engine.wait_for_generation(generation, timeout)


def test_an_owner_that_takes_whole_episodes_has_them_made_under_a_manual_refill_too() -> None:
    with OnlineDataEngine(cfg(refill_policy="manual")) as engine:
        taken = list(itertools.islice(engine.episodes(), 20))
    assert [each.index for each in taken] == list(range(20))
    assert [each.origin.generation for each in taken] == [1] * 8 + [2] * 8 + [3] * 4


def test_a_full_log_of_events_holds_the_worker_up_and_none_is_lost() -> None:
    """The start alone has more of them than the log holds: 20 come, and 12 of them go."""
    engine = OnlineDataEngine(cfg(refill_policy="manual", lifecycle_event_capacity=16, several=20))
    with engine:
        first = engine.drain_lifecycle_events()
        came = [each for each in first if each.kind == "published"]
        assert [(each.index, each.row) for each in came] == [(index, index % 8) for index in range(20)]
        assert [each.index for each in first if each.kind == "evicted"] == list(range(12))
        assert {(each.num_frames, each.run_id) for each in first} == {(20, engine.run_id)}
        generation = engine.request_refill()
        refused(engine.wait_for_generation, generation, 0.3, error=TimeoutError)
        second = engine.drain_lifecycle_events()
        assert len(second) == 16
        while engine.stats()["data/fills"] < 2:
            second += engine.drain_lifecycle_events()
    second += engine.drain_lifecycle_events()  # also after the end
    assert [each.sequence for each in first + second] == list(range(len(first) + len(second)))
    assert [each.index for each in second if each.kind == "published"] == list(range(20, 40))
    for each, after in itertools.pairwise(second):
        if each.kind == "evicted":  # its row is free when the next one comes
            assert (after.kind, after.row, after.generation) == ("published", each.row, 2)


@pytest.mark.parametrize("draw", ["sample_batch", "sample_batch_with_context"])
def test_what_is_drawn_is_whole_while_every_row_is_rewritten(draw: str) -> None:
    """Wide frames make the copies long: with plain reads some hundred of these chunks are torn. Threads share it."""
    size = (4, 25) if draw == "sample_batch" else (4, 10, 15)
    with OnlineDataEngine(cfg(refill_threshold=1, buffer_size=2, wide=4000, lengths=[50, 30, 44])) as engine:
        drawn, sample = [], partial(getattr(engine, draw), *size)
        threads = [
            threading.Thread(target=lambda: drawn.append(draw_while_refilled(engine, lambda: is_whole(sample()), 8)))
            for _ in range(3)
        ]
        for act in (threading.Thread.start, threading.Thread.join):
            for thread in threads:
                act(thread)
        assert len(drawn) == 3 and engine.stats()["data/samples"] == 4.0 * sum(drawn)


def test_failed_attempts_are_counted_and_never_drawn() -> None:
    at = dict(enumerate(("fail", "incomplete", "unsuccessful", "long", "empty")))
    with OnlineDataEngine(cfg(max_generation_attempts=6, at=at, delay=0.02)) as engine:
        is_whole(engine.sample_batch(100, 20))
        time.sleep(0.2)
        stats = engine.stats()
    assert stats["data/failed_attempts"] == 5.0 and stats["data/success_rate"] == 8 / 13
    assert 1.0 < stats["data/episodes_per_s"] < 50.0 and 0.2 < stats["data/age_s"] < BOUND_S
    assert 0.0 < stats["data/samples_per_s"] < 500.0


def test_worker_and_consumer_import_what_they_need_alone(tmp_path: Path) -> None:
    """The worker is given a task by name; neither has jax, nor the main module."""
    script = "print(engine.sample_batch(1, 1)['actions'].shape, sorted({'jax', 'data_tasks'} & set(sys.modules)))"
    with OnlineDataEngine(cfg(data_tasks.Importing, folder=str(tmp_path))) as engine:
        modules = set((tmp_path / "modules").read_text().split())
        process = consumer(script, engine, tmp_path, stderr=subprocess.PIPE)
        assert process.communicate(timeout=BOUND_S) == ("(1, 1, 4) []\n", "")
    assert "jax" in sys.modules and "data_tasks" in modules
    assert not modules & {"jax", "flax", "pydantic", "torch", "pytest", "test_data_engine"}


def told(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ()), str(error.__cause__)])


CLOSING = {"task": "data_tasks:Closing", "folder": "FOLDER"}
SOON = {"initialization_timeout": 2.0, "shutdown_timeout": 0.3}


@cases(
    "options error text",
    ({"build": "raise"}, SimulationError, "no simulator.*in __init__"),
    ({"at": {0: "raise"}}, SimulationError, "the arm left the table.*in generate"),
    ({"build": "emoji"}, SimulationError, "😀{9000}.*in __init__"),
    ({"at": {0: "emoji"}}, SimulationError, "😀{9000}.*in generate"),
    ({"build": "exit"}, OnlineDataWorkerError, r"the worker ended \(exit code 17\) before its task was built"),
    ({"at": {3: "exit"}}, OnlineDataWorkerError, r"\(exit code 17\) before stop\(\)"),
    ({"at": {0: "crash"}}, OnlineDataWorkerError, r"code -11, SIGSEGV\)\nFatal Python error.*in misbehave"),
    ({"at": {0: "wrong"}}, ValueError, "fields are not those of the spec: missing"),
    ({"at": {0: "none"}}, TypeError, "must return Episode, Failure or a list of them, got None"),
    ({"build": "no spec"}, TypeError, r"spec\(\) must return an EpisodeSpec, got NoneType"),
    ({"at": dict.fromkeys(range(3), "fail")}, RuntimeError, "no successful .* 3 attempts in a row .*no way to the"),
    ({"task": "data_tasks:Nothing"}, AttributeError, "has no attribute 'Nothing'"),
    ({"task": "no_such_module:Toy"}, ModuleNotFoundError, "No module named 'no_such_module'"),
    ({"task": "data_tasks"}, ValueError, "write 'package.module:Name'"),
    ({"wide": 2**40}, MemoryError, r"needs \d+ MiB of shared memory.*lower buffer_size or max_episode_steps"),
    ({**SOON, "build": "hang"}, TimeoutError, r"took longer than 2.0 s \(initialization_timeout\) to build its task"),
    ({**SOON, "build": "suspended"}, TimeoutError, "longer than 2.0 s .* to build its task"),
    ({**SOON, "build": "deaf"}, TimeoutError, r"2.0 s .* to build.*not end within 0.3 s \(shutdown_timeout\)"),
    ({**CLOSING, **SOON, "hang": "opened"}, TimeoutError, "2.0 s .* to build.*within 0.3 s .* was killed"),
    ({"initialization_timeout": 2.0, "worker_timeout": 0.2, "at": {0: "hang"}}, TimeoutError, "to fill the buffer"),
    (
        {**CLOSING, "initialization_timeout": 2.0, "fail": True, "delay": BOUND_S},
        TimeoutError,
        "while stopping the worker: could not close",
    ),
    ({**CLOSING, "fail": True, "speechless": True}, SimulationError, "knows no spec"),
    ids=str,
)
def test_start_raises_why_it_failed(options: dict[str, Any], error: type[Exception], text: str, tmp_path: Path) -> None:
    options = {name: str(tmp_path) if value == "FOLDER" else value for name, value in options.items()}
    engine = OnlineDataEngine(cfg(**options))
    with pytest.raises(error) as caught:
        engine.start()
    assert re.search(text, told(caught.value), re.S), told(caught.value)
    for act in (engine.start, lambda: engine.sample_batch(1, 5)):
        refused(act, match="current state is FAILED", error=RuntimeError)
    engine.stop()
    assert engine.state is EngineState.FAILED


def test_a_task_of_the_main_script_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_tasks.Toy, "__module__", "__main__")
    with pytest.raises(ValueError, match=r"defined in the main script, .*put it into another module"):
        OnlineDataEngine(cfg(data_tasks.Toy)).start()


SIGNALS = {"suspend": signal.SIGSTOP, "kill": signal.SIGKILL}
DRAW = """
try:
    while True:
        engine.sample_batch(4, 5)
        print("drawn", flush=True)
except Exception as error:
    print(type(error).__name__, str(error).partition(chr(10))[0], flush=True)
print(sorted({"jax", "flax", "data_tasks"} & set(sys.modules)), flush=True)
"""


@cases(
    "how error text",
    ("raise", SimulationError, "the arm left the table"),
    ("unpicklable", OnlineDataWorkerError, "data_tasks.UnpicklableError: with a lock inside"),
    ("exit", OnlineDataWorkerError, "the worker ended (exit code 17) before stop()"),
    ("hang", OnlineDataWorkerError, "hangs: no attempt of its task ended for 0.5 s (worker_timeout)"),
    ("suspend", OnlineDataWorkerError, "hangs"),
    ("kill", OnlineDataWorkerError, "(exit code -9, SIGKILL)"),
)
def test_every_consumer_hears_of_a_failure(how: str, error: type[Any], text: str, tmp_path: Path) -> None:
    engine = OnlineDataEngine(cfg(refill_threshold=4, worker_timeout=0.5, at={9: how} if how not in SIGNALS else {}))
    with pytest.raises(error, match=re.escape(text)) as caught, engine:  # stop() adds nothing: it was reported
        others = [consumer(DRAW, engine, tmp_path) for _ in range(2)]
        try:
            if how in SIGNALS:
                os.kill(*(workers()), SIGNALS[how])
            draw_until_it_fails(engine)
        finally:
            said = [each.splitlines()[-2:] for each in said_by(*others)]
    assert how != "hang" or "in misbehave" in str(caught.value)
    assert engine.state is EngineState.FAILED and engine.stop() is None
    for line, modules in said:
        assert line.startswith("OnlineDataWorkerError ") and text in line and modules == "[]"


@cases(
    "options error text",
    ({}, None, ""),
    ({"shutdown_timeout": BOUND_S, "at": {8: "hang"}}, None, ""),  # interrupted
    ({"fail": True}, SimulationError, "could not close"),
    ({"at": {8: "exit"}}, OnlineDataWorkerError, r"\(exit code 17\) before stop\(\)"),  # nobody heard of it
    ({"shutdown_timeout": 0.3, "at": {8: "deaf"}}, OnlineDataWorkerError, r"within 0.3 s .* and was killed"),
    ({"shutdown_timeout": 0.5, "hang": "closed"}, OnlineDataWorkerError, "within 0.5 s .* and was killed"),
    ({"shutdown_timeout": 0.5, "hang": "thread"}, OnlineDataWorkerError, "within 0.5 s .* and was killed"),
    ({"shutdown_timeout": 0.5, "hang": "exit"}, OnlineDataWorkerError, "within 0.5 s .* and was killed"),
    ids=str,
)
def test_stop_closes_the_task_within_its_bound_and_raises_what_was_not_reported(
    options: dict[str, Any], error: type[Exception] | None, text: str, tmp_path: Path
) -> None:
    engine = OnlineDataEngine(cfg("data_tasks:Closing", folder=str(tmp_path), refill_threshold=1, **options))
    engine.start()
    copy, start = pickle.loads(pickle.dumps(engine)), time.monotonic()
    assert copy.is_init and (tmp_path / "opened").exists() and not (tmp_path / "closed").exists()
    if "at" in options:
        engine.sample_batch(8, 5)
        wait_until(lambda: (tmp_path / "attempts").read_text() == "9")
        time.sleep(0.2)  # it has written the number, and is about to go deaf, or to end
    if error is None:
        engine.stop()
    else:
        with pytest.raises(error, match=text):
            engine.stop()
    assert time.monotonic() - start < BOUND_S / 2
    engine.stop()
    assert engine.state is (EngineState.FAILED if error else EngineState.STOPPED) and not copy.is_init
    assert (tmp_path / "closed").exists() == (set(options.get("at", {}).values()) <= {"hang"})


def test_the_first_attempt_may_compile_for_longer_and_an_idle_worker_does_not_hang() -> None:
    with OnlineDataEngine(cfg(worker_timeout=1.0, at={0: "slow"})) as engine:
        time.sleep(2.0)
        is_whole(engine.sample_batch(1, 5))
        assert engine.state is EngineState.READY


@pytest.mark.parametrize("seed", range(4))
def test_a_worker_killed_at_any_moment_is_reported_and_leaves_nothing(seed: int) -> None:
    """Rows are rewritten all the time; what is drawn until the end is whole."""
    engine = OnlineDataEngine(cfg(refill_threshold=1, buffer_size=2, wide=2000))
    with pytest.raises(OnlineDataWorkerError, match=r"\(exit code -9, SIGKILL\) before stop\(\)"), engine:
        (worker,) = workers()
        threading.Timer(random.Random(seed).uniform(0.0, 0.3), os.kill, (worker, signal.SIGKILL)).start()
        draw_until_it_fails(engine, 2)
    assert engine.state is EngineState.FAILED


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_consumer_killed_or_suspended_while_it_draws_stops_nobody(number: int, tmp_path: Path) -> None:
    """No lock of a consumer's outlives it, because it has none."""
    with OnlineDataEngine(cfg(refill_threshold=1, buffer_size=2, wide=2000)) as engine:
        others = [consumer(DRAW, engine, tmp_path) for _ in range(2)]
        for process in others:
            assert process.stdout.readline() == "drawn\n"
            process.send_signal(number)
        draw_while_refilled(engine, lambda: is_whole(engine.sample_batch(2, 20)))
        for process in others:
            process.kill()
        said_by(*others)


def test_a_worker_that_outlives_being_killed_can_be_stopped_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def outlived(process: subprocess.Popen[bytes], timeout: float) -> None:
        raise subprocess.TimeoutExpired("worker", timeout)

    engine = OnlineDataEngine(cfg())
    engine.start()
    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "wait", outlived)
        patched.setattr(subprocess.Popen, "poll", lambda process: None)
        refused(engine.stop, match="outlived SIGKILL", error=OnlineDataWorkerError)
    assert engine.state is EngineState.FAILED
    engine.stop()
    assert engine.state is EngineState.FAILED


def test_a_worker_that_died_since_the_monitor_looked_is_no_clean_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = OnlineDataEngine(cfg())
    engine.start()
    monkeypatch.setattr(supervisor, "POLL_S", BOUND_S)
    time.sleep(1.0)  # until the monitor waits for that long
    (worker,) = workers()
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: not is_running(worker))
    refused(engine.stop, match=r"\(exit code -9, SIGKILL\) before stop\(\)", error=OnlineDataWorkerError)


def test_the_error_of_the_body_stays_the_first() -> None:
    engine = OnlineDataEngine(cfg(refill_threshold=1, at={8: "exit"}))
    with pytest.raises(KeyError, match="mine") as caught, engine:
        engine.sample_batch(8, 5)
        wait_until(lambda: engine.state is EngineState.FAILED)
        raise KeyError("mine")
    assert re.search("while stopping the engine: .*exit code 17", told(caught.value), re.S)


def test_a_failure_ends_the_wait_for_a_generation() -> None:
    engine = OnlineDataEngine(cfg(refill_policy="manual", at={12: "raise"}))
    with pytest.raises(SimulationError, match="the arm left the table"), engine:
        engine.wait_for_generation(engine.request_refill(), BOUND_S)


def test_stop_cancels_a_start_under_way() -> None:
    engine, raised = OnlineDataEngine(cfg(delay=5.0)), []

    def start() -> None:
        try:
            engine.start()
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    wait_until(lambda: engine.state is EngineState.STARTING)
    time.sleep(0.3)
    engine.stop()
    thread.join(BOUND_S)
    assert engine.state is EngineState.STOPPED and raised == ["start() was cancelled by stop()"]


class BrokenTextError(Exception):
    def __str__(self) -> None:
        raise RuntimeError("no text")


def unpicklable(error: Any) -> Any:
    error.lock = threading.Lock()
    return error


@cases(
    "error text",
    (ValueError("x" * 10**6), r"^ValueError: x{1000,2000}$"),
    (ValueError("x" + "😀" * 10**6), "😀"),
    (ValueError("\udc80" * 40_000), "."),
    (type("😀" * 9000, (Exception,), {"__module__": "é" * 40_000})("text"), "."),
    (unpicklable(BrokenTextError()), r"BrokenTextError: <exception str\(\) failed>"),
    (SystemExit(3), r"^SystemExit: 3"),  # which must not end a consumer
    ids=["long", "wide", "surrogates", "long names", "no text", "exit"],
)
def test_a_failure_of_any_text_keeps_within_its_bytes(error: Any, text: str) -> None:
    packed = pack_failure(error)
    assert len(packed) <= CAPACITY
    refused(raise_failure, packed, match=text, error=(OnlineDataWorkerError, ValueError))


@pytest.mark.slow
def test_an_engine_that_nobody_holds_ends_its_worker() -> None:
    """The monitor thread does not hold it."""
    engine = OnlineDataEngine(cfg())
    engine.start()
    reference = weakref.ref(engine)
    del engine
    gc.collect()
    assert reference() is None and not workers()


OWNER = """
import os, pickle, signal, sys, time
sys.path.insert(0, {tasks!r})
from pathlib import Path
from ejax.data import OnlineDataEngine, OnlineDataEngineCfg, supervisor
supervisor.PLACE = Path({place!r})
engine = OnlineDataEngine(OnlineDataEngineCfg("data_tasks:Toy", {own}, buffer_size=2, max_episode_steps=50))
engine.start()
print(pickle.dumps(engine).hex(), flush=True)
{end}
"""


def start_owner(runs: Path, end: str, **own: Any) -> tuple[subprocess.Popen[str], OnlineDataEngine, int]:
    """Start a process with an engine, which runs the program ``end``; a copy of the engine, and its worker."""
    code = OWNER.format(tasks=TASKS, place=str(runs), own=own, end=f"sys.stdin.readline()\n{end}")
    # Python 3.12 warns of every fork of a process with threads
    command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", code]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    owner = subprocess.Popen(command, text=True, **pipes)
    copy = pickle.loads(bytes.fromhex(owner.stdout.readline()))
    (worker,) = workers(owner.pid)
    return owner, copy, worker


@cases(
    "end code",
    ("", 0),
    ("raise SystemExit(3)", 3),
    ("os.kill(os.getpid(), signal.SIGKILL)", -9),
    ids=["returns", "exits", "is killed"],
)
def test_a_worker_does_not_outlive_its_owner_and_consumers_hear_of_it(end: str, code: int, runs: Path) -> None:
    owner, copy, worker = start_owner(runs, end)
    is_whole(copy.sample_batch(2, 5))
    _, err = owner.communicate("\n", timeout=BOUND_S)
    assert (owner.returncode, err) == (code, "")
    expected = "the worker is gone, and its owner gives no reason" if code < 0 else "STOPPED"
    refused(draw_until_it_fails, copy, match=expected, error=RuntimeError)
    wait_until(lambda: not is_running(worker) and not any(runs.iterdir()))


FORKED = """
is_child = os.fork() == 0
if not is_child:
    os.wait()
print(engine.sample_batch(20, 5)["episode_step"][:, 0].tolist(), engine.state.name, flush=True)
if is_child:
    try:
        engine.stop()
    except RuntimeError as error:
        print(error, flush=True)
    sys.exit()  # runs what is registered for the interpreter's end
"""


def test_a_forked_child_draws_its_own_chunks_and_leaves_the_engine_alone(runs: Path) -> None:
    owner, _, _ = start_owner(runs, FORKED)
    out, err = owner.communicate("\n", timeout=BOUND_S)
    drawn, refusal, other = out.splitlines()
    assert drawn != other and drawn.endswith("READY") and other.endswith("READY")
    assert "only draw" in refusal and err == ""


def test_who_waits_for_episodes_hears_that_all_others_were_killed_and_the_next_engine_clears_up(runs: Path) -> None:
    """The worker hangs in its third attempt; it and the owner are killed, so no reason is given."""
    owner, copy, worker = start_owner(runs, "time.sleep(60)", at={2: "hang"})
    taken, raised = [], []

    def listen() -> None:
        try:
            taken.extend(iter(copy.episodes()))
        except OnlineDataWorkerError as error:
            raised.append(str(error))

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    time.sleep(0.5)  # it has asked for more, and waits
    os.kill(owner.pid, signal.SIGSTOP)  # nor may one of them see the other one die
    for pid in (worker, owner.pid):
        os.kill(pid, signal.SIGKILL)
    thread.join(BOUND_S)
    assert raised == ["the worker is gone, and its owner gives no reason"]
    wait_until(lambda: not is_running(owner.pid) and not is_running(worker))
    # the kernel frees a lock with the last thread, which may outlive the one that makes the process a zombie
    wait_until(lambda: all(len([*Path(f"/proc/{pid}/task").glob("*")]) <= 1 for pid in (worker, owner.pid)))
    (left,) = runs.iterdir()
    assert (left / "buffer").exists()
    with OnlineDataEngine(cfg()) as engine:  # the owner is a zombie yet
        assert not left.exists()
        with OnlineDataEngine(cfg()) as other:  # what belongs to a living process is left alone
            supervisor.clear_leftovers()
            is_whole(engine.sample_batch(2, 5))
            is_whole(other.sample_batch(2, 5))
    owner.communicate()


def test_shared_memory_is_what_the_system_has_for_it() -> None:
    """The default place; the other tests of this file choose a folder on the disk."""
    code = "from ejax.data import supervisor; print(supervisor.PLACE)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "/dev/shm\n"


def test_only_this_users_folders_that_no_process_has_locked_are_cleared(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, lock = supervisor.make_run_folder()
    gone, other, link = runs / "ejax-data-gone", runs / "psm_ejax-data-gone", runs / "ejax-data-link"
    for folder in (gone, other):
        folder.mkdir()
        (folder / "order").touch()
    link.symlink_to(other)
    with monkeypatch.context() as patched:
        user = os.geteuid()
        patched.setattr(os, "geteuid", lambda: user + 1)
        supervisor.clear_leftovers()
        assert gone.exists()
    supervisor.clear_leftovers()
    assert held.exists() and (other / "order").exists() and link.is_symlink() and not gone.exists()
    os.close(lock)
    supervisor.clear_leftovers()
    assert not held.exists()
    link.unlink()
    shutil.rmtree(other)


@pytest.mark.slow
def test_engines_that_start_at_once_clear_up_side_by_side(runs: Path) -> None:
    for number in range(200):
        (runs / f"ejax-data-{number}").mkdir()
    code = "import sys; from pathlib import Path; from ejax.data import supervisor; sys.stdin.read(1); "
    code += f"supervisor.PLACE = Path({str(runs)!r}); supervisor.clear_leftovers()"
    command = [sys.executable, "-W", "error", "-c", code]
    others = [subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(4)]
    assert [other.communicate(b"x", timeout=60.0)[1] for other in others] == [b""] * 4
    assert [other.returncode for other in others] == [0] * 4


def test_the_example_of_the_documents_runs_as_written(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    (tmp_path / "reach.py").write_text(re.search(r"```python\n(.*?)```", text, re.S)[1])
    command = [sys.executable, "-W", "error", "reach.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60.0)
    assert (done.returncode, done.stderr) == (0, "") and "'data/samples'" in done.stdout
