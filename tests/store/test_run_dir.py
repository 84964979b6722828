"""A run's folder: which run a name means, and the messages about a damaged one."""

import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from case_tables import cases, refused
from kills import Killed, kill_at
from tiny import tiny

import ejax
from ejax.config import RunConfig, bind, parse_config
from ejax.run import train
from ejax.store import checkpoint
from ejax.store.checkpoint import CheckpointError
from ejax.store.resume_rules import record_changes
from ejax.store.run_dir import RunDirectory, create_run_directory, has_no_config, newest_run, open_run_directory
from ejax.store.run_lock import RunInUseError, _started, run_lock
from ejax.store.schedule_file import check_schedule, write_schedule


def config(exp_name: str) -> RunConfig:
    return parse_config(tiny(exp_name=exp_name, iterations=1))


def make(folder: Path, exp_name: str, number: int) -> Path:
    """Make a run of that name, started at that second."""
    path = create_run_directory(config(exp_name), folder / f"{exp_name}_20260101_00000{number}").path
    os.utime(path / "configs" / "resolved.json", (number, number))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return create_run_directory(config("tiny"), tmp_path / "tiny").path


def test_a_checkout_that_is_not_installed_has_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("ejax.store.checkpoint.version", version)
    monkeypatch.setattr("ejax.store.checkpoint._version", checkpoint._version.__wrapped__)
    folder = create_run_directory(config("tiny"), tmp_path / "tiny").path
    versions = json.loads((folder / "configs" / "versions.json").read_text())
    assert (versions["ejax"], versions["jax"]) == (ejax.__version__, "not installed")


def test_a_folder_that_cannot_be_written_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **folders: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ejax.schema.plain_files.os.replace", full)
    refused(lambda: create_run_directory(config("tiny"), tmp_path / "tiny"), match="No space left", error=OSError)
    assert not (tmp_path / "tiny").exists()


def test_a_name_is_not_the_beginning_of_a_name(tmp_path: Path) -> None:
    """As of ``configs/push_cube/bc.yaml`` and ``bc_images.yaml``."""
    cloned, other = make(tmp_path, "push_cube_bc", 1), make(tmp_path, "push_cube_bc", 2)
    make(tmp_path, "push_cube_bc_images", 3)
    assert newest_run(tmp_path, "push_cube_bc") == other
    assert open_run_directory(tmp_path / "push_cube_bc")[0] == RunDirectory(other, "push_cube_bc")
    assert cloned != other
    for name in ("push_cube", "push", "*", "push_cube_b?"):
        refused(newest_run, tmp_path, name, match="no run of", error=FileNotFoundError)


def test_a_mistyped_name_is_answered_by_the_nearest_one(tmp_path: Path) -> None:
    make(tmp_path, "sweep", 1)
    make(tmp_path, "walk", 2)
    with pytest.raises(FileNotFoundError, match=r"name the folder of a run\. Did you mean 'sweep'\?"):
        newest_run(tmp_path, "swep")
    refused(newest_run, tmp_path, "nothing alike", match=r"folder of a run$", error=FileNotFoundError)


def test_a_run_whose_name_cannot_be_read_is_not_passed_over(tmp_path: Path) -> None:
    """Its folder's name says enough: an older run in its place would be the wrong one."""
    make(tmp_path, "tiny", 1)
    damaged, other = make(tmp_path, "tiny", 2), make(tmp_path, "tiny_two", 3)
    for path in (damaged, other):
        (path / "configs" / "resolved.json").write_text("{")
    assert newest_run(tmp_path, "tiny") == damaged
    refused(open_run_directory, tmp_path / "tiny", match=r"configs of run .* are damaged", error=CheckpointError)


@pytest.mark.parametrize("file", ["resolved.json", "versions.json", "SHA256"])
@cases(
    "change",
    lambda file: file.write_text(""),
    lambda file: file.write_text(file.read_text()[:-40]),
    lambda file: file.write_text(file.read_text().replace("1", "2", 1)),
    lambda file: (file.unlink(), file.mkdir()),
    ids=["empty", "cut", "one digit", "a folder"],
)
def test_changed_configs_are_refused(file: str, change: Callable[[Path], object], run: Path) -> None:
    change(run / "configs" / file)
    error = FileNotFoundError if (run / "configs" / "resolved.json").is_dir() else CheckpointError
    with pytest.raises(error, match=str(run)):
        open_run_directory(run)


