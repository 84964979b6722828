"""The engine's life, its failures, and what they leave behind: nothing, checked after every test."""

import gc
import itertools
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import data_tasks
import numpy as np
import pytest

from ejax.data import (
    ChunkSizeSampler,
    DataBudgetExhaustedError,
    EngineState,
    OnlineDataEngine,
    OnlineDataEngineCfg,
    OnlineDataset,
    OnlineDataWorkerError,
    UniformChunkSampler,
)
from ejax.data import supervisor as supervisor_module
from ejax.data.control import CAPACITY, pack_failure, raise_failure
from ejax.data.engine_config import embodichain_field
from ejax.data.prefetch import prefetch_to_device

TASKS = str(Path(__file__).parents[1] / "helpers")
BOUND_S = 120.0
"""No test waits longer for what should come at once."""


@pytest.fixture(autouse=True)
def left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """After each test: no folder of a run, and so no shared memory, and no worker."""
    workers, spawn = [], supervisor_module._spawn

    def spawn_noted(*args: Any) -> subprocess.Popen[bytes]:
        workers.append(spawn(*args))
        return workers[-1]

    monkeypatch.setattr(supervisor_module, "_spawn", spawn_noted)
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(supervisor_module, "PLACE", tmp_path / "runs")
    yield workers
    assert list((tmp_path / "runs").iterdir()) == []
    assert [worker.pid for worker in workers if worker.poll() is None] == []


def cfg(task: str = "data_tasks:Toy", **kwargs: Any) -> OnlineDataEngineCfg:
    task_cfg = kwargs.pop("task_cfg", {})
    defaults = {"buffer_size": 8, "max_episode_steps": 50, "initialization_timeout": 60.0}
    return OnlineDataEngineCfg(task, task_cfg, **(defaults | kwargs))


def wait_until(condition: Callable[[], Any], bound: float = BOUND_S) -> None:
    deadline = time.monotonic() + bound
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


def draw_while_refilled(engine: OnlineDataEngine, least: int, draw: Callable[[], Any]) -> int:
    """Draw ``least`` times, and on until rows were refilled thrice: a busy machine lets the worker run late."""
    deadline, drawn = time.monotonic() + BOUND_S, 0
    while drawn < least or engine.stats()["data/fills"] <= 3:
        assert time.monotonic() < deadline, "rows are not refilled"
        draw()
        drawn += 1
    return drawn


def draw_until_it_fails(engine: OnlineDataEngine, size: int = 1) -> None:
    """Draw until the engine raises; nothing else ends this but the bound."""
    deadline = time.monotonic() + BOUND_S
    while time.monotonic() < deadline:
        engine.sample_batch(size, 5)
    pytest.fail("the engine did not fail")


def consumer(script: str, engine: OnlineDataEngine, tmp_path: Path, **popen: Any) -> subprocess.Popen[str]:
    """Start a process that has ``engine`` as a pickled copy, and neither test nor task modules on its path."""
    path = tmp_path / f"engine{time.monotonic_ns()}.pickle"
    path.write_bytes(pickle.dumps(engine))
    code = f"import pathlib, pickle, sys\nengine = pickle.loads(pathlib.Path({str(path)!r}).read_bytes())\n{script}"
    return subprocess.Popen([sys.executable, "-W", "error", "-c", code], stdout=subprocess.PIPE, text=True, **popen)


DRAW = """
try:
    while True:
        engine.sample_batch(4, 5)
        print("drawn", flush=True)
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
print(sorted({"jax", "flax", "data_tasks"} & set(sys.modules)), flush=True)
"""


def is_running(pid: int | str) -> bool:
    """Return False for a process that is dead and not yet reaped, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def is_whole(chunks: dict[str, Any]) -> None:
    """All numbers of a chunk belong to one episode, and go on without a gap."""
    mark = chunks["episode"]["mark"]
    assert (chunks["obs"]["robot"]["qpos"] == mark[:, None, None]).all()
    assert (chunks["actions"] == mark[:, None, None]).all()
    assert (np.diff(chunks["rewards"], axis=1) == 1).all()
    assert (chunks["rewards"] == chunks["episode_step"]).all()
    assert chunks["valid"].all()


# one engine, healthy


def test_a_buffer_is_filled_before_anyone_draws_and_chunks_have_their_shape() -> None:
    engine = OnlineDataEngine(cfg())
    assert engine.state is EngineState.CREATED and not engine.is_init
    with engine:
        assert engine.state is EngineState.READY and engine.is_init
        stats = engine.stats()
        assert stats["data/fill"] == 1.0 and stats["data/episodes"] == 8.0 and stats["data/fills"] == 1.0
        chunks = engine.sample_batch(3, 10)
        assert chunks["obs"]["robot"]["qpos"].shape == (3, 10, 10)
        assert chunks["actions"].shape == (3, 10, 4) and chunks["rewards"].shape == (3, 10)
        assert chunks["episode"]["seed"].shape == (3,) and set(chunks["episode"]["instruction"]) == {b"push the cube"}
        is_whole(chunks)
    assert engine.state is EngineState.STOPPED and not engine.is_init


def test_a_stopped_engine_gives_its_memory_back() -> None:
    engine = OnlineDataEngine(cfg())
    with engine:
        engine.sample_batch(1, 5)
        block = str(engine._ticket.folder)
        assert block in Path("/proc/self/maps").read_text()
    gc.collect()
    assert block not in Path("/proc/self/maps").read_text()


def test_rules_of_the_life_of_an_engine() -> None:
    engine = OnlineDataEngine(cfg())
    with pytest.raises(RuntimeError, match="sample_batch requires state READY; current state is CREATED"):
        engine.sample_batch(1, 5)
    with pytest.raises(RuntimeError, match="in state CREATED cannot be handed to another process; start"):
        pickle.dumps(engine)
    engine.start()
    with pytest.raises(RuntimeError, match=r"start\(\) requires state CREATED; current state is READY"):
        engine.start()
    with pytest.raises(ValueError, match="chunk_size 51 is more than max_episode_steps, 50"):
        engine.sample_batch(1, 51)
    engine.stop()
    engine.stop()
    with pytest.raises(RuntimeError, match="sample_batch requires state READY; current state is STOPPED"):
        engine.sample_batch(1, 5)
    with pytest.raises(RuntimeError, match=r"start\(\) requires state CREATED; current state is STOPPED"):
        engine.start()
    with pytest.raises(RuntimeError, match=r"stats\(\) requires state READY or FAILED; current state is STOPPED"):
        engine.stats()


def test_an_engine_never_started_stops() -> None:
    engine = OnlineDataEngine(cfg())
    engine.stop()
    assert engine.state is EngineState.STOPPED


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"initialization_timeout": float("nan")}, "initialization_timeout must be finite and above 0 s, got nan"),
        ({"worker_timeout": float("inf")}, "worker_timeout must be finite"),
        ({"shutdown_timeout": 0.0}, "shutdown_timeout must be finite and above 0"),
        ({"max_generation_attempts": 0}, "max_generation_attempts must be at least 1"),
        ({"refill_threshold": 0}, "refill_threshold must be at least 1, got 0"),
        ({"buffer_size": 0}, "buffer_size must be at least 1"),
        ({"seed": -1}, "seed must be an int of at least 0"),
        ({"refill_policy": "never"}, "no refill_policy 'never'; there is sample_threshold, manual"),
        ({"episode_sample_budget": 0}, "episode_sample_budget must be at least 1, got 0"),
        ({"episode_sample_budget": 3, "episode_sample_hard_limit": 2}, "is 2, below episode_sample_budget, 3"),
        ({"episode_sample_hard_limit": 2}, "is 2, without episode_sample_budget; give both"),
        ({"lifecycle_event_capacity": 15}, "must be 0 or at least 2 · buffer_size, 16: .*; got 15"),
        ({"lifecycle_event_capacity": -1}, "lifecycle_event_capacity must be at least 1, got -1"),
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cfg(**wrong)


def test_the_same_seed_makes_the_same_episodes() -> None:
    made = []
    for seed in (3, 3, 4):
        with OnlineDataEngine(cfg(seed=seed)) as engine:
            chunks = engine.sample_batch(200, 20, rng=np.random.default_rng(0))
            made.append(dict(zip(chunks["episode"]["index"].tolist(), chunks["episode"]["seed"].tolist(), strict=True)))
    assert made[0] == made[1] and len(set(made[0].values())) == 8
    assert not set(made[0].values()) & set(made[2].values())


def test_a_refill_comes_once_at_the_threshold() -> None:
    with OnlineDataEngine(cfg(refill_threshold=1)) as engine:
        engine.sample_batch(7, 5)
        time.sleep(0.2)  # ten looks of the worker
        assert engine.stats()["data/fills"] == 1.0
        engine.sample_batch(1, 5)
        wait_until(lambda: engine.stats()["data/fills"] == 2.0)
        time.sleep(0.2)
        stats = engine.stats()
        assert stats["data/fills"] == 2.0 and stats["data/episodes"] == 16.0 and stats["data/samples"] == 8.0
        assert set(engine.sample_batch(200, 5)["episode"]["index"]) == set(range(8, 16))


def test_a_manual_refill_comes_when_the_owner_asks_and_else_never(tmp_path: Path) -> None:
    with OnlineDataEngine(cfg(refill_policy="manual", refill_threshold=1, task_cfg={"delay": 0.05})) as engine:
        for _ in range(4):
            engine.sample_batch(8, 5)
        time.sleep(0.2)  # ten looks of the worker
        assert engine.stats()["data/fills"] == 1.0
        engine.wait_for_generation(1)
        with pytest.raises(ValueError, match=r"generation 2 was not requested, 1 are made"):
            engine.wait_for_generation(2)
        assert [engine.request_refill() for _ in range(3)] == [2, 2, 2]  # while it is made
        with pytest.raises(TimeoutError, match=r"generation 2 was not complete after 0\.01 s; 1 are"):
            engine.wait_for_generation(2, 0.01)
        engine.wait_for_generation(2, BOUND_S)
        time.sleep(0.2)
        stats = engine.stats()
        assert stats["data/fills"] == 2.0 and stats["data/episodes"] == 16.0
        script = """
