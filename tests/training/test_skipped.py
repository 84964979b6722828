"""Updates that were not applied: the messages about them, what a run of them ends with, what is never kept. And other
things that a run is warned of while it trains."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from case_tables import cases, refused
from failing_env import Failing
from tiny import EVALUATED, NUM_STEPS, STEPS, tiny

from ejax.config import parse_config
from ejax.run import train
from ejax.runtime.stopwatch import Stopwatch
from ejax.schema.registry import ENVS
from ejax.train import main
from ejax.training.reporter import MetricReporter, NonFiniteUpdateError, refuse_nonfinite, skip_notes, skipped_fraction


@pytest.fixture(autouse=True)
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVS, "Failing", Failing)


def raw(folder: Path, *, updates: int = 4, env: dict | None = None, trainer: dict | None = None, **cfg: object) -> dict:
    trainer = {"iterations": updates, "save_frequency_updates": 1, **(trainer or {})}
    return tiny(folder, "Failing", env_cfg=env or {}, ppo=cfg, **trainer)


def command(folder: Path, config: dict, *more: str) -> int:
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return main(["--config", str(file), "--run", str(folder / "run"), "--device", "cpu", *more])


def test_the_part_of_an_update_that_was_skipped() -> None:
    assert skipped_fraction({"train/loss": 1.0}) == 0.0
    assert skipped_fraction({"train/skipped_fraction": 0.25, "train/skipped_minibatches": 3.0}) == 0.25
    assert skipped_fraction({"train/skipped_fraction": 0.25, "train/skipped_update": 1.0}) == 1.0  # SHAC
    assert skip_notes(7, {"train/skipped_minibatches": 0.0, "train/skipped_update": 0.0}) == []
    (note,) = skip_notes(7, {"train/skipped_minibatches": 3.0})
    assert note == "update 7: skipped_minibatches 3, loss, gradient or step were not finite"
    (note,) = skip_notes(7, {"train/skipped_update": 1.0, "train/skipped_excessive_gradient": 1.0})
    assert "max_grad_norm_before_clip" in note


NAN = float("nan")


@cases(
    "metrics text",
    ({"loss": NAN, "grad_norm": NAN, "actor_loss": NAN}, r"non-finite loss and gradient \(actor_loss\);"),
    ({"loss": 1.0, "grad_norm": float("inf"), "skipped_minibatches": 1.0}, "non-finite gradient;"),
    ({"loss": 1.0, "grad_norm": 1.0}, "non-finite step of the optimizer;"),
    ({"loss": 1.0, "grad_norm": 1.0, "value_loss": NAN}, "non-finite critic's loss;"),
)
def test_a_refusal_says_in_one_line_what_was_not_finite_and_what_to_do(metrics: dict, text: str) -> None:
    told = {f"train/{name}": x for name, x in metrics.items()} | {"train/skipped_fraction": 0.5, "charts/x": NAN}
    with pytest.raises(NonFiniteUpdateError, match=f"update 7 gave a {text}") as caught:
        refuse_nonfinite(7, told, Path("RUN/checkpoints/tiny_step_96"))
    message = str(caught.value)
    assert "last checkpoint: RUN/checkpoints/tiny_step_96" in message and "learning_rate" in message
    assert "\n" not in message and len(message) < 600
    refused(refuse_nonfinite, 7, told, None, match="last checkpoint: none", error=NonFiniteUpdateError)


def test_a_sound_update_and_one_skipped_on_purpose_are_not_refused() -> None:
    refuse_nonfinite(7, {"train/loss": 1.0, "train/skipped_fraction": 0.0}, None)
    excessive = {"train/loss": 1.0, "train/skipped_update": 1.0, "train/skipped_excessive_gradient": 1.0}
    refuse_nonfinite(7, excessive, None)


@pytest.mark.slow
def test_a_run_that_hardly_learned_says_so_and_does_not_end_as_if_all_were_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, raw(tmp_path, env={"sound": 1})) == 3
    told = capsys.readouterr()
    assert "[summary] skipped updates: 4 of 4, not finite" in told.out
    assert "ejax train: 4 of 4 updates were skipped" in told.err and "learning_rate" in told.err
    assert "Traceback" not in told.err

    # of these eight updates half are sound, as every second rollout is; the count goes on where a run is resumed
    folder = tmp_path / "half"
    folder.mkdir()
    half = raw(folder, updates=2, env={"sound": NUM_STEPS + 1})
    assert command(folder, half) == 0
    half["trainer"]["iterations"] = 8
    assert command(folder, half, "--resume", "latest") == 0
    assert "[summary] skipped updates: 4 of 8, not finite" in capsys.readouterr().out


@pytest.mark.slow
def test_a_sound_run_says_nothing_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(tmp_path, raw(tmp_path)) == 0
    assert "skipped updates" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_training_that_does_not_skip_ends_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first update is sound; with several minibatches a mean over the sound ones hid the others."""
    assert command(tmp_path, raw(tmp_path, env={"sound": NUM_STEPS + 1}, skip_nonfinite_updates=False)) == 3
    told = capsys.readouterr().err
    last = tmp_path / "run" / "checkpoints" / f"tiny_step_{STEPS}"
    assert told.startswith("ejax train: update 2 gave a non-finite loss and gradient (")
    assert f"last checkpoint: {last}" in told and [*last.parent.iterdir()] == [last]  # none of the failure
    assert "Traceback" not in told and told.count("\n") == 1


