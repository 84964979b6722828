"""Environments that do not return: cut off by name, with the state saved, in a bounded time."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from case_tables import refused
from commands_under_way import wait_until
from host_tasks import Drift, Linear, Wrapped
from rude_runs import config, in_workers
from rude_tasks import end

from ejax.collectors import AsyncCollector, HostCollector, Schedule
from ejax.config.collector import CollectorConfig
from ejax.envs.host.calls import EnvAbandoned, EnvOverdue, HostEnvError, call_env
from ejax.envs.host.guarded import GuardedEnv
from ejax.envs.host.pure_host import PureHostEnv
from ejax.play.acting import load
from ejax.play.replay import main as replay
from ejax.play.saved_policy import evaluate_run
from ejax.play.show import Viewer, play_run
from ejax.run import train
from ejax.runtime.process_exit import interruptible
from ejax.training.watchdog import Watchdog
from interop.export import export_run

SOON = 0.3
BOUND = 300.0
"""Seconds; half of what a hang takes, and more than any of this does on a machine that others share."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ejax.training.watchdog._POLL_S", 0.05)
    monkeypatch.setattr("ejax.training.watchdog._NATIVE_S", 0.3)
    monkeypatch.setattr("ejax.training.watchdog._LAST_CLOSE_S", 0.1)


@contextmanager
def bounded(seconds: float = BOUND) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def watchdog(**changes: Any) -> Watchdog:
    return Watchdog(**{"env_timeout_s": 60.0, "stop_timeout_s": 60.0} | changes)


@contextmanager
def signal_when(ready: Callable[[], bool], number: signal.Signals = signal.SIGTERM) -> Iterator[None]:
    """Send it to this process, from another thread, once."""

    def send() -> None:
        deadline = time.monotonic() + BOUND
        while not ready() and time.monotonic() < deadline:
            time.sleep(5e-3)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("hang", [partial(end, "sleep"), lambda: threading.Event().wait()], ids=["sleep", "wait"])
def test_a_call_that_takes_too_long_is_cut_off_by_name(hang: Callable[[], None]) -> None:
    text = r"env 'x' did not return from step within 0\.3 s \(trainer\.collector\.env_timeout_s\)"
    with bounded(), watchdog(env_timeout_s=SOON), pytest.raises(EnvOverdue, match=text) as caught:
        call_env("x", "step", hang)
    assert caught.value.__cause__ is not None and caught.value.__cause__.__traceback__ is not None  # where it hung


def test_a_call_is_abandoned_after_a_signal_to_stop_and_not_before() -> None:
    with bounded(), watchdog(stop_timeout_s=SOON), interruptible() as interrupted:
        call_env("x", "step", time.sleep, 2 * SOON)
        began = time.monotonic()
        with signal_when(lambda: True), pytest.raises(EnvAbandoned, match="after the signal to stop"):
            call_env("x", "step", end, "sleep")
        assert time.monotonic() - began > SOON and interrupted()
        for _ in range(10):  # each is short: none is too long
            call_env("x", "step", time.sleep, 0.05)


def test_closing_has_a_bound_of_its_own_and_a_shorter_one_once_something_hung() -> None:
    with bounded(), watchdog(stop_timeout_s=SOON):
        with pytest.raises(EnvOverdue, match=r"from close within 0\.3 s .*is left open"):
            call_env("x", "close", end, "sleep")
        refused(call_env, "x", "close", end, "sleep", match=r"from close within 0\.1 s", error=EnvOverdue)


def test_what_is_no_call_is_left_alone_and_so_are_other_threads() -> None:
    def slow() -> str:
        time.sleep(3 * SOON)
        return "done"

    returned: list[str] = []
    with watchdog(env_timeout_s=SOON):
        thread = threading.Thread(target=lambda: returned.append(call_env("x", "step", slow)))
        thread.start()
        time.sleep(3 * SOON)
        thread.join()
    assert returned == ["done"]


def test_in_another_thread_it_does_nothing() -> None:
    def run() -> None:
        with watchdog(env_timeout_s=SOON):
            call_env("x", "step", time.sleep, 2 * SOON)
        ended.set()

    ended = threading.Event()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(BOUND)
    assert ended.is_set()


def test_what_it_changed_is_as_it_was() -> None:
    before, threads = signal.getsignal(signal.SIGURG), threading.active_count()
    with watchdog():
        assert threading.active_count() == threads + 1
    assert signal.getsignal(signal.SIGURG) is before and threading.active_count() == threads
    former = signal.set_wakeup_fd(-1)
    assert former == -1


