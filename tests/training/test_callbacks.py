"""Callbacks of a caller's: their events, stopping, and states that survive a kill."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from damages import same, what_is_left
from helpers.tiny import EVALUATED, NUM_ENVS, NUM_STEPS, STEPS, tiny
from kills import Killed

from ejax.collectors import HostStep
from ejax.config import parse_config
from ejax.run import Callback, RunResult, TrainingRun, train
from ejax.store.checkpoint import verify_checkpoint
from ejax.store.run_dir import RunDirectory

UPDATES = 6


def config(folder: Path, **trainer: Any) -> Any:
    saved = {"iterations": UPDATES, "save_frequency_updates": 2, **EVALUATED, "eval_freq": 3 * STEPS}
    return parse_config(tiny(folder, **saved | trainer))


class Recorder(Callback):
    """Writes down its events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.metrics: dict[str, Mapping[str, float]] = {}
        self.steps: list[HostStep] = []

    def on_start(self, run: TrainingRun) -> None:
        self.events.append(("start", run.update))

    def on_step(self, step: HostStep) -> None:
        self.steps.append(step)

    def on_rollout(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        self.events.append(("rollout", run.update))
        self.metrics["rollout"] = metrics

    def on_update(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        self.events.append(("update", run.update))
        self.metrics["update"] = metrics

    def on_evaluation(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        self.events.append(("evaluation", run.update))
        self.metrics["evaluation"] = metrics

    def on_save(self, run: TrainingRun, path: Path) -> None:
        assert (path / "meta.json").is_file()
        self.events.append(("best" if "_best_" in path.name else "save", run.update))

    def on_end(self, run: TrainingRun, result: RunResult) -> None:
        assert result.num_updates == run.update and int(run.state.update) == run.update
        self.events.append(("end", run.update))


class Counter(Callback):
    """Keeps a sum of everything it saw: any update missed or seen twice changes it."""

    def __init__(self) -> None:
        self.total, self.calls = 0.0, 0

    def on_update(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        self.total = 0.9 * self.total + metrics["train/loss"]
        self.calls += 1
        run.log({"own/total": self.total})

    def on_evaluation(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        self.total = 0.9 * self.total + metrics["eval/avg_reward"]

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "calls": self.calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total, self.calls = state["total"], state["calls"]


@pytest.mark.slow
def test_the_events_of_a_run_come_in_their_order(tmp_path: Path) -> None:
    seen = Recorder()
    train(config(tmp_path), run_dir=tmp_path / "run", callbacks=[seen])
    of_all = [event for event in seen.events if event[0] != "best"]
    expected: list[tuple[str, int]] = [("start", 0)]
    for update in range(1, UPDATES + 1):
        expected += [("rollout", update), ("update", update)]
        expected += [("save", update)] * (update % 2 == 0) + [("evaluation", update)] * (update % 3 == 0)
    assert of_all == [*expected, ("end", UPDATES)]
    assert seen.events.index(("best", 3)) == seen.events.index(("evaluation", 3)) + 1
    assert not any(tag.startswith(("train/", "time/")) for tag in seen.metrics["rollout"])
    assert seen.metrics["rollout"].items() < seen.metrics["update"].items()
    assert "train/loss" in seen.metrics["update"] and "eval/avg_reward" in seen.metrics["evaluation"]


@pytest.mark.slow
def test_a_callback_stops_a_run_which_can_go_on(tmp_path: Path) -> None:
    class Stopper(Callback):
        def on_update(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
            if metrics["train/loss"] < 1e9 and run.update == 2:
                run.stop()

    # all alike: the tests' compiler flags round a loop of one update otherwise
    one = config(tmp_path, updates_per_dispatch=1)
    stopped = train(one, run_dir=tmp_path / "run", callbacks=[Stopper()])
    assert not stopped.finished and stopped.num_updates == 3  # the one under way was finished
    again = train(one, run_dir=tmp_path / "run", resume="latest")
    whole = train(one, run_dir=tmp_path / "whole")
    assert again.finished and again.best_eval_value == whole.best_eval_value
    assert same(*(what_is_left(tmp_path / name, "tiny") for name in ("run", "whole")), log=True)


@pytest.mark.slow
@pytest.mark.parametrize("update", [3, 5])
def test_the_state_of_a_callback_survives_a_kill_bit_for_bit(update: int, tmp_path: Path) -> None:
    class Killer(Callback):
        def on_update(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
            if run.update == update:
                raise Killed

    with pytest.raises(Killed):
        train(config(tmp_path), run_dir=tmp_path / "run", callbacks=[Counter(), Killer()])
    resumed, whole = Counter(), Counter()
    train(config(tmp_path), run_dir=tmp_path / "run", resume="latest", callbacks=[resumed])
    train(config(tmp_path), run_dir=tmp_path / "whole", callbacks=[whole])
    assert (resumed.calls, resumed.total) == (whole.calls, whole.total) and whole.calls == UPDATES
    assert same(*(what_is_left(tmp_path / name, "tiny") for name in ("run", "whole")), log=True)
    states = [
        verify_checkpoint(RunDirectory(tmp_path / name, "tiny").periodic()[0])["callbacks"] for name in ("run", "whole")
    ]
    assert states[0] == states[1] == {"Counter": whole.state_dict()}


def test_what_a_callback_logs_is_in_the_log(tmp_path: Path) -> None:
    counter = Counter()
    train(config(tmp_path, enable_eval=False, eval_freq=0), run_dir=tmp_path / "run", callbacks=[counter])
    rows = [json.loads(line) for line in (tmp_path / "run/logs/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == UPDATES and rows[-1]["own/total"] == counter.total


def test_a_callback_whose_state_nobody_takes_back_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(config(tmp_path, iterations=1), run_dir=tmp_path / "run", callbacks=[Counter()])
    train(config(tmp_path, iterations=2), run_dir=tmp_path / "run", resume="latest")
    assert "the checkpoint has the state of callback Counter, which this call" in capsys.readouterr().err


def test_a_state_that_cannot_be_saved_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    class Unsavable(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": {1, 2}}

    seen = Recorder()
    with pytest.raises(ValueError, match=r"callback .*Unsavable: its state_dict cannot be saved.*x\.tolist\(\)"):
        train(config(tmp_path), run_dir=tmp_path / "run", callbacks=[seen, Unsavable()])
    assert seen.events == [("start", 0)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["host", "async"])
def test_steps_of_host_environments_are_seen(mode: str, tmp_path: Path) -> None:
    class Changes(Recorder):
        def on_step(self, step: HostStep) -> None:
            super().on_step(step)
            assert step.timestep.reward.shape == (NUM_ENVS // 2,)

    seen = Changes()
    collector = {"mode": mode, "num_groups": 2}
    raw = tiny(tmp_path, env="gymnasium:Pendulum-v1", collector=collector)
    train(parse_config(raw), run_dir=tmp_path / "run", callbacks=[seen])
    for group in range(2):
        steps = [step for step in seen.steps if step.group == group and step.update <= 2]
        assert [step.update for step in steps] == [1] * NUM_STEPS + [2] * NUM_STEPS
        for before, after in itertools.pairwise(steps):
            assert (after.obs == before.timestep.obs).all()


def test_environments_inside_the_program_have_no_steps_to_see(tmp_path: Path) -> None:
    seen = Recorder()
    train(config(tmp_path), run_dir=tmp_path / "run", callbacks=[seen])
    assert not seen.steps


class Namesake(Callback):
    """Logs under a tag that ejax has, too."""

    def on_update(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        run.log({"train/loss": 0.0})


def test_a_number_under_a_tag_that_ejax_has_gets_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(config(tmp_path, iterations=2), run_dir=tmp_path / "run", callbacks=[Namesake()])
    rows = [json.loads(line) for line in (tmp_path / "run/logs/metrics.jsonl").read_text().splitlines()]
    assert result.finished and all(row["own/train/loss"] == 0.0 != row["train/loss"] for row in rows[:2])
    assert capsys.readouterr().err.count("the number of that name is logged as own/train/loss") == 1