for ask in (engine.request_refill, lambda: print(engine.wait_for_generation(2))):
    try:
        ask()
    except RuntimeError as error:
        print(error)
"""
        said, _ = consumer(script, engine, tmp_path).communicate(timeout=BOUND_S)
        assert "request_refill() is for the process that made the engine" in said and "None" in said
        for generation, timeout, error in ((0, 1.0, ValueError), (1.5, 1.0, TypeError), (1, 0.0, ValueError)):
            with pytest.raises(error, match=r"generation must be|timeout must be finite and above 0 s"):
                engine.wait_for_generation(generation, timeout)
    with pytest.raises(RuntimeError, match="request_refill requires state READY; current state is STOPPED"):
        engine.request_refill()


def test_a_failure_ends_the_wait_for_a_generation() -> None:
    engine = OnlineDataEngine(cfg(refill_policy="manual", task_cfg={"at": {12: "raise"}}))
    with pytest.raises(data_tasks.SimulationError, match="the arm left the table"), engine:
        engine.wait_for_generation(engine.request_refill(), BOUND_S)


def test_an_owner_that_takes_whole_episodes_has_them_made_under_a_manual_refill_too() -> None:
    with OnlineDataEngine(cfg(refill_policy="manual")) as engine:
        taken = list(itertools.islice(engine.episodes(), 20))
    assert [each.index for each in taken] == list(range(20))
    assert [each.origin.generation for each in taken] == [1] * 8 + [2] * 8 + [3] * 4


def test_an_episode_tells_where_it_comes_from() -> None:
    """Attempts 0 and 3 fail; the others have three outcomes each."""
    task_cfg = {"several": 3, "at": {0: "fail", 3: "fail"}}
    with OnlineDataEngine(cfg(refill_policy="manual", seed=5, task_cfg=task_cfg)) as engine:
        first = engine.sample_batch(200, 5)["episode"]
        engine.wait_for_generation(engine.request_refill(), BOUND_S)
        second = engine.sample_batch(200, 5)["episode"]
        run_id = engine.run_id
    with OnlineDataEngine(cfg(seed=5)) as other:
        again = other.sample_batch(200, 5)["episode"]
    assert run_id != other.run_id and set(first["run_id"]) == set(second["run_id"]) == {run_id}
    assert set(again["run_id"]) == {other.run_id}
    assert set(first["generation"]) == {1} and set(second["generation"]) == {2}
    attempt_of = dict(zip(first["index"].tolist(), first["attempt"].tolist(), strict=True))
    assert attempt_of == {1: 1, 2: 1, 3: 2, 4: 2, 5: 2, 6: 4, 7: 4, 8: 4}  # 0 was overwritten in the same filling
    assert set(second["attempt"]) == {5, 6, 7}
    seed_of = {int(a): int(s) for a, s in zip(again["attempt"], again["seed"], strict=True)}
    assert all(seed_of[a] == s for a, s in zip(first["attempt"].tolist(), first["seed"].tolist(), strict=True))


def test_a_budget_is_shared_by_all_consumers_and_renewed_with_the_episodes(tmp_path: Path) -> None:
    with OnlineDataEngine(cfg(refill_policy="manual", episode_sample_budget=5)) as engine:
        assert engine.stats()["data/chunks_left"] == 40.0
        draws = [consumer("for _ in range(5): engine.sample_batch(2, 5)", engine, tmp_path) for _ in range(3)]
        assert [process.wait(BOUND_S) for process in draws] == [0, 0, 0]
        counts = np.bincount(engine.sample_batch_with_context(10, 2, 3)["episode"]["index"], minlength=8)
        assert counts.max() <= 5 and engine.stats()["data/chunks_left"] == 0.0
        with pytest.raises(DataBudgetExhaustedError, match="0 more chunks"):
            engine.sample_batch(1, 5)
        time.sleep(0.1)
        assert engine.stats()["data/fills"] == 1.0  # to run out asks for nothing
        engine.wait_for_generation(engine.request_refill(), BOUND_S)
        assert np.bincount(engine.sample_batch(40, 5)["episode"]["index"])[8:].tolist() == [5] * 8
        for process in draws:
            process.stdout.close()


def test_windows_around_a_frame_are_whole_while_every_row_is_rewritten() -> None:
    task_cfg = {"wide": 4000, "lengths": [50, 30, 44]}
    with OnlineDataEngine(cfg(refill_threshold=1, buffer_size=2, task_cfg=task_cfg)) as engine:

        def draw() -> None:
            chunks = engine.sample_batch_with_context(4, 10, 15)
            mark = np.where(chunks["valid"], chunks["episode"]["mark"][:, None], 0)
            assert (chunks["obs"]["robot"]["qpos"] == mark[..., None]).all()
            assert (chunks["rewards"] == np.where(chunks["valid"], chunks["episode_step"], 0)).all()

        draw_while_refilled(engine, 100, draw)
        with pytest.raises(ValueError, match="history_length must be at least 1"):
            engine.sample_batch_with_context(4, 0, 15)
        with pytest.raises(ValueError, match="batch_size must be at least 1"):
            engine.sample_batch_with_context(0, 1, 15)


def test_every_episode_that_comes_and_goes_is_an_event() -> None:
    """The start alone has more of them than the log holds: 20 come, and 12 of them go."""
    engine = OnlineDataEngine(cfg(refill_policy="manual", lifecycle_event_capacity=16, task_cfg={"several": 20}))
    with engine:
        first = engine.drain_lifecycle_events()
        assert [each.index for each in first if each.kind == "published"] == list(range(20))
        assert [each.index for each in first if each.kind == "evicted"] == list(range(12))
        assert {each.num_frames for each in first} == {20} and {each.run_id for each in first} == {engine.run_id}
        assert [each.row for each in first if each.kind == "published"] == [index % 8 for index in range(20)]
        generation = engine.request_refill()
        with pytest.raises(TimeoutError):  # nobody takes the events, and none is lost for that
            engine.wait_for_generation(generation, 0.3)
        second = engine.drain_lifecycle_events()
        assert len(second) == 16
        while engine.stats()["data/fills"] < 2:
            second += engine.drain_lifecycle_events()
    second += engine.drain_lifecycle_events()  # also after the end
    assert engine.drain_lifecycle_events() == []
    assert [each.sequence for each in first + second] == list(range(len(first) + len(second)))
    came = [each.index for each in second if each.kind == "published"]
    assert came == list(range(20, 40)) and {each.generation for each in second if each.kind == "published"} == {2}
    for each in second:
        if each.kind == "evicted":  # its row is free when the next one comes
            later = [other for other in second if other.sequence == each.sequence + 1]
            assert later == [] or (later[0].kind, later[0].row) == ("published", each.row)


def test_without_a_log_there_are_no_events() -> None:
    with OnlineDataEngine(cfg()) as engine:
        assert engine.drain_lifecycle_events() == []


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


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"state_dim": 0}, "state_dim must be at least 1, got 0"),
        ({"gym_config": {"id": "PushCubeRL"}}, "give task, or gym_config in its place; got both"),
        ({"action_config": {"noise": 0.1}}, "action_config are arguments of what demonstrates in a gym_config"),
        ({"buffer_device": "cuda:0"}, "buffer_device is 'cuda:0', but the buffer is in memory that processes share"),
        ({"action_semantics": "policy_request"}, "action_semantics: .* names its fields of actions"),
        ({"action_contracts": ("eef_pose.relative@1",)}, "action_contracts: .* names its fields of actions"),
        ({"bufer_size": 3}, "bufer_size: EmbodiChain's OnlineDataEngineCfg has no such field"),
    ],
)
def test_fields_of_embodichain_that_cannot_be_honoured_are_refused_with_a_reason(
    field: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        OnlineDataEngineCfg.from_embodichain({**OF_EMBODICHAIN, **field}, "data_tasks:Toy")


def test_draws_of_all_consumers_count_together(tmp_path: Path) -> None:
    with OnlineDataEngine(cfg(refill_threshold=2)) as engine:
        draws = [consumer("engine.sample_batch(5, 5)", engine, tmp_path) for _ in range(3)]
        assert [process.wait(BOUND_S) for process in draws] == [0, 0, 0]
        wait_until(lambda: engine.stats()["data/samples"] == 15.0)
        time.sleep(0.1)
        assert engine.stats()["data/fills"] == 1.0
        engine.sample_batch(1, 5)
        wait_until(lambda: engine.stats()["data/fills"] == 2.0)
        for process in draws:
            process.stdout.close()


def test_chunks_are_whole_while_every_row_is_rewritten_all_the_time() -> None:
    """Wide frames make the copies long: with plain reads some hundred of these chunks are torn."""
    task_cfg = {"wide": 4000, "lengths": [50, 30, 44]}
    with OnlineDataEngine(cfg(refill_threshold=1, buffer_size=2, task_cfg=task_cfg)) as engine:
        drawn = draw_while_refilled(engine, 300, lambda: is_whole(engine.sample_batch(4, 25)))
        wait_until(lambda: engine.stats()["data/samples"] == 4.0 * drawn)


def test_several_outcomes_of_one_attempt_each_get_a_row() -> None:
    with OnlineDataEngine(cfg(task_cfg={"several": 3})) as engine:
        assert engine.stats()["data/episodes"] == 9.0  # three attempts fill eight rows
        is_whole(engine.sample_batch(50, 10))


def test_failed_attempts_are_counted_and_never_drawn() -> None:
    at = dict(enumerate(("fail", "incomplete", "unsuccessful", "long", "empty")))
    with OnlineDataEngine(cfg(max_generation_attempts=6, task_cfg={"at": at})) as engine:
        stats = engine.stats()
        assert stats["data/failed_attempts"] == 5.0 and stats["data/episodes"] == 8.0
        assert stats["data/success_rate"] == 8 / 13
        is_whole(engine.sample_batch(100, 20))


def test_stats_tell_rates_and_the_age_of_the_data() -> None:
    with OnlineDataEngine(cfg(task_cfg={"delay": 0.02})) as engine:
        engine.sample_batch(10, 5)
        wait_until(lambda: engine.stats()["data/samples"] == 10.0)
        time.sleep(0.2)
        stats = engine.stats()
        assert 1.0 < stats["data/episodes_per_s"] < 50.0  # an attempt takes 0.02 s, and more on a busy machine
        assert 0.2 < stats["data/age_s"] < BOUND_S
        assert 0.0 < stats["data/samples_per_s"] < 50.0


def test_the_worker_imports_neither_jax_nor_the_main_module(tmp_path: Path) -> None:
    """It is given a task by name, in a process of its own."""
    assert "jax" in sys.modules
    with OnlineDataEngine(cfg("data_tasks:Importing", task_cfg={"folder": str(tmp_path)})):
        modules = set((tmp_path / "modules").read_text().split())
    assert "data_tasks" in modules
    assert not modules & {"jax", "flax", "pydantic", "torch", "pytest", "test_data_engine"}


def test_a_task_that_is_a_context_manager_is_opened_and_closed(tmp_path: Path) -> None:
    with OnlineDataEngine(cfg(data_tasks.Closing, task_cfg={"folder": str(tmp_path)})):
        assert (tmp_path / "opened").exists() and not (tmp_path / "closed").exists()
    assert (tmp_path / "closed").exists()


def test_stop_interrupts_the_attempt_under_way(tmp_path: Path) -> None:
    task_cfg = {"folder": str(tmp_path), "at": {"8": "hang"}}
    options: dict[str, Any] = {"refill_threshold": 1, "shutdown_timeout": BOUND_S, "task_cfg": task_cfg}
    engine = OnlineDataEngine(cfg("data_tasks:Closing", **options))
    engine.start()
    engine.sample_batch(8, 5)
    wait_until(lambda: (tmp_path / "attempts").read_text() == "9")
    engine.stop()  # an attempt that goes on is killed after the time, which raises
    assert engine.state is EngineState.STOPPED and (tmp_path / "closed").exists()


# failures


@pytest.mark.parametrize("task_cfg", [{"build": "raise"}, {"at": {0: "raise"}}], ids=["when built", "when run"])
def test_start_raises_what_the_task_raised(task_cfg: dict[str, Any]) -> None:
    engine = OnlineDataEngine(cfg(task_cfg=task_cfg))
    with pytest.raises(data_tasks.SimulationError, match=r"no simulator|the arm left the table") as caught:
        engine.start()
    assert "in generate" in str(caught.value.__cause__) or "in __init__" in str(caught.value.__cause__)
    assert engine.state is EngineState.FAILED
    with pytest.raises(RuntimeError, match="current state is FAILED"):
        engine.sample_batch(1, 5)
    with pytest.raises(RuntimeError, match="current state is FAILED"):
        engine.start()
    engine.stop()
    assert engine.state is EngineState.FAILED


@pytest.mark.parametrize(
    ("task", "task_cfg", "error", "message"),
    [
        ("data_tasks:Toy", {"build": "exit"}, OnlineDataWorkerError, r"the worker ended \(exit code 17\) before its"),
        ("data_tasks:Toy", {"at": {3: "exit"}}, OnlineDataWorkerError, r"\(exit code 17\) before stop\(\)"),
        ("data_tasks:Toy", {"at": {0: "wrong"}}, ValueError, "fields are not those of the spec: missing"),
        ("data_tasks:Toy", {"at": {0: "none"}}, TypeError, "must return Episode, Failure or a list of them, got None"),
        ("data_tasks:Toy", {"build": "no spec"}, TypeError, r"spec\(\) must return an EpisodeSpec, got NoneType"),
        ("data_tasks:Nothing", {}, AttributeError, "has no attribute 'Nothing'"),
        ("no_such_module:Toy", {}, ModuleNotFoundError, "No module named 'no_such_module'"),
        ("data_tasks", {}, ValueError, "write 'package.module:Name'"),
    ],
)
def test_start_tells_why_it_failed(task: str, task_cfg: dict[str, Any], error: type[Exception], message: str) -> None:
    engine = OnlineDataEngine(cfg(task, task_cfg=task_cfg))
    with pytest.raises(error, match=message):
        engine.start()
    assert engine.state is EngineState.FAILED


def test_attempts_that_all_fail_end_with_their_reason() -> None:
    engine = OnlineDataEngine(cfg(task_cfg={"at": dict.fromkeys(range(3), "fail")}))
    with pytest.raises(RuntimeError, match=r"no successful demonstration in 3 attempts in a row .*no way to the goal"):
        engine.start()


@pytest.mark.parametrize(
    ("task_cfg", "timeout", "what"),
    [({"build": "hang"}, 0.8, "to build its task"), ({"at": {0: "hang"}}, 3.0, "to fill the buffer")],
)
def test_a_start_that_takes_too_long_is_a_timeout(task_cfg: dict[str, Any], timeout: float, what: str) -> None:
    engine = OnlineDataEngine(cfg(initialization_timeout=timeout, task_cfg=task_cfg))
    with pytest.raises(TimeoutError, match=rf"took longer than {timeout} s \(initialization_timeout\) {what}"):
        engine.start()
    assert engine.state is EngineState.FAILED


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("raise", data_tasks.SimulationError, "the arm left the table"),
        ("unpicklable", OnlineDataWorkerError, "data_tasks.UnpicklableError: with a lock inside"),
        ("exit", OnlineDataWorkerError, r"the worker ended \(exit code 17\) before stop\(\)"),
    ],
)
def test_every_consumer_hears_of_a_failure(how: str, error: type[Any], message: str, tmp_path: Path) -> None:
    engine = OnlineDataEngine(cfg(refill_threshold=4, task_cfg={"at": {9: how}}))
    with pytest.raises(error, match=message), engine:  # stop() adds nothing of its own: it was reported
        others = [consumer(DRAW, engine, tmp_path) for _ in range(2)]
        try:
            for _ in range(2):
                draw_until_it_fails(engine)
        finally:
            said = [process.communicate(timeout=BOUND_S)[0].splitlines()[-2:] for process in others]
    assert engine.state is EngineState.FAILED
    assert len(said) == 2
    for text, modules in said:
        assert text.startswith("OnlineDataWorkerError: ")
        assert modules == "[]"  # without importing what failed
        expected = {"raise": "data_tasks.SimulationError: the arm left the table", "exit": "(exit code 17)"}
        assert expected.get(how, "with a lock inside") in text


def test_a_failure_that_nobody_heard_of_is_raised_by_stop() -> None:
    engine = OnlineDataEngine(cfg(refill_threshold=1, task_cfg={"at": {8: "exit"}}))
    engine.start()
    engine.sample_batch(8, 5)
    wait_until(lambda: engine.state is EngineState.FAILED)
    with pytest.raises(OnlineDataWorkerError, match=r"\(exit code 17\) before stop\(\)"):
        engine.stop()
    engine.stop()
    assert engine.state is EngineState.FAILED


def test_a_hanging_worker_is_found_and_says_where_it_is() -> None:
    engine = OnlineDataEngine(cfg(refill_threshold=1, worker_timeout=0.5, task_cfg={"at": {8: "hang"}}))
    with (
        pytest.raises(OnlineDataWorkerError, match=r"hangs: no attempt .* for 0.5 s \(worker_timeout\)") as caught,
        engine,
    ):
        engine.sample_batch(8, 5)
        draw_until_it_fails(engine)
    assert "in misbehave" in str(caught.value)


def test_the_first_attempt_may_compile_for_longer_than_an_attempt_may_take() -> None:
    with OnlineDataEngine(cfg(worker_timeout=1.0, task_cfg={"at": {0: "slow"}})) as engine:
        is_whole(engine.sample_batch(1, 5))


def test_a_first_attempt_that_hangs_ends_with_the_initialization() -> None:
    engine = OnlineDataEngine(cfg(initialization_timeout=3.0, worker_timeout=0.2, task_cfg={"at": {0: "hang"}}))
    expected = r"3.0 s \(initialization_timeout\) to fill the buffer.*raise initialization_timeout"
    with pytest.raises(TimeoutError, match=expected):
        engine.start()


def test_a_worker_that_crashes_says_where_it_was() -> None:
    engine = OnlineDataEngine(cfg(task_cfg={"at": {0: "crash"}}))
    with pytest.raises(OnlineDataWorkerError, match=r"exit code -11, SIGSEGV\)\nFatal Python error") as caught:
        engine.start()
    assert "in misbehave" in str(caught.value)


def test_a_stopped_process_counts_as_hanging(left_behind: list[subprocess.Popen[bytes]]) -> None:
    engine = OnlineDataEngine(cfg(worker_timeout=0.5))
    with pytest.raises(OnlineDataWorkerError, match="hangs"), engine:
        os.kill(left_behind[0].pid, signal.SIGSTOP)
        draw_until_it_fails(engine)


def test_an_idle_worker_does_not_count_as_hanging() -> None:
    with OnlineDataEngine(cfg(worker_timeout=0.5)) as engine:
        time.sleep(1.2)
        is_whole(engine.sample_batch(1, 5))
        assert engine.state is EngineState.READY


@pytest.mark.parametrize("seed", range(4))
def test_a_worker_killed_at_any_moment_is_reported_and_leaves_nothing(
    seed: int, left_behind: list[subprocess.Popen[bytes]]
) -> None:
    """Rows are rewritten all the time; what is drawn until the end is whole."""
    engine = OnlineDataEngine(cfg(refill_threshold=1, buffer_size=2, task_cfg={"wide": 2000}))
    with (
        pytest.raises(OnlineDataWorkerError, match=r"\(exit code -9, SIGKILL\) before stop\(\)"),
        engine,
    ):
        threading.Timer(random.Random(seed).uniform(0.0, 0.3), left_behind[0].kill).start()
        deadline = time.monotonic() + BOUND_S
        while time.monotonic() < deadline:
            is_whole(engine.sample_batch(2, 20))
    assert engine.state is EngineState.FAILED


def test_a_consumer_killed_while_it_draws_stops_nobody(tmp_path: Path) -> None:
    """No lock of a consumer's outlives it, because it has none."""
    rng = random.Random(0)
    with OnlineDataEngine(cfg(refill_threshold=1, buffer_size=2, task_cfg={"wide": 2000})) as engine:
        others = [consumer("while True: engine.sample_batch(4, 20)", engine, tmp_path) for _ in range(2)]
        time.sleep(0.5)
        for process in others:
            time.sleep(rng.uniform(0.0, 0.1))
            process.kill()
            process.communicate()
        fills = engine.stats()["data/fills"]
        wait_until(lambda: is_whole(engine.sample_batch(2, 20)) or engine.stats()["data/fills"] >= fills + 3)


