"""The loop: resumed runs, signals, damaged checkpoints, what a run leaves behind."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from case_tables import cases, refused
from commands_under_way import start_process, wait_for_checkpoint
from damages import asynchronous_run, damage, outcome, same, what_is_left
from kills import Killed, kill_at
from tiny import EVALUATED, STEPS, tiny

from ejax.config import ConfigError, bind, parse_config
from ejax.logs.metrics import MetricWriter
from ejax.run import train
from ejax.store import checkpoint
from ejax.store.checkpoint import CheckpointError, verify_checkpoint
from ejax.store.run_dir import RunDirectory, create_run_directory, new_run_folder
from ejax.training import open_run, saver
from ejax.training.evaluators import DeviceEvaluator
from ejax.training.saver import Lane
from ejax.training.sink import RunSink
from ejax.training.steppers import DeviceStepper


def config(output_dir: Path, env: str = "PointMassRL", updates: int = 12, **trainer: Any) -> dict[str, Any]:
    evaluated = EVALUATED | {"eval_freq": 4 * STEPS}
    return tiny(output_dir, env, **evaluated | {"iterations": updates, "save_frequency_updates": 3} | trainer)


@pytest.mark.slow
@pytest.mark.parametrize("env", ["PointMassRL", "CartPoleRL", "PushCubeRL"])
def test_a_killed_run_resumes_to_the_same_bits(env: str, tmp_path: Path) -> None:
    raw = config(tmp_path, env, updates=30, keep_checkpoints=100)
    train(parse_config(raw), run_dir=tmp_path / "whole")

    process = start_process(raw, tmp_path)
    wait_for_checkpoint(process, tmp_path)
    time.sleep(random.random() / 3)  # any moment will do, saving included
    process.send_signal(signal.SIGKILL)
    process.communicate()
    resumed = train(parse_config(raw), resume="latest", run_dir=tmp_path / "run")

    assert resumed.finished and resumed.latest_checkpoint_path == tmp_path / f"run/checkpoints/tiny_step_{30 * STEPS}"
    # nothing is missing in the log, nothing is in it twice
    assert same(what_is_left(tmp_path / "run", "tiny"), what_is_left(tmp_path / "whole", "tiny"), log=True)


def left(run: Path) -> tuple[dict, list[tuple[str, object]]]:
    """All that a run leaves that does not depend on timing: the newest checkpoint, the log, what is best."""
    directory = RunDirectory(run, "tiny")
    metas = [verify_checkpoint(path) for path in (directory.periodic()[0], *directory.best())]
    facts = ("num_updates", "best_eval_value", "last_eval_metrics", "last_evaluated", "evaluation_due")
    return what_is_left(run, "tiny"), [(name, meta.get(name)) for meta in metas for name in facts]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Make runs that are evaluated where they save, elsewhere, and at the end; never interrupted. By their updates."""
    folder = tmp_path_factory.mktemp("whole")
    run = cache(lambda n: train(parse_config(config(folder, updates=n)), run_dir=folder / str(n)).run_dir)
    run(14)  # that all cases but some of the long tier need, so that none of them pays for it
    return run


