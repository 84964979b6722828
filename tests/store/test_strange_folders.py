"""Folders of a stranger, of another system, or that may only be read: no link is followed, no file of others is damage,
and what cannot be written beside a result does not cost the result."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from case_tables import cases
from tiny import EVALUATED, tiny

import ejax
from ejax import evaluate
from ejax.config import parse_config, shipped
from ejax.logs import metric_log
from ejax.play.saved_policy import evaluate_run
from ejax.report.__main__ import main as report
from ejax.run import train
from ejax.schema import writing
from ejax.schema.writing import LinkError
from ejax.store import run_lock
from ejax.store.checkpoint import CheckpointError, verify_checkpoint
from ejax.store.run_dir import RunDirectory, open_run_directory

TRAINER = EVALUATED | {"save_freq": 32, "final_eval_episodes": 2}
FEW = {"num_episodes": 2, "num_envs": 2}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(parse_config(tiny(tmp_path_factory.mktemp("made"), **TRAINER))).run_dir


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


@pytest.fixture(autouse=True)
def failed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(writing, "FAILED", [])
    return writing.FAILED


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def resume(run: Path) -> Any:
    return train(parse_config(tiny(run.parent, iterations=3, **TRAINER)), resume="latest", run_dir=run)


def link(run: Path, name: str, theirs: Path) -> Path:
    """Put a link in the place of a run's file or folder: to a stranger's folder, file, or nothing."""
    path = run / name
    target = theirs / "folder" if path.is_dir() or not path.suffix else theirs / "file"
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(target)
    return path


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    (tmp_path / "theirs" / "folder").mkdir(parents=True)
    (tmp_path / "theirs" / "file").write_text("export PATH\n")
    (tmp_path / "theirs" / "folder" / ".partial-tiny_step_1").write_text("mine")
    return tmp_path / "theirs"


@cases(
    "name",
    "logs",
    "logs/tiny",
    "logs/sessions.jsonl",
    "logs/metrics.jsonl",
    "checkpoints",
    "evaluations",
    "evaluations/fresh_last.json",
    "configs",
    "configs/changes.json",
    ".lock",
)
def test_a_resume_writes_through_no_link(name: str, run: Path, theirs: Path, failed: list[str]) -> None:
    before, at = contents(theirs), link(run, name, theirs)
    try:
        resume(run)
        assert name in ("logs/metrics.jsonl", "logs/sessions.jsonl") or str(at) in "".join(failed)
    except (LinkError, CheckpointError, FileNotFoundError) as error:
        assert name in str(error) or name == "configs"
    assert contents(theirs) == before


@pytest.mark.parametrize("old", [".partial", ".metrics.jsonl.partial"])
def test_a_link_by_the_name_of_a_partial_file_is_not_used(old: str, run: Path, theirs: Path) -> None:
    for folder in ("logs", "evaluations", "configs"):
        (run / folder / old).symlink_to(theirs / "file")
    before = contents(theirs)
    with pytest.raises(CheckpointError, match="cp -rL"):  # in configs, where digests are
        resume(run)
    (run / "configs" / old).unlink()
    resume(run)
    assert contents(theirs) == before


@pytest.mark.parametrize("way", ["a link to a file", "a link to nothing", "the folder is a link", "a file in the way"])
def test_an_evaluation_that_cannot_be_written_keeps_its_numbers(
    way: str, run: Path, theirs: Path, failed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    report = Path(str(evaluate_run(run, **FEW)["report"]))
    before, numbers = contents(theirs), json.loads(report.read_text())
    report.unlink()
    if way == "a link to a file":
        report.symlink_to(theirs / "file")
    elif way == "a link to nothing":
        report.symlink_to(theirs / "none")
    else:
        shutil.rmtree(report.parent)
        report.parent.symlink_to(theirs / "folder") if "link" in way else report.parent.write_text("")
    assert evaluate.main([str(run), "--episodes", "2", "--num-envs", "2"]) == 0  # 1, as a command
    said = capsys.readouterr()
    assert f"eval/avg_reward: {numbers['eval/avg_reward']:.4g}" in said.out and "[summary] report" not in said.out
    assert len(failed) == 1 and failed[0] in said.err and str(report.parent) in failed[0]
    assert contents(theirs) == before


def test_what_was_not_written_is_an_exit_code() -> None:
    code = """if True:
        from ejax.runtime.process_exit import exit_with
        from ejax.schema.writing import by_product
        def main():
            with by_product("a plot"):
                raise PermissionError(13, "no", "/a")
            return {}
        exit_with(main)
    """
    for given, found in ((0, 1), (2, 2)):
        done = subprocess.run([sys.executable, "-c", code.replace("{}", str(given))], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (found, "ejax: a plot is not written: [Errno 13] no: '/a'\n")


def test_many_overrides_are_evaluated_elsewhere_under_a_name_that_fits(run: Path, failed: list[str]) -> None:
    overrides = [f"env.cfg.max_episode_steps={10**6 + i}" for i in range(11)] + ["env.cfg.max_episode_steps=3"]
    reports = [Path(str(evaluate_run(run, overrides[i:], **FEW)["report"])) for i in (0, 1)]
    assert reports[0].name != reports[1].name and max(len(each.name) for each in reports) < 256
    assert json.loads(reports[0].read_text())["overrides"] == overrides and not failed


@pytest.mark.parametrize("target", ["file", "none"])
def test_a_page_and_a_copied_config_go_through_no_link(
    target: str, run: Path, theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(theirs)
    for name in ("page.html", ".page.html.partial", "mine.yaml"):
        (tmp_path / name).symlink_to(theirs / target)
    assert report([str(run), "--to", str(tmp_path / "page.html")]) == 2
    assert "page.html is a symbolic link" in capsys.readouterr().err
    (tmp_path / "page.html").unlink()
    assert report([str(run), "--to", str(tmp_path / "page.html")]) == 0
    assert shipped.main(["copy", "push_cube/ppo", str(tmp_path / "mine.yaml")]) == 2
    assert contents(theirs) == before


def test_a_log_that_cannot_be_written_does_not_end_a_run(
    tmp_path: Path, failed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ejax.logs.metric_log.append_whole", full)
    monkeypatch.setattr("ejax.training.evaluators.replace_file", full)
    result = train(parse_config(tiny(tmp_path, **TRAINER)))
    assert result.finished and len(result.train_history) == 2 and set(result.fresh_eval_metrics) == {"best", "last"}
    assert [each.partition(" is not")[0].rpartition("/")[2] for each in failed] == [
        "metrics.jsonl", "fresh_best.json", "fresh_last.json",
    ]  # fmt: skip
    assert list(result.run_dir.glob("logs/tiny/events*"))  # the other log is whole


def test_a_disk_that_fails_at_the_end_does_not_lose_a_finished_run(
    tmp_path: Path, failed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where the log is synced nor where the run is given back."""

    def given_back(file: IO[bytes], owner: dict[str, Any]) -> None:
        if not owner:
            raise OSError(30, "Read-only file system")
        owned(file, owner)

    owned = run_lock._write_owner
    monkeypatch.setattr(run_lock, "_write_owner", given_back)
    monkeypatch.setattr(metric_log, "os", SimpleNamespace(**vars(os) | {"fsync": lambda _: os.fsync(2**30)}))
    assert train(parse_config(tiny(tmp_path, **TRAINER))).finished
    assert [each.partition(" is not")[0] for each in failed] == ["the end of the log"]


