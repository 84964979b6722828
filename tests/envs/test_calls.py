"""An exception in an environment is an error that names it: in every mode, in evaluation, in worker processes."""

import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from case_tables import cases, refused
from host_tasks import Drift
from rude_runs import config, in_workers
from rude_tasks import Rude, Stop, end

from ejax.envs.adapters.gymnasium import Contained, make_in_worker
from ejax.envs.host.calls import Call, EnvExit, HostEnvError, call_env, closing, short_error, under_way, waiting_for
from ejax.envs.host.guarded import GuardedEnv
from ejax.play.saved_policy import evaluate_run
from ejax.report.runs import Run
from ejax.run import train
from ejax.runtime.process_exit import interruptible
from ejax.schema.trust import trust
from ejax.training.environments import make_env

SEED = np.array([3, 5], np.uint32)
CALM = np.zeros((2, 1), np.float32)


@pytest.fixture(autouse=True)
def trusted() -> None:
    """Let these tests make it by name, without a config that names it."""
    trust("rude_tasks:Rude")


@cases("how told", ("exit", r"SystemExit\(0\)"), ("generator_exit", r"GeneratorExit\(\)"), ("stop", "Stop"))
def test_what_would_end_the_process_is_an_error_that_names_the_environment(how: str, told: str) -> None:
    with pytest.raises(EnvExit, match=rf"env 'x' raised {told}.*which ends a process.*it was in step") as caught:
        call_env("x", "step", end, how)
    assert isinstance(caught.value.__cause__, SystemExit | GeneratorExit | Stop)
    assert under_way(threading.get_ident()) is None


def test_an_ordinary_exception_passes_as_it_is() -> None:
    refused(call_env, "x", "step", end, "so", match="no such way to end: so")


def test_the_users_interrupt_passes_and_the_environments_own_does_not() -> None:
    with pytest.raises(KeyboardInterrupt):
        call_env("x", "step", signal.raise_signal, signal.SIGINT)
    with interruptible() as interrupted:
        refused(call_env, "x", "step", end, "keyboard_interrupt", match="raised KeyboardInterrupt", error=EnvExit)
        assert not interrupted()
        call_env("x", "step", signal.raise_signal, signal.SIGINT)
        assert interrupted()


def test_in_another_thread_no_interrupt_is_the_users() -> None:
    caught: list[BaseException] = []

    def call() -> None:
        try:
            call_env("x", "step", end, "keyboard_interrupt")
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert isinstance(caught[0], EnvExit)


def test_calls_are_on_record_while_they_last() -> None:
    me = threading.get_ident()
    seen: list[Call | None] = []

    def inner() -> None:
        seen.append(under_way(me))

    def outer() -> None:
        seen.append(under_way(me))
        call_env("inner", "reset", inner)
        seen.append(under_way(me))

    call_env("outer", "step", outer)
    assert [(call.name, call.what) for call in seen if call is not None] == [
        ("outer", "step"),
        ("inner", "reset"),
        ("outer", "step"),
    ]
    assert under_way(me) is None


