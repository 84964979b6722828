"""``ejax evaluate --chunks``: the table of a run's policy, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from case_tables import cases
from tiny import tiny

from ejax.config import parse_config
from ejax.evaluate import main
from ejax.run import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chunks") / "run"
    cfg = {"max_episode_steps": 20, "action_chunk": 8}
    train(parse_config(tiny(env_cfg=cfg, iterations=1)), run_dir=folder)
    return folder


@pytest.mark.slow
def test_single_actions_of_a_runs_chunks_are_evaluated_in_a_table(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--latency", "0", "--latency", "3", "--hold", "zero", "--episodes", "4", "--seed", "1"]
    assert main([str(run), "--chunks", "async", *options, "--json", str(tmp_path / "chunks.json")]) == 0
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[:4]]
    assert [line[:2] for line in lines[2:]] == [["async", "latency 0, every 4"], ["async", "latency 3, every 4"]]
    assert [lines[0][0], *lines[0][-2:]] == ["method", "largest jump", "on average"]  # a point has no joints that turn
    result: Any = json.loads((tmp_path / "chunks.json").read_text())
    assert result["horizon"] == 8 and [row["length"] for row in result["rows"]] == [20.0, 20.0]  # control steps
    assert all(0.0 < row["metrics/largest_jump"] <= row["largest_jump"] <= 1.0 for row in result["rows"])


@cases(
    "options text",
    (["--chunks", "rtc"], "--chunks rtc guides a flow (head.type: flow), which this policy is not"),
    (["--chunks", "now"], "no way to execute chunks 'now'"),
    (["--chunks", "async", "--latency", "2"], "no config states how it holds: pass --hold zero"),
    (["--chunks", "async", "--latency", "5", "--hold", "zero"], "8 actions, 5 steps late, got one in 5 steps"),
    (["--chunks", "async", "--latency", "0.5"], "--latency: got 0.5; must be whole control steps"),
    (["--chunks", "async", "--hold", "zero,last,zero"], "--hold: got zero,last,zero; must be zero or last, once or"),
    (["--chunks", "async", "--noise", "0.1"], "--noise does not go with --chunks: evaluate one condition"),
    (["--every", "2"], "--every and --hold go with chunks"),
    (["--chunks", "async", "env.cfg.action_chunk=1"], "this policy decides on one action"),
)
def test_what_cannot_be_executed_is_refused(
    run: Path, options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), *options]) == 2
    assert text in " ".join(capsys.readouterr().err.split())
