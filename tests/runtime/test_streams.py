"""Standard output and error whose reader is gone, or whose disk is full."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import EVALUATED, STEPS, tiny

LOSE = """
import os, pty, select, sys, threading
kind, numbers = {kind!r}, {numbers}
if kind != "from the start":
    reader, end = pty.openpty() if kind == "terminal" else os.pipe()
    [os.dup2(end, number) for number in numbers]
    os.close(end)

def read():  # a terminal holds 4 KB, and a view redraws itself
    while not gone.is_set():
        if select.select([reader], [], [], 0.02)[0]:
            os.read(reader, 65536)

gone, reading = threading.Event(), threading.Thread(target=read)
if kind == "terminal":
    reading.start()

def lose(*_):
    gone.set()
    if kind == "terminal":
        reading.join()
    if kind == "disk":
        full = os.open("/dev/full", os.O_WRONLY)
        [os.dup2(full, number) for number in numbers]
    elif kind != "from the start":
        os.close(reader)
"""
"""``lose`` loses the standard streams of these numbers."""
WRITERS = """
import logging, threading, warnings
from ejax.runtime.process_exit import exit_with
from ejax.runtime.streams import note_losses

def write():
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        print("… by print", file=stream, flush=True)
    sys.stdout.buffer.write(b"bytes")
    warnings.warn("a warning")
    logging.warning("logged")
    os.system("echo of a child; echo of a child >&2")

def main():
    write()
    lose()
    write()
    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    open({done!r}, "w").write(repr(notes))
    return 0

notes = []
{before}
exit_with(main)
"""
DRIVE = """
from ejax.runtime.process_exit import exit_on_signal, exit_with
exit_on_signal()
import ejax.train
import ejax.training.command
from ejax.logs.metrics import MetricWriter
from ejax.store.run_dir import RunDirectory
from ejax.training.sink import RunSink

def losing(owner, name, calls=[]):
    function = getattr(owner, name)
    def lost(*args, **kwargs):
        calls or calls.append(lose())
        return function(*args, **kwargs)
    setattr(owner, name, lost)

losing({moment})
exit_with(lambda: ejax.train.main({words!r}))
"""
MOMENTS = {
    "before the first update": "RunSink, 'start'",
    "in the middle": "RunSink, 'finish'",
    "while a checkpoint is written": "RunDirectory, 'save'",
    "during the evaluation": "RunSink, '_record_evaluation'",
    "at the summary": "ejax.training.command, 'print_summary'",
}
KINDS = ["pipe", "disk", "terminal", "from the start"]
NUMBERS = [(1,), (2,), (1, 2)]


def run(script: str, kind: str, numbers: tuple[int, ...], **values: object) -> "subprocess.CompletedProcess[str]":
    closed = [f"{number}>&-" for number in numbers if kind == "from the start"]
    code = LOSE.format(kind=kind, numbers=numbers) + script.format(**values)
    command = ["bash", "-c", f'"$0" -c "$1" {" ".join(closed)}', sys.executable, code]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_whoever_writes_goes_on(kind: str, numbers: tuple[int, ...], tmp_path: Path) -> None:
    done = run(WRITERS, kind, numbers, done=str(tmp_path / "done"), before="note_losses(notes.append)")
    assert done.returncode == 0 and "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    notes = eval((tmp_path / "done").read_text())
    assert len(notes) == len(numbers) and all("continues" in note for note in notes)
    named = {1: "output", 2: "error"}
    assert sorted(note.split()[1] for note in notes) == sorted(named[number] for number in numbers)
    for number, printed in ((1, done.stdout), (2, done.stderr)):
        assert number in numbers or printed.count("by print") == 6  # the other stream is whole


@pytest.mark.parametrize(("kind", "code"), [("pipe", 0), ("disk", 1), ("terminal", 0), ("from the start", 0)])
def test_a_result_that_a_full_disk_lost_is_a_failure(kind: str, code: int, tmp_path: Path) -> None:
    done = run(WRITERS, kind, (1,), done=str(tmp_path / "done"), before="")
    assert done.returncode == code
    assert ("No space left" in done.stderr) == bool(code)


@pytest.mark.parametrize("options", [[], ["-u"]], ids=str)
def test_a_letter_that_a_terminal_lacks_ends_nothing(options: list[str]) -> None:
    code = "from ejax.runtime.streams import keep_streams; keep_streams(); keep_streams(); print('a…b')"
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(command, capture_output=True, env={"PYTHONIOENCODING": "ascii"}, check=True)
    assert done.stdout == b"a\\u2026b\n" and not done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "kind"),
    [*((moment, kind) for moment in MOMENTS for kind in KINDS[:2]), *(("in the middle", kind) for kind in KINDS[2:])],
)
def test_a_run_goes_on_to_its_end(moment: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny(iterations=6, console=True, **EVALUATED)))
    words = ["--config", str(tmp_path / "config.json"), "--run", str(tmp_path / "run")]
    done = run(DRIVE, kind, (1, 2), moment=MOMENTS[moment], words=words)
    assert done.returncode == 0
    assert (tmp_path / "run" / "checkpoints" / f"tiny_step_{6 * STEPS}").is_dir()
    assert "standard output is lost" in (tmp_path / "run" / "logs" / "notes.log").read_text()