def test_who_waits_for_threads_is_at_the_oldest_of_their_calls() -> None:
    release, began = threading.Event(), threading.Semaphore(0)

    def step() -> None:
        began.release()
        release.wait(30)

    threads = [threading.Thread(target=call_env, args=(name, "step", step)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
        assert began.acquire(timeout=30)
    with waiting_for(threads):
        call = under_way(threading.get_ident())
        assert call is not None and call.name == "first"
        release.set()
        for thread in threads:
            thread.join()
        assert under_way(threading.get_ident()) is None


class Unspeakable(Exception):
    def __repr__(self) -> str:
        sys.exit(0)


def test_errors_are_described_in_bounded_length_whatever_their_repr_does() -> None:
    assert short_error(Unspeakable()) == "Unspeakable(…)"
    with pytest.raises(AssertionError) as caught:
        raise AssertionError
    assert re.fullmatch(r"AssertionError\(\) \(in test_errors_are.*test_calls\.py:\d+\)", short_error(caught.value))
    text = short_error(ValueError("🤖" * 9000))
    assert len(text) < 600 and "… (9014 characters) …" in text


def guarded(folder: Path, **cfg: Any) -> GuardedEnv:
    made: list[Any] = []

    def make() -> Any:
        options = {"where": cfg["where"], "how": cfg["how"], "at": cfg.get("at", 1)} if not made else {}
        made.append(make_env("rude_tasks:Rude", options, num_envs=2))
        return made[-1]

    recipe = {"id": "rude_tasks:Rude", "cfg": {}}
    return GuardedEnv(make(), make, recipe=recipe, folder=folder, max_restarts=cfg.get("restarts", 0))


@pytest.mark.parametrize("how", ["exit", "generator_exit", "stop"])
def test_an_exit_counts_as_an_exception_where_it_may_be_made_anew(tmp_path: Path, how: str) -> None:
    env = guarded(tmp_path, where="step", how=how, at=2, restarts=1)
    env.reset(SEED)
    env.step(CALM)
    assert not env.step(CALM).info["valid"].any()
    assert env.num_restarts == 1 and "which ends a process" in env.reports()[0]
    assert env.step(CALM).info["valid"].all()
    env.close()


@pytest.mark.parametrize(("where", "text"), [("reset", "failed to reset after 0 steps"), ("step", "at its step 1")])
def test_an_exit_ends_with_the_name_of_the_environment_otherwise(tmp_path: Path, where: str, text: str) -> None:
    env = guarded(tmp_path, where=where, how="exit")
    with pytest.raises(HostEnvError, match=rf"'rude_tasks:Rude'.*{text}.*SystemExit\(0\)"):
        env.reset(SEED)
        env.step(CALM)
    env.close()


def test_a_close_that_raises_names_the_environment(tmp_path: Path) -> None:
    for how, text in [("exit", r"raised SystemExit\(0\)"), ("so", "failed to close: ValueError")]:
        env = guarded(tmp_path, where="close", how=how)
        env.reset(SEED)
        env.step(CALM)
        refused(env.close, match=f"env 'rude_tasks:Rude' {text}", error=HostEnvError)


def test_a_close_that_raises_hides_no_error_and_loses_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (guarded(tmp_path, where="close", how="so") for _ in range(2))
    for env in (first, second):
        env.reset(SEED)
        env.step(CALM)
    with pytest.raises(ValueError, match="the first") as caught, closing(first):
        raise ValueError("the first")
    assert "failed to close" in caught.value.__notes__[0]
    with closing(second):
        result = 1
    assert result == 1 and "failed to close" in capsys.readouterr().err


class Awkward(Exception):
    """Cannot be made from one argument, and not be pickled."""

    def __init__(self, what: str, lock: Any) -> None:
        super().__init__(what, lock)


class RaisesAwkwardly(Rude):
    def step(self, action: Any) -> Any:
        raise Awkward("the arm is bent", threading.Lock())


@cases(
    "make told",
    (partial(Rude, where="step", how="exit"), r"SystemExit\(0\), which ends a process"),
    (partial(Rude, where="step", how="so"), "no such way to end: so"),
    (RaisesAwkwardly, "the arm is bent"),
)
def test_what_is_raised_in_a_worker_arrives(make: Any, told: str) -> None:
    env = Contained(make())
    env.reset(seed=1)
    error = refused(env.step, None, match=told, error=(RuntimeError, ValueError))
    assert told.split(",")[0].replace("\\", "") in str(type(error)(error))  # as Gymnasium raises it again


def test_gymnasiums_own_are_made_so_in_workers() -> None:
    env = make_env("gymnasium:CartPole-v1", {"vectorization": "async"}, num_envs=1)
    assert env.env.env_fns[0].func is make_in_worker
    env.close()


@pytest.mark.filterwarnings("ignore::UserWarning")  # how Gymnasium logs what its workers raised
def test_a_worker_that_exits_ends_the_training_with_its_name_and_is_gone(tmp_path: Path) -> None:
    env = in_workers(2, where="step", at=2)
    guard = GuardedEnv(env, lambda: env, recipe={"id": "rude", "cfg": {}}, folder=tmp_path)
    guard.reset(SEED)
    guard.step(CALM)
    for process in env.env.processes:
        os.kill(process.pid, signal.SIGINT)  # as a terminal does: the owner decides what becomes of it
    refused(guard.step, CALM, match=r"raised at its step 2 .*SystemExit\(0\), which ends a process", error=HostEnvError)
    guard.close()
    for process in env.env.processes:
        process.join(10)
        assert not process.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["host", "async"])
@pytest.mark.parametrize("where", ["make", "reset", "step", "close"])
def test_an_exit_is_the_error_of_a_run(tmp_path: Path, mode: str, where: str) -> None:
    run_config = config(tmp_path, f"trainer.collector.mode={mode}", "trainer.collector.num_groups=2", where=where)
    refused(train, run_config, match=r"env 'rude_tasks:Rude'.*SystemExit\(0\)", error=HostEnvError)


def test_an_exit_in_evaluation_is_the_error_of_a_run(tmp_path: Path) -> None:
    with pytest.raises(HostEnvError, match=r"at its step 7 \(1 rows\).*SystemExit\(0\)"):
        train(config(tmp_path, "trainer.enable_eval=true", "trainer.eval_freq=8", where="step", at=7, rows=1))


@dataclass(frozen=True)
class Quits(Drift):
    """A pure environment that ends the process while it is traced."""

    def step(self, state: Any, action: Any, key: Any) -> Any:
        sys.exit(0)


@pytest.mark.parametrize("mode", ["device", "host", "async"])
def test_a_pure_environment_that_exits_is_an_error_too(tmp_path: Path, mode: str) -> None:
    with pytest.raises(HostEnvError, match=r"Quits' raised SystemExit\(0\)"):
        train(config(tmp_path, f"trainer.collector.mode={mode}", name="test_calls:Quits"))


def test_an_exit_is_the_error_of_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(config(tmp_path), run_dir=tmp_path / "run")
    monkeypatch.setattr(Rude, "step", lambda self, action: sys.exit(0))
    refused(evaluate_run, tmp_path / "run", num_episodes=2, match=r"SystemExit\(0\)", error=HostEnvError)


@pytest.mark.slow
def test_the_command_line_ends_with_an_exit_code_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(config(tmp_path, where="step", at=6).model_dump_json())
    command = [sys.executable, "-m", "ejax.train", "--config", str(file), "env.id=rude_tasks:Rude"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 1
    assert "env 'rude_tasks:Rude' raised at its step 6 (2 rows): SystemExit(0)" in done.stderr


@pytest.mark.slow
@cases("at state", (14, "not finished: [12] of 4 updates"), (17, "not finished: its last eval"))
def test_a_run_that_native_code_ended_with_code_0_is_unfinished_and_goes_on(
    tmp_path: Path, at: int, state: str
) -> None:
    run, once, file = tmp_path / "run", tmp_path / "once", tmp_path / "config.json"
    options = ["trainer.save_frequency_updates=1"]
    if at > 16:  # in the evaluation, whose environment is one alone and is made last
        options += ["trainer.enable_eval=true", "trainer.num_eval_episodes=8"]
    rows = {"rows": 1} if at > 16 else {}
    run_config = config(tmp_path, *options, where="step", how="native_exit", at=at, once=str(once), **rows)
    file.write_text(run_config.model_dump_json())
    command = [sys.executable, "-m", "ejax.train", "--config", str(file), "env.id=rude_tasks:Rude", "--run", str(run)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, timeout=600)
    assert done.returncode == 0 and once.exists()  # which says nothing: docs/host_envs.md
    assert re.match(state, Run(run).state), Run(run).state
    assert train(run_config, run_dir=run, resume="latest").finished
    assert Run(run).state == "finished"
