"""Reports of users: each input of ``reports/`` is right, or refused by a text that helps (reports/README.md)."""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from case_tables import cases

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "reports"


def load() -> ModuleType:
    spec = spec_from_file_location("reports_of_users", ROOT / "benchmarks" / "reports.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := module_from_spec(spec))
    return module


reports = load()


def is_slow(folder: Path) -> bool:
    return (folder / "run.sh").exists() or "\nSLOW = True" in (folder / "repro.py").read_text()


NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] if is_slow(FOLDER / name) else []) for name in reports.names_in(FOLDER)
]


@pytest.mark.usefixtures("nothing_trusted")
@pytest.mark.filterwarnings("default")  # a report judges what is done, also with a warning
@pytest.mark.parametrize("name", NAMES)
def test_a_report_is_right_or_refused(name: str, tmp_path: Path) -> None:
    apart = (FOLDER / name / "run.sh").exists()
    found = reports.run_apart(FOLDER, name, 300.0) if apart else reports.run_here(FOLDER, name, tmp_path)
    if found.verdict == "INFO":
        pytest.skip(found.text)
    assert found.verdict in ("RIGHT", "REFUSED"), found.text


@cases(
    "printed code verdict",
    ("VERDICT: RIGHT\nVERDICT: WRONG 2 of 3\n", 0, ("WRONG", "2 of 3")),
    ("text\nVERDICT: REFUSED by name\n", 0, ("REFUSED", "by name")),
    ("VERDICT: RIGHT\nTraceback", 1, ("NONE", "exit status 1: Traceback")),
    ("VERDICT: RIGHTLY", 0, ("NONE", "exit status 0: VERDICT: RIGHTLY")),
    ("", -9, ("NONE", "exit status -9: ")),
)
def test_the_worst_verdict_counts(printed: str, code: int, verdict: tuple[str, str]) -> None:
    assert reports.verdict_of(printed, code) == verdict


def test_a_folder_of_any_reports_makes_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, file, text in (
        ("a", "repro.py", "from common import word\nprint('VERDICT:', word)"),
        ("b", "run.sh", 'touch "$OUT/x"; echo "VERDICT: WRONG $(basename "$PWD")"'),
        ("c", "repro.py", "import time; time.sleep(60)"),
        ("_common", "common.py", "word = 'RIGHT'"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    (tmp_path / "was.json").write_text('{"a": "WRONG"}')
    words = [
        str(tmp_path),
        "--limit",
        "2",
        "--before",
        str(tmp_path / "was.json"),
        "--json",
        str(tmp_path / "now.json"),
    ]
    monkeypatch.setattr(sys, "argv", ["reports.py", *words])
    assert reports.main() == 1
    table = capsys.readouterr().out
    assert "| a      | WRONG  | RIGHT | " in table and "| b      | –      | WRONG | " in table and "1 RIGHT" in table
    assert json.loads((tmp_path / "now.json").read_text()) == {"a": "RIGHT", "b": "WRONG", "c": "NONE"}