def test_a_consumer_that_is_suspended_does_not_hold_up_the_worker(tmp_path: Path) -> None:
    with OnlineDataEngine(cfg(refill_threshold=1, buffer_size=2)) as engine:
        other = consumer(DRAW, engine, tmp_path)
        assert other.stdout.readline() == "drawn\n"
        os.kill(other.pid, signal.SIGSTOP)
        fills = engine.stats()["data/fills"]
        wait_until(lambda: is_whole(engine.sample_batch(2, 5)) or engine.stats()["data/fills"] >= fills + 3)
        other.kill()
        other.communicate()


def test_a_worker_that_will_not_end_is_killed_and_said_so(tmp_path: Path) -> None:
    task_cfg = {"folder": str(tmp_path), "at": {"8": "deaf"}}
    engine = OnlineDataEngine(cfg(refill_threshold=1, shutdown_timeout=0.3, task_cfg=task_cfg))
    engine.start()
    copy = pickle.loads(pickle.dumps(engine))
    assert copy.is_init
    engine.sample_batch(8, 5)
    wait_until(lambda: (tmp_path / "attempts").read_text() == "9")
    time.sleep(0.05)  # it has written the number, and is about to go deaf
    with pytest.raises(OnlineDataWorkerError, match=r"did not end within 0.3 s \(shutdown_timeout\) and was killed"):
        engine.stop()
    assert engine.state is EngineState.FAILED
    with pytest.raises(OnlineDataWorkerError, match="was killed"):
        copy.sample_batch(1, 5)


