"""The log: what a run that goes on keeps of it, and what it says of one that was damaged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from case_tables import cases

from ejax.logs.metric_log import MetricLog, keep_up_to


@pytest.fixture
def log(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """Three updates and an evaluation; what a checkpoint after the second says, which the evaluation came after."""
    path = tmp_path / "metrics.jsonl"
    with MetricLog(path) as log:
        log.write(10, {"train/loss": 0.5})
        log.write(20, {"train/loss": float("nan")})
        logged = log.so_far()
        log.write(20, {"eval/avg_reward": 1.0})
        log.write(30, {"train/loss": 0.1})
    return path, logged


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def asides(path: Path) -> list[Path]:
    return list(path.parent.glob("metrics.damaged-*.jsonl"))


def test_what_comes_after_the_checkpoint_is_set_aside_and_said(log: tuple[Path, dict[str, Any]]) -> None:
    path, logged = log
    before = path.read_bytes()
    (said,) = keep_up_to(path, 20, logged=logged)
    (aside,) = path.parent.glob("metrics.superseded-*.jsonl")
    assert steps(path) == [10, 20, 20] and steps(aside) == [30] and asides(path) == []
    assert path.read_bytes() + aside.read_bytes() == before
    assert f"continues from step 20; its lines of later ones are in {aside.name}" in said


def test_an_evaluation_that_is_made_again_is_dropped(log: tuple[Path, dict[str, Any]]) -> None:
    path, logged = log
    keep_up_to(path, 20, logged=logged, evaluates_again=True)
    assert steps(path) == [10, 20] and path.stat().st_size == logged["bytes"]


def test_the_digest_goes_on_after_a_resume(log: tuple[Path, dict[str, Any]]) -> None:
    path, logged = log
    keep_up_to(path, 20, logged=logged)
    with MetricLog(path) as again:
        again.write(30, {"train/loss": 0.2})
        logged = again.so_far()
    assert keep_up_to(path, 30, logged=logged) == []
    path.write_bytes(path.read_bytes().replace(b"0.2", b"0.3"))
    assert len(keep_up_to(path, 30, logged=logged)) == 1


@pytest.mark.parametrize("line", ["[1]", "{}", '{"step": "20"}', '{"step": 2, "a": [1]}', '{"ste', "[" * 10_000, "\0"])
def test_a_line_that_is_no_record_is_left_out_and_said(line: str, log: tuple[Path, dict[str, Any]]) -> None:
    path, logged = log
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, *lines[1:]]) + "\n")
    before = path.read_bytes()
    problems = keep_up_to(path, 20, logged=logged)
    assert steps(path) == [10, 20, 20]
    (aside,) = asides(path)
    assert len(problems) == 1 and "is damaged: line 2 was not written by ejax" in problems[0]
    assert aside.name in problems[0] and aside.read_bytes() == before


@pytest.mark.parametrize(("end", "said"), [(b"{", 0), (b'{"step": 40, "ti', 0), (b"0", 1), (b'{"step": 40, "ti\n', 1)])
def test_a_line_that_a_kill_cut_short_is_nothing_to_speak_of(end: bytes, said: int, log: tuple) -> None:
    path, logged = log
    path.write_bytes(path.read_bytes() + end)
    assert len(keep_up_to(path, 30, logged=logged)) == said
    assert steps(path) == [10, 20, 20, 30]


@cases(
    "damage text",
    (lambda path: path.write_bytes(path.read_bytes().replace(b"0.5", b"0.6")), "was changed since"),
    (lambda path: path.write_bytes(path.read_bytes()[:60]), "lacks lines that it had"),
    (lambda path: path.write_bytes(b""), "is gone"),
    (lambda path: path.unlink(), "is gone"),
    (lambda path: (path.unlink(), path.mkdir()), "was not a file"),
    ids=["changed", "cut", "empty", "removed", "a folder"],
)
def test_a_log_that_is_another_than_at_the_checkpoint_is_said(damage: Callable, text: str, log: tuple) -> None:
    path, logged = log
    damage(path)
    (problem,) = keep_up_to(path, 20, logged=logged)
    assert text in problem and str(path) in problem
    with MetricLog(path) as again:
        again.write(30, {})


def test_a_run_without_a_log_has_nothing_to_keep(tmp_path: Path) -> None:
    assert keep_up_to(tmp_path / "metrics.jsonl", 0) == []