@pytest.mark.slow
def test_no_evaluation_with_a_broken_episode_is_the_best(tmp_path: Path) -> None:
    """The environment says success 1 and a finite return; what it shows is infinite at the end."""
    for seen, best in ((1000, 1.0), (2 * NUM_STEPS, None)):
        trainer = EVALUATED | {"best_eval_metric": "eval/success_rate"}
        result = train(parse_config(raw(tmp_path, env={"seen": seen}, trainer=trainer)), run_dir=tmp_path / str(seen))
        broken = 0.0 if best else 2.0
        assert [entry["eval/nonfinite_episodes"] for entry in result.eval_history] == [broken] * 4
        assert [entry["eval/success_rate"] for entry in result.eval_history] == [best or 0.0] * 4
        assert result.best_eval_value == best and (result.best_checkpoint_path is None) == (best is None)
        assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(result.params))


class AlarmLog:
    """A log that keeps its alarms."""

    def __init__(self) -> None:
        self.alarms: list[str] = []

    def alarm(self, text: str) -> None:
        self.alarms.append(text)

    def write(self, *args: Any) -> None:
        pass


def reported(*updates: dict[str, float], schedule: str = "fixed") -> list[str]:
    """Return the alarms of a run with these metrics, each of an evaluation or else of an update."""
    log, progress = AlarmLog(), SimpleNamespace(best=None)
    reporter = MetricReporter(log, progress, Stopwatch(), jax.devices()[0], None)  # type: ignore[arg-type]
    for i, metrics in enumerate(updates):
        cadence = SimpleNamespace(logs=lambda update: True)
        run: Any = SimpleNamespace(update=i, step=100 * i, steps_per_s=1.0, cadence=cadence, extra={})
        run.config = SimpleNamespace(algorithm=SimpleNamespace(cfg=SimpleNamespace(schedule=schedule)))
        evaluated = any(tag.startswith("eval/") for tag in metrics)
        (reporter.on_evaluation if evaluated else reporter.on_update)(run, metrics)
    return log.alarms


def test_a_success_that_exploration_makes_is_told_once() -> None:
    sampled, poor, good = {"charts/success_rate_avg_100": 0.72}, {"eval/success_rate": 0.01}, {"eval/success_rate": 0.7}
    (text,) = reported(sampled, poor, sampled, poor)
    assert text.startswith("step 100: sampled actions succeed in 0.72, the policy's mode") and "use it, 0.01" in text
    assert "exploration does a part of the work" in text and "policy.initial_log_std" in text
    assert len(reported(sampled, poor, sampled, good, sampled, poor)) == 2  # they agreed between
    assert "the noise of exploration costs the rest" in reported({"charts/success_rate_avg_100": 0.2}, good)[0]
    assert not reported(sampled, good) and not reported({}, poor)  # nothing to compare with


def test_a_return_that_exploration_costs_is_told_where_two_evaluations_say_so() -> None:
    sampled, first, later = {"charts/episode_reward_avg_100": 2.0}, {"eval/avg_reward": 0.0}, {"eval/avg_reward": 10.0}
    (text,) = reported(sampled, first, later, later, later)
    assert text.startswith("step 300: sampled actions return 2,") and "use it, 10: the noise of exploration" in text
    assert not reported(sampled, first, later)
    assert not reported(sampled, first, later, sampled | {"charts/episode_reward_avg_100": 9.0}, later, later)


@cases(
    "limited schedule advice",
    (10, "adaptive", ()),
    (11, "adaptive", ("or n_epochs, or use schedule=adaptive_per_update",)),
    (11, "adaptive_per_update", ("desired_kl or n_epochs",)),
)
def test_a_learning_rate_that_is_mostly_at_a_limit_is_told_once(
    limited: int, schedule: str, advice: tuple[str, ...]
) -> None:
    alarms = reported(*({"train/rate_at_limit": float(i % 20 < limited)} for i in range(60)), schedule=schedule)
    for text, cure in zip(alarms, advice, strict=True):
        assert "after 11 of 11 updates" in text and cure in text
