"""Population-based training: current values and ancestors, on the console and in the report."""

import json
import re
from pathlib import Path

import pytest
from tiny import EVALUATED, STEPS, tiny

from ejax.population.lineage import Exploited, lineage, read_exploits, value_texts, values_at, write_exploit
from ejax.report.__main__ import main as report
from ejax.schema.messages import number
from ejax.train import main as train

RATE = "algorithm.cfg.optimizer.learning_rate"
COPIES = [(20, 1, 2, 2e-3), (40, 0, 1, 3e-3), (40, 3, 2, 4e-3), (60, 1, 3, 5e-3)]
EXPLOITS = [
    Exploited(step=10 * update, update=update, member=member, parent=parent, values={RATE: rate})
    for update, member, parent, rate in COPIES
]


def test_ancestors_are_those_at_the_time_of_each_copy() -> None:
    assert lineage(EXPLOITS, 0) == "0 ← 1 at update 40 ← 2 at update 20"  # not 1's copy of 3, which came later
    assert lineage(EXPLOITS, 1) == "1 ← 3 at update 60 ← 2 at update 40"
    assert lineage(EXPLOITS, 1, step=500) == "1 ← 2 at update 20"
    assert lineage(EXPLOITS, 2) == "2"


def test_values_are_those_of_the_last_copy_before_a_step() -> None:
    first = {RATE: 1e-5}
    assert [values_at(EXPLOITS, 1, step, first)[RATE] for step in (100, 200, 599, 600)] == [1e-5, 2e-3, 2e-3, 5e-3]
    assert value_texts(EXPLOITS, 1, 300, first) == {RATE: "0.005 now, 0.002 at its best, 1e-05 at first"}
    assert value_texts(EXPLOITS, 0, 500, first) == {RATE: "0.003 now, 1e-05 at first"}
    assert value_texts(EXPLOITS, 2, None, first) == {RATE: "1e-05"}


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    assert read_exploits(tmp_path) == []
    for each in EXPLOITS:
        write_exploit(tmp_path, each)
    file = tmp_path / "exploits.jsonl"
    file.write_bytes(b'{"step": -1}\nnull\n\xff\n' + file.read_bytes() + b'{"step": 6')
    assert read_exploits(tmp_path) == EXPLOITS


@pytest.mark.slow
def test_the_summary_and_the_report_have_current_values_and_who_copied_whom(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # returns are known once an episode has ended: after 11 steps, in the second update
    config = tiny(tmp_path, **EVALUATED, iterations=6)
    config["population"] = {"seeds": 2, RATE: [1e-5, 1e-3], "exploit": {"every": 3, "perturb": [1.25]}}
    file, run = tmp_path / "config.json", tmp_path / "run"
    file.write_text(json.dumps(config))
    assert train(["--config", str(file), "--run", str(run)]) == 0
    exploits = read_exploits(run)
    assert [each.update for each in exploits] == [3, 6] and exploits[0].step == 3 * STEPS
    best = json.loads((run / "population.json").read_text())["best"]
    summary = dict(re.findall(r"^\[summary\] (.*?): (.*)$", capsys.readouterr().out, re.M))
    assert summary["its lineage"] == lineage(exploits, best)
    assert summary["exploits"].startswith("2: ")
    first = {RATE: (1e-5, 1e-5, 1e-3, 1e-3)[best]}
    assert summary[RATE] in [value_texts(exploits, best, step, first)[RATE] for step in (None, STEPS, 6 * STEPS)]

    assert report([str(run), "--to", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(lineage(exploits, each.member) in page for each in exploits)
    assert "continued from each other" in page and "learning_rate=1e-05" not in page
    assert all(f"{number(each.values[RATE])} now" in page for each in exploits[-1:])
