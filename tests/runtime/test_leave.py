"""The end of a command line: threads that somebody left behind."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import tiny

SCRIPT = """
import sys, threading, time
from ejax.runtime import process_exit
process_exit._GRACE_S = 0.3

def telemetry():
    time.sleep(600)

def main():
    print("at work")
    {body}

process_exit.exit_with(main)
"""
THREADS = "[threading.Thread(target=telemetry, name='telemetry').start() for _ in range(6)]"


def run(body: str) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.format(body=body)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("code", [0, 3])
def test_threads_left_behind_are_named_and_do_not_keep_the_process(code: int) -> None:
    done = run(f"{THREADS}; return {code}")
    assert done.returncode == code and done.stdout == "at work\n"
    assert done.stderr == "ejax: leaving without threads that do not end: telemetry\n"


def test_an_exception_keeps_its_traceback_and_its_exit_code() -> None:
    done = run(f"{THREADS}; raise ValueError('the arm is bent')")
    assert done.returncode == 1
    assert "ValueError: the arm is bent" in done.stderr and "leaving without threads" in done.stderr


def test_a_thread_that_ends_is_waited_for() -> None:
    done = run("threading.Thread(target=lambda: (time.sleep(0.1), print('written'))).start(); return 0")
    assert (done.returncode, done.stdout, done.stderr) == (0, "at work\nwritten\n", "")


def test_idle_pools_and_a_clean_end_are_as_ever() -> None:
    pool = "from concurrent.futures import ThreadPoolExecutor as P; p = P(2); p.submit(print, 'pooled').result()"
    began = time.monotonic()
    done = run(f"{pool}; return 2")
    assert (done.returncode, done.stdout, done.stderr) == (2, "at work\npooled\n", "")
    assert run("sys.exit(4)").returncode == 4
    assert time.monotonic() - began < 50.0


def test_a_script_without_a_guard_is_named_by_the_workers_that_import_it(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    spawn = "multiprocessing.get_context('spawn').Process(target=print)"
    text = f"import multiprocessing\nfrom ejax.runtime.process_exit import refuse_rerun\nrefuse_rerun()\np = {spawn}"
    file.write_text(f"{text}\np.start()\np.join()\nprint('exit code', p.exitcode)\n")
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=60)
    assert "exit code 1" in done.stdout
    assert done.stderr.count("\n") == 1 and 'if __name__ == "__main__":' in done.stderr


@pytest.mark.slow
def test_a_training_without_a_guard_names_it(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    made = tiny(env="gymnasium:Pendulum-v1", env_cfg={"vectorization": "async"})
    text = "from ejax.config import parse_config\nfrom ejax.run import train\nfrom pathlib import Path\n"
    file.write_text(f"{text}train(parse_config({made!r}), run_dir=Path({str(tmp_path / 'run')!r}))\n")
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=300)
    assert 'if __name__ == "__main__":' in done.stderr.splitlines()[-1]
    assert "RunInUseError" not in done.stderr and "ConnectionResetError" not in done.stderr
