"""Demonstrations in the environment of an EmbodiChain gym config, and what of one the engine refuses."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from case_tables import cases, refused

from ejax.config.embodichain.demonstrations import make_task
from ejax.data import Episode, Failure, OnlineDataEngine, OnlineDataEngineCfg
from ejax.data.record import main as record
from ejax.data.task import EpisodeSpec, check_episode
from ejax.experts.push_cube import SceneArm
from ejax.experts.task import Attempts, ScriptedTask
from ejax.schema import trust as trust_module
from ejax.schema.trust import trust

ROOT = Path(__file__).parents[2]
FIRST_FORM = json.loads((ROOT / "configs/agents/rl/push_cube/gym_config.json").read_text())
NUM_ENVS = 32
FINGER = "gripper_finger1_joint_1"


@pytest.fixture(scope="module")
def gym_config() -> dict[str, Any]:
    """EmbodiChain's PushCubeRL in manager form, unchanged."""
    return json.loads((ROOT / "tests/gym_configs/push_cube.json").read_text())


@pytest.fixture(scope="module")
def task(gym_config: dict[str, Any]) -> ScriptedTask:
    return make_task(gym_config={**gym_config, "num_envs": NUM_ENVS}, action_config={})


@pytest.fixture(scope="module")
def attempts(task: ScriptedTask) -> Attempts:
    return task.attempt(3)


@pytest.fixture
def planners_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust_module, "_named", set(trust_module._named))
    trust("planners:nods", "planners:two_nods", "planners:no_plan", "planners:too_narrow")


def nodding(gym_config: dict[str, Any], **action_config: Any) -> dict[str, Any]:
    return {"gym_config": {**gym_config, "id": "EmbodiedEnv-v1"}, "action_config": action_config, "num_envs": 2}


@pytest.mark.slow
def test_the_expert_succeeds_in_an_unchanged_scene_of_embodichain(task: ScriptedTask, attempts: Attempts) -> None:
    """The config draws goals within 0.3 m of the robot's own base, of which not all can be reached in 100 steps."""
    assert attempts.success.mean() > 0.6
    assert task.attempt(4).success.mean() > 0.6
    assert np.array_equal(attempts.success, attempts.terminated)


def test_episodes_have_embodichains_field_paths(task: ScriptedTask) -> None:
    made = [each for each in task.generate(3) if isinstance(each, Episode)]
    spec = task.spec()
    assert {"obs/robot/qpos", "obs/robot/qvel", "obs/robot/qf", "actions", "rewards"} <= set(spec.frames)
    assert spec.frames["obs/robot/qpos"][0] == spec.frames["actions"][0] == (8,)
    check_episode(made[0], spec, 100)
    assert made[0].fields["instruction"].decode().split()[0] in ("push", "slide", "move", "shove")


def test_recorded_actions_replay_the_episode(task: ScriptedTask, attempts: Attempts) -> None:
    state, _ = task.start(3)
    keys = jax.random.split(jax.random.key(0), NUM_ENVS)
    going = np.ones(NUM_ENVS, bool)
    for t, action in enumerate(attempts.action):
        state, timestep = task._step(state, action, keys)
        np.testing.assert_array_equal(np.asarray(timestep.reward)[going], attempts.reward[t][going])
        going &= ~np.asarray(timestep.terminated | timestep.truncated)
    assert np.all(attempts.action >= task.env.action_space.low) and np.all(
        attempts.action <= task.env.action_space.high
    )


@pytest.mark.slow
@cases(
    "actions",
    {"q": {"func": "QposTerm", "params": {}}},
    {"q": {"func": "QposDenormalizedTerm", "params": {}}},
    {
        "arm": {"func": "RelativeJointPositionAction", "params": {"part_name": "arm", "scale": 0.2}},
        "hand": {
            "func": "ParallelGripperAction",
            "params": {"part_name": "hand", "lower_command": {FINGER: 0.0}, "upper_command": {FINGER: 0.04}},
        },
    },
    ids=["absolute", "of the limits", "arm and gripper"],
)
def test_any_terms_of_joint_positions_move_the_arm_alike(gym_config: dict[str, Any], actions: dict[str, Any]) -> None:
    changed = copy.deepcopy(gym_config)
    changed["env"]["actions"] = actions
    env = make_task(gym_config={**changed, "num_envs": 1}, action_config={}).env
    arm = SceneArm(env, "cube", "goal_pose")  # it tries the terms
    state = jax.tree.map(lambda x: x[None], env.reset(jax.random.key(0))[0])
    assert arm.command(state, np.zeros((1, 6), np.float32)).shape == (1, env.action_space.shape[0])