@pytest.mark.parametrize(
    ("task", "task_cfg"),
    [("data_tasks:Toy", {"build": "deaf"}), ("data_tasks:Closing", {"hang": "opened"})],
    ids=["when built", "when opened"],
)
def test_a_worker_that_goes_deaf_before_it_works_ends_within_its_bounds(
    task: str, task_cfg: dict[str, str], tmp_path: Path, left_behind: list[subprocess.Popen[bytes]]
) -> None:
    """initialization_timeout, then shutdown_timeout."""
    if task != "data_tasks:Toy":
        task_cfg |= {"folder": str(tmp_path)}
    engine = OnlineDataEngine(cfg(task, initialization_timeout=2.0, shutdown_timeout=0.3, task_cfg=task_cfg))
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"took longer than 2.0 s \(initialization_timeout\) to build") as caught:
        engine.start()
    assert time.monotonic() - start < 2.3 + BOUND_S / 2
    assert "did not end within 0.3 s (shutdown_timeout) and was killed" in caught.value.__notes__[0]
    assert left_behind[0].poll() == -signal.SIGKILL


@pytest.mark.parametrize("where", ["closed", "thread", "exit"])
def test_a_worker_that_hangs_when_it_closes_is_killed_within_its_bound(
    where: str, tmp_path: Path, left_behind: list[subprocess.Popen[bytes]]
) -> None:
    task_cfg = {"folder": str(tmp_path), "hang": where}
    engine = OnlineDataEngine(cfg("data_tasks:Closing", shutdown_timeout=0.5, task_cfg=task_cfg))
    engine.start()
    start = time.monotonic()
    with pytest.raises(OnlineDataWorkerError, match=r"did not end within 0.5 s \(shutdown_timeout\) and was killed"):
        engine.stop()
    assert time.monotonic() - start < 0.5 + BOUND_S / 2
    assert (tmp_path / "closed").exists() and left_behind[0].poll() == -signal.SIGKILL


