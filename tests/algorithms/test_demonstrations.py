"""Demonstrations beside the replay buffer: their transitions, their part of a minibatch, runs with them."""

import itertools
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import demonstrated_points
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from damages import same, what_is_left
from tiny import tiny_sac

from ejax.algorithms.demonstrations import DemonstrationConfig, draw_minibatch
from ejax.algorithms.off_policy import OffPolicyState
from ejax.algorithms.replay_buffer import Replay, ReplayConfig, init_replay
from ejax.config import ConfigError, parse_config
from ejax.data.lerobot.write import EpisodeWriter
from ejax.data.samplers import attempt_seeds
from ejax.data.task import Episode
from ejax.run import train
from ejax.store.checkpoint import load_checkpoint, save_checkpoint
from ejax.training.build import build
from ejax.training.warm_start import start_from_policy, start_from_run

COUNT = 24
GAMMA = 0.9
POINTS: dict[str, Any] = {"num_transitions": COUNT, "task": "demonstrated_points:Points", "seed": 3}


def episodes(count: int, **task: Any) -> list[Episode]:
    """List the first episodes that a run gets."""
    points = demonstrated_points.Points(**task)
    made = (points.generate(seed) for _, seed in attempt_seeds(POINTS["seed"]))
    return list(itertools.islice((each for each in made if isinstance(each, Episode)), count))


def transitions(episode: Episode, n_step: int) -> list[tuple[Any, ...]]:
    """Make an episode's transitions one by one. The last step counts where it ended the task."""
    obs, action, reward = (np.asarray(episode.frames[name]) for name in ("obs", "actions", "rewards"))
    last = len(obs) - 1 if episode.terminated else len(obs) - 2
    found: list[tuple[Any, ...]] = []
    for t in range(last + 1):
        if np.isnan(reward[t]):
            continue
        total, end = 0.0, t
        for k in range(n_step):
            if t + k > last or np.isnan(reward[t + k]):
                break
            total, end = total + GAMMA**k * reward[t + k], t + k
        ended = episode.terminated and end == len(obs) - 1
        following = obs[end] if ended else obs[end + 1]
        found.append((obs[t], action[t], total, following, 0.0 if ended else GAMMA ** (end - t + 1)))
    return found


def first_state(n_step: int = 1, name: str = "sac", **changes: Any) -> tuple[OffPolicyState, list[str]]:
    wanted = {"replay": {"capacity": 80, "n_step": n_step}, "gamma": GAMMA, "demonstrations": POINTS | changes}
    raw = tiny_sac(sac=wanted)
    if name == "flash_sac":
        raw["policy"] = {"name": "flash_q", "cfg": {"actor_width": 6, "critic_width": 6}, "squash_actions": True}
        raw["algorithm"]["name"] = name
    config = parse_config(raw)
    state, notes = start_from_policy(build(config), config)
    return state.own, notes


@pytest.mark.slow
@pytest.mark.parametrize(("n_step", "broken_at"), [(1, None), (1, 2), (3, 2)])
def test_the_rows_are_the_transitions_of_successful_episodes(n_step: int, broken_at: int | None) -> None:
    own, _ = first_state(n_step, task_cfg={} if broken_at is None else {"broken_at": broken_at})
    expected = [x for each in episodes(4, broken_at=broken_at) for x in transitions(each, n_step)][:COUNT]
    rows, columns = own.demonstrations.rows, [np.stack(x) for x in zip(*expected, strict=True)]
    for name, column in zip(("obs", "action", "reward", "next_obs", "discount"), columns, strict=True):
        np.testing.assert_allclose(np.asarray(getattr(rows, name))[0], column, rtol=1e-6, err_msg=name)
    assert own.demonstrations.size.tolist() == [COUNT]
    assert own.replay.size.tolist() == [0]


@pytest.mark.slow
def test_a_folder_gives_the_rows_of_the_task_that_was_recorded(tmp_path: Path) -> None:
    record(tmp_path / "kept")
    played, notes = first_state()
    read, _ = first_state(task=None, folder=str(tmp_path / "kept"))
    jax.tree.map(np.testing.assert_array_equal, played.demonstrations, read.demonstrations)
    returns = np.mean([each.frames["rewards"].sum() for each in episodes(4)])
    assert f"of 4 episodes with a mean return {returns:.4g}" in notes[0]


def record(folder: Path, without: str = "") -> None:
    spec = demonstrated_points.Points().spec()
    spec = replace(spec, frames={path: field for path, field in spec.frames.items() if path != without})
    with EpisodeWriter(folder, spec, fps=60) as writer:
        for each in episodes(4):
            frames = {path: x for path, x in each.frames.items() if path != without}
            writer.append(replace(each, frames=frames), "reach the goal")


def ring(first: float, num_strata: int) -> Replay:
    empty = init_replay(ReplayConfig(capacity=5), jnp.zeros((2, 3)), jnp.zeros((2, 2)), num_strata=num_strata)
    reward = first + jnp.arange(num_strata * 5.0).reshape(num_strata, 5)
    return replace(empty, rows=replace(empty.rows, reward=reward), size=jnp.full(num_strata, 5))


