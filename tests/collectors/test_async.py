"""Asynchronous collection: what it computes at any timing, what becomes of every rollout, how it ends."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refusals, refused
from damages import same, what_is_left
from host_tasks import Drift, Linear, Sleepy, Wrapped, nap
from tiny import EVALUATED, STEPS, tiny

from ejax.algorithms.ppo import PPOConfig, ppo_update
from ejax.collectors import AsyncCollector, HostCollector, Schedule, Share
from ejax.config import RunConfig, parse_config
from ejax.envs.host.pure_host import PureHostEnv
from ejax.optim import make_optimizer
from ejax.run import RunResult, train
from ejax.store.checkpoint import load_checkpoint
from ejax.training.build import build
from ejax.types import Params, TrainState, make_train_state

KEY = jax.random.key(11)
T, N = 5, 4
PPO = PPOConfig(batch_size=10, n_epochs=2)
OPTIMIZER = make_optimizer(PPO.optimizer)
POLICY = Linear()
PARAMS = POLICY.init(jax.random.key(1), None)
ONE_OLD = Schedule(max_staleness=1)


def start_state(policy: Linear) -> TrainState:
    return make_train_state(policy.init(jax.random.key(1), None), OPTIMIZER)


def update(state: TrainState, rollout: Any, index: int, policy: Linear) -> TrainState:
    _, key = jax.random.split(jax.random.fold_in(KEY, index))
    rollout = jax.device_put(rollout, jax.devices()[0])  # where the learner is
    return ppo_update(state, rollout, key, policy=policy, optimizer=OPTIMIZER, config=PPO)[0]


def as_it_is(env: Any) -> Any:
    return env


def collector(policy: Linear = POLICY, wrap: Any = as_it_is, groups: int = 1, **options: Any) -> HostCollector:
    envs = [wrap(PureHostEnv(Drift(), N // groups)) for _ in range(groups)]
    return HostCollector(policy, envs, **{"num_steps": T, "seed": 3} | options)


def background(schedule: Schedule = ONE_OLD, *args: Any, times: Any = None, **kwargs: Any) -> AsyncCollector:
    return AsyncCollector(collector(*args, **kwargs), KEY, schedule=schedule, **(times or {}))


def learn_beside(running: AsyncCollector, updates: int, policy: Linear, naps: float = 0.0) -> tuple[TrainState, list]:
    """Train asynchronously, and return the last state and every rollout."""
    state, rollouts = start_state(policy), []
    with running:
        running.start(state.params)
        for index in range(updates):
            nap(naps)
            collected = running.collect()
            assert collected is not None
            rollouts.append(collected.rollout)
            state = update(state, collected.rollout, index, policy)
            running.publish(state.params, index + 1)
    return state, rollouts


@cases(
    "schedule asked versions",
    (Schedule(max_staleness=2), [(k, 0, 9) for k in range(5)], [0, 0, 0, 1, 2]),
    (Schedule(max_staleness=2), [(5, 0, 2), (5, 4, 4)], [None, 4]),  # it waits; after a resume nothing is older
    (Schedule(max_staleness=2, free=True), [(3, 0, 3), (3, 0, 1), (4, 0, 1)], [3, 1, None]),
    (Schedule(max_staleness=2, recorded=(0, 0, 2)), [(0, 0, 5), (1, 0, 5), (2, 0, 5), (2, 0, 1)], [0, 0, 2, None]),
    ids=["fixed", "fixed at its ends", "free", "recorded"],
)
def test_a_schedule_has_a_version_for_each_rollout(schedule: Schedule, asked: list[Any], versions: list[Any]) -> None:
    assert [schedule.version(k, first=first, newest=newest) for k, first, newest in asked] == versions


def test_a_recorded_schedule_ends() -> None:
    with pytest.raises(IndexError, match="ends with rollout 2; no 3"):
        Schedule(max_staleness=2, recorded=(0, 0, 2)).version(3, first=0, newest=5)


@refusals(
    ({"max_staleness": -1}, "max_staleness", "got -1"),
    ({"recorded": (0, 2)}, "recorded[1]", "rollout 1 can have 0 to 1"),
    ({"max_staleness": 2, "recorded": (0, 0, 0, 0)}, "recorded[3]", "rollout 3 can have 1 to 3"),
)
def test_impossible_schedules_are_refused(given: dict[str, Any], key: str, word: str) -> None:
    refused(Schedule, **given, key=key, word=word)


def in_turn(updates: int, lag: int) -> tuple[TrainState, list]:
    """Compute what asynchronous collection must equal, on one thread: old parameters, written out by hand."""
    policy = Linear()
    state, rollouts = start_state(policy), []
    versions: list[Params] = [state.params]
    with collector() as rollout_maker:
        for index in range(updates):
            key, _ = jax.random.split(jax.random.fold_in(KEY, index))
            params = versions[max(0, index - lag)]
            rollouts.append(rollout_maker.collect(params, key, index=index).rollout)
            state = update(state, rollouts[-1], index, policy)
            versions.append(state.params)
    return state, rollouts


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_run_is_the_synchronous_program_with_old_parameters_whatever_the_timing(lag: int) -> None:
    """D2, D3, D5, D37: two runs with random sleeps in environment, policy and learner, bit for bit."""
    expected, rollouts = in_turn(8, lag)
    for naps in (0.0, 4e-3):
        policy = Linear(naps=naps / 2)
        state, seen = learn_beside(background(Schedule(lag), policy, Sleepy if naps else as_it_is), 8, policy, naps)
        chex.assert_trees_all_equal(state, expected)
        for index, (a, b) in enumerate(zip(seen, rollouts, strict=True)):
            assert (a.version == max(0, index - lag)).all()
            chex.assert_trees_all_equal((a.obs, a.action, a.log_prob, a.value), (b.obs, b.action, b.log_prob, b.value))


def test_a_recorded_schedule_repeats_a_free_run() -> None:
    free = background(Schedule(3, free=True), wrap=Sleepy)
    state, rollouts = learn_beside(free, 12, Linear(), naps=3e-3)
    lags = [index - version for index, version in enumerate(free.versions)]
    assert all(0 <= lag <= 3 for lag in lags)
    again = background(Schedule(3, recorded=tuple(free.versions)), wrap=Sleepy)
    repeated, its_rollouts = learn_beside(again, 12, Linear(), naps=1e-3)
    chex.assert_trees_all_equal(state, repeated)
    chex.assert_trees_all_equal(rollouts, its_rollouts)
    assert again.versions == free.versions


@pytest.mark.slow
def test_several_groups_and_timings_give_the_same_bits() -> None:
    runs = [learn_beside(background(wrap=wrap, groups=2), 5, Linear(), 2e-3) for wrap in (Sleepy, as_it_is)]
    chex.assert_trees_all_equal(*runs)


@pytest.mark.slow
def test_actor_and_learner_on_different_devices() -> None:
    device = jax.devices()[2]
    expected, _ = learn_beside(background(), 4, Linear())
    state, rollouts = learn_beside(background(share=Share(devices=[device])), 4, Linear())
    assert all(rollout.value.devices() == {device} for rollout in rollouts)
    chex.assert_trees_all_equal(state, expected)


def test_the_learner_may_donate_what_it_published() -> None:
    """D5: what is published is a copy."""
    donate = jax.jit(lambda params: jax.tree.map(lambda x: x + 1.0, params), donate_argnums=0)
    params = jax.tree.map(jnp.copy, PARAMS)
    with background(Schedule(1), wrap=Sleepy) as running:
        running.start(params)
        for index in range(6):
            assert running.collect() is not None
            params = donate(params)
            running.publish(params, index + 1)


def test_the_collector_waits_for_the_learner_and_loses_nothing() -> None:
    """D6, D19, D36: bounded, in order, each once."""
    running = background(Schedule(2, free=True))
    with running:
        running.start(PARAMS)
        deadline = time.monotonic() + 30
        while running.stats.queued < 3 and time.monotonic() < deadline:
            time.sleep(1e-3)
        time.sleep(0.05)
        assert (running.stats.begun, running.stats.queued) == (3, 3)  # 0, 1, 2 with version 0; 3 must wait
        seen = [running.collect() for _ in range(3)]
        assert not running.collector.lost_steps
        actions = [np.asarray(each.rollout.action) for each in seen if each is not None]
        assert len({each.tobytes() for each in actions}) == 3
        assert [each.facts["collector/staleness"] for each in seen if each is not None] == [0.0, 1.0, 2.0]
    stats = running.stats
    assert stats.begun == stats.delivered + stats.queued + stats.given_up == 3


def test_versions_are_published_one_by_one() -> None:
    with background() as running:
        running.start(PARAMS)
        refused(running.publish, PARAMS, 3, match="version 3 published after 0; publish one version after the other")


class Breaks(Wrapped):
    def before(self) -> None:
        if self.num_steps == 7:
            raise RuntimeError("the gripper is stuck")


def test_an_exception_ends_the_training_with_its_traceback_and_no_wait() -> None:
    """D33: the rollout that is complete is still delivered."""
    running = background(wrap=Breaks)
    with pytest.raises(RuntimeError, match="the gripper is stuck") as caught, running:
        running.start(PARAMS)
        assert running.collect() is not None
        running.collect()
    text = "".join(traceback.format_exception(caught.value))
    assert "in before" in text and "in the collecting thread, at rollout 1, step 3 of 5" in text
    assert running.stats.given_up == 1
    assert running.collector.lost_steps == 2 * N


def test_closing_stops_inside_a_rollout_and_leaves_no_thread() -> None:
    """D34, D35"""
    running = background(num_steps=100_000, times={"stop_timeout_s": 300.0})
    running.start(PARAMS)
    while running.collector.workers[0].num_steps < 3:
        time.sleep(1e-3)
    running.close()
    assert not running._thread.is_alive()
    assert running.stats.given_up == 1 and running.collector.lost_steps > 0
    refused(running.start, {}, match="was started before; make a new one", error=RuntimeError)
    refused(running.collect, match="the collector is closed", error=RuntimeError)


class Hangs(Wrapped):
    release: threading.Event

    def before(self) -> None:
        if self.num_steps == 2:
            self.release.wait(60)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_step_that_hangs_is_named_and_nobody_waits_for_it(groups: int) -> None:
    Hangs.release = threading.Event()
    running = background(wrap=Hangs, groups=groups, times={"env_timeout_s": 1.0, "stop_timeout_s": 0.2})
    where = r"at rollout 0, step 3 of 5, group \d: Hangs"
    with pytest.raises(TimeoutError, match=f"nothing happened for 1 s {where}") as caught, running:
        running.start(PARAMS)
        running.collect()
    assert "while closing the collector: not stopped within 0 s" in caught.value.__notes__[0]
    assert not any(group.closed for group in running.collector.groups)  # a thread is still inside
    Hangs.release.set()
    running._thread.join(10)
    assert not running._thread.is_alive()


@pytest.mark.parametrize("groups", [1, 2])
def test_no_environment_steps_while_paused(groups: int) -> None:
    """D39 too: what evaluates meanwhile is another environment, and there is no hidden state to share."""
    running = background(Schedule(1), wrap=Sleepy, groups=groups, num_steps=200)
    envs = running.collector.groups
    steps = lambda: [env.num_steps for env in envs if isinstance(env, Sleepy)]  # noqa: E731
    with running:
        running.start(PARAMS)
        for _ in range(5):
            before = sum(steps())
            while sum(steps()) < before + 5:
                time.sleep(1e-3)
            with running.paused():
                inside = steps()
                time.sleep(0.01)
                assert steps() == inside


def test_a_learner_wakes_when_the_rollout_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """D38: what is waited for is a notice of the thread, not the next look."""
    monkeypatch.setattr("ejax.collectors.background._POLL_S", 600.0)
    began = time.monotonic()
    with background(wrap=Sleepy) as running:
        running.start(PARAMS)
        assert running.collect() is not None
    assert time.monotonic() - began < 300.0


def test_an_interrupted_learner_does_not_wait() -> None:
    with background(wrap=Sleepy, num_steps=1000) as running:
        running.start(PARAMS)
        assert running.collect(lambda: True) is None


def test_a_collector_that_is_not_started_says_so() -> None:
    with background() as running, pytest.raises(RuntimeError, match="the collector is not started"):
        running.collect()


@pytest.mark.parametrize("seed", range(6))
def test_random_timings_end_with_everything_accounted_for(seed: int) -> None:
    """D31: publish, collect, pause and close at random moments, with steps that fail."""
    rng = random.Random(seed)

    class Wild(Sleepy):
        most_s = 5e-4

        def before(self) -> None:
            super().before()
            if rng.random() < 0.002:
                raise OSError("lost")

    schedule = Schedule(rng.randint(0, 3), free=rng.random() < 0.5)
    groups = rng.choice([1, 2])
    running = background(schedule, wrap=Wild, groups=groups)
    version = 0
    try:
        with running:
            running.start(PARAMS)
            for _ in range(rng.randint(0, 15)):
                if rng.random() < 0.3:
                    with running.paused():
                        pass
                assert running.collect() is not None
                version += 1
                running.publish(PARAMS, version)
    except OSError:
        pass
    stats = running.stats
    assert stats.begun == stats.delivered + stats.queued + stats.given_up
    assert stats.delivered == len(running.versions) <= version + 1
    assert all(0 <= index - each <= schedule.max_staleness for index, each in enumerate(running.versions))
    steps = sum(env.num_steps * env.num_envs for env in running.collector.groups if isinstance(env, Wild))
    assert steps == T * N * (stats.delivered + stats.queued) + running.collector.lost_steps
    assert not running._thread.is_alive()


def config(folder: Path, mode: str, updates: int = 8, **collector: Any) -> dict:
    saved = {"save_frequency_updates": 4, "keep_checkpoints": 100}
    return tiny(folder, **saved, iterations=updates, collector={"mode": mode, **collector})


def final_state(result: RunResult, run_config: RunConfig) -> Any:
    assert result.finished and result.latest_checkpoint_path is not None
    return load_checkpoint(result.latest_checkpoint_path, build(run_config).state)[0]


def versions(run: Path) -> list[int]:
    return json.loads((run / "schedule.json").read_text())["versions"]


@pytest.mark.slow
def test_a_killed_host_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    raw = config(tmp_path, "host", updates=12)
    raw["trainer"]["save_frequency_updates"] = 2
    train(parse_config(raw), run_dir=tmp_path / "whole")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    command = [sys.executable, "-m", "ejax.train", "--config", str(tmp_path / "config.json")]
    process = subprocess.Popen(
        [*command, "--run", str(tmp_path / "run")], stdout=subprocess.DEVNULL, env={**os.environ}
    )
    deadline = time.monotonic() + 120
    while not list((tmp_path / "run" / "checkpoints").glob("tiny_step_*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    resumed = train(parse_config(raw), resume="latest", run_dir=tmp_path / "run")
    assert resumed.finished and same(*(what_is_left(tmp_path / name, "tiny") for name in ("run", "whole")))


@pytest.mark.slow
def test_an_async_run_repeats_itself_and_tells_its_versions(tmp_path: Path) -> None:
    """D1, D9: chosen by the config; steps are those of all environments."""
    raw = config(tmp_path, "async", num_groups=2)
    first = train(parse_config(raw), run_dir=tmp_path / "first")
    second = train(parse_config(raw), run_dir=tmp_path / "second")
    assert first.finished and same(*(what_is_left(each.run_dir, "tiny") for each in (first, second)))
    assert versions(first.run_dir) == [0, 0, 1, 2, 3, 4, 5, 6]
    assert first.global_step == 8 * STEPS
    assert [entry["global_step"] for entry in first.train_history] == list(range(STEPS, 8 * STEPS + 1, STEPS))
    staleness = [entry["collector/staleness"] for entry in first.train_history]
    assert staleness == [0.0] + [1.0] * 7


@pytest.mark.slow
def test_a_resumed_async_run_says_what_is_not_exact_and_its_schedule_repeats_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = config(tmp_path, "async", max_staleness=2)
    raw["trainer"] |= {"console": True, "iterations": 5}
    train(parse_config(raw), run_dir=tmp_path / "run")
    capsys.readouterr()
    raw["trainer"]["iterations"] = 8
    resumed = train(parse_config(raw), resume=str(tmp_path / f"run/checkpoints/tiny_step_{4 * STEPS}"))
    assert "not exact: the first 2 rollouts after a resume are made by newer parameters" in capsys.readouterr().out
    assert versions(tmp_path / "run") == [0, 0, 0, 1, 4, 4, 4, 5]  # fixed to 2: the fifth would have had version 2
    raw["trainer"]["collector"]["replay_schedule"] = str(tmp_path / "run" / "schedule.json")
    repeated = train(parse_config(raw), run_dir=tmp_path / "again")
    assert versions(repeated.run_dir) == versions(tmp_path / "run")
    chex.assert_trees_all_equal(*(final_state(each, parse_config(raw)).train for each in (resumed, repeated)))


@pytest.mark.slow
def test_environments_that_cannot_be_saved_start_anew_and_are_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = config(tmp_path, "host", updates=2)
    raw["trainer"]["console"] = True
    raw["env"] = {"id": "gymnasium:Pendulum-v1", "cfg": {"max_episode_steps": 24}}
    train(parse_config(raw), run_dir=tmp_path / "run")
    raw["trainer"]["iterations"] = 5
    capsys.readouterr()
    result = train(parse_config(raw), resume="latest", run_dir=tmp_path / "run")
    assert "not exact: these environments cannot be saved, so new episodes start" in capsys.readouterr().out
    assert result.last_train_metrics["charts/num_episodes"] == 4
    assert result.last_train_metrics["charts/episode_length_avg_100"] == 24  # the 16 steps before are in none


@pytest.mark.slow
def test_several_learner_devices_agree_with_one(tmp_path: Path) -> None:
    raw = config(tmp_path, "async", updates=4)
    raw["trainer"] |= EVALUATED | {"eval_freq": 2 * STEPS}
    one = final_state(train(parse_config(raw), run_dir=tmp_path / "one"), parse_config(raw))
    raw["trainer"]["collector"] |= {"learner_devices": ["cpu:0", "cpu:1"], "actor_devices": ["cpu:3"]}
    two = final_state(train(parse_config(raw), run_dir=tmp_path / "two"), parse_config(raw))
    chex.assert_trees_all_close(one.train, two.train, rtol=1e-3, atol=1e-4)


COLLECTOR = "trainer.collector"
APG = ["algorithm={name: apg, cfg: {}}", "trainer.buffer_size=16"]
GRPO = ["algorithm={name: grpo, cfg: {batch_size: 16}}", "policy.name=actor_only", "policy.critic=null"]


@refusals(
    ([f"{COLLECTOR}.replay_schedule=nowhere.json"], f"{COLLECTOR}.replay_schedule", "'nowhere.json'"),
    ([f"{COLLECTOR}.actor_devices=[cpu:9]"], f"{COLLECTOR}.actor_devices", "'cpu:9'"),
    ([f"{COLLECTOR}.learner_devices=[cpu:0,cpu:1,cpu:2]"], f"{COLLECTOR}.learner_devices", "3 devices"),
    (APG, "algorithm.name", "with host environments: ppo"),
    ([*GRPO, f"{COLLECTOR}.num_groups=2"], f"{COLLECTOR}.num_groups", "group_size 4 must divide"),
)
def test_parts_that_do_not_go_together_are_refused(given: list[str], key: str, word: str, tmp_path: Path) -> None:
    refused(lambda: build(parse_config(config(tmp_path, "async"), given)), key=key, word=word)


def test_a_recorded_schedule_that_ends_before_the_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "schedule.json").write_text('{"versions": [0, 0, 1]}')
    given = ["trainer.iterations=4", f"{COLLECTOR}.replay_schedule={tmp_path}/schedule.json"]
    made = parse_config(config(tmp_path, "async"), given)
    refused(build, made, key=f"{COLLECTOR}.replay_schedule", word="3 rollouts")