def test_a_worker_that_is_suspended_before_it_works_is_not_waited_for() -> None:
    options: dict[str, Any] = {"initialization_timeout": 1.0, "shutdown_timeout": 0.3}
    engine = OnlineDataEngine(cfg(task_cfg={"build": "suspended"}, **options))
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"took longer than 1.0 s \(initialization_timeout\) to build its task"):
        engine.start()
    assert time.monotonic() - start < BOUND_S


def test_a_worker_that_outlives_being_killed_can_be_stopped_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = OnlineDataEngine(cfg())
    engine.start()
    end = supervisor_module.Supervisor._end

    def outlived(self: supervisor_module.Supervisor, timeout: float) -> None:
        raise OnlineDataWorkerError("the worker outlived SIGKILL")

    monkeypatch.setattr(supervisor_module.Supervisor, "_end", outlived)
    with pytest.raises(OnlineDataWorkerError, match="outlived SIGKILL"):
        engine.stop()
    assert engine.state is EngineState.FAILED
    monkeypatch.setattr(supervisor_module.Supervisor, "_end", end)
    engine.stop()
    assert engine.state is EngineState.FAILED


def test_a_task_that_fails_to_close_is_told(tmp_path: Path) -> None:
    engine = OnlineDataEngine(cfg("data_tasks:Closing", task_cfg={"folder": str(tmp_path), "fail": True}))
    engine.start()
    with pytest.raises(data_tasks.SimulationError, match="could not close"):
        engine.stop()
    assert engine.state is EngineState.FAILED


def test_a_worker_that_died_since_the_monitor_looked_is_no_clean_stop(
    monkeypatch: pytest.MonkeyPatch, left_behind: list[subprocess.Popen[bytes]]
) -> None:
    engine = OnlineDataEngine(cfg())
    engine.start()
    monkeypatch.setattr(supervisor_module, "POLL_S", BOUND_S)
    time.sleep(0.1)  # until the monitor waits for that long
    left_behind[0].kill()
    left_behind[0].wait()
    with pytest.raises(OnlineDataWorkerError, match=r"\(exit code -9, SIGKILL\) before stop\(\)"):
        engine.stop()
    assert engine.state is EngineState.FAILED


def test_a_task_that_fails_to_close_after_a_failed_start_is_a_note(tmp_path: Path) -> None:
    task_cfg = {"folder": str(tmp_path), "fail": True, "delay": BOUND_S}
    engine = OnlineDataEngine(cfg("data_tasks:Closing", initialization_timeout=3.0, task_cfg=task_cfg))
    with pytest.raises(TimeoutError) as caught:
        engine.start()
    assert "while stopping the worker: could not close" in caught.value.__notes__[0]