@pytest.mark.slow_cases(
    "14-RunDirectory-save_best-1",
    "14-RunSink-_record_evaluation-3",
    "14-ejax.training.saver-rewrite_meta",
    "14-RunSink-_record_evaluation-4",
    "14-ejax.store.checkpoint-remove-3",
    "15-",
)
@cases(
    "updates owner name count",
    (14, MetricWriter, "write", 3),  # before there is a checkpoint
    (14, RunDirectory, "save_best", 1),
    (14, RunSink, "_record_evaluation", 3),  # saved at the same update, not evaluated
    (14, saver, "rewrite_meta", 1),  # saved, evaluated, and the checkpoint does not say so yet
    (14, RunSink, "_record_evaluation", 4),  # after the last checkpoint
    (14, saver, "rewrite_meta", 2),
    (15, RunSink, "_record_evaluation", 4),  # the last checkpoint is a periodic one as well
    (15, saver, "rewrite_meta", 2),
    (14, checkpoint, "_complete", 2),
    (14, checkpoint, "remove", 3),
)
def test_a_kill_at_any_step_of_saving_changes_nothing(
    updates: int,
    owner: object,
    name: str,
    count: int,
    whole: Callable[[int], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_config = parse_config(config(tmp_path, updates=updates))
    kill_at(monkeypatch, owner, name, count)
    with pytest.raises(Killed):
        train(run_config, run_dir=tmp_path / "run")
    monkeypatch.undo()
    result = train(run_config, resume="latest", run_dir=tmp_path / "run")
    (arrays, facts), (expected_arrays, expected_facts) = left(tmp_path / "run"), left(whole(updates))
    assert same(arrays, expected_arrays, log=True) and facts == expected_facts
    assert result.best_eval_value == dict(expected_facts)["best_eval_value"]


def test_improvements_in_quick_succession_are_saved_once_and_survive_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A best state that waits for the next checkpoint is found again by the run that goes on from the last one."""
    steps: dict[str, list[int]] = {}
    save_best = RunDirectory.save_best

    def counted(self: RunDirectory, state: Any, meta: dict[str, Any]) -> Path:
        steps.setdefault(self.path.name, []).append(meta["global_step"])
        return save_best(self, state, meta)

    monkeypatch.setattr(RunDirectory, "save_best", counted)
    # evaluations become better until update 6, and worse after it
    evaluated, save = RunSink._results, Lane.save_best
    monkeypatch.setattr(
        RunSink, "_results", lambda sink, x: {**evaluated(sink, x), "eval/avg_reward": -abs(sink._run.update - 6.0)}
    )
    raw = config(tmp_path, updates=8, eval_freq=STEPS, save_frequency_updates=4, final_eval_episodes=0)
    for name, seconds in (("at_once", 0.0), ("held", 3600.0)):
        monkeypatch.setattr(saver, "_SECONDS_BETWEEN_BESTS", seconds)
        train(parse_config(raw), run_dir=tmp_path / name)
    assert steps == {
        "at_once": [n * STEPS for n in range(1, 7)],
        # the first; then those that a checkpoint names
        "held": [n * STEPS for n in (1, 3, 4, 6)],
    }

    def unless_killed(self: Lane, **options: bool) -> Path | None:
        return None if isinstance(sys.exc_info()[1], Killed) else save(self, **options)

    with pytest.raises(Killed), monkeypatch.context() as patch:
        patch.setattr(Lane, "save_best", unless_killed)
        kill_at(patch, RunSink, "_record_evaluation", 7)
        train(parse_config(raw), run_dir=tmp_path / "killed")
    assert steps["killed"] == [n * STEPS for n in (1, 3, 4)]  # the one of update 6 is lost
    train(parse_config(raw), resume="latest", run_dir=tmp_path / "killed")
    assert RunDirectory(tmp_path / "killed", "tiny").best()[0].name == f"tiny_best_step_{6 * STEPS}"


def test_a_run_without_a_checkpoint_starts_from_the_beginning_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_config = parse_config(config(tmp_path, updates=3))
    kill_at(monkeypatch, RunDirectory, "save", 1)
    with pytest.raises(Killed):
        train(run_config, run_dir=tmp_path / "run")
    assert len((tmp_path / "run/logs/metrics.jsonl").read_text().splitlines()) == 3
    monkeypatch.setattr(DeviceStepper, "start", None)  # nor does it become a folder without a run when that fails
    refused(train, run_config, resume="latest", run_dir=tmp_path / "run")
    monkeypatch.undo()
    capsys.readouterr()
    result = train(run_config, resume="latest", run_dir=tmp_path / "run")
    assert "has no checkpoint, a kill came before the first: it starts from the beginning" in capsys.readouterr().err
    train(run_config, run_dir=tmp_path / "whole")
    assert result.finished and same(*(what_is_left(tmp_path / name, "tiny") for name in ("run", "whole")), log=True)
    empty = create_run_directory(run_config, tmp_path / "empty").path
    for resume in (
        "best",
        str(empty / "checkpoints/tiny_step_1"),
    ):  # where there is something to go on from, or nothing
        with pytest.raises(CheckpointError, match=r"no best checkpoint|does not exist"):
            train(run_config, resume=resume, run_dir=empty)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "saved_at"), [(2, 8), (4, 14)], ids=["along the way", "at the end"])
def test_what_was_trained_before_an_evaluation_that_fails_is_kept(
    number: int, saved_at: int, whole: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_config, begin, evaluations = parse_config(config(tmp_path, updates=14)), DeviceEvaluator.begin, []

    def fail() -> None:
        raise ArithmeticError("the arm left the table")

    def begin_or_fail(self: DeviceEvaluator, params: object) -> object:
        evaluations.append(params)
        return fail if len(evaluations) == number else begin(self, params)

    monkeypatch.setattr(DeviceEvaluator, "begin", begin_or_fail)
    refused(train, run_config, run_dir=tmp_path / "run", match="left the table", error=ArithmeticError)
    monkeypatch.undo()
    newest = RunDirectory(tmp_path / "run", "tiny").periodic()[0]
    assert verify_checkpoint(newest)["num_updates"] == saved_at
    train(run_config, resume="latest", run_dir=tmp_path / "run")
    (arrays, facts), (expected_arrays, expected_facts) = left(tmp_path / "run"), left(whole(14))
    assert same(arrays, expected_arrays, log=True) and facts == expected_facts


def test_a_best_metric_that_is_not_measured_is_refused_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceStepper, "start", None)
    run_config = parse_config(config(tmp_path, best_eval_metric="eval/metrics/nothing"))
    with pytest.raises(ConfigError, match=r"best_eval_metric.*'eval/metrics/nothing' is not measured here; there is"):
        train(run_config, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_best_metric_that_a_host_environment_does_not_measure_is_refused_once_the_state_is_saved(
    tmp_path: Path,
) -> None:
    raw = config(tmp_path, "gymnasium:Pendulum-v1", best_eval_metric="eval/success_rate")
    raw["trainer"]["save_frequency_updates"] = 100
    with pytest.raises(ConfigError, match=r"best_eval_metric.*'eval/success_rate' is not measured here"):
        train(parse_config(raw), run_dir=tmp_path / "run")
    (saved,) = RunDirectory(tmp_path / "run", "tiny").periodic()
    raw["trainer"] |= {"best_eval_metric": "eval/avg_reward", "iterations": 5}
    resumed = train(parse_config(raw), resume=str(saved))
    assert [entry["global_step"] for entry in resumed.eval_history] == [4 * STEPS, 5 * STEPS]


@pytest.fixture(scope="module")
def to_damage(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path, dict]:
    """Make a run to go on with, and what it should come to."""
    folder = tmp_path_factory.mktemp("to_damage")
    raw = asynchronous_run(folder)
    train(parse_config(raw), run_dir=folder / "whole")
    short = {**raw, "trainer": {**raw["trainer"], "iterations": 6}}
    return raw, train(parse_config(short), run_dir=folder / "run").run_dir, what_is_left(folder / "whole", "tiny")


@pytest.mark.slow
@cases(
    "name how verdict",
    ("configs/resolved.json", "one bit", "refused"),
    ("configs/SHA256", "removed", "reported"),
    (f"checkpoints/tiny_step_{6 * STEPS}/SHA256", "cut to nothing", "reported"),
    (f"checkpoints/tiny_step_{6 * STEPS}/meta.json", "a folder", "reported"),
    ("logs/metrics.jsonl", "middle byte", "reported"),
    ("schedule.json", "cut in half", "reported"),
)
def test_a_damaged_file_is_said_and_changes_no_bit(
    name: str, how: str, verdict: str, to_damage: tuple[dict, Path, dict], tmp_path: Path
) -> None:
    """A slice of ``benchmarks/damage.py``, which goes through all files."""
    raw, base, expected = to_damage
    shutil.copytree(base, tmp_path / "run")
    assert damage(tmp_path / "run" / name, how)
    given, text = outcome(parse_config(raw), tmp_path / "run", "latest", expected)
    assert (given, name.rpartition("/")[2] in text) == (verdict, True), text


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_exits_cleanly(number: signal.Signals, tmp_path: Path) -> None:
    raw = config(tmp_path, updates=100_000, save_frequency_updates=50)
    process = start_process(raw, tmp_path)
    wait_for_checkpoint(process, tmp_path)
    process.send_signal(number)
    output = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 0, output
    assert "Traceback" not in output
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/logs/metrics.jsonl").read_text().splitlines()]
    newest = RunDirectory(tmp_path / "run", "tiny").periodic()[0]
    assert newest.name == f"tiny_step_{steps[-1]}"  # the very last update is saved


@pytest.mark.slow
def test_results_do_not_depend_on_how_updates_are_dispatched(tmp_path: Path) -> None:
    train(parse_config(config(tmp_path)), run_dir=tmp_path / "one")
    raw = config(tmp_path, updates_per_dispatch=7, save_frequency_updates=5, eval_freq=0, enable_eval=False)
    train(parse_config(raw), run_dir=tmp_path / "other")
    assert same(*(what_is_left(tmp_path / name, "tiny") for name in ("one", "other")))


TRAIN_ALL = """
import json, sys
from pathlib import Path
from ejax.config import parse_config
from ejax.run import train
for folder, raw in json.loads(sys.stdin.read()).items():
    train(parse_config(raw), run_dir=Path(folder))
"""


@pytest.mark.slow
def test_a_dispatch_of_one_update_gives_the_same_bits(tmp_path: Path) -> None:
    given = {
        str(tmp_path / str(count)): parse_config(config(tmp_path, updates_per_dispatch=count)).to_dict()
        for count in (1, 3, 64)
    }
    # with the compiler's usual flags: those of the tests round a loop of at most one update otherwise
    env = os.environ | {"XLA_FLAGS": ""}
    subprocess.run([sys.executable, "-c", TRAIN_ALL], input=json.dumps(given), env=env, text=True, check=True)
    one, *others = (what_is_left(Path(folder), "tiny") for folder in given)
    assert all(same(one, other) for other in others)


def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_it_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = config(tmp_path, console=True)
    train(parse_config(raw), run_dir=tmp_path / "run")
    newest, before, *_ = RunDirectory(tmp_path / "run", "tiny").periodic()
    damaged = max((newest / "state").rglob("*"), key=lambda file: file.stat().st_size if file.is_file() else 0)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    capsys.readouterr()
    result = train(parse_config(raw), resume="latest", run_dir=tmp_path / "run")
    text = capsys.readouterr().out
    assert f"{newest} is damaged" in text
    assert f"resumed from {before}" in text and "nothing is left to train" not in text
    assert result.finished
    train(parse_config(raw), resume="latest", run_dir=tmp_path / "run")
    assert "nothing is left to train: the run has " in capsys.readouterr().out


def test_the_console_shows_each_step_of_the_start_before_it_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, build = [], open_run.build

    def building(*args: Any, **options: Any) -> Any:
        seen.append(capsys.readouterr().out)
        return build(*args, **options)

    monkeypatch.setattr(open_run, "build", building)
    train(parse_config(config(tmp_path, updates=4, console=True)), run_dir=tmp_path / "run")
    assert seen == [f"run folder {tmp_path / 'run'}; building the environment PointMassRL …\n"]
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"environment built in [\d.]+ s; compiling …", first)
    assert re.fullmatch(r"built and compiled in [\d.]+ s", second)


def test_resume_refuses_another_config(tmp_path: Path) -> None:
    raw = config(tmp_path, updates=3)
    train(parse_config(raw), run_dir=tmp_path / "run")
    raw["algorithm"]["cfg"]["batch_size"] = 32
    with pytest.raises(CheckpointError, match=r"algorithm\.cfg\.batch_size is 16 in the run and 32 now"):
        train(parse_config(raw), resume="latest", run_dir=tmp_path / "run")


@pytest.mark.slow
def test_a_finished_run_can_be_extended_and_keeps_its_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = config(tmp_path, updates=6)
    raw["algorithm"]["cfg"]["lr_scheduler"] = {"name": "linear"}
    train(parse_config(raw), run_dir=tmp_path / "run")
    raw["trainer"]["iterations"] = 9
    result = train(parse_config(raw), resume="latest", run_dir=tmp_path / "run")
    assert [entry["train/learning_rate"] for entry in result.train_history] == [0.0] * 3  # linear to 0 over 6 updates
    assert "3 updates from there to 9 have the rate 0" in capsys.readouterr().err
    stretched = parse_config(raw, ["trainer.iterations=11", "algorithm.cfg.lr_scheduler.kwargs.total_iters=12"])
    rates = [train(stretched, resume="latest", run_dir=tmp_path / "run").train_history]
    raw["trainer"]["iterations"] = 12  # without the key: as it was stretched
    rates.append(train(parse_config(raw), resume="latest", run_dir=tmp_path / "run").train_history)
    first = parse_config(raw).algorithm.cfg.optimizer.learning_rate
    found = [entry["train/learning_rate"] / first for history in rates for entry in history]
    assert found == pytest.approx([2 / 12, 1 / 12, 0.0], abs=1e-6)


def test_a_run_leaves_what_is_needed_to_repeat_it(tmp_path: Path) -> None:
    raw = config(tmp_path, updates=3)
    result = train(parse_config(raw))
    assert result.run_dir.parent == tmp_path
    assert result.run_dir.name.startswith("tiny_")
    saved = json.loads((result.run_dir / "configs/resolved.json").read_text())
    assert parse_config(saved) == bind(parse_config(raw))
    versions = json.loads((result.run_dir / "configs/versions.json").read_text())
    assert {"python", "jax", "ejax", "device"} <= versions.keys()
    assert list((result.run_dir / "logs" / "tiny").glob("events.out.tfevents.*"))
    assert result.best_checkpoint_path is not None and result.best_checkpoint_path.exists()


def test_a_new_run_does_not_overwrite_an_old_one(tmp_path: Path) -> None:
    raw = config(tmp_path, updates=1)
    train(parse_config(raw), run_dir=tmp_path / "run")
    refused(lambda: train(parse_config(raw), run_dir=tmp_path / "run"), match="--resume latest", error=FileExistsError)


@pytest.mark.slow
def test_a_run_that_goes_on_from_an_older_checkpoint_keeps_what_it_saves(tmp_path: Path) -> None:
    raw = config(tmp_path, updates=12, keep_checkpoints=2)
    train(parse_config(raw), run_dir=tmp_path / "run")
    directory = RunDirectory(tmp_path / "run", "tiny")
    newest, older = directory.periodic()
    result = train(parse_config({**raw, "trainer": {**raw["trainer"], "iterations": 10}}), resume=str(older))
    assert result.latest_checkpoint_path == directory.periodic()[0]  # not cleared away, and the one to go on from
    assert result.latest_checkpoint_path.name == f"tiny_step_{10 * STEPS}"
    assert list(directory.checkpoints.glob(f"superseded_*_{newest.name}"))  # nothing is lost


def test_runs_that_start_in_one_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of two processes, neither of which has seen the other's folder."""
    monkeypatch.setattr(time, "strftime", lambda _format: "20260101_000000")
    monkeypatch.setattr(Path, "exists", lambda _path: False)
    run_config = parse_config(config(tmp_path / "outputs"))
    paths = [create_run_directory(run_config, new_run_folder(run_config)).path for _ in range(3)]
    assert paths[0].name == "tiny_20260101_000000" and len(set(paths)) == 3
    assert all(path.name.startswith(paths[0].name) and (path / "configs").is_dir() for path in paths)
