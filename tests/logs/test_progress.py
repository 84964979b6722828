"""The counters of a run: what is best, what a checkpoint keeps of them, and what a resumed run takes over."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from case_tables import cases
from tiny import EVALUATED, tiny

from ejax.config import parse_config
from ejax.config.models import TrainerConfig
from ejax.logs.best import Best, improves
from ejax.run import train
from ejax.training.saver import Progress

TAG = "eval/avg_reward"


def best_of(mode: Any, values: list[float], broken: list[float]) -> Best | None:
    best = None
    for step, (value, episodes) in enumerate(zip(values, broken, strict=True)):
        if improves({TAG: value, "eval/nonfinite_episodes": episodes}, best, tag=TAG, mode=mode):
            best = Best(value, step)
    return best


@cases(
    "mode values broken expected",
    ("max", [5.0, math.nan, 9.0, math.inf, 9.0], [0.0] * 5, Best(9.0, 2)),
    ("min", [5.0, 3.0, 9.0, -math.inf, 2.0], [0.0] * 5, Best(2.0, 4)),
    ("max", [5.0, 9.0, 6.0, 7.0], [0.0, 1.0, 0.0, 3.0], Best(6.0, 2)),
    ("max", [math.nan], [0.0], None),
)
def test_the_best_is_the_first_extreme_of_the_evaluations_that_are_finite_throughout(
    mode: str, values: list[float], broken: list[float], expected: Best | None
) -> None:
    assert best_of(mode, values, broken) == expected


def test_of_equal_values_the_one_with_the_higher_reward_is_best() -> None:
    tag, first = "eval/success_rate", Best(1.0, 10, 5.0)

    def better(success: float, reward: float, best: Best = first) -> bool:
        return improves({tag: success, TAG: reward}, best, tag=tag, mode="max")

    assert better(1.0, 5.5) and not better(1.0, 5.0) and not better(1.0, 4.5)
    assert not better(0.5, 9.0) and not better(1.0, math.nan)
    assert not better(1.0, 9.0, Best(1.0, 10))  # of a checkpoint that did not keep the reward


def test_what_a_checkpoint_keeps_is_what_the_next_run_begins_with() -> None:
    trainer = TrainerConfig(exp_name="tiny", eval_seed=0)
    kept = Progress(4.5, 30, 2.0, {TAG: 4.0}, last_evaluated=7, skipped_updates=1.5)
    meta = asdict(kept)
    meta["config"] = {"trainer": trainer.model_dump()}
    assert Progress.of(meta, trainer) == (kept, [])
    assert Progress.of({}, trainer) == (Progress(), [])
    del meta["best_eval_step"], meta["best_eval_reward"]  # as earlier checkpoints were
    assert Progress.of(meta, trainer)[0].best == Best(4.5, None)


@pytest.mark.slow
def test_a_run_that_watches_another_metric_from_now_on_does_not_compare_it_with_the_former(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = tiny(tmp_path, **EVALUATED, save_frequency_updates=2, console=True)
    first = train(parse_config(raw), run_dir=tmp_path / "run")
    raw["trainer"] |= {"iterations": 3, "best_eval_metric": "eval/avg_length", "best_eval_mode": "min"}
    second = train(parse_config(raw), resume="latest", run_dir=tmp_path / "run")
    assert first.best_eval_value == max(entry[TAG] for entry in first.eval_history)
    (evaluation,) = second.eval_history
    assert second.best_eval_value == evaluation["eval/avg_length"] and second.best_checkpoint_path is not None
    assert "the best so far, the max of eval/avg_reward, is not compared" in capsys.readouterr().out
