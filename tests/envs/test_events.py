"""``trainer.events``: what happens to the world in training, or in evaluation, besides the gym config's events."""

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from damages import same, what_is_left
from tiny import EVALUATED, tiny

from ejax.config import ConfigError, load_config, parse_config
from ejax.config.embodichain.check import check
from ejax.envs.manager.embodied import EmbodiedEnv
from ejax.envs.mujoco.engine import Physics
from ejax.envs.task.terms import Snapshot
from ejax.envs.task.world import World
from ejax.envs.tasks.push_cube import PushCubeRL
from ejax.envs.terms.registry import TERMS
from ejax.envs.wrappers.placing import add_events
from ejax.play.saved_policy import evaluate_run
from ejax.rollout import reset, step
from ejax.run import train
from ejax.schema.registry import ENVS
from ejax.store.checkpoint import CheckpointError
from ejax.training.environments import build_env, evaluation_env
from ejax.types import Key

KEY = jax.random.key(0)
FOLDER = Path(__file__).parents[1] / "gym_configs"
CART_POLE = json.loads((FOLDER / "cart_pole.json").read_text())
TILT = {  # puts the pole 1 rad to the side, after each second step
    "func": "randomize_robot_qpos",
    "mode": "interval",
    "interval_step": 2,
    "params": {"qpos_range": [[0.0, 1.0], [0.0, 1.0]], "relative_qpos": False},
}
COUNT = {"func": "count", "mode": "interval", "interval_step": 3}


def count(world: World, key: Key, store_key: str = "fired") -> World:
    """Add 1 to a stored pose each time."""
    del key
    return world.keep(**{store_key: world.pose(store_key) + 1.0})


@pytest.fixture(autouse=True)
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TERMS["events"], "count", count)


def raw(output_dir: Path, events: object, updates: int = 2, **trainer: object) -> dict:
    cfg = {"gym_config": copy.deepcopy(CART_POLE), "physics": "mujoco"}
    changes: dict = {"exp_name": "tilted", "iterations": updates, **EVALUATED, **trainer}
    return tiny(output_dir, "EmbodiedEnv", env_cfg=cfg, events=copy.deepcopy(events), **changes)


def cart_pole(max_episode_steps: int, **interval_events: dict) -> EmbodiedEnv:
    return EmbodiedEnv({**CART_POLE, "max_episode_steps": max_episode_steps}, "mujoco", interval_events)


def angle(env: EmbodiedEnv, num_steps: int) -> float:
    state, _ = env.reset(KEY)
    for _ in range(num_steps):
        state, _ = jax.jit(env.step)(state, jnp.zeros(2), KEY)
    return float(state.physics.qpos[1])


def test_an_event_fires_at_the_multiples_of_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Physics, "step", lambda self, state, ctrl: state)
    env = cart_pole(100, counter=COUNT)
    state, _ = env.reset(KEY)
    fired = []
    for _ in range(10):
        state, _ = jax.jit(env.step)(state, jnp.zeros(2), KEY)
        fired.append(float(state.kept["fired"][0, 0]))
    assert fired == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3]


def test_steps_are_counted_from_the_start_of_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Physics, "step", lambda self, state, ctrl: state)
    env = cart_pole(4, counter=COUNT)
    carry = reset(env, KEY, 1)
    fired = []
    for _ in range(8):
        carry, _ = jax.jit(step, static_argnums=0)(env, carry, jnp.zeros((1, 2)), KEY)
        fired.append(float(carry.state.kept["fired"][0, 0, 0]))
    assert fired == [0, 0, 1, 0, 0, 0, 1, 0]  # episodes of 4: the third step of each


def test_events_of_the_gym_config_draw_the_same_with_and_without_others() -> None:
    plain, more = EmbodiedEnv(CART_POLE, "mujoco"), cart_pole(500, counter=COUNT)
    for one, other in zip(jax.tree.leaves(plain.reset(KEY)[1]), jax.tree.leaves(more.reset(KEY)[1]), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["train", "eval"])
def test_an_event_happens_in_its_phase_only(phase: str, tmp_path: Path) -> None:
    config = parse_config(raw(tmp_path, {phase: {"tilt": TILT}}))
    env = build_env(config)
    envs = {"train": env, "eval": evaluation_env(config, env)}
    assert {name: angle(each, 2) > 0.9 for name, each in envs.items()} == {
        "train": phase == "train",
        "eval": phase == "eval",
    }