@pytest.mark.slow
@pytest.mark.parametrize(("share", "num_strata", "rows"), [(0.5, 1, 4), (0.25, 1, 2), (0.5, 2, 4), (0.7, 1, 6)])
def test_the_share_of_each_stratums_rows_is_demonstrated(share: float, num_strata: int, rows: int) -> None:
    own, demonstrated = ring(0.0, num_strata), ring(100.0, num_strata)
    wanted = DemonstrationConfig(num_transitions=5, task="PushCubeExpert", share=share)
    batch = draw_minibatch(own, demonstrated, jax.random.key(0), 8, wanted)
    reward = np.asarray(batch.reward).reshape(num_strata, -1)
    each = rows // num_strata
    assert (reward[:, -each:] >= 100.0).all()
    assert (reward[:, :-each] < 100.0).all()
    strata = reward % 100.0 // 5.0
    np.testing.assert_array_equal(strata, np.arange(num_strata)[:, None] * np.ones_like(strata))


def test_both_parts_of_minibatches_are_uniform() -> None:
    wanted = DemonstrationConfig(num_transitions=5, task="PushCubeExpert")
    draw = jax.jit(partial(draw_minibatch, batch_size=8000, wanted=wanted))
    drawn = np.asarray(draw(ring(0.0, 1), ring(5.0, 1), jax.random.key(1)).reward)
    counts = np.bincount(drawn.astype(int), minlength=10)
    assert np.abs(counts - 800).max() < 5 * np.sqrt(800)


@pytest.mark.slow
def test_the_scale_of_flash_sacs_rewards_is_that_of_the_demonstrations() -> None:
    own, _ = first_state(name="flash_sac")
    returns = []
    for each in episodes(4):
        running = 0.0
        rewards = np.asarray(each.frames["rewards"])[: None if each.terminated else -1]
        for reward in rewards:
            running = GAMMA * running + reward
            returns.append(running)
    np.testing.assert_allclose(own.extra.largest, np.abs(returns).max(), rtol=1e-5)
    np.testing.assert_allclose(own.extra.returns.moments[0], len(returns))
    np.testing.assert_allclose(own.extra.returns.moments[1][0], np.mean(returns), rtol=1e-5)
    assert own.extra.returns.discounted.shape == (4,)


def with_config(wanted: dict[str, Any] | None, name: str = "sac") -> Any:
    raw = tiny_sac(sac={"demonstrations": wanted}, iterations=4)
    if name == "flash_sac":
        raw["policy"] = {"name": "flash_q", "cfg": {"actor_width": 6, "critic_width": 6}, "squash_actions": True}
        raw["algorithm"]["name"] = name
    config = parse_config(raw)
    parts = build(config)
    return config, parts, start_from_policy(parts, config)[0]


OTHERS = POINTS | {"seed": 9}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "now", "num_notes"),
    [(None, POINTS, 1), (POINTS, None, 1), (POINTS, OTHERS, 2), (POINTS, POINTS | {"num_transitions": 9}, 2)],
)
def test_a_fork_has_the_demonstrations_of_its_own_config(
    before: dict[str, Any] | None, now: dict[str, Any] | None, num_notes: int, tmp_path: Path
) -> None:
    theirs, _, state = with_config(before)
    replay = replace(state.own.replay, size=state.own.replay.size + 7)
    state = replace(state, own=replace(state.own, replay=replay))
    checkpoint = save_checkpoint(tmp_path, "theirs", state, {"config": theirs.to_dict()})
    config, parts, fresh = with_config(now)
    forked, notes = start_from_run(checkpoint, parts, config)
    assert len(notes) == 1 + num_notes
    assert forked.own.replay.size.tolist() == [7]
    if now is None:
        assert forked.own.demonstrations is None
        return
    rows = forked.own.demonstrations.rows
    jax.tree.map(np.testing.assert_array_equal, rows, fresh.own.demonstrations.rows)
    again = save_checkpoint(tmp_path, "ours", forked, {"config": config.to_dict()}, previous=checkpoint)
    saved, _ = load_checkpoint(again, parts.state)
    jax.tree.map(np.testing.assert_array_equal, saved.own.demonstrations.rows, rows)  # none linked to the others


def test_a_fork_with_another_share_keeps_the_demonstrations(tmp_path: Path) -> None:
    theirs, _, state = with_config(POINTS)
    rows = jax.tree.map(lambda x: x + 1.0, state.own.demonstrations.rows)  # not those that would be played again
    state = replace(state, own=replace(state.own, demonstrations=replace(state.own.demonstrations, rows=rows)))
    checkpoint = save_checkpoint(tmp_path, "theirs", state, {"config": theirs.to_dict()})
    config, parts, _ = with_config(POINTS | {"share": 0.25})
    forked, notes = start_from_run(checkpoint, parts, config)
    assert len(notes) == 1
    jax.tree.map(np.testing.assert_array_equal, forked.own.demonstrations, state.own.demonstrations)