LITTER = (".DS_Store", "Thumbs.db", "desktop.ini", ".nfs0000000001", "meta.json~", "._meta.json")


def test_side_files_of_systems_and_editors_change_nothing(run: Path, made: Path) -> None:
    for folder in [run, *(path for path in run.rglob("*") if path.is_dir())]:
        for name in LITTER:
            (folder / name).write_bytes(b"\0\0\0\1Bud1")
        (folder / ".ipynb_checkpoints").mkdir()
        (folder / ".ipynb_checkpoints" / "meta-checkpoint.json").write_text("{}")
    theirs, found = ejax.load(made), ejax.load(run)
    assert found.params["params"].keys() == theirs.params["params"].keys()
    assert resume(run).num_updates == 3


@pytest.mark.parametrize("put", [lambda p: p.write_text(""), lambda p: p.mkdir() or (p / "a").write_text("")])
@pytest.mark.parametrize("where", ["", "state"])
def test_another_file_is_named_with_the_remedy_and_no_older_checkpoint_is_taken(
    where: str, put: Callable[[Path], object], run: Path
) -> None:
    newest, older = RunDirectory(run, "tiny").periodic()
    for path in (newest, *RunDirectory(run, "tiny").best()):
        put(path / where / "note.txt")
    for open_it in (ejax.load, resume, verify_checkpoint):
        with pytest.raises(CheckpointError, match=r"note\.txt.* is not in SHA256.*remove it") as caught:
            open_it(newest if open_it is verify_checkpoint else run)
        assert "damaged" not in str(caught.value).replace("nothing is damaged", "")
    verify_checkpoint(older)


def test_a_hubs_snapshot_of_links_is_refused_with_the_command_that_copies_it(run: Path, tmp_path: Path) -> None:
    for file in [path for path in run.rglob("*") if path.is_file()]:
        blob = tmp_path / "blobs" / str(len(list(tmp_path.rglob("*"))))
        blob.parent.mkdir(exist_ok=True)
        file.rename(blob)
        file.symlink_to(os.path.relpath(blob, file.parent))
    for open_it in (open_run_directory, ejax.load):
        with pytest.raises(CheckpointError, match=r"is a symbolic link; copy the whole folder with cp -rL") as caught:
            open_it(run)
        assert "damaged" not in str(caught.value)
    shutil.copytree(run, tmp_path / "copied")  # as cp -rL
    assert ejax.load(tmp_path / "copied").params