def test_the_last_resort_is_called_where_no_exception_arrives() -> None:
    told: list[tuple[str, bool]] = []
    read, write = os.pipe()

    def stubborn() -> None:
        while not told:
            try:
                os.read(read, 1)
            except BaseException:
                continue

    def rescue(text: str, asked: bool) -> None:
        told.append((text, asked))
        os.write(write, b"\0")

    with bounded(), watchdog(env_timeout_s=SOON, rescue=rescue):
        call_env("x", "step", stubborn)
    assert "did not return from step" in told[0][0] and told[0][1] is False


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("tiny_step_*"))


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
def test_a_step_that_hangs_in_turn_ends_the_run_by_name(tmp_path: Path, groups: int) -> None:
    limits = [f"trainer.collector.env_timeout_s={SOON + 0.7}", f"trainer.collector.num_groups={groups}"]
    with bounded(), pytest.raises(HostEnvError, match=r"'rude_tasks:Rude' did not return from step within 1 s"):
        train(config(tmp_path, *limits, where="step", how="sleep", at=6))


@pytest.mark.slow
def test_one_that_hangs_in_turn_is_made_anew_where_that_is_allowed(tmp_path: Path) -> None:
    limits = ["trainer.collector.env_timeout_s=1.0", "trainer.collector.max_env_restarts=5"]
    with bounded():
        result = train(config(tmp_path, *limits, where="step", how="sleep", at=6, once=str(tmp_path / "hung")))
    assert result.finished and result.last_train_metrics["collector/env_restarts"] == 1


@pytest.mark.parametrize(("groups", "number"), [(1, signal.SIGTERM), (1, signal.SIGINT), (2, signal.SIGTERM)])
def test_a_signal_while_a_step_hangs_saves_and_leaves(tmp_path: Path, groups: int, number: signal.Signals) -> None:
    mark = tmp_path / "hangs"
    limits = [f"trainer.collector.stop_timeout_s={SOON}", f"trainer.collector.num_groups={groups}"]
    run_config = config(tmp_path, *limits, where="step", how="sleep", at=6, mark=str(mark))
    closing = pytest.raises(TimeoutError, match="left open: its step") if groups == 2 else bounded()
    with bounded(), signal_when(mark.exists, number), closing:
        result = train(run_config, run_dir=tmp_path / "run")
        assert not result.finished and result.num_updates == 1
    assert saved(tmp_path / "run") == ["tiny_step_8"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["host", "async"])
def test_a_signal_while_an_evaluation_hangs_saves_and_leaves(tmp_path: Path, mode: str) -> None:
    mark = tmp_path / "hangs"
    limits = [f"trainer.collector.stop_timeout_s={SOON}", f"trainer.collector.mode={mode}"]
    limits += ["trainer.enable_eval=true", "trainer.eval_freq=8"]
    run_config = config(tmp_path, *limits, where="step", how="sleep", at=9, mark=str(mark), rows=1)
    with bounded(), signal_when(mark.exists):
        result = train(run_config, run_dir=tmp_path / "run")
    assert not result.finished and result.num_updates == 2  # which was made before the evaluation of the first
    assert saved(tmp_path / "run") == ["tiny_step_16"]


@pytest.mark.parametrize("mode", ["host", "async"])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_close_that_hangs_is_named_and_the_state_is_saved(tmp_path: Path, mode: str, groups: int) -> None:
    limits = [f"trainer.collector.stop_timeout_s={SOON}", f"trainer.collector.mode={mode}"]
    limits += [f"trainer.collector.num_groups={groups}"]
    run_config = config(tmp_path, *limits, where="close", how="sleep")
    text = "did not return from close within 0.3 s" if mode == "host" else "closing group 0: rude_tasks:Rude"
    with bounded(), pytest.raises((HostEnvError, TimeoutError), match=text):
        train(run_config, run_dir=tmp_path / "run")
    assert saved(tmp_path / "run") == ["tiny_step_32"]


def test_environments_close_in_the_thread_that_stepped_them(tmp_path: Path) -> None:
    threads: dict[str, set[int]] = {"step": set(), "close": set()}

    class Located(Wrapped):
        def before(self) -> None:
            threads["step"].add(threading.get_ident())

        def close(self) -> None:
            threads["close"].add(threading.get_ident())

    collector = HostCollector(Linear(), [Located(PureHostEnv(Drift(), 2))], num_steps=3, seed=1)
    with AsyncCollector(collector, jax.random.key(1), schedule=Schedule(1)) as running:
        running.start(Linear().init(jax.random.key(1), None))
        assert running.collect() is not None
    assert threads["step"] == threads["close"] != {threading.get_ident()}


