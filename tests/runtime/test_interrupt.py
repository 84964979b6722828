"""Signals: who is ended at once, who finishes and saves, and the message."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from case_tables import refused
from commands_under_way import wait_until
from tiny import STEPS, tiny

from ejax.runtime.process_exit import SIGNALS, StopRequested, interruptible, until_signal
from ejax.store.run_dir import RunDirectory
from ejax.train import main


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # the handler runs between two bytecodes


def write_config(folder: Path) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(tiny(iterations=100_000, save_frequency_updates=20, console=True)))
    return file


def heeds(process: "subprocess.Popen[bytes]", number: int) -> bool:
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_command_that_is_not_interrupted_is_ended_with_a_last_word(
    number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    former = signal.getsignal(number)

    def body() -> int:
        try:
            send(number)
        except KeyboardInterrupt as error:
            error.add_note("the last checkpoint is here")
            raise
        return 0

    assert until_signal("ejax train", body) == 128 + number
    name = signal.Signals(number).name
    assert capfd.readouterr().err == f"ejax train: ended at once by {name}: the last checkpoint is here\n"
    assert signal.getsignal(number) is former


def test_what_the_body_returns_and_raises_is_passed_on() -> None:
    assert until_signal("ejax train", lambda: 2) == 2
    refused(until_signal, "ejax train", lambda: 1 // 0, error=ZeroDivisionError)


def test_an_error_that_an_interruption_became_is_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    """As compilers do with what is raised in a callback."""

    def body() -> int:
        try:
            send(signal.SIGTERM)
        except KeyboardInterrupt:
            raise RuntimeError("INTERNAL: callback failed") from None
        return 0

    assert until_signal("ejax train", body) == 143
    assert "ended at once by SIGTERM: no run was under way" in capfd.readouterr().err


def test_an_interruption_that_came_to_nothing_stops_the_run_in_order() -> None:
    def body() -> int:
        with contextlib.suppress(KeyboardInterrupt):
            send(signal.SIGTERM)
        with interruptible() as interrupted:
            return int(interrupted())

    assert until_signal("ejax train", body) == 1


def test_a_run_heeds_the_first_signal_and_is_ended_by_a_second_ctrl_c(capfd: pytest.CaptureFixture[str]) -> None:
    formers = [signal.getsignal(number) for number in SIGNALS]
    with interruptible() as interrupted:
        assert not interrupted()
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
            send(number)
            assert interrupted()
        refused(send, signal.SIGINT, match="SIGINT", error=StopRequested)
    said = capfd.readouterr().err
    assert said.startswith("SIGTERM: finishing the update under way, then saving") and said.count("\n") == 1
    assert [signal.getsignal(number) for number in SIGNALS] == formers


def test_what_is_ignored_under_nohup_stays_ignored() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible() as interrupted:
            send(signal.SIGHUP)
            assert not interrupted()
        assert until_signal("ejax train", lambda: send(signal.SIGHUP) or 0) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)


@pytest.mark.slow
def test_two_quick_ctrl_c_say_where_the_last_checkpoint_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    save, saves = RunDirectory.save, []

    def save_slowly(*args: Any, **kwargs: Any) -> Path:
        saves.append(args)
        if len(saves) == 3:
            send(signal.SIGINT)
            send(signal.SIGINT)
        return save(*args, **kwargs)

    monkeypatch.setattr(RunDirectory, "save", save_slowly)
    file = write_config(tmp_path)
    assert main(["--config", str(file), "--run", str(tmp_path / "run")]) == 130
    said = capfd.readouterr().err
    kept = tmp_path / "run" / "checkpoints" / f"tiny_step_{40 * STEPS}"
    assert f"ended at once by SIGINT: the last checkpoint is {kept}, what came after it is lost" in said
    assert f"--run {tmp_path / 'run'} --resume latest" in said and "Traceback" not in said
    assert RunDirectory(tmp_path / "run", "tiny").find("latest", pytest.fail) == kept


@pytest.mark.parametrize(("words", "code"), [([], 0), (["--stopped-exit-code", "75"], 75)])
def test_a_run_that_was_stopped_and_saved_has_the_exit_code_that_a_scheduler_needs(
    words: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = RunDirectory.save

    def stop_at_save(*args: Any, **kwargs: Any) -> Path:
        send(signal.SIGTERM)
        return save(*args, **kwargs)

    file, run = write_config(tmp_path), str(tmp_path / "run")
    with monkeypatch.context() as stopping:
        stopping.setattr(RunDirectory, "save", stop_at_save)
        assert main(["--config", str(file), "--run", run, *words]) == code
    assert main(["--run", run, "--resume", "latest", "trainer.iterations=24", *words]) == 0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks for the handlers in /proc")
@pytest.mark.parametrize("module", ["train", "play", "evaluate"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_modules_are_imported_is_answered(module: str, number: int, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", f"ejax.{module}", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    wait_until(lambda: heeds(process, number), process)
    process.send_signal(number)
    said = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 128 + number
    assert said == f"ejax {module}: ended by {signal.Signals(number).name} before it began: nothing was left\n"


@pytest.mark.slow
def test_a_closed_terminal_ends_a_run_in_order(tmp_path: Path) -> None:
    """Output has nowhere to go then, and must not keep the run from being saved."""
    command = [sys.executable, "-m", "ejax.train", "--config", str(write_config(tmp_path))]
    run = tmp_path / "run"
    terminal, its_end = pty.openpty()
    take = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", take, *command, "--run", str(run)],
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
        start_new_session=True,
    )
    os.close(its_end)
    deadline = time.monotonic() + 120
    while not list((run / "checkpoints").glob("tiny_step_*")):
        assert os.read(terminal, 65536) and time.monotonic() < deadline
    os.close(terminal)
    assert process.wait(timeout=60) == 0
    steps = [json.loads(line)["step"] for line in (run / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert RunDirectory(run, "tiny").periodic()[0].name == f"tiny_step_{steps[-1]}"
