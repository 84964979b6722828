"""``benchmarks/score_tables.py``: scores per seed, their estimates, and what cannot be compared."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from case_tables import cases, refused
from tiny import tiny

from ejax.config import parse_config
from ejax.logs.metric_log import MetricLog
from ejax.store.run_dir import create_run_directory

HEADER = "exp_name,env_name,seed,metric,env_step,value"


@pytest.fixture(scope="module", autouse=True)
def benchmarks_on_the_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield


@pytest.fixture(scope="module")
def tables(benchmarks_on_the_path: None) -> ModuleType:
    return importlib.import_module("score_tables")


def write(path: Path, *lines: str, header: str = HEADER) -> Path:
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


def two_seeds(path: Path, task: str = "Ant-v4", values: tuple[float, float] = (0.0, 10.0), step: int = 100) -> Path:
    return write(path, *(f"x,{task},{seed},avg_return,{step},{value}" for seed, value in enumerate(values)))


def make_run(folder: Path, seed: int, curve: dict[int, float], env: str = "gymnasium:Pendulum-v1") -> Path:
    """Make a run's folder as a training leaves it, without one."""
    create_run_directory(parse_config(tiny(env=env, seed=seed, enable_eval=True)), folder)
    (folder / "logs").mkdir(exist_ok=True)
    with MetricLog(folder / "logs" / "metrics.jsonl") as log:
        for step, value in curve.items():
            log.write(step, {"charts/SPS": 1.0})
            log.write(step, {"eval/avg_reward": value})
    return folder


def test_the_interquartile_mean_leaves_a_quarter_out_at_each_end(tables: ModuleType) -> None:
    assert tables.iqm(np.array([100.0, 0.0, 3.0, 1.0, 2.0])) == 2.0  # of 1, 2, 3
    assert tables.iqm(np.array([[0.0, 2.0, 4.0, 100.0], [1.0, 1.0, 2.0, 2.0]])).tolist() == [3.0, 1.5]


def test_a_tie_is_half_an_improvement(tables: ModuleType) -> None:
    assert tables.improvement(np.array([1.0, 2.0, 3.0]), np.array([2.0, 2.0])) == 0.5  # (0 + 0 + ½ + ½ + 1 + 1) / 6


def test_the_table_has_the_numbers_of_each_task_and_of_all_and_repeats(tables: ModuleType) -> None:
    found = [
        tables.Compared("A", 100.0, ("100", "99 to 101"), (np.array([0.0, 10.0]), np.array([4.0, 4.0]))),
        tables.Compared("B", 100.0, ("100", "100"), (np.array([8.0, 8.0]), np.array([8.0, 8.0, 8.0]))),
    ]
    lines = list(tables.table(found, ("runs", "theirs")))
    # of two seeds the mean is 0, 5 or 10, each end with a quarter of the draws; √50 = 7.07
    assert lines[2] == ("| A | 100 / 99 to 101 | 2 / 2 | 5 [0, 10] | 5 ± 7.07 | 4 [4, 4] | 4 ± 0 | 0.5 [0, 1] |")
    assert lines[3] == "| B | 100 / 100 | 2 / 3 | 8 [8, 8] | 8 ± 0 | 8 [8, 8] | 8 ± 0 | 0.5 [0.5, 0.5] |"
    # divided by 4 and 8: 0, 2.5, 1, 1 without the lowest and the highest; of draws 0 0 1 1, 0 2.5 1 1 or 2.5 2.5 1 1
    assert lines[4].startswith("| all 2, theirs's mean = 1 | | | 1 [0.5, 1.75] | 1.12 ± 1.03 | 1 [1, 1] | 1 ± 0 |")
    assert lines[4].endswith("| 0.5 [0.25, 0.75] |")
    assert list(tables.table(found, ("runs", "theirs"))) == lines