@pytest.mark.slow
def test_a_fork_of_flash_sac_adds_their_returns_to_its_own(tmp_path: Path) -> None:
    theirs, _, state = with_config(None, "flash_sac")
    returns = replace(state.own.extra.returns, moments=(jnp.float32(5.0), jnp.full(1, -1.0), jnp.full(1, 2.0)))
    state = replace(state, own=replace(state.own, extra=replace(state.own.extra, returns=returns)))
    checkpoint = save_checkpoint(tmp_path, "theirs", state, {"config": theirs.to_dict()})
    config, parts, fresh = with_config(POINTS, "flash_sac")
    forked, _ = start_from_run(checkpoint, parts, config)
    (count, mean, _), (alone, its_mean, _) = (x.own.extra.returns.moments for x in (forked, fresh))
    assert float(count) == 5.0 + float(alone)
    np.testing.assert_allclose(mean, (-5.0 + alone * its_mean) / count, rtol=1e-5)


@pytest.mark.slow
def test_a_forked_run_with_demonstrations_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    raw = tiny_sac(save_frequency_updates=1, iterations=2)
    first = train(parse_config(raw), run_dir=tmp_path / "first").latest_checkpoint_path
    raw = tiny_sac(sac={"demonstrations": POINTS}, save_frequency_updates=1, iterations=4)
    train(parse_config(raw), run_dir=tmp_path / "whole", fork=first)
    short = raw | {"trainer": raw["trainer"] | {"iterations": 3}}
    train(parse_config(short), run_dir=tmp_path / "run", fork=first)
    train(parse_config(raw), run_dir=tmp_path / "run", resume="latest")
    assert same(*(what_is_left(tmp_path / name, "tiny") for name in ("run", "whole")))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["device", "host", "async"])
def test_a_run_that_goes_on_without_the_folder_has_the_bits_of_one_that_was_never_stopped(
    mode: str, tmp_path: Path
) -> None:
    record(tmp_path / "kept")
    wanted = {**POINTS, "task": None, "folder": str(tmp_path / "kept")}
    collector = {"mode": mode} | ({"max_staleness": 0} if mode == "async" else {})
    raw = tiny_sac(sac={"demonstrations": wanted}, save_frequency_updates=2, iterations=4, collector=collector)
    whole = train(parse_config(raw), run_dir=tmp_path / "whole")
    train(parse_config(raw | {"trainer": raw["trainer"] | {"iterations": 2}}), run_dir=tmp_path / "run")
    shutil.rmtree(tmp_path / "kept")
    train(parse_config(raw), resume="latest", run_dir=tmp_path / "run")
    assert same(*(what_is_left(tmp_path / name, "tiny") for name in ("run", "whole")))
    assert np.isfinite([row["train/critic_loss"] for row in whole.train_history[2:]]).all()


@pytest.mark.parametrize(
    ("changes", "key", "text"),
    [
        ({"task": None}, "", "needs a task that demonstrates, or a folder of episodes"),
        ({"folder": "there"}, "", "set one of the two"),
        ({"share": 0.01}, ".share", "0 rows of algorithm.cfg.batch_size 8; both parts need at least one"),
        ({"task": None, "folder": "nowhere"}, ".folder", "nowhere"),
        ({"task_cfg": {"fails": True}}, ".task", "in 100 attempts in a row"),
        ({"task_cfg": {"speed": 1}}, ".task_cfg", "unexpected keyword argument 'speed'"),
        ({"task_cfg": {"scale": 3.0}}, ".action_field", "beyond the bounds of the environment's, -1 to 1"),
        ({"action_field": "obs"}, ".action_field", "the demonstrated actions are [14], the environment's [2]"),
        ({"obs_field": "actions"}, ".obs_field", "'actions' is [2], the environment's observation [14]"),
        ({"reward_field": "obs"}, ".reward_field", "'obs' is [14], and a step has one reward"),
        ({"task": "PickPlaceExpert", "task_cfg": {"number": 2}}, ".task_cfg.number", "unknown key"),
        ({"task": "PickPlaceExpert"}, ".task_cfg", "its env is env.cfg where task_cfg has none"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], key: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        first_state(**changes)
    where = re.escape(f"algorithm.cfg.demonstrations{key}: ")
    assert re.search(rf"{where}.*{re.escape(text)}", str(caught.value)), caught.value


def test_a_folder_with_too_few_transitions_or_no_rewards_is_refused_by_name(tmp_path: Path) -> None:
    record(tmp_path / "few")
    record(tmp_path / "bare", without="rewards")
    given = {"task": None, "num_transitions": 28}
    with pytest.raises(ConfigError, match=r"got 28, but the 4 episodes in .*few have 27; use at most that"):
        first_state(**given, folder=str(tmp_path / "few"))
    with pytest.raises(ConfigError, match=r"no field 'rewards'; there is obs, actions; a task's environment gives"):
        first_state(**given, folder=str(tmp_path / "bare"))
