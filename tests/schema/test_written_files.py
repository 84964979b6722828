"""Files are written by one module, through no link below a run, and a crash leaves the old one or the new one."""

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from case_tables import cases, refused

from ejax.schema.plain_files import ExpansionError, a_path, expanded, is_side_file, read_json, read_text
from ejax.schema.writing import LinkError, append_file, make_folder, move, new_file, replace_file, replacing

ROOT = Path(__file__).parents[2]
WAYS: dict[str, Callable[[Path, Path], object]] = {
    "replace": lambda path, below: replace_file(path, "new", below),
    "new": lambda path, below: new_file(path, below).close(),
    "append": lambda path, below: append_file(path, below).close(),
    "folder": lambda path, below: make_folder(path / "more", below),
    "move": lambda path, below: move(_source(below), path / "moved", below),
}


def _source(folder: Path) -> Path:
    (folder / "source").write_text("moved")
    return folder / "source"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("link", ["logs", "logs/deep", "logs/deep/file", "logs/deep/file to nothing", "a loop"])
def test_nothing_is_written_through_a_link_below_the_run(way: str, link: str, tmp_path: Path) -> None:
    run, theirs = tmp_path / "run", tmp_path / "theirs"
    (theirs / "deep").mkdir(parents=True)
    (theirs / "deep" / "file").write_text("kept")
    file = run / "logs" / "deep" / "file"
    at = file if "file" in link else run / ("logs" if link == "a loop" else link)
    at.parent.mkdir(parents=True)
    target = {"logs": theirs, "logs/deep": theirs / "deep", "a loop": at}.get(link, theirs / "deep" / "file")
    at.symlink_to(target if "nothing" not in link else tmp_path / "none")
    with pytest.raises((LinkError, FileExistsError)) as caught:  # a new file: what is there has that name
        WAYS[way](file, run)
    assert str(at) in str(caught.value)
    assert isinstance(caught.value, FileExistsError) or str(run) in str(caught.value).partition("remove it")[2]
    assert sorted(p.name for p in tmp_path.rglob("*") if p.name not in ("source", "logs", "run", "theirs", "deep")) in (
        ["file"], ["file", "file"],
    )  # fmt: skip
    assert (theirs / "deep" / "file").read_text() == "kept" and not (tmp_path / "none").exists()


@pytest.mark.parametrize("way", WAYS)
def test_the_run_itself_and_what_is_above_it_may_be_links(way: str, tmp_path: Path) -> None:
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "outputs").symlink_to(tmp_path / "disk")
    (tmp_path / "mine").symlink_to("outputs/run")
    for run in (tmp_path / "outputs" / "run", tmp_path / "mine"):
        WAYS[way](run / run.parent.name / "file", run)
    assert len(list((tmp_path / "disk" / "run").iterdir())) == 2


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_nothing_else(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    replace_file(file, "old")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call if call != "write" else "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{file}'"), replacing(file) as partial:
        assert [p.name for p in tmp_path.iterdir() if p != file] == [Path(partial.name).name]
        if call == "write":
            full()
    assert list(tmp_path.iterdir()) == [file] and file.read_text() == "old"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # JAX warns of the fork
def test_a_kill_at_any_moment_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    file, seen = tmp_path / "file", set()
    for count in range(8):
        replace_file(file, "old" * 1000)
        if not (child := os.fork()):
            calls = iter(range(count, -1, -1))

            def ends(name: str) -> Callable[..., object]:
                real = getattr(os, name)
                return lambda *a, **k: real(*a, **k) if next(calls) else os._exit(9)  # noqa: B023

            for name in ("mkdir", "open", "lstat", "fsync", "replace"):
                setattr(os, name, ends(name))
            with suppress(StopIteration):
                replace_file(file, "new" * 1000)
            os._exit(0)
        os.waitpid(child, 0)
        seen.add(text := file.read_text())
        assert text in ("old" * 1000, "new" * 1000)
    assert len(seen) == 2


@pytest.mark.parametrize("place", ["/dev/stdout", "/dev/fd/1"])
def test_a_shells_streams_can_be_written_to(place: str) -> None:
    code = f"import pathlib as p; from ejax.schema.writing import replace_file as r; r(p.Path('{place}'), 'x')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"x"


def test_a_record_that_does_not_fit_is_not_there_in_part(tmp_path: Path) -> None:
    code = """if True:
        import resource, sys
        from pathlib import Path
        from ejax.logs.metric_log import MetricLog, read_log
        from ejax.schema.writing import by_product
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        with MetricLog(Path(sys.argv[1])) as log:
            log.write(1, {"loss": 1.0})
            for _ in range(2):
                with by_product("a line"):
                    log.write(2, {f"a long name {i}": 1.0 for i in range(5)})
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
            log.write(3, {"loss": 1.0})
            said = log.so_far()
        records, problems = read_log(Path(sys.argv[1]), logged=said)
        assert [each["step"] for each in records] == [1, 3] and not problems, problems
    """
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "m.jsonl"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("ejax: a line is not written: [Errno 27]") and len(done.stderr.splitlines()) == 1


@cases(
    "path found",
    ("~", "/home/me"),
    ("~/runs", "/home/me/runs"),
    ("$HOME/runs", "/home/me/runs"),
    ("${HOME}/runs", "/home/me/runs"),
    ("/data/$WHO/${WHO}_1", "/data/ann/ann_1"),
    ("runs/a~b", "runs/a~b"),
    ("./~", "./~"),
    ("price$", "price$"),
    ("", ""),
)
def test_a_path_is_expanded_as_in_a_shell(path: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("WHO", "ann")
    assert (expanded(path), a_path(path)) == (found, Path(found))


@cases("path named", ("$NOBODY/runs", "$NOBODY"), ("a/${NO_BODY}", "${NO_BODY}"), ("~no_one/a", "~no_one"))
def test_what_stands_for_nothing_is_refused_by_name(
    path: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(expanded, path, match=re.escape(named), error=ExpansionError)
    (tmp_path / path).mkdir(parents=True)  # a folder may have any name, but ~ means home
    if path[0] == "~":
        refused(expanded, path, match=re.escape(named), error=ExpansionError)
    else:
        assert expanded(path) == path


SIDE_FILES = """
    .DS_Store ._a __MACOSX .Spotlight-V100 Thumbs.db thumbs.db desktop.ini Desktop.ini a:Zone.Identifier @eaDir
    .nfs00000001a2b3c4 .fuse_hidden0001 .directory .ipynb_checkpoints meta.json~ .a.swp #meta.json# .#a .~lock.a.csv#"""
OURS = (
    "note.txt meta.json SHA256 .lock ~ _METADATA manifest.ocdbt d .partial-a_step_1 a.nfs1 .gitignore 0_0_000000.rows"
)


def test_side_files_are_known_and_nothing_else() -> None:
    assert all(map(is_side_file, ["Icon\r", *SIDE_FILES.split()]))
    assert not any(map(is_side_file, OURS.split()))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_byte_order_mark_is_no_part_of_a_text(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes('{"a":\r\n "ü"}'.encode(encoding))
    assert read_text(tmp_path / "a.json") == '{"a":\r\n "ü"}' and read_json(tmp_path / "a.json") == {"a": "ü"}