def test_a_signal_while_a_pause_waits_for_a_step_that_hangs_ends_the_wait() -> None:
    release = threading.Event()

    class Hangs(Wrapped):
        def before(self) -> None:
            if self.num_steps == 3:
                release.wait(BOUND)

    collector = HostCollector(Linear(), [Hangs(PureHostEnv(Drift(), 2))], num_steps=3, seed=1)
    running = AsyncCollector(collector, jax.random.key(1), schedule=Schedule(1), stop_timeout_s=SOON)
    with bounded(), pytest.raises(TimeoutError, match="not stopped within 0 s"), running:
        running.start(Linear().init(jax.random.key(1), None))
        assert running.collect() is not None
        while running._moving == 0 or collector.groups[0].num_steps < 3:  # type: ignore[attr-defined]
            time.sleep(1e-3)
        with pytest.raises(EnvAbandoned, match="no pause within"), running.paused(lambda: True):
            pass
    release.set()
    running._thread.join(BOUND)
    assert collector.groups[0].closed  # type: ignore[attr-defined]


def test_workers_that_hang_are_gone_after_the_close(tmp_path: Path) -> None:
    env = in_workers(1, where="step", how="sleep")
    guard = GuardedEnv(env, lambda: env, recipe={"id": "rude", "cfg": {}}, folder=tmp_path)
    guard.reset(np.array([1], np.uint32))
    with bounded(), watchdog(env_timeout_s=SOON, stop_timeout_s=5.0):
        refused(guard.step, np.zeros((1, 1), np.float32), match="did not return from step", error=HostEnvError)
        guard.close()
    env.env.processes[0].join(BOUND)
    assert not env.env.processes[0].is_alive()


@pytest.mark.slow
def test_a_close_that_hangs_while_the_run_is_built_is_named(tmp_path: Path) -> None:
    limits = [f"trainer.collector.stop_timeout_s={SOON}"]
    with bounded(), pytest.raises(HostEnvError, match=r"did not return from close within 0\.3 s .* and is left open"):
        train(config(tmp_path, *limits, name="rude_tasks:Miscounted"))


@pytest.mark.slow
def test_an_environment_that_hangs_while_it_is_made_is_named_by_whatever_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, once = tmp_path / "run", tmp_path / "once"
    once.touch()
    limits = ["trainer.collector.env_timeout_s=1.0"]
    run_config = config(tmp_path, *limits, "trainer.iterations=1", where="make", how="sleep", once=str(once))
    train(run_config, run_dir=run)
    recipe = {"recipe": run_config.env.model_dump(mode="json"), "seed": 1, "seeded": True, "complete": True}
    np.savez(tmp_path / "episode.npz", facts=json.dumps(recipe), actions=np.zeros((1, 1), np.float32))
    monkeypatch.setattr("ejax.play.replay.CollectorConfig", partial(CollectorConfig, env_timeout_s=1.0))
    replayed: list[int] = []
    uses: dict[str, Callable[[], object]] = {
        "train": lambda: train(run_config, run_dir=tmp_path / "other"),
        "resume": lambda: train(run_config, run_dir=run, resume="latest"),
        "evaluate": lambda: evaluate_run(run),
        "play": lambda: play_run(run, viewer=Viewer(video=tmp_path / "video.mp4")),
        "load": lambda: load(run),
        "export": lambda: export_run(run, tmp_path / "exported", ["stablehlo"]),
        "replay": lambda: replayed.append(replay([str(tmp_path / "episode.npz")])),
    }
    for name, use in uses.items():
        once.unlink()
        expected = pytest.raises(HostEnvError, match="'rude_tasks:Rude' did not return from make within 1 s")
        with bounded(), nullcontext() if name == "replay" else expected:
            use()
        assert once.exists(), name  # it hung
    assert replayed == [2] and not (tmp_path / "other").exists()


@pytest.mark.slow
def test_a_step_that_hangs_in_native_code_is_left_with_the_state_saved(tmp_path: Path) -> None:
    mark, file = tmp_path / "hangs", tmp_path / "config.json"
    limits = ["trainer.collector.stop_timeout_s=0.5"]
    run_config = config(tmp_path, *limits, where="step", how="stuck", at=6, mark=str(mark))
    file.write_text(run_config.model_dump_json())
    command = [sys.executable, "-m", "ejax.train", "--config", str(file), "env.id=rude_tasks:Rude"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([*command, "--run", str(tmp_path / "run")], stderr=subprocess.PIPE, env=env) as process:
        wait_until(mark.exists, process)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=BOUND)
    assert process.returncode == 0
    assert b"'rude_tasks:Rude' did not return from step within 0.5 s after the signal to stop" in told
    assert saved(tmp_path / "run") == ["tiny_step_8"]