@pytest.mark.parametrize("text", ["[]", "{", '{"trainer": {}}', '{"trainer": {"exp_name": 3}}', "[" * 100_000])
def test_configs_without_digests_are_read_with_care(text: str, run: Path) -> None:
    """The first runs of ejax have none."""
    (run / "configs" / "SHA256").unlink()
    assert open_run_directory(run)[1] == config("tiny")
    (run / "configs" / "resolved.json").write_text(text)
    refused(open_run_directory, run, match=r"are damaged: .*resolved\.json", error=CheckpointError)


def test_what_others_put_beside_the_configs_does_not_matter(run: Path) -> None:
    (run / "configs" / "notes.txt").touch()
    assert open_run_directory(run)[1] == config("tiny")


@pytest.mark.parametrize("made", ["", "configs", "configs/versions.json", "configs/.partial", "checkpoints"])
def test_a_folder_that_a_kill_left_before_it_was_a_run_can_be_given_again(made: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    (path / made).parent.mkdir(parents=True) if "." in made else (path / made).mkdir(parents=True)
    if "." in made:
        (path / made).write_text("{")
    assert has_no_config(path)
    create_run_directory(config("tiny"), path)
    assert not has_no_config(path) and open_run_directory(path)[1] == config("tiny")


def test_a_folder_of_something_else_is_no_unfinished_run(tmp_path: Path, run: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    (run / "configs" / "resolved.json").unlink()
    (run / "checkpoints" / "tiny_step_1").mkdir()
    assert not has_no_config(tmp_path / "other") and not has_no_config(run) and not has_no_config(tmp_path / "none")


def test_the_best_checkpoint_is_used_where_no_other_is_left(tmp_path: Path) -> None:
    directory, reports = RunDirectory(tmp_path, "a"), []
    for step in (10, 20):
        (directory.save({"w": jnp.ones(1)}, {"global_step": step}, keep=5) / "meta.json").unlink()
    best = directory.save_best({"w": jnp.ones(1)}, {"global_step": 10})
    assert directory.find("latest", reports.append) == best
    assert len(reports) == 2


def test_a_last_word_says_what_is_left_and_how_to_go_on(tmp_path: Path, run: Path) -> None:
    directory = RunDirectory(run, "tiny")
    assert "nothing was left" in RunDirectory(tmp_path / "none", "tiny").status_line()
    assert f"--run {run} --resume latest starts it from the beginning" in directory.status_line()
    saved = directory.save({"w": jnp.ones(1)}, {"global_step": 10}, keep=5)
    assert f"the last checkpoint is {saved}," in directory.status_line()


def test_a_schedule_goes_on_where_it_was(run: Path) -> None:
    directory = RunDirectory(run, "tiny")
    digest = write_schedule(directory.path, 0, [0, 0, 1])
    assert check_schedule(directory.path, 3, digest) == []
    assert write_schedule(directory.path, 0, [0, 0, 1]) == digest
    write_schedule(directory.path, 2, [2, 3])
    assert json.loads((run / "schedule.json").read_text()) == {"versions": [0, 0, 2, 3]}


@cases("text", None, "", "[]", '{"versions": [0, 0', '{"versions": [0]}', '{"versions": [0, 1]}', '{"versions": ["0"]}')
def test_a_schedule_that_is_another_is_set_aside_and_the_run_goes_on(text: str | None, run: Path) -> None:
    directory, file = RunDirectory(run, "tiny"), run / "schedule.json"
    digest = write_schedule(directory.path, 0, [0, 0])
    file.unlink() if text is None else file.write_text(text)
    (problem,) = check_schedule(directory.path, 2, digest)
    assert str(file) in problem and not file.exists()
    assert text is None or [each.read_text() for each in run.glob("schedule.damaged-*.json")] == [text]
    write_schedule(directory.path, 2, [1])
    assert json.loads(file.read_text()) == {"versions": [None, None, 1]}


HOLD = """
import sys, time
from pathlib import Path
from typing import Any
from ejax.store.run_lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def holding(folder: Path) -> subprocess.Popen[str]:
    """Another process, which holds the lock of a run's folder until its standard input ends."""
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None and owner.stdout.readline() == "held\n"
    return owner


def test_a_run_that_another_process_trains_is_refused_and_left_as_it_is(run: Path) -> None:
    with holding(run) as owner:
        files = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
        for arguments in ({"resume": "latest"}, {}, {"fork": run}):
            text = f"is in use by process {owner.pid} on {socket.gethostname()}; wait until it ends"
            if "fork" in arguments:
                text = "no best checkpoint|no latest checkpoint"
            refused(train, config("tiny"), run_dir=run, **arguments, match=text, error=CheckpointError)
        assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == files
        open_run_directory(run)
        owner.communicate()
    with run_lock(run) as note:
        assert note == ""


def test_the_lock_of_a_killed_process_is_taken_and_said(run: Path) -> None:
    with holding(run) as owner:
        owner.kill()
    with run_lock(run) as note:
        assert note.startswith(f"process {owner.pid} on {socket.gethostname()} ended without giving {run} back")


def test_a_second_call_of_the_process_is_refused_and_the_first_keeps_the_lock(run: Path) -> None:
    with run_lock(run):
        for _ in range(2):
            with pytest.raises(RunInUseError, match="in use by another call in this process"), run_lock(run):
                pass
        done = subprocess.run([sys.executable, "-c", HOLD, str(run)], capture_output=True, text=True, input="")
        assert "RunInUseError" in done.stderr
    with run_lock(run) as note:
        assert note == ""


def test_a_lock_whose_file_its_owner_took_away_protects_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that could not begin is taken back, with the lock's file, while another process waits to open it."""
    monkeypatch.setattr("ejax.store.run_lock.fcntl.lockf", lambda *_: (run / ".lock").unlink())
    with pytest.raises(RunInUseError, match="in use by a process that has just given it up"), run_lock(run):
        pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # JAX warns of the fork
def test_a_forked_child_does_not_keep_the_lock(run: Path) -> None:
    with run_lock(run):
        reads, writes = os.pipe()
        if not (child := os.fork()):
            os.close(writes)
            os.read(reads, 1)
            os._exit(0)
        os.close(reads)
    with holding(run) as other:
        other.communicate()
    os.close(writes)
    os.waitpid(child, 0)


def test_a_lock_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    """The folder may be a stranger's, and the link lead to a file of whoever resumes."""
    (tmp_path / "mine").write_text("mine")
    for put in (lambda path: path.symlink_to(tmp_path / "mine"), lambda path: path.symlink_to("none"), os.mkfifo):
        put(tmp_path / ".lock")
        with pytest.raises(CheckpointError, match=r"\.lock is not a regular file"), run_lock(tmp_path):
            pass
        (tmp_path / ".lock").unlink()
    assert (tmp_path / "mine").read_text() == "mine" and not (tmp_path / "none").exists()


def test_a_lock_whose_owner_is_no_json_is_taken(tmp_path: Path) -> None:
    for text in ("[" * 4000, "[", "[]", "9" * 4000, "\0"):
        (tmp_path / ".lock").write_text(text)
        with run_lock(tmp_path) as note:
            assert note == ""


def test_without_locks_in_the_file_system_owners_are_compared(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("ejax.store.run_lock.fcntl.lockf", no_locks)
    for owner, taken in (
        ({"host": socket.gethostname(), "pid": 1, "boot_ticks": _started(1)}, False),
        ({"host": socket.gethostname(), "pid": os.getpid(), "boot_ticks": -1}, True),
        ({"host": "elsewhere", "pid": os.getpid(), "boot_ticks": 1}, False),
        ("damaged", True),
    ):
        (run / ".lock").write_text(json.dumps(owner))
        if taken:
            with run_lock(run):
                pass
        else:
            with (
                pytest.raises(RunInUseError, match=r"has no locks: if that process has ended, remove .*\.lock"),
                run_lock(run),
            ):
                pass


@pytest.mark.slow
def test_a_resume_that_lengthens_a_run_is_recorded_and_keeps_the_schedules_horizon(tmp_path: Path) -> None:
    def config(iterations: int) -> Any:
        schedule = {"name": "linear", "kwargs": {}}
        return parse_config(tiny(tmp_path, iterations=iterations, ppo={"lr_scheduler": schedule}))

    run = train(config(2)).run_dir
    train(config(3), resume="latest", run_dir=run)
    train(config(4), resume="latest", run_dir=run)
    resolved = json.loads((run / "configs" / "resolved.json").read_text())
    assert resolved["trainer"]["iterations"] == 4
    assert resolved["algorithm"]["cfg"]["lr_scheduler"]["kwargs"] == {"total_iters": 2}
    changes = json.loads((run / "configs" / "changes.json").read_text())["changes"]
    assert [(each["step"], each["updates"]) for each in changes] == [(64, [2, 3]), (96, [3, 4])]
    assert changes[0]["changed"] == {"trainer.iterations": [2, 3]}
    _, again = open_run_directory(run)  # its digests agree
    train(again, resume="latest", run_dir=run)
    assert dict(open_run_directory(run)[1].algorithm.cfg.lr_scheduler.kwargs) == {"total_iters": 2}


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_kill_while_a_change_is_recorded_leaves_a_whole_run(
    count: int, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = open_run_directory(run)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, os, "replace", count)
        record_changes(directory.config_file, bind(parse_config(tiny(iterations=3))), 64)
    assert open_run_directory(run)[1].trainer.iterations == (3 if count == 4 else 1)  # the new configs are there
