"""The scripted experts: they succeed, and what they record is what happened."""

import pickle
from collections.abc import Callable
from typing import Any

import chex
import jax
import numpy as np
import pytest
from case_tables import refusals, refused

from ejax.data import Episode, Failure, OnlineDataEngine, OnlineDataEngineCfg
from ejax.data.task import check_episode
from ejax.envs.mujoco.engine import Physics
from ejax.envs.mujoco.kinematics import site_pose
from ejax.envs.tasks.instructed_place import InstructedPlaceRL
from ejax.envs.tasks.push_cube import PushCubeRL
from ejax.experts import instructed_place, pick_place, push_cube
from ejax.experts.task import Attempts, ScriptedTask, name_place, phrase

SEED = 7
NUM_ENVS = 64
EXPERTS = {"push_cube": push_cube, "pick_place": pick_place, "instructed_place": instructed_place}
MAKERS: dict[str, Callable[..., ScriptedTask]] = {name: expert.make_task for name, expert in EXPERTS.items()}
GOAL = {"push_cube": slice(12, 14), "pick_place": slice(14, 16)}
"""x and y in the observation."""
MIDDLE = {"push_cube": (-0.9, -0.6), "pick_place": (-0.65, -0.3)}


@pytest.fixture(scope="module", params=MAKERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def task(name: str) -> ScriptedTask:
    return MAKERS[name](num_envs=NUM_ENVS)


@pytest.fixture(scope="module")
def attempts(task: ScriptedTask) -> Attempts:
    return task.attempt(SEED)


@pytest.fixture(scope="module")
def outcomes(task: ScriptedTask) -> list[Episode | Failure]:
    return task.generate(SEED)


def at(attempts: Attempts, t: int) -> Any:
    return jax.tree.map(lambda x: x[t], attempts.obs)


def parts(obs: Any) -> dict[str, Any]:
    """Map the frame's paths to an observation's parts."""
    return {f"obs/{name}": x for name, x in obs.items()} if isinstance(obs, dict) else {"obs/state": obs}


def start(attempts: Attempts) -> Any:
    """Flatten the first observations, [N, F]."""
    return np.concatenate([x[0].reshape(NUM_ENVS, -1) for x in jax.tree.leaves(attempts.obs)], axis=1)


@pytest.mark.slow
def test_the_expert_succeeds(name: str, task: ScriptedTask, attempts: Attempts) -> None:
    """With its noise, over 192 episodes."""
    rates = [attempts.success.mean(), *(task.attempt(seed).success.mean() for seed in (11, 12))]
    assert np.mean(rates) >= {"push_cube": 0.95, "pick_place": 0.95, "instructed_place": 0.97}[name]


@pytest.mark.slow
def test_replaying_the_actions_gives_what_was_recorded(task: ScriptedTask, attempts: Attempts) -> None:
    """From ``start(seed)`` through the environment's own step."""
    state, obs = task.start(SEED)
    step = task._step
    keys = jax.random.split(jax.random.key(0), NUM_ENVS)  # unlike the recording's: the physics uses no key
    going = np.ones(NUM_ENVS, bool)
    for t, action in enumerate(attempts.action):
        chex.assert_trees_all_equal(*(jax.tree.map(lambda x: x[going], each) for each in (obs, at(attempts, t))))  # noqa: B023
        state, timestep = step(state, action, keys)
        np.testing.assert_array_equal(np.asarray(timestep.reward)[going], attempts.reward[t][going])
        ended = going & np.asarray(timestep.terminated | timestep.truncated)
        np.testing.assert_array_equal(ended, going & (attempts.length == t + 1))
        np.testing.assert_array_equal(np.asarray(timestep.info["success"])[ended], attempts.success[ended])
        going &= ~ended
        obs = timestep.obs
    assert not going.any()


@pytest.mark.slow
def test_an_episode_is_its_row_of_the_attempt(attempts: Attempts, outcomes: list, task: ScriptedTask) -> None:
    assert len(outcomes) == NUM_ENVS
    for row, outcome in enumerate(outcomes):
        assert isinstance(outcome, Episode) == bool(attempts.success[row])
        if isinstance(outcome, Failure):
            continue
        check_episode(outcome, task.spec(), 100)
        length = attempts.length[row]
        assert outcome.complete and outcome.success and outcome.terminated and outcome.fields["row"] == row
        for path, part in parts(attempts.obs).items():
            np.testing.assert_array_equal(outcome.frames[path], part[:length, row])
        np.testing.assert_array_equal(outcome.frames["actions"], attempts.action[:length, row])
        np.testing.assert_array_equal(outcome.frames["rewards"], attempts.reward[:length, row])
        assert outcome.frames["rewards"][-1] > (0.9 if isinstance(task.env, InstructedPlaceRL) else 9.0)  # the bonus


@pytest.mark.slow
def test_a_seed_gives_the_same_episodes_and_another_gives_others(task: ScriptedTask, attempts: Attempts) -> None:
    again, other = task.attempt(SEED), task.attempt(SEED + 1)
    for field in ("obs", "action", "intended", "reward", "segment", "length", "success"):
        chex.assert_trees_all_equal(getattr(again, field), getattr(attempts, field))
    assert again.instruction == attempts.instruction
    assert not np.array_equal(start(other), start(attempts)) and other.instruction != attempts.instruction


@pytest.mark.slow
def test_episodes_of_a_batch_differ(attempts: Attempts) -> None:
    lengths = attempts.length[attempts.success]
    assert len(np.unique(lengths)) > 10 and len(np.unique(start(attempts), axis=0)) == NUM_ENVS


@pytest.mark.slow
def test_segments_follow_their_order_without_gaps(task: ScriptedTask, outcomes: list, name: str) -> None:
    count = {"push_cube": 3}.get(name, 7)
    for outcome in outcomes:
        if isinstance(outcome, Episode):
            assert outcome.segment_id is not None and len(outcome.segment_id) == len(outcome.frames["actions"])
            changes = np.diff(outcome.segment_id)
            assert set(changes) <= {0, 1} and outcome.segment_id[0] <= 1
            assert outcome.segment_id[-1] == count - 1


@pytest.mark.slow
def test_actions_are_the_intended_ones_and_noise_within_the_bounds(
    attempts: Attempts, task: ScriptedTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = task.env.action_space
    assert np.all(attempts.action >= space.low) and np.all(attempts.action <= space.high)  # type: ignore[attr-defined]
    off = np.abs(attempts.action - attempts.intended)
    assert 0.005 < off.mean() < 0.2
    monkeypatch.setattr(task, "_noise", 0.0)
    quiet = task.attempt(SEED)
    np.testing.assert_array_equal(quiet.action, quiet.intended)
    if isinstance(task.env, InstructedPlaceRL):
        assert quiet.success.mean() >= 0.99 and quiet.length.max() < 80


@pytest.mark.slow
@pytest.mark.parametrize("name", GOAL, indirect=True)
def test_the_expert_brings_a_disturbed_tool_back(name: str, task: ScriptedTask, attempts: Attempts) -> None:
    """The expert goes less far along x, or back, if the tool is 5 cm further along x on the approach."""
    expert, obs = task._expert, attempts.obs[0]
    variation = expert.vary(np.random.default_rng(0), NUM_ENVS)
    disturbed = obs.copy()
    disturbed[:, {"push_cube": 6, "pick_place": 8}[name]] += 0.05  # joint angles stay: the Jacobian does too
    steps = [expert.act(each, np.zeros(NUM_ENVS, np.int64), variation)[0] for each in (obs, disturbed)]
    if name == "push_cube":
        model = Physics("push_cube.xml").model
        qpos = np.concatenate([obs[:, :6], np.zeros((NUM_ENVS, 7), np.float32)], axis=1)
        tool = jax.vmap(lambda qpos: site_pose(model, "tcp", qpos)[:3, 3])
        steps = [np.asarray(tool(qpos + np.pad(0.1 * step, ((0, 0), (0, 7))))) for step in steps]
    way, way_back = (step[:, 0] for step in steps)
    assert np.all(way_back <= way + 1e-4) and np.mean(way_back < way - 1e-3) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", GOAL, indirect=True)
def test_the_instruction_names_the_side_of_the_goal(name: str, attempts: Attempts) -> None:
    assert len(set(attempts.instruction)) > 8
    for row, text in enumerate(attempts.instruction):
        x, y = attempts.obs[0, row, GOAL[name]] - np.array(MIDDLE[name])
        assert ("left" in text) == (y <= -0.02) and ("right" in text) == (y >= 0.02), (text, x, y)
        assert ("far" in text) == (x <= -0.02) and ("near" in text) == (x >= 0.02), (text, x, y)
        assert len(text.encode()) <= 96


def test_places_have_names_and_wordings_are_drawn() -> None:
    places = [name_place(np.array(offset)) for offset in ((0.1, 0.0), (0.0, 0.1), (-0.1, -0.1), (0.0, 0.0))]
    assert places == ["near", "right", "far left", "middle"]
    texts = phrase(np.random.default_rng(0), ("to the {place}", "{place}!"), np.zeros((50, 2)))
    assert set(texts) == {"to the middle", "middle!"}


def test_a_goal_out_of_reach_is_a_failure_and_no_sample() -> None:
    far = {"goal_position": (-2.5, 0.0, 0.05), "episode_length": 12}
    outcomes = push_cube.make_task(env=far, num_envs=2).generate(0)
    assert [type(outcome) for outcome in outcomes] == [Failure, Failure]
    assert isinstance(outcomes[1], Failure)
    assert outcomes[1].reason.startswith("environment 1: no success in 12 steps; the last segment was 'approach'")


@pytest.mark.slow
def test_pictures_show_the_steps_they_belong_to() -> None:
    task = push_cube.make_task(num_envs=2, image_size=(24, 32))
    attempts, outcomes = task.attempt(3), task.generate(3)
    row = int(np.flatnonzero(attempts.success)[0])
    episode = outcomes[row]
    assert isinstance(episode, Episode)
    images = episode.frames["obs/image"]
    assert images.shape == (attempts.length[row], 24, 32, 3) and images.dtype == np.uint8 and images.std() > 20
    check_episode(episode, task.spec(), 100)
    t = int(attempts.length[row]) // 2
    state = jax.tree.map(lambda x: x[t, row], attempts.state)
    np.testing.assert_array_equal(images[t], PushCubeRL(**push_cube.ENV).render(state, 32, 24, push_cube.CAMERA))
    assert np.any(images[t] != images[0])


@refusals(
    ({"num_envs": 0}, "num_envs", "got 0"),
    ({"noise": 2.0}, "noise", "2.0"),
    ({"image_size": (64,)}, "image_size", "64"),
)
def test_wrong_arguments_are_named(given: dict[str, Any], key: str, word: str) -> None:
    refused(push_cube.make_task, **given, key=key, word=word)


def test_variety_is_the_part_of_each_range_that_is_drawn_from(name: str) -> None:
    drawn = [MAKERS[name](variety=x)._expert.vary(np.random.default_rng(0), 100) for x in (1.0, 0.5, 0.0)]
    for each, whole in drawn[0].items():
        low, high = whole.min(), whole.max()
        assert np.ptp(drawn[1][each]) == pytest.approx(0.5 * (high - low))
        assert np.ptp(drawn[2][each]) == pytest.approx(0.0, abs=1e-12) and low < drawn[2][each].mean() < high


@pytest.mark.slow_cases("pick_place", "instructed_place")
def test_a_maker_travels_to_a_worker(name: str) -> None:
    made = pickle.loads(pickle.dumps(MAKERS[name]))(num_envs=2)
    assert type(made._expert) is type(MAKERS[name](num_envs=2)._expert)
    np.testing.assert_array_equal(made.attempt(SEED).action, MAKERS[name](num_envs=2).attempt(SEED).action)


@pytest.mark.slow
def test_the_engine_is_filled_by_an_expert_in_its_worker() -> None:
    cfg = OnlineDataEngineCfg(
        task="ejax.experts.pick_place:make_task",
        task_cfg={"num_envs": 8},
        buffer_size=8,
        max_episode_steps=100,
        refill_threshold=10**6,
        shutdown_timeout=60.0,  # it compiles for some seconds, and longer where others compile too
    )
    with OnlineDataEngine(cfg) as engine:
        batch = engine.sample_batch(16, 10)
    assert batch["obs"]["state"].shape == (16, 10, 24) and batch["actions"].shape == (16, 10, 4)
    assert all(text.decode() for text in batch["episode"]["instruction"])
    assert np.all(np.abs(batch["actions"]) <= 1.0) and batch["segment_id"].max() <= 6
