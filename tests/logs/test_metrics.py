"""The contents of a run's log files, and of its console."""

import io
import json
import math
import struct
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from case_tables import refused
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c
from tiny import tiny

from ejax.config import parse_config
from ejax.logs.best import Best
from ejax.logs.console import Latest, LiveView, PlainView, followed, make_console, summary
from ejax.logs.metrics import MetricWriter
from ejax.schema.frozen import with_value
from ejax.schema.messages import duration

TRAIN = {"train/policy_loss": -0.5, "charts/SPS": 1000.0, "charts/episode_reward_avg_100": 2.5}


def _writer(
    run_dir: Path, trainer: dict[str, Any] | None = None, *, resume_step: int | None = None, **options: Any
) -> MetricWriter:
    config = parse_config(tiny(exp_name="probe", **(trainer or {})))
    for name in ("console", "use_wandb"):
        config = with_value(config, f"trainer.{name}", options.pop(name, False))
    options = {"update": resume_step or 0, "is_new": resume_step is None, **options}
    return MetricWriter(run_dir, config, {}, rows=1, **options)


def _records(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "logs/metrics.jsonl").read_text().splitlines()]


def _events(run_dir: Path) -> list[Event]:
    """All events in the order in which TensorBoard reads the files; every CRC is checked."""
    events = []
    for path in sorted((run_dir / "logs/probe").iterdir()):
        data = path.read_bytes()
        while data:
            length, length_crc = struct.unpack_from("<QI", data)
            message, (message_crc,) = data[12 : 12 + length], struct.unpack_from("<I", data, 12 + length)
            assert (length_crc, message_crc) == (masked_crc32c(data[:8]), masked_crc32c(message))
            events.append(Event.FromString(message))
            data = data[16 + length :]
    return events


def _points(run_dir: Path) -> list[tuple[int, str, float]]:
    """(step, tag, value) that TensorBoard shows: a START event hides what was logged from its step on."""
    points: list[tuple[int, str, float]] = []
    for event in _events(run_dir):
        if event.session_log.status == SessionLog.START:
            points = [point for point in points if point[0] < event.step]
        points += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return points


def test_each_write_is_one_json_line_with_step_time_and_tags(tmp_path: Path) -> None:
    with _writer(tmp_path) as writer:
        writer.write(10, TRAIN)
        assert len(_records(tmp_path)) == 1 and len(_points(tmp_path)) == len(TRAIN)  # on disk before it is closed
        writer.write(20, {"eval/avg_reward": 3.0})
    first, second = _records(tmp_path)
    assert first == {"step": 10, "time": first["time"], **TRAIN}
    assert second == {"step": 20, "time": second["time"], "eval/avg_reward": 3.0}
    assert second["time"] >= first["time"] > 1.7e9


def test_tensorboard_holds_each_tag_value_and_step(tmp_path: Path) -> None:
    with _writer(tmp_path) as writer:
        writer.write(10, TRAIN)
        writer.write(20, {"eval/avg_reward": 3.0})
    assert _points(tmp_path) == [(10, tag, value) for tag, value in TRAIN.items()] + [(20, "eval/avg_reward", 3.0)]
    assert _events(tmp_path)[0].file_version == "brain.Event:2"


def test_nan_is_null_in_jsonl_and_absent_from_tensorboard(tmp_path: Path) -> None:
    with _writer(tmp_path) as writer:
        writer.write(10, {"eval/success_rate": math.nan, "train/kl": math.inf})
        writer.write(20, {"eval/success_rate": math.nan})
    assert [record["eval/success_rate"] for record in _records(tmp_path)] == [None, None]
    assert _records(tmp_path)[0]["train/kl"] is None
    assert _points(tmp_path) == [(10, "train/kl", math.inf)]


def test_after_a_resume_every_step_is_there_once(tmp_path: Path) -> None:
    with _writer(tmp_path) as writer:
        for step in (10, 20, 30, 40):
            writer.write(step, {"train/loss": step})
    with _writer(tmp_path, resume_step=20) as writer:
        for step in (30, 40, 50):
            writer.write(step, {"train/loss": step})
    assert [record["step"] for record in _records(tmp_path)] == [10, 20, 30, 40, 50]
    assert _points(tmp_path) == [(step, "train/loss", step) for step in (10, 20, 30, 40, 50)]