def test_the_evaluation_next_to_the_step_counts_if_it_is_near(tables: ModuleType, tmp_path: Path) -> None:
    lines = [f"x,Ant-v4,{seed},avg_return,{step},{step}" for seed in (1, 2) for step in (280, 299, 320, 5000)]
    sides = [
        tables.collect(path.stem, tables.rows_of([path]), "avg_return")
        for path in (write(tmp_path / "a.csv", *lines), two_seeds(tmp_path / "b.csv", step=303))
    ]
    (found,), none = tables.pair(*sides, 300)
    assert found.at == ("299", "303") and found.scores[0].tolist() == [299.0, 299.0] and not none
    (found,), _ = tables.pair(*sides, None)
    assert found.step == 303  # the last that all have
    found, none = tables.pair(*sides, 5000)
    assert not found and none["Ant-v4"] == (
        "seed 0 of b has no evaluation within 5% of step 5,000; the nearest is at 303: train it on, or pass --at 303"
    )
    assert (
        "seed 1 of a has no evaluation within 5% of step 400; the nearest is at 320: pass --at 320"
        in (tables.pair(*sides, 400)[1]["Ant-v4"])
    )


@cases(
    "header line error",
    ("steps,trial_0", "0,1", r"lacks the columns exp_name, .*value; it has steps, trial_0\. A table has exp_name, "),
    (HEADER, "x,Ant-v4,1,avg_return,many,1", r"line 2: env_step 'many' and value '1' are not two numbers; correct"),
    (HEADER, "x,Ant-v4,1,avg_return", "line 2: env_step None and value None are not two numbers"),
    (HEADER, "x,Ant-v4,1,success,1,1", r"no row is of the metric avg_return; there are success \(1 rows\)\. Use --"),
)
def test_a_table_that_cannot_be_read_is_an_error(
    tables: ModuleType, tmp_path: Path, header: str, line: str, error: str
) -> None:
    path = write(tmp_path / "a.csv", line, header=header)
    refused(lambda: tables.collect("a", tables.rows_of([path]), "avg_return"), match=error, error=tables.TableError)


def test_runs_become_a_table_that_says_the_same(tables: ModuleType, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(seed), seed, {100: seed / 4, 200: 2.0}) for seed in (10, 9)]
    file = tmp_path / "more" / "table.csv"
    assert tables.export(runs, file) == 4
    assert file.read_text().splitlines() == [
        HEADER,
        "tiny,Pendulum-v1,9,avg_return,100,2.25",
        "tiny,Pendulum-v1,9,avg_return,200,2.0",
        "tiny,Pendulum-v1,10,avg_return,100,2.5",
        "tiny,Pendulum-v1,10,avg_return,200,2.0",
    ]
    of_runs, of_file = (tables.collect("a", tables.rows_of(paths), "avg_return") for paths in (runs, [file]))
    assert of_runs == of_file
    with pytest.raises(tables.TableError, match="are both tiny, Pendulum-v1, seed 9: keep one of them"):
        tables.export([*runs, make_run(tmp_path / "again", 9, {100: 1.0})], file)


def test_compare_prints_and_draws_and_lists_what_is_left(
    tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = importlib.import_module("scores")
    theirs = two_seeds(tmp_path / "sac.csv", "Pendulum-v1", (1.0, 2.0))
    runs = [str(make_run(tmp_path / str(seed), seed, {50: 1.0, 100: 2.0})) for seed in (1, 2)]
    swimmer = str(two_seeds(tmp_path / "swimmer.csv", "Swimmer-v4"))
    command = ["scores.py", "compare", *runs, swimmer, "--against", str(theirs), "--plot", str(tmp_path / "a.png")]
    pytest.importorskip("matplotlib").use("agg")
    monkeypatch.setattr("sys.argv", command)
    scores.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith(
        "| Pendulum-v1 | 100 / 100 | 2 / 2 | 2 [2, 2] | 2 ± 0 | 1.5 [1, 2] | 1.5 ± 0.707 | 0.75 ["
    )
    assert lines[-2:] == ["Not compared:", "- Swimmer-v4: only in runs"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("sys.argv", ["scores.py", "compare", swimmer, "--against", str(theirs)])
    with pytest.raises(SystemExit, match="no task can be compared:\n- Pendulum-v1: only in sac\n- Swimmer-v4: only in"):
        scores.main()