@cases(
    "change action_config message",
    ({"id": "CartPoleRL"}, {}, "gym_config.id: ejax has no expert for 'CartPoleRL' in this form; .* PushCubeRL"),
    ({}, {"nois": 0.1}, "action_config.nois: unknown key; allowed: .*Did you mean 'noise'"),
    ({}, {"noise": "much"}, "action_config.noise: got 'much'"),
    ({}, {"scope": {}, "node": {}}, "scope: an action bank.*\n.*node: an action bank"),
    ({"articulation": [{"uid": "door"}]}, {}, "articulation: ejax has no articulations"),
    ({}, {"create_demo_action_list": 3}, "create_demo_action_list: got 3; name a function"),
    ({}, {"create_demo_action_list": "planners:nods", "step": 2}, "action_config.step: unknown key; .*'steps'"),
    ({}, {"create_demo_action_list": "planners:gone"}, "planners:gone.*code that a file alone may not start"),
    ({}, {"create_demo_action_list": "a:b", "create_demo_segments": "a:c"}, "create_demo_segments: .* keep one"),
)
@pytest.mark.usefixtures("nothing_trusted")
def test_what_cannot_be_honoured_is_refused_key_by_key(
    gym_config: dict[str, Any], planners_trusted: None, change: dict[str, Any], action_config: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=f"(?s)cannot honour.*({message})"):
        make_task(gym_config={**gym_config, **change}, action_config=action_config)


def test_terms_that_do_not_take_joint_positions_are_refused(gym_config: dict[str, Any]) -> None:
    for func in ("QvelTerm", "EefPoseTerm"):
        changed = copy.deepcopy(gym_config)
        changed["env"]["actions"] = {"term": {"func": func, "params": {}}}
        refused(make_task, gym_config=changed, action_config={}, match=r"env\.actions: its terms .* use DeltaQposTerm")


@pytest.mark.slow
@pytest.mark.usefixtures("planners_trusted")
def test_a_function_of_ones_own_demonstrates_in_a_scene_without_a_task(gym_config: dict[str, Any]) -> None:
    config = {**gym_config, "env": {**gym_config["env"], "rewards": {}}}
    config["env"]["dataset"] = {"lerobot": {"params": {"instruction": {"lang": "nod to the cube"}}}}
    task = make_task(**nodding(config, create_demo_action_list="planners:nods", steps=7))
    episodes = task.generate(0)
    assert len(episodes) == 2 and all(isinstance(each, Episode) and not each.terminated for each in episodes)
    actions = np.asarray(episodes[0].frames["actions"])
    assert actions.shape == (7, 8) and np.ptp(actions[:, 0]) > 0.0
    np.testing.assert_array_equal(actions, episodes[0].frames["expert_actions"])  # no noise
    assert episodes[0].fields["instruction"] == b"nod to the cube"


@pytest.mark.usefixtures("planners_trusted")
def test_segments_are_planned_from_where_the_last_one_ended(gym_config: dict[str, Any]) -> None:
    config = {**gym_config, "env": {**gym_config["env"], "rewards": {}, "observations": {}}}
    task = make_task(**nodding(config, create_demo_segments="planners:two_nods"))
    (episode, _) = task.generate(0)
    assert isinstance(episode, Episode)
    assert episode.segment_id is not None and episode.segment_id.tolist() == [0] * 5 + [1] * 3
    angle, actions = (np.asarray(episode.frames[name])[:, 0] for name in ("obs/robot/qpos", "actions"))
    np.testing.assert_allclose(actions[5], angle[0] - angle[5], atol=1e-6)


@pytest.mark.usefixtures("planners_trusted")
def test_without_action_terms_actions_are_the_joints_targets(gym_config: dict[str, Any]) -> None:
    config = {**gym_config, "env": {}}
    task = make_task(**nodding(config, create_demo_action_list="planners:nods", steps=30))
    (episode, _) = task.generate(0)
    assert isinstance(episode, Episode)
    assert abs(np.asarray(episode.frames["obs/robot/qpos"])[-1, 1:6]).max() < 0.2  # the start is at up to 1.57 rad


@pytest.mark.slow
@pytest.mark.usefixtures("planners_trusted")
def test_a_plan_that_is_missing_is_a_failure_and_one_of_another_shape_an_error(gym_config: dict[str, Any]) -> None:
    config = {**gym_config, "env": {**gym_config["env"], "rewards": {}}}
    task = make_task(**nodding(config, create_demo_action_list="planners:no_plan"))
    assert task.generate(0) == [Failure("the plan is empty")]
    task = make_task(**nodding(config, create_demo_action_list="planners:too_narrow"))
    refused(task.generate, 0, match=r"gave actions \[40, 2, 3\]; they must be \[T, 2, 8\]: steps, environments")


def test_the_first_releases_form_is_demonstrated_by_the_task_classs_expert() -> None:
    task = make_task(gym_config=FIRST_FORM, action_config={"variety": 0.5})
    assert type(task.env).__name__ == "PushCubeRL" and task.num_envs == 64