def test_a_new_run_in_a_used_directory_is_an_error(tmp_path: Path) -> None:
    _writer(tmp_path).close()
    refused(_writer, tmp_path, match="resume that run", error=FileExistsError)


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    with _writer(tmp_path) as writer:
        writer.write(10, TRAIN)
        writer.close()
        written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == written
    assert [record["step"] for record in _records(tmp_path)] == [10]


class _FakeRun:
    def __init__(self, run_id: str) -> None:
        self.id = run_id
        self.logged: list[tuple[int, dict]] = []
        self.exit_code: int | None = None

    def log(self, metrics: dict, step: int) -> None:
        self.logged.append((step, metrics))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def wandb_runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict, _FakeRun]]:
    """List the calls of ``wandb.init``, each with the run that it gave."""
    runs: list[tuple[dict, _FakeRun]] = []

    def init(**options: object) -> _FakeRun:
        runs.append((options, _FakeRun(str(options["id"] or f"id{len(runs)}"))))
        return runs[-1][1]

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    return runs


def test_wandb_gets_the_config_and_every_write_without_nan(tmp_path: Path, wandb_runs: list) -> None:
    with _writer(tmp_path, {"wandb_project_name": "arms", "seed": 3}, use_wandb=True) as writer:
        writer.write(10, {"train/loss": 1.0, "eval/success_rate": math.nan})
    ((init, run),) = wandb_runs
    assert (init["project"], init["name"], init["config"]["trainer"]["seed"]) == ("arms", "probe", 3)
    assert run.logged == [(10, {"train/loss": 1.0})]
    assert run.exit_code == 0


def test_wandb_goes_on_with_the_same_run_after_a_resume(tmp_path: Path, wandb_runs: list) -> None:
    _writer(tmp_path, use_wandb=True).close()
    _writer(tmp_path, use_wandb=True, resume_step=0).close()
    assert [run.id for _, run in wandb_runs] == ["id0", "id0"]


def test_wandb_marks_a_run_that_raised_as_failed(tmp_path: Path, wandb_runs: list) -> None:
    with pytest.raises(KeyboardInterrupt), _writer(tmp_path, use_wandb=True):
        raise KeyboardInterrupt
    assert wandb_runs[0][1].exit_code == 1


def test_a_missing_wandb_is_an_error_that_tells_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # what import takes for "not installed"
    refused(_writer, tmp_path, use_wandb=True, match=r"pip install -e '\.\[wandb\]'", error=ModuleNotFoundError)
    assert not list(tmp_path.iterdir())


def test_plain_lines_have_the_form_of_embodichain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with _writer(tmp_path, console=True) as writer:
        writer.write(10, {**TRAIN, "charts/episode_length_avg_100": 40.0})
        writer.note("saved [checkpoint]")
    assert capsys.readouterr().out.splitlines() == [
        "[train] step=10 done=100% left=0:00:00 sps=1000 avgReward(100)=2.5 avgLength(100)=40 policy_loss=-0.5",
        "saved [checkpoint]",
    ]