@pytest.mark.parametrize("events", [{}, {"train": {"tilt": TILT}, "eval": {"tilt": TILT}}])
def test_one_environment_serves_both_phases_where_events_are_equal(events: dict, tmp_path: Path) -> None:
    config = parse_config(raw(tmp_path, events))
    env = build_env(config)
    assert evaluation_env(config, env) is env and build_env(config, phase="eval") == env


@pytest.mark.slow
def test_evaluation_sees_its_events_and_training_does_not(tmp_path: Path) -> None:
    plain, tilted = (parse_config(raw(tmp_path, events)) for events in ({}, {"eval": {"tilt": TILT}}))
    without = train(plain, run_dir=tmp_path / "without")
    result = train(tilted, run_dir=tmp_path / "with")
    assert same(*(what_is_left(tmp_path / name, "tilted") for name in ("without", "with")))
    assert result.last_eval_metrics["eval/avg_length"] != without.last_eval_metrics["eval/avg_length"]
    again = evaluate_run(tmp_path / "with", checkpoint="latest", num_episodes=2, num_envs=2)
    for name, value in result.last_eval_metrics.items():
        assert again[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.slow
def test_a_resumed_run_with_events_ends_with_the_same_bits(tmp_path: Path) -> None:
    events = {"train": {"tilt": TILT, "counter": COUNT}}
    config = parse_config(raw(tmp_path, events, updates=4, enable_eval=False))
    train(config, run_dir=tmp_path / "whole")
    train(parse_config(raw(tmp_path, events, updates=1, enable_eval=False)), run_dir=tmp_path / "halves")
    train(config, resume="latest", run_dir=tmp_path / "halves")
    train(
        parse_config(raw(tmp_path, {"train": {"counter": COUNT}}, updates=4, enable_eval=False)),
        run_dir=tmp_path / "plain",
    )
    whole, halves, plain = (what_is_left(tmp_path / name, "tilted") for name in ("whole", "halves", "plain"))
    assert same(whole, halves)
    assert whole["arrays"].keys() == plain["arrays"].keys() and not same(whole, plain)


@pytest.mark.slow
def test_a_resumed_run_may_be_evaluated_otherwise_but_not_trained_otherwise(tmp_path: Path) -> None:
    start = parse_config(raw(tmp_path, {"train": {"tilt": TILT}}, updates=1, enable_eval=False))
    train(start, run_dir=tmp_path / "run")
    other = {"train": {"tilt": {**TILT, "interval_step": 5}}}
    with pytest.raises(CheckpointError, match=r"trainer\.events\.train\.tilt\.interval_step is 2 in the run and 5 now"):
        train(parse_config(raw(tmp_path, other)), resume="latest", run_dir=tmp_path / "run")
    more = {"train": {"tilt": TILT}, "eval": {"tilt": TILT}}
    assert train(parse_config(raw(tmp_path, more)), resume="latest", run_dir=tmp_path / "run").finished


PLACE = r"trainer\.events\.eval\.tilt"


@cases(
    "change message",
    ({"func": "randomize_robot_qpo"}, rf"{PLACE}\.func: no events functor .*Did you mean 'randomize_robot_qpos'"),
    ({"func": "record_camera_data_asyn"}, rf"{PLACE}\.func: .*Did you mean 'record_camera_data_async'"),
    ({"func": "json:nothing"}, rf"{PLACE}\.func: module 'json' has no 'nothing'"),
    ({"mode": "prestartup"}, rf"{PLACE}\.mode: got 'prestartup'; allowed: startup, reset, interval"),
    ({"interval_step": 0}, rf"{PLACE}\.interval_step: got 0; must be greater than 0"),
    ({"interval": 3}, rf"{PLACE}\.interval: unknown key; .*Did you mean 'interval_step'"),
    ({"params": {"qpos_rang": 1}}, rf"{PLACE}\.params\.qpos_rang: unknown key; .*Did you mean 'qpos_range'"),
    ({"params": {"qpos_range": [[1.0], [1.0]]}}, rf"{PLACE}: qpos_range has 1 and 1 numbers, but moves 2 joints"),
)
def test_a_wrong_event_is_refused_by_name(change: dict, message: str, tmp_path: Path) -> None:
    refused(lambda: parse_config(raw(tmp_path, {"eval": {"tilt": {**TILT, **change}}})), match=message)


SHOVE = {  # turns the first joint by 0.1 rad, after each second step
    "func": "randomize_robot_qpos",
    "mode": "interval",
    "interval_step": 2,
    "params": {"qpos_range": [[0.1], [0.1]], "joint_ids": [0]},
}
STAY = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
TOSS = {"func": "randomize_rigid_object_pose", "params": {"entity_cfg": {"uid": "cube"}, "position_range": STAY}}
PURE = [name for name in ENVS if name.endswith("RL") and name not in ("PointMassRL", "PlanarReachRL")]


@pytest.mark.parametrize("name", ["PointMassRL", "PlanarReachRL"])
def test_an_environment_without_physics_takes_no_events_of_a_model(name: str, tmp_path: Path) -> None:
    data = raw(tmp_path, {"train": {"tilt": TILT}}) | {"env": {"id": name}}
    with pytest.raises(
        ConfigError, match=rf"events\.train\.tilt: randomize_robot_qpos changes a MuJoCo model, and {name} has none"
    ):
        parse_config(data)


def test_an_environment_without_physics_takes_events_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def home(world: Snapshot, key: Key) -> Snapshot:
        del key
        return replace(world, state=replace(world.state, position=jnp.zeros(2)))

    monkeypatch.setitem(TERMS["events"], "home", home)
    events = {"start": {"func": "home", "mode": "reset"}, "later": {"func": "home", "interval_step": 3}}
    env = build_env(parse_config(raw(tmp_path, {"train": events}) | {"env": {"id": "PointMassRL"}}))
    state, obs = env.reset(KEY)
    np.testing.assert_array_equal(obs[:2], 0.0)
    at_home = []
    for _ in range(6):
        state, timestep = jax.jit(env.step)(state, jnp.ones(2), KEY)
        at_home.append(not timestep.obs[:2].any())
    assert at_home == [False, False, True] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", PURE)
def test_events_happen_in_every_task_on_physics(name: str, tmp_path: Path) -> None:
    """After the second step, before its observation, as in manager form; not in the other phase."""
    data = raw(tmp_path, {"train": {"shove": SHOVE}}) | {"env": {"id": name, "cfg": {"physics": "mujoco"}}}
    config = parse_config(data)
    states, seen = {}, {}
    for phase in ("train", "eval"):
        env = build_env(config, phase=phase)
        state, _ = jax.jit(env.reset)(KEY)
        one = jax.jit(env.step)
        states[phase] = []
        for _ in range(3):
            state, timestep = one(state, jnp.zeros(env.action_space.shape), KEY)
            states[phase].append(env.world(state).physics.qpos)
        seen[phase] = timestep.obs
    np.testing.assert_allclose(states["train"][0], states["eval"][0], atol=1e-5)
    change = np.asarray(states["train"][1] - states["eval"][1])
    assert change.max() == pytest.approx(0.1, abs=1e-5) and (np.abs(change) > 1e-4).sum() == 1
    assert not jax.tree.all(jax.tree.map(np.array_equal, seen["train"], seen["eval"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", PURE)
def test_events_of_a_start_come_before_the_first_observation(name: str, tmp_path: Path) -> None:
    """In every task on physics, one after the other: startup, then reset."""
    events = {mode: {**SHOVE, "mode": mode} for mode in ("reset", "startup")}
    data = raw(tmp_path, {"train": events}) | {"env": {"id": name, "cfg": {"physics": "mujoco"}}}
    config = parse_config(data)
    (state, obs), (plain, seen) = (jax.jit(build_env(config, phase=phase).reset)(KEY) for phase in ("train", "eval"))
    change = np.asarray(state.physics.qpos - plain.physics.qpos)
    assert change.max() == pytest.approx(0.2, abs=1e-5) and (np.abs(change) > 1e-4).sum() == 1
    assert not jax.tree.all(jax.tree.map(np.array_equal, obs, seen))


@pytest.mark.slow
@pytest.mark.parametrize("task", ["PushCubeRL", "EmbodiedEnv"])
def test_what_starts_once_is_the_same_in_every_episode_and_a_reset_differs(task: str, tmp_path: Path) -> None:
    shake = {"func": "randomize_robot_qpos", "params": {"qpos_range": [[-0.1], [0.1]]}}
    events = {
        mode: {**shake, "mode": mode, "params": {**shake["params"], "joint_ids": [joint]}}
        for joint, mode in enumerate(("startup", "reset"))
    }
    data = raw(tmp_path, {"train": events})
    if task == "PushCubeRL":
        data["env"] = {"id": task, "cfg": {"physics": "mujoco"}}
    env = build_env(parse_config(data))
    keys = jax.random.split(KEY, 5)
    once, each = jax.jit(jax.vmap(env.reset))(keys)[0].physics.qpos[:, :2].T
    plain = build_env(parse_config(data), phase="eval").reset(KEY)[0].physics.qpos
    assert len(np.unique(once)) == 1 and once[0] != plain[0] and len(np.unique(each)) == 5


WRAPPERS: dict[str, dict[str, object]] = {
    "RenderedEnv": {"renderer": "raycast", "width": 8, "height": 8},
    "AsymmetricEnv": {},
}


@pytest.mark.slow_cases("RenderedEnv")
@pytest.mark.parametrize("name", WRAPPERS)
def test_events_happen_in_a_task_that_is_wrapped(name: str, tmp_path: Path) -> None:
    part = {"RenderedEnv": "state", "AsymmetricEnv": "critic"}[name]
    events = {"shove": {**SHOVE, "mode": "reset"}, "noise": {"func": "add_action_noise", "params": {"noise": 0.1}}}
    env = {"id": "PushCubeRL", "cfg": {"physics": "mujoco"}, "wrappers": [{name: WRAPPERS[name]}]}
    data = raw(tmp_path, {"train": events}) | {"env": env}
    config = parse_config(data)
    train, plain = (build_env(config, phase=phase) for phase in ("train", "eval"))
    seen = [
        float(jax.jit(env.reset)(KEY)[1][part][0])
        for env in (train, plain, add_events(plain, config.trainer.events.of("train")))
    ]
    assert seen[0] == pytest.approx(seen[1] + 0.1, abs=1e-5) and seen[2] == seen[0]


def test_events_and_chunks_of_actions_go_together(tmp_path: Path) -> None:
    cfg = {"physics": "mujoco", "action_chunk": 2}
    data = raw(tmp_path, {"train": {"shove": SHOVE}}) | {"env": {"id": "PushCubeRL", "cfg": cfg}}
    env = build_env(parse_config(data))
    assert env.env.functor_events and env.size == 2


def test_an_environment_that_is_built_already_takes_events_or_refuses_them_by_name() -> None:
    plain = PushCubeRL(physics="mujoco")
    shoved = add_events(plain, {"shove": {**SHOVE, "mode": "reset"}})
    assert shoved.reset(KEY)[1][0] == pytest.approx(plain.reset(KEY)[1][0] + 0.1)
    with pytest.raises(ConfigError, match="shove: qpos_range has 1 and 1 numbers, but moves 6 joints"):
        add_events(plain, {"shove": {**SHOVE, "params": {"qpos_range": [[0.1], [0.1]]}}})
    with pytest.raises(ConfigError, match=r"shove: object takes no event functors: .* class of yours with an argument"):
        add_events(object(), {"shove": SHOVE})


def test_an_event_puts_the_cube_of_push_cube_back(tmp_path: Path) -> None:
    data = raw(tmp_path, {"train": {"toss": TOSS}}) | {"env": {"id": "PushCubeRL", "cfg": {"physics": "mujoco"}}}
    env = build_env(parse_config(data))
    state, _ = env.reset(KEY)
    moved = env.world(state).with_object_pose("cube", jnp.eye(4).at[:3, 3].set(jnp.array([0.5, 0.5, 0.05]))).state
    _, timestep = jax.jit(env.step)(moved, jnp.zeros(6), KEY)
    start = env.world(state).initial_pose("cube")[:3, 3]
    np.testing.assert_allclose(timestep.obs[9:12], start, atol=1e-6)


def test_an_event_of_ones_own_sees_the_goal_of_push_cube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        TERMS["events"], "solve", lambda world, key: world.place("cube", world.body("goal").position + 0.01)
    )
    data = raw(tmp_path, {"train": {"solve": {"func": "solve"}}}) | {"env": {"id": "PushCubeRL", "cfg": {}}}
    env = build_env(parse_config(data))
    state, _ = env.reset(KEY)
    _, timestep = jax.jit(env.step)(state, jnp.zeros(6), KEY)
    np.testing.assert_allclose(timestep.obs[9:12], timestep.obs[12:15] + 0.01, atol=1e-6)
    assert timestep.terminated


@cases(
    "event message",
    ({**TOSS, "params": {"entity_cfg": {"uid": "cub"}}}, r"toss: no body 'cub'; there is .*Did you mean 'cube'"),
    ({**TOSS, "params": {}}, r"toss\.params\.entity_cfg: is missing"),
    (
        {"func": "randomize_target_pose", "params": {"position_range": STAY}},
        "toss: this task stores no numbers, nor target_pose",
    ),
)
def test_an_event_that_a_task_cannot_have_is_refused(event: dict, message: str, tmp_path: Path) -> None:
    data = raw(tmp_path, {"eval": {"toss": event}}) | {"env": {"id": "PushCubeRL", "cfg": {"physics": "mujoco"}}}
    refused(parse_config, data, match=rf"trainer\.events\.eval\.{message}")


@pytest.mark.usefixtures("nothing_trusted")
def test_a_file_alone_does_not_even_import_an_event_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_event.py").write_text(
        "import jax.numpy as jnp\ndef turn(world, key): return world.with_qpos((1,), jnp.ones(1))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = {"func": "own_event:turn", "interval_step": 2}
    data = raw(tmp_path, {"train": {"own": own}})
    data["env"]["cfg"]["gym_config"]["env"]["events"]["own"] = {**own, "mode": "interval"}
    (tmp_path / "train.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"env\.events\.own\.func: .* file alone may not .*--trust own_event:turn"):
        load_config(tmp_path / "train.json")
    del data["env"]["cfg"]["gym_config"]["env"]["events"]["own"]
    (tmp_path / "trainer.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"trainer\.events\.train\.own\.func: .*--trust own_event:turn"):
        load_config(tmp_path / "trainer.json")
    assert "own_event" not in sys.modules
    config = load_config(tmp_path / "train.json", ["trainer.events.train.own.func=own_event:turn"])  # at both places
    assert angle(build_env(config), 2) == pytest.approx(1.0)


@pytest.mark.usefixtures("nothing_trusted")
def test_a_gym_config_with_code_of_its_own_is_not_imported_by_reading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_reward.py").write_text("def half(world, obs, action, info): return 0.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    gym_config = copy.deepcopy(CART_POLE)
    gym_config["env"]["rewards"]["own"] = {"func": "own_reward:half", "mode": "add"}
    (tmp_path / "gym.json").write_text(json.dumps(gym_config))
    data = raw(tmp_path, {}, gym_config="gym.json")
    del data["env"]
    (tmp_path / "train.json").write_text(json.dumps(data))
    refused(load_config, tmp_path / "train.json", match="code that a file alone may not start")
    assert any(note.status == "unsupported" for note in check(tmp_path / "train.json"))
    assert "own_reward" not in sys.modules


def test_the_canonical_form_gives_the_events_back_and_check_lists_their_keys(tmp_path: Path) -> None:
    camera = {"func": "record_camera_data_async", "params": {"name": "main", "resolution": [64, 48]}}
    data = raw(tmp_path, {"train": {"tilt": TILT, "video": camera}, "eval": {"video": camera}})
    config = parse_config(data)
    assert parse_config(config.to_dict()) == config and hash(config) == hash(parse_config(data))
    assert [camera.phase for camera in config.trainer.cameras] == ["train", "eval"]
    (tmp_path / "train.json").write_text(json.dumps(data))
    status = {note.key: note.status for note in check(tmp_path / "train.json") if note.key.startswith("trainer.events")}
    assert len(status) == 2 * 3 + 5 and set(status.values()) == {"used"}