def test_the_limit_of_an_episode_may_stand_in_the_extensions() -> None:
    config = {name: value for name, value in FIRST_FORM.items() if name != "max_episode_steps"}
    config["env"] = {"extensions": {"episode_length": 40}}
    assert make_task(gym_config=config, action_config={}).env.max_episode_steps == 40
    assert OnlineDataEngineCfg(gym_config=config, buffer_size=64).max_episode_steps == 40


def test_options_of_the_engine_follow_the_gym_config() -> None:
    cfg = OnlineDataEngineCfg(gym_config=FIRST_FORM, buffer_size=64, max_episode_steps=40)
    assert cfg.max_episode_steps == 100  # the gym config's wins, as in EmbodiChain
    assert OnlineDataEngineCfg(gym_config={"id": "PushCubeRL"}, max_episode_steps=40).max_episode_steps == 40
    assert OnlineDataEngineCfg(gym_config={"id": "PushCubeRL"}, buffer_size=4).demonstrator[1]["num_envs"] == 4
    assert cfg.replace(gym_config={}, task="data_tasks:Toy").demonstrator == ("data_tasks:Toy", {})


@cases(
    "options message",
    ({}, "set either task or gym_config; got neither"),
    ({"gym_config": FIRST_FORM}, "num_envs 64, episodes that are made side by side, and buffer_size is 16"),
    ({"gym_config": {"id": "x"}, "task_cfg": {"noise": 0.0}}, "the expert of a gym_config takes action_config"),
    ({"gym_config": "push.json"}, "mappings, as json.load gives them, not file paths"),
    ({"gym_config": {"id": "x"}, "action_dim": 2.5}, "action_dim must be an int"),
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    refused(OnlineDataEngineCfg, **options, match=message)


def test_widths_are_checked_where_they_are_given() -> None:
    spec = EpisodeSpec({"obs/robot/qpos": ((8,), "float32"), "obs/state": ((3,), "float32")})
    make = OnlineDataEngineCfg("data_tasks:Toy").replace
    make(state_dim=8).check_widths(spec)
    with pytest.raises(ValueError, match=r"state_dim is 14, the width of obs/robot/qpos, but obs/robot/qpos is \[8\]"):
        make(state_dim=14).check_widths(spec)
    with pytest.raises(ValueError, match="action_dim is 3, the width of actions, but it has obs/robot/qpos, obs/state"):
        make(action_dim=3).check_widths(spec)


@pytest.fixture(scope="module")
def engine(gym_config: dict[str, Any]) -> Iterator[OnlineDataEngine]:
    cfg = OnlineDataEngineCfg(
        gym_config=gym_config,
        action_config={"noise": 0.1},
        buffer_size=8,
        refill_threshold=10**6,
        state_dim=8,
        buffer_device="cpu",
        shutdown_timeout=60.0,
    )
    with OnlineDataEngine(cfg) as engine:
        yield engine


@pytest.mark.slow
def test_the_engine_runs_an_unchanged_gym_config(engine: OnlineDataEngine) -> None:
    batch = engine.sample_batch(16, 10)
    assert batch["obs"]["robot"]["qpos"].shape == batch["actions"].shape == (16, 10, 8)
    assert batch["obs"]["object"]["goal_pos"].shape == (16, 10, 3)
    assert engine.shared_buffer["obs"]["robot"]["qpos"].shape == (8, 100, 8)
    assert engine.max_episode_steps == 100


@pytest.mark.slow
@pytest.mark.usefixtures("planners_trusted")
def test_a_worker_lets_through_what_its_owner_does(gym_config: dict[str, Any]) -> None:
    config = {**gym_config, "id": "EmbodiedEnv-v1", "num_envs": 2, "env": {**gym_config["env"], "rewards": {}}}
    cfg = OnlineDataEngineCfg(
        gym_config=config,
        action_config={"create_demo_action_list": "planners:nods"},
        buffer_size=2,
        shutdown_timeout=60.0,
    )
    with OnlineDataEngine(cfg) as engine:
        assert engine.sample_batch(4, 40)["actions"].shape == (4, 40, 8)


@pytest.mark.slow
def test_what_a_gym_config_demonstrates_can_be_kept(gym_config: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    file = tmp_path / "gym_config.json"
    file.write_text(json.dumps({**gym_config, "num_envs": 4}))
    given = ["--gym-config", str(file), "--action-config", '{"noise": 0.0}', "--episodes", "3", "--fps", "25"]
    assert record([*given, "--to", str(tmp_path / "kept")]) == 0
    assert record([*given, "--to", str(tmp_path / "other"), "--task-cfg", '{"a": 1}']) == 1