def test_the_first_error_of_a_task_is_shown_though_its_closing_fails_too(tmp_path: Path) -> None:
    task_cfg = {"folder": str(tmp_path), "fail": True, "speechless": True}
    with pytest.raises(Exception, match="knows no spec"):
        OnlineDataEngine(cfg("data_tasks:Closing", task_cfg=task_cfg)).start()


def test_the_error_of_the_body_stays_the_first() -> None:
    engine = OnlineDataEngine(cfg(refill_threshold=1, task_cfg={"at": {8: "exit"}}))
    with pytest.raises(KeyError, match="mine") as caught, engine:
        engine.sample_batch(8, 5)
        wait_until(lambda: engine.state is EngineState.FAILED)
        raise KeyError("mine")
    assert "while stopping the engine: " in caught.value.__notes__[0]
    assert "exit code 17" in caught.value.__notes__[0]


def test_what_goes_wrong_in_cleaning_up_a_failed_start_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def outlived(self: supervisor_module.Supervisor, timeout: float) -> None:
        self._process.kill()
        self._process.wait()
        raise OnlineDataWorkerError("outlived")

    monkeypatch.setattr(supervisor_module.Supervisor, "_end", outlived)
    engine = OnlineDataEngine(cfg(initialization_timeout=0.3, task_cfg={"build": "hang"}))
    with pytest.raises(TimeoutError) as caught:
        engine.start()
    assert "while stopping the worker: OnlineDataWorkerError: outlived" in caught.value.__notes__[0]
    engine.stop()


def test_stop_cancels_a_start_under_way() -> None:
    engine = OnlineDataEngine(cfg(task_cfg={"delay": 5.0}))
    raised = []

    def start() -> None:
        try:
            engine.start()
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    wait_until(lambda: engine.state is EngineState.STARTING)
    time.sleep(0.3)
    engine.stop()
    thread.join(BOUND_S)
    assert not thread.is_alive()
    assert engine.state is EngineState.STOPPED
    assert str(raised[0]) == "start() was cancelled by stop()"


def test_too_little_shared_memory_is_told_before_it_is_a_bus_error() -> None:
    engine = OnlineDataEngine(cfg(task_cfg={"wide": 2**40}))
    with pytest.raises(MemoryError, match=r"needs \d+ MiB of shared memory.*lower buffer_size or max_episode_steps"):
        engine.start()


# who may do what, and where


def test_a_copy_draws_and_neither_starts_nor_stops() -> None:
    with OnlineDataEngine(cfg()) as engine:
        copy = pickle.loads(pickle.dumps(engine))
        is_whole(copy.sample_batch(3, 10))
        for verb in (copy.start, copy.stop):
            with pytest.raises(RuntimeError, match="is for the process that made the engine"):
                verb()
        assert copy.is_init
    assert copy.state is EngineState.STOPPED
    with pytest.raises(RuntimeError, match="current state is STOPPED"):
        copy.sample_batch(1, 5)


def test_a_copy_that_comes_too_late_finds_the_engine_stopped() -> None:
    with OnlineDataEngine(cfg()) as engine:
        pickled = pickle.dumps(engine)
    late = pickle.loads(pickled)
    with pytest.raises(RuntimeError, match="requires state READY; current state is STOPPED"):
        late.sample_batch(1, 5)


