"""Report a finished run's best checkpoint and its last in episodes that chose neither."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damages import same, what_is_left
from tiny import EVALUATED, tiny

from ejax.config import parse_config
from ejax.numerics.finite import NONFINITE_EPISODES
from ejax.play.saved_policy import evaluate_run
from ejax.population.loop import train_population
from ejax.report.runs import Run
from ejax.run import RunResult, train
from ejax.train import main
from ejax.training.evaluators import DeviceEvaluator, evaluate_fresh, fresh_seeds, read_fresh
from ejax.types import Metrics, Params

MEASURED = ("eval/avg_reward", "eval/avg_length", "eval/success_rate")


def trained(folder: Path, **changes: Any) -> RunResult:
    return train(parse_config(tiny(folder, **EVALUATED | {"iterations": 3} | changes)))


def same_training(*runs: Path) -> bool:
    return same(*(what_is_left(run, "tiny") for run in runs), log=True)


def played(run: Path, facts: dict[str, Any], member: int | None = None) -> dict[str, Any]:
    """Figures of ``ejax evaluate`` in the same episodes."""
    checkpoint, (seed,) = facts["checkpoint"], facts["seeds"]
    again = evaluate_run(run, member=member, checkpoint=checkpoint, num_episodes=2, num_envs=2, seed=seed)
    return {tag: again[tag] for tag in MEASURED if tag in again}


@pytest.mark.slow
@pytest.mark.parametrize("env", ["PointMassRL", "gymnasium:Pendulum-v1"])
def test_best_and_last_are_played_in_episodes_of_their_own(env: str, tmp_path: Path) -> None:
    result = trained(tmp_path, env=env)
    found = read_fresh(result.run_dir)
    assert found == result.fresh_eval_metrics and [*found] == ["best", "last"]
    for which, checkpoint in (("best", result.best_checkpoint_path), ("last", result.latest_checkpoint_path)):
        facts = found[which]
        assert facts["checkpoint"] == str(checkpoint) and facts["episodes"] == 2
        assert played(result.run_dir, facts).items() <= facts.items()
        assert facts["eval/avg_reward"] not in [row["eval/avg_reward"] for row in result.eval_history]


@pytest.mark.slow
def test_training_and_its_evaluations_have_the_same_numbers_with_and_without(tmp_path: Path) -> None:
    on, off = (trained(tmp_path / name, final_eval_episodes=count) for name, count in (("on", 4), ("off", None)))
    assert same_training(on.run_dir, off.run_dir) and on.best_eval_value == off.best_eval_value
    assert on.fresh_eval_metrics and not off.fresh_eval_metrics and not read_fresh(off.run_dir)


def test_a_run_without_evaluation_plays_none(tmp_path: Path) -> None:
    assert not trained(tmp_path, enable_eval=False, final_eval_episodes=10).fresh_eval_metrics


def test_episodes_are_rounded_up_to_whole_evaluations_whose_mean_counts() -> None:
    trainer = parse_config(tiny(**EVALUATED, final_eval_episodes=5)).trainer
    seeds = fresh_seeds(trainer)
    assert len(seeds) == len({*seeds, trainer.seed, trainer.eval_seed}) - 2 == 3
    found = evaluate_fresh([1, 2, 6], lambda seed: {"eval/avg_reward": np.float32(seed), NONFINITE_EPISODES: 1})
    assert found == {"eval/avg_reward": 3.0, NONFINITE_EPISODES: 3}


def test_the_last_checkpoint_is_the_best_where_it_does_better_in_the_same_fresh_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, last_better = DeviceEvaluator.begin, [True]

    def played_otherwise(self: DeviceEvaluator, params: Params, seed: int | None = None) -> Callable[[], Metrics]:
        """Begin an evaluation that is worse than the one before it; in fresh episodes the last does better or worse."""
        count[seed is None] += 1
        value = -count[True] if seed is None else float(count[False] * (1 if last_better[0] else -1))
        return lambda: begin(self, params, seed)() | {"eval/avg_reward": np.float32(value)}

    monkeypatch.setattr(DeviceEvaluator, "begin", played_otherwise)
    for last_better[0] in (True, False):
        count = {True: 0, False: 0}
        result = trained(tmp_path / str(last_better[0]))
        best, last = result.best_checkpoint_path, result.latest_checkpoint_path
        assert best is not None and last is not None
        last_step = int(last.name.rpartition("_")[2])
        assert (int(best.name.rpartition("_")[2]) == last_step) == last_better[0] and best.is_dir()
        assert result.best_eval_value == (-count[True] if last_better[0] else -1)
        assert result.fresh_eval_metrics["best"]["eval/avg_reward"] == (2 if last_better[0] else -1)
        reported = Run(result.run_dir)
        assert reported.best is not None and reported.best.step == int(best.name.rpartition("_")[2])
        assert reported.fresh("best") == (2, 2.0 if last_better[0] else -1.0)


@pytest.mark.slow
def test_a_run_killed_while_it_plays_them_plays_them_when_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, begin = trained(tmp_path / "whole"), DeviceEvaluator.begin

    def kill(self: DeviceEvaluator, params: Params, seed: int | None = None) -> Callable[[], Metrics]:
        if seed is not None:
            raise KeyboardInterrupt
        return begin(self, params)

    config = parse_config(tiny(tmp_path, **EVALUATED, iterations=3))
    with monkeypatch.context() as patch:
        patch.setattr(DeviceEvaluator, "begin", kill)
        with pytest.raises(KeyboardInterrupt):
            train(config, run_dir=tmp_path / "run")
    assert not read_fresh(tmp_path / "run")
    resumed = train(config, run_dir=tmp_path / "run", resume="latest")
    assert same_training(resumed.run_dir, whole.run_dir)
    for which in ("best", "last"):
        assert {**resumed.fresh_eval_metrics[which], "checkpoint": ""} == {
            **whole.fresh_eval_metrics[which],
            "checkpoint": "",
        }


@pytest.mark.slow
def test_a_damaged_best_checkpoint_is_told_and_the_last_one_stands_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = trained(tmp_path)
    best, last = result.best_checkpoint_path, result.latest_checkpoint_path
    assert best is not None and last is not None
    (best / "meta.json").write_text("{}")
    config = parse_config(tiny(tmp_path, **EVALUATED, iterations=3))
    resumed = train(config, run_dir=result.run_dir, resume="latest")
    assert resumed.finished and resumed.fresh_eval_metrics["best"]["checkpoint"] == str(last)
    assert "the last checkpoint replaces it" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [False, True])
def test_each_member_of_a_population_is_played(distributed: bool, tmp_path: Path) -> None:
    given = tiny(tmp_path, **EVALUATED, iterations=4, distributed=distributed)
    config = parse_config({**given, "population": {"seeds": 2}})
    result = train_population(config)
    for i in range(2):
        found = read_fresh(result.run_dir / "members" / str(i))
        assert [*found] == ["best", "last"]
        assert played(result.run_dir, found["best"], i).items() <= found["best"].items()


def test_the_summary_has_them_beside_the_maximum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tiny(tmp_path, **EVALUATED)))
    assert main(["--config", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("[summary] best eval/avg_reward: "))
    assert lines[place + 1].startswith("[summary] best checkpoint over 2 fresh episodes: eval/avg_reward ")
    assert lines[place + 2].startswith("[summary] last checkpoint over 2 fresh episodes: eval/avg_reward ")


@pytest.mark.slow
def test_evaluations_with_other_overrides_have_files_of_their_own(tmp_path: Path) -> None:
    run = trained(tmp_path).run_dir
    given = ["env.cfg.dt=0.05", "env.cfg.dt=0.06", "env.cfg={dt: 0.05}", "env.cfg={dt:  0.05}"]
    reports = [evaluate_run(run, [each], num_episodes=2, num_envs=2)["report"] for each in given]
    reports += [evaluate_run(run, num_episodes=2, num_envs=2, samples=samples)["report"] for samples in (False, True)]
    assert len({*reports}) == len(given) + 2