def test_plain_train_lines_give_the_share_done_and_the_time_left_and_stay_within_120_characters() -> None:
    file, many = io.StringIO(), {f"train/a_rather_long_name_{i}": float(i + 1) for i in range(20)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ejax.logs.console.time.monotonic", lambda: now)
        now = 0.0
        view = PlainView(file, Latest("probe", total_steps=1000), clock=lambda: now)
        for step in (100, 200):
            now += 10.0
            view.write(step, {"charts/SPS": 10.0, **many}, None)
    first, second = file.getvalue().splitlines()
    assert first.startswith("[train] step=100 done=10% left=-:--:-- sps=10 a_rather_long_name_0=1 ")
    assert second.startswith("[train] step=200 done=20% left=0:01:20 sps=10 ")
    shown = second.count("a_rather_long_name_")
    assert 60 < len(second) <= 120 and second.endswith(f" … {20 - shown} more")


def test_plain_train_lines_come_at_most_once_a_second_and_always_at_the_end() -> None:
    now, file = 0.0, io.StringIO()
    view = PlainView(file, Latest("probe", total_steps=1000), clock=lambda: now)
    for step in range(1, 26):  # 10 writes a second
        now = step / 10
        view.write(step, {"charts/SPS": 10.0}, None)
    view.close()
    assert [line.split()[1] for line in file.getvalue().splitlines()] == ["step=1", "step=11", "step=21", "step=25"]


def test_plain_eval_lines_always_come_after_what_was_pending() -> None:
    file = io.StringIO()
    view = PlainView(file, Latest("probe", total_steps=1), clock=lambda: 0.0)
    view.write(1, {"train/loss": 1.0}, None)
    view.write(2, {"train/loss": 0.5}, None)
    view.write(2, {"eval/avg_reward": 3.0, "eval/success_rate": math.nan}, Best(value=4.0, step=1))
    view.write(2, {"eval/avg_reward": 2.0}, None)
    assert file.getvalue().splitlines() == [
        "[train] step=1 done=100% left=0:00:00 loss=1",
        "[train] step=2 done=100% left=0:00:00 loss=0.5",
        "[eval] step=2 mean action: avg_reward=3 success_rate=nan best=4@1",
        "[eval] step=2 mean action: avg_reward=2",
    ]


def test_output_that_is_no_terminal_is_plain_even_when_colour_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(make_console("probe", total_steps=1, file=io.StringIO()), PlainView)


@pytest.mark.parametrize(("width", "height", "beside"), [(60, 30, 1), (80, 24, 2), (200, 24, 4)])
def test_the_live_view_has_four_blocks_beside_each_other_and_fits_the_terminal(
    width: int, height: int, beside: int
) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None)
    view = LiveView(terminal, Latest("probe", total_steps=100, watched="eval/avg_reward"))
    view.write(50, TRAIN | {"time/collect_s": 1.0, "memory/host_peak_mib": 760.0}, None)
    view.write(50, {"eval/avg_reward": 3.25, "eval/success_rate": 0.75}, Best(value=4.5, step=25))
    view.write(60, {"time/collect_s": 1.5, **{f"train/loss_{i}": 1.0 for i in range(20)}}, Best(value=4.5, step=25))
    view.note("[saved]")
    view.close()
    final = terminal.file.getvalue().split("\x1b[2K")[-1]
    shown = [line for line in final.splitlines() if not line.startswith("\x1b")]
    for text in (
        "60%  60/100",
        "ETA",
        "1,000 steps/s",
        "policy_loss",
        "0.75",
        "best avg_reward 4.5 at step 25",
        "2.5 s",
    ):
        assert text in final
    assert "[saved]" in terminal.file.getvalue()
    assert max(map(len, shown)) <= width and len(shown) <= height and "… " in final
    heads = [line for line in shown if any(block in line for block in ("sampled actions", "mean action", "since the"))]
    assert len(heads) == {1: 3, 2: 2, 4: 1}[beside]
    rows = [line for line in shown if "avgReward(100)" in line]
    assert beside == 1 or "3.25" in rows[0], "an evaluation stands beside the training"


def test_work_of_seconds_is_shown_on_a_terminal_alone_and_its_output_goes_where_it_belongs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(followed([1, 2], "drawing a.mp4", 2)) == [1, 2] and capsys.readouterr() == ("", "")
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    for item in followed([1, 2], "drawing a.mp4", 2):
        print(item)
    assert capsys.readouterr().out == "1\n2\n"
    assert "drawing a.mp4" in terminal.getvalue() and "/2" in terminal.getvalue()


def test_plain_lines_become_rare_in_a_long_run_and_name_the_action_of_evaluations() -> None:
    now, file = 0.0, io.StringIO()
    view = PlainView(file, Latest("probe", total_steps=40_000, acts="most likely action"), clock=lambda: now)
    for step in range(1, 40_000):  # one a second, for 11 hours
        now = float(step)
        view.write(step, {"charts/SPS": 1.0}, None)
    view.write(40_000, {"eval/avg_reward": 1.0}, None)
    *lines, last = file.getvalue().splitlines()
    assert 100 * math.log(400) < len(lines) < 200 + 100 * math.log(400)
    assert last == "[eval] step=40000 most likely action: avg_reward=1"


def test_the_summary_is_plain_lines_when_piped() -> None:
    file = io.StringIO()
    facts = {"env steps": 30_000_000, "wall time": duration(75.4), "best": 0.98765, "run": Path("runs/a")}
    summary(facts, file)
    assert file.getvalue().splitlines() == [
        "[summary] env steps: 30,000,000",
        "[summary] wall time: 0:01:15",
        "[summary] best: 0.9877",
        "[summary] run: runs/a",
    ]