def test_a_process_that_draws_imports_numpy_only(tmp_path: Path) -> None:
    script = "print(engine.sample_batch(1, 1)['actions'].shape, sorted({'jax', 'data_tasks'} & set(sys.modules)))"
    with OnlineDataEngine(cfg(data_tasks.Toy)) as engine:
        process = consumer(script, engine, tmp_path, stderr=subprocess.PIPE)
        assert process.communicate(timeout=BOUND_S) == ("(1, 1, 4) []\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
def test_children_draw_each_its_own_chunks_and_cannot_stop(method: str) -> None:
    context = multiprocessing.get_context(method)
    with OnlineDataEngine(cfg()) as engine:
        engine.sample_batch(1, 5)
        queue = context.Queue()
        children = [context.Process(target=data_tasks.draw_in_a_child, args=(engine, queue)) for _ in range(2)]
        for child in children:
            child.start()
        said = [queue.get(timeout=30.0) for _ in range(4)]
        for child in children:
            child.join(BOUND_S)
        assert [child.exitcode for child in children] == [0, 0]
        drawn = [item for item in said if isinstance(item, tuple)]
        assert [state for _, state in drawn] == ["READY", "READY"]
        assert drawn[0][0] != drawn[1][0]
        assert sum("only draw" in item for item in said if isinstance(item, str)) == 2
        queue.close()
        queue.join_thread()
        is_whole(engine.sample_batch(1, 5))


def test_threads_share_an_engine() -> None:
    failures = []

    def draw(seed: int) -> None:
        try:
            for _ in range(30):
                is_whole(engine.sample_batch(4, 20, rng=np.random.default_rng(seed)))
        except Exception as error:
            failures.append(error)

    with OnlineDataEngine(cfg(refill_threshold=1)) as engine:
        threads = [threading.Thread(target=draw, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


@pytest.mark.slow
def test_an_engine_that_nobody_holds_ends_its_worker(left_behind: list[subprocess.Popen[bytes]]) -> None:
    """The monitor thread does not hold it."""
    engine = OnlineDataEngine(cfg())
    engine.start()
    reference = weakref.ref(engine)
    del engine
    gc.collect()
    assert reference() is None
    assert left_behind[0].poll() is not None


OWNER = """
import os, signal, sys, time
sys.path.insert(0, {tasks!r})
from pathlib import Path
from ejax.data import OnlineDataEngine, OnlineDataEngineCfg, supervisor
supervisor.PLACE = Path({place!r})
engine = OnlineDataEngine(OnlineDataEngineCfg("data_tasks:Toy", buffer_size=2, max_episode_steps=50))
engine.start()
print(engine._supervisor._process.pid, engine._ticket.folder, flush=True)
{end}
"""


def start_owner(tmp_path: Path, end: str, script: str = OWNER, **popen: Any) -> subprocess.Popen[str]:
    """Start a process with an engine: it prints its worker and its folder, then runs the program ``end``."""
    code = script.format(tasks=TASKS, place=str(tmp_path / "runs"), end=end)
    # Python 3.12 warns of every fork of a process with threads
    command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **popen)


@pytest.mark.parametrize(
    ("end", "code"),
    [("", 0), ("raise SystemExit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", -9)],
    ids=["returns", "exits", "is killed"],
)
def test_a_worker_does_not_outlive_an_owner_that_did_not_stop_it(end: str, code: int, tmp_path: Path) -> None:
    owner = start_owner(tmp_path, end)
    out, err = owner.communicate(timeout=30.0)
    worker, folder = out.split()
    assert (owner.returncode, err) == (code, "")
    wait_until(lambda: not is_running(worker))
    wait_until(lambda: not Path(folder).exists())


def kill_owner_and_worker(tmp_path: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start an engine in a process, then kill that and its worker. The folder that they leave behind."""
    owner = start_owner(tmp_path, "time.sleep(60)")
    worker, folder = owner.stdout.readline().split()
    os.kill(owner.pid, signal.SIGSTOP)  # nor may one of them see the other one die
    for pid in (int(worker), owner.pid):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(owner.pid) and not is_running(worker))
    # the kernel frees a lock with the last thread, which may outlive the one that makes the process a zombie
    wait_until(lambda: all(len([*Path(f"/proc/{pid}/task").glob("*")]) <= 1 for pid in (worker, owner.pid)))
    owner.stdout.close()
    owner.stderr.close()
    return owner, Path(folder)


def test_the_next_engine_clears_what_belongs_to_no_living_process(tmp_path: Path) -> None:
    owner, folder = kill_owner_and_worker(tmp_path)
    assert (folder / "buffer").exists()
    with OnlineDataEngine(cfg()) as engine:  # the owner is a zombie yet
        assert not folder.exists()
        is_whole(engine.sample_batch(2, 5))
    owner.wait()


def test_what_belongs_to_a_living_process_is_left_alone() -> None:
    with OnlineDataEngine(cfg()) as engine:
        other = OnlineDataEngine(cfg())
        with other:
            supervisor_module.clear_leftovers()
            for each in (engine, other):
                assert each._ticket.folder.exists()
                is_whole(each.sample_batch(2, 5))
                assert stat.S_IMODE(each._ticket.folder.stat().st_mode) == 0o700


def test_shared_memory_is_what_the_system_has_for_it() -> None:
    """The default place; the other tests of this file choose a folder on the disk."""
    code = "from ejax.data import supervisor; print(supervisor.PLACE)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "/dev/shm\n"


def test_only_folders_that_no_process_has_locked_are_cleared(tmp_path: Path) -> None:
    held, lock = supervisor_module.make_folder()
    gone, other = tmp_path / "runs/ejax-data-gone", tmp_path / "runs/psm_ejax-data-gone"
    for folder in (gone, other):
        folder.mkdir()
        (folder / "order").touch()
    supervisor_module.clear_leftovers()
    assert held.exists() and other.exists() and not gone.exists()
    os.close(lock)
    supervisor_module.clear_leftovers()
    assert not held.exists()
    shutil.rmtree(other)


def test_what_another_user_left_and_links_are_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, link = tmp_path / "runs/ejax-data-gone", tmp_path / "runs/ejax-data-link"
    (tmp_path / "mine").mkdir()
    gone.mkdir()
    link.symlink_to(tmp_path / "mine")
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    supervisor_module.clear_leftovers()
    assert gone.exists()
    monkeypatch.setattr(os, "geteuid", lambda: user)
    supervisor_module.clear_leftovers()
    assert not gone.exists() and link.is_symlink() and (tmp_path / "mine").exists()
    link.unlink()


@pytest.mark.slow
def test_engines_that_start_at_once_clear_up_side_by_side(tmp_path: Path) -> None:
    place = tmp_path / "runs"
    for number in range(200):
        (place / f"ejax-data-{number}").mkdir()
    code = "import sys; from pathlib import Path; from ejax.data import supervisor; sys.stdin.read(1); "
    code += f"supervisor.PLACE = Path({str(place)!r}); supervisor.clear_leftovers()"
    command = [sys.executable, "-W", "error", "-c", code]
    others = [subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(4)]
    said = [other.communicate(b"x", timeout=60.0)[1] for other in others]
    assert said == [b""] * 4 and [other.returncode for other in others] == [0] * 4
    assert not any(place.iterdir())


def test_a_consumer_outlives_its_owner_and_says_so(tmp_path: Path) -> None:
    end = "import pickle; print(pickle.dumps(engine).hex(), flush=True); sys.stdin.read(1); os.kill(os.getpid(), 9)"
    owner = start_owner(tmp_path, end, stdin=subprocess.PIPE)
    worker, folder = owner.stdout.readline().split()
    copy = pickle.loads(bytes.fromhex(owner.stdout.readline()))
    is_whole(copy.sample_batch(2, 5))
    owner.communicate("x", timeout=BOUND_S)
    with pytest.raises(OnlineDataWorkerError, match="the worker is gone, and its owner gives no reason"):
        draw_until_it_fails(copy)
    wait_until(lambda: not is_running(worker) and not Path(folder).exists())


def test_who_waits_for_episodes_hears_that_everybody_else_is_gone(tmp_path: Path) -> None:
    """The worker hangs in its third attempt; it and the owner are killed, so no reason is given."""
    end = "import pickle; print(pickle.dumps(engine).hex(), flush=True); time.sleep(60)"
    owner = start_owner(tmp_path, end, OWNER.replace('"data_tasks:Toy",', '"data_tasks:Toy", {{"at": {{2: "hang"}}}},'))
    worker, folder = owner.stdout.readline().split()
    copy = pickle.loads(bytes.fromhex(owner.stdout.readline()))
    taken, raised = [], []

    def listen() -> None:
        try:
            for each in copy.episodes():
                taken.append(each)
        except OnlineDataWorkerError as error:
            raised.append(str(error))

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    wait_until(lambda: len(taken) == 2)
    time.sleep(0.2)  # it has asked for more, and waits
    for pid in (owner.pid, int(worker)):
        os.kill(pid, signal.SIGKILL)
    owner.communicate(timeout=BOUND_S)
    thread.join(BOUND_S)
    assert raised == ["the worker is gone, and its owner gives no reason"]
    supervisor_module.clear_leftovers()
    assert not Path(folder).exists()


FORKED = """
if os.fork() == 0:
    sys.exit()  # runs what is registered for the interpreter's end
os.wait()
time.sleep(0.1)
print(engine.sample_batch(1, 5)["valid"].shape, engine.state.name)
engine.stop()
"""


def test_a_forked_child_that_ends_leaves_the_engine_alone(tmp_path: Path) -> None:
    owner = start_owner(tmp_path, FORKED)
    out, err = owner.communicate(timeout=30.0)
    assert (owner.returncode, err) == (0, "")
    assert out.splitlines()[1:] == ["(1, 5) READY"]


def test_a_task_of_the_main_script_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_tasks.Toy, "__module__", "__main__")
    engine = OnlineDataEngine(cfg(data_tasks.Toy))
    with pytest.raises(ValueError, match=r"defined in the main script, .*put it into a module of its own"):
        engine.start()


# failures as bytes


def test_a_failure_keeps_within_its_bytes() -> None:
    packed = pack_failure(ValueError("x" * 10**6))
    assert len(packed) <= CAPACITY
    with pytest.raises(OnlineDataWorkerError, match=r"^ValueError: x{1000,2000}$"):
        raise_failure(packed)


class BrokenTextError(Exception):
    def __str__(self) -> None:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x" + "😀" * 10**6),
        ValueError("\udc80" * 40_000),
        type("😀" * 9000, (Exception,), {"__module__": "é" * 40_000})("text"),
    ],
    ids=["many", "surrogates", "long names"],
)
def test_a_failure_of_any_text_keeps_within_its_bytes(error: Any) -> None:
    packed = pack_failure(error)
    assert len(packed) <= CAPACITY
    with pytest.raises((OnlineDataWorkerError, ValueError)):
        raise_failure(packed)


def test_a_failure_without_a_text_is_reported_all_the_same() -> None:
    error = BrokenTextError()
    error.lock = threading.Lock()  # nor can it be pickled
    with pytest.raises(OnlineDataWorkerError, match=r"BrokenTextError: <exception str\(\) failed>"):
        raise_failure(pack_failure(error))


@pytest.mark.parametrize("task_cfg", [{"build": "emoji"}, {"at": {0: "emoji"}}], ids=["when built", "when run"])
def test_a_worker_that_fails_with_a_long_text_of_wide_characters_says_it(task_cfg: dict[str, Any]) -> None:
    engine = OnlineDataEngine(cfg(task_cfg=task_cfg))
    with pytest.raises(data_tasks.SimulationError, match=r"^😀{9000}$") as caught:
        engine.start()
    assert "in generate" in str(caught.value.__cause__) or "in __init__" in str(caught.value.__cause__)


def test_an_exit_of_the_worker_does_not_exit_a_consumer() -> None:
    with pytest.raises(OnlineDataWorkerError, match=r"^SystemExit: 3"):
        raise_failure(pack_failure(SystemExit(3)))


def test_the_example_of_the_documents_runs_as_written(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    (tmp_path / "reach.py").write_text(re.search(r"```python\n(.*?)```", text, re.S)[1])
    done = subprocess.run(
        [sys.executable, "-W", "error", "reach.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60.0
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "'data/samples'" in done.stdout


# the dataset


class Fixed(ChunkSizeSampler):
    """3, 4, 5, ..."""

    def __init__(self) -> None:
        self.next = 2

    def __call__(self) -> int:
        self.next += 1
        return self.next


def take(iterable: Iterable[Any], count: int) -> list[Any]:
    return list(itertools.islice(iterable, count))


@pytest.fixture(scope="module")
def ready() -> Iterator[OnlineDataEngine]:
    """One engine for the tests that only draw."""
    path = [entry for entry in sys.path if entry]
    assert TASKS in path
    with OnlineDataEngine(cfg(refill_threshold=10**6, task_cfg={"segments": 4, "lengths": [40]})) as engine:
        yield engine


def test_items_and_batches_have_their_shapes(ready: OnlineDataEngine) -> None:
    (item,) = take(OnlineDataset(ready, 8), 1)
    assert item["actions"].shape == (8, 4) and item["episode"]["mark"].shape == ()
    (batch,) = take(OnlineDataset(ready, 8, batch_size=4), 1)
    assert batch["actions"].shape == (4, 8, 4) and batch["episode"]["mark"].shape == (4,)


def test_a_transform_comes_last_and_its_result_is_what_is_yielded(ready: OnlineDataEngine) -> None:
    seen = []
    dataset = OnlineDataset(ready, 8, transform=lambda chunks: seen.append(chunks["rewards"].shape) or "mine")
    assert take(dataset, 2) == ["mine", "mine"]
    assert seen == [(8,), (8,)]


def test_the_mode_is_passed_on(ready: OnlineDataEngine) -> None:
    ids = take(OnlineDataset(ready, 6, 100, sampling_mode="boundary"), 1)[0]["segment_id"]
    assert (ids.min(axis=1) < ids.max(axis=1)).all()
    ids = take(OnlineDataset(ready, 6, 100, sampling_mode="segment"), 1)[0]["segment_id"]
    assert (ids == ids[:, :1]).all()


def test_a_batch_and_an_item_each_draw_a_chunk_size(ready: OnlineDataEngine) -> None:
    sizes = [batch["rewards"].shape for batch in take(OnlineDataset(ready, Fixed(), batch_size=2), 3)]
    assert sizes == [(2, 3), (2, 4), (2, 5)]
    assert [item["rewards"].shape for item in take(OnlineDataset(ready, Fixed()), 3)] == [(3,), (4,), (5,)]


def test_items_share_a_chunk_size_as_many_as_chunk_size_every_or_in_an_iterator(ready: OnlineDataEngine) -> None:
    by_two = take(OnlineDataset(ready, Fixed(), chunk_size_every=2), 5)
    assert [item["rewards"].shape for item in by_two] == [(3,), (3,), (4,), (4,), (5,)]
    batches = take(OnlineDataset(ready, Fixed(), batch_size=2, chunk_size_every=2), 2)
    assert [batch["rewards"].shape for batch in batches] == [(2, 3), (2, 4)]  # an option of items
    dataset = OnlineDataset(ready, Fixed(), chunk_size_every=None)
    assert [item["rewards"].shape for item in take(dataset, 3)] == [(3,)] * 3
    assert [item["rewards"].shape for item in take(dataset, 3)] == [(4,)] * 3


def test_the_shared_buffer_is_all_rows_and_only_to_be_read() -> None:
    engine = OnlineDataEngine(cfg(task_cfg={"lengths": [40]}))
    assert (engine.buffer_size, engine.device) == (8, "cpu")
    with pytest.raises(RuntimeError, match="state CREATED: there is no buffer"):
        _ = engine.shared_buffer
    with engine:
        buffer = engine.shared_buffer
        assert buffer["obs"]["robot"]["qpos"].shape == (8, 50, 10)
        np.testing.assert_array_equal(buffer["valid"].sum(axis=1), buffer["episode"]["length"])
        with pytest.raises(ValueError, match="read-only"):
            buffer["rewards"][0, 0] = 1.0
        del buffer


def test_sizes_of_a_sampler_vary_and_stay_in_its_range(ready: OnlineDataEngine) -> None:
    dataset = OnlineDataset(ready, UniformChunkSampler(2, 9), batch_size=1)
    sizes = {batch["rewards"].shape[1] for batch in take(dataset, 200)}
    assert sizes == set(range(2, 10))


def test_the_same_seed_draws_the_same_chunks_and_iterators_and_shards_differ(ready: OnlineDataEngine) -> None:
    def steps(iterator: Iterable[Any]) -> list[Any]:
        return [item["episode_step"][0] for item in take(iterator, 30)]

    dataset, again = (OnlineDataset(ready, 5, seed=1) for _ in range(2))
    first, second = steps(dataset), steps(dataset)
    assert first == steps(again) and second == steps(again)
    others = [first, second, steps(OnlineDataset(ready, 5, seed=2))]
    others += [steps(OnlineDataset(ready, 5, seed=1).iterate(shard)) for shard in range(2)]
    assert len(set(map(tuple, others))) == 5


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
        ({"chunk_size": 2.5}, TypeError, "chunk_size must be an int or a ChunkSizeSampler, got float"),
        ({"chunk_size": True}, TypeError, "got bool"),
        ({"chunk_size": 2, "batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"chunk_size": 2, "chunk_size_every": 0}, ValueError, "chunk_size_every must be at least 1, got 0"),
        ({"chunk_size": 2, "sampling_mode": "row"}, ValueError, "no sampling_mode 'row'"),
    ],
)
def test_wrong_datasets_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        OnlineDataset(None, **arguments)


def test_batches_are_on_the_device_ahead_of_their_use(ready: OnlineDataEngine) -> None:
    import jax

    drawn = []
    dataset = OnlineDataset(ready, 8, 4, transform=lambda chunks: drawn.append(1) or {"actions": chunks["actions"]})
    batches = prefetch_to_device(dataset, size=2)
    first = next(batches)
    assert isinstance(first["actions"], jax.Array) and first["actions"].shape == (4, 8, 4)
    wait_until(lambda: len(drawn) == 3)
    next(batches)
    wait_until(lambda: len(drawn) == 4)
    batches.close()
    assert [int(x) for x in prefetch_to_device(np.arange(5), size=3)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="size must be at least 1"):
        prefetch_to_device(dataset, size=0)
