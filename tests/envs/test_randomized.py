"""Randomization by row and by episode: the draws, their ranges and times, and their lifetimes."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refusals, refused
from damages import same, what_is_left
from tiny import tiny

from ejax.config import ConfigError, parse_config
from ejax.envs.host.pure_host import PureHostEnv
from ejax.envs.locomotion.velocity import VelocityRL
from ejax.envs.manager.embodied import EmbodiedEnv
from ejax.envs.mujoco.drawing import asset_of
from ejax.envs.mujoco.engine import Physics, PhysicsState, load_model
from ejax.envs.randomization.draws import read_draw
from ejax.envs.randomization.physics import randomize_articulation_mass, randomize_drive_gains
from ejax.envs.tasks.instructed_place import InstructedPlaceRL
from ejax.envs.tasks.pick_place import PickPlaceRL
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.envs.tasks.push_cube import PushCubeRL
from ejax.envs.wrappers.action_chunk import ActionChunk
from ejax.envs.wrappers.randomized import LEVEL, RandomizedEnv
from ejax.envs.wrappers.rendered import RenderedEnv
from ejax.rollout import EnvCarry, reset, restart, starts_of, step
from ejax.run import train
from ejax.training.environments import build_env
from ejax.types import Timestep

KEY = jax.random.key(0)
CUBE, ROBOT = {"uid": "cube"}, {"uid": "robot"}
MASS = {"func": "randomize_rigid_object_mass", "params": {"entity_cfg": CUBE, "mass_range": [1.0, 3.0]}}
FRICTION = {"func": "randomize_rigid_object_friction", "params": {"entity_cfg": CUBE, "friction_range": [0.3, 0.9]}}
GRAVITY = {"func": "randomize_gravity", "params": {"gravity_range": [[0, 0, -1], [0, 0, 1]]}}
GAINS = {
    "func": "randomize_drive_gains",
    "params": {"entity_cfg": ROBOT, "stiffness_range": [0.5, 1.5], "damping_range": [0.5, 1.5]},
}
NOISE = {"func": "add_observation_noise", "params": {"noise": 0.01, "bias_range": [-0.1, 0.1]}}
PUSH_CUBE = load_model("push_cube.xml")
CUBE_ID = PUSH_CUBE.body("cube").id


def of(func: str, mode: str | None = None, **params: Any) -> dict[str, Any]:
    return {"func": func, "params": params, **({"mode": mode} if mode else {})}


def push_cube(**events: Any) -> RandomizedEnv:
    return RandomizedEnv(PushCubeRL(episode_length=3, physics="mujoco"), events)


def point_mass(**events: Any) -> RandomizedEnv:
    return RandomizedEnv(PointMassRL(max_episode_steps=3), events)


def parameters(env: Any, num_rows: int = 1) -> dict[str, np.ndarray]:
    state = reset(env, KEY, num_rows).state
    return {name: np.asarray(value) for name, value in state.env.physics.parameters.items()}


def play(env: Any, carry: EnvCarry, num_steps: int, seed: int = 1) -> tuple[EnvCarry, list[Timestep]]:
    steps = []
    stepper = jax.jit(step, static_argnums=0)
    for i in range(num_steps):
        action = jnp.zeros((len(carry.state.episode_step), *env.action_space.shape))
        carry, timestep = stepper(env, carry, action, jax.random.key(seed * 1000 + i))
        steps.append(timestep)
    return carry, steps


def assert_same(one: Any, other: Any) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_row_draws_from_its_own_key_whatever_the_batch_and_the_other_events() -> None:
    keys = jax.random.split(KEY, 64)
    env, more = push_cube(mass=MASS, friction=FRICTION), push_cube(gains=GAINS, mass=MASS, friction=FRICTION)
    many, some, others = (
        jax.vmap(each.reset)(rows)[0].env.physics.parameters
        for each, rows in ((env, keys), (env, keys[:4][::-1]), (more, keys))
    )
    for name, value in many.items():
        np.testing.assert_array_equal(value[:4][::-1], some[name])
        np.testing.assert_array_equal(value, others[name])
    assert len(np.unique(many["body_mass"][:, CUBE_ID])) == 64


@pytest.mark.slow
def test_the_episode_itself_is_the_one_without_events() -> None:
    plain, randomized = PushCubeRL(physics="mujoco"), push_cube(mass=MASS)
    np.testing.assert_array_equal(plain.reset(KEY)[1], randomized.reset(KEY)[1])


@cases(
    "given operation distribution low high",
    ([1.0, 3.0], "abs", "uniform", 1.0, 3.0),
    ([0.5, 2.0], "scale", "log_uniform", 1.0, 4.0),
    ([0.0, 0.1], "add", "gaussian", 1.7, 2.3),
)
def test_what_is_drawn_stays_within_the_ends_that_are_checked(
    given: list[float], operation: str, distribution: str, low: float, high: float
) -> None:
    draw, nominal = read_draw("range", given, operation, distribution), np.full(2000, 2.0)
    values = draw.value(nominal, draw.sample(KEY, (2000,)), None)
    np.testing.assert_allclose([end[0] for end in draw.ends(nominal)], [low, high])
    assert (values >= low).all() and (values <= high).all()
    mean = {"uniform": 2.0, "log_uniform": 3.0 / np.log(4.0), "gaussian": 2.0}[distribution]
    assert float(values.mean()) == pytest.approx(mean, rel=0.02)


def test_inertia_goes_with_mass_and_sizes_with_their_powers() -> None:
    mass = parameters(push_cube(mass=MASS))
    ratio = mass["body_mass"][0, CUBE_ID] / 2.0
    np.testing.assert_allclose(mass["body_inertia"][0, CUBE_ID], PUSH_CUBE.body_inertia[CUBE_ID] * ratio, rtol=1e-6)
    scale = of("randomize_rigid_object_scale", entity_cfg=CUBE, scale_factor_range=[[0.8], [1.2]])
    scaled = parameters(push_cube(scale=scale))
    s = scaled["body_mass"][0, CUBE_ID] ** (1 / 3) / 2.0 ** (1 / 3)
    assert s != pytest.approx(1.0, abs=1e-3)
    geoms = PUSH_CUBE.geom_bodyid == CUBE_ID
    np.testing.assert_allclose(scaled["body_inertia"][0, CUBE_ID], PUSH_CUBE.body_inertia[CUBE_ID] * s**5, rtol=1e-5)
    for name in ("geom_size", "geom_pos", "geom_rbound"):
        np.testing.assert_allclose(scaled[name][0][geoms], getattr(PUSH_CUBE, name)[geoms] * s, rtol=1e-5)
        np.testing.assert_allclose(scaled[name][0][~geoms], getattr(PUSH_CUBE, name)[~geoms], rtol=1e-6)


def test_stiffness_scales_the_whole_spring_and_its_target() -> None:
    drawn = parameters(push_cube(gains=GAINS))
    ratio = drawn["actuator_gainprm"][0, :, 0] / PUSH_CUBE.actuator_gainprm[:, 0]
    np.testing.assert_allclose(drawn["actuator_biasprm"][0, :, 1], PUSH_CUBE.actuator_biasprm[:, 1] * ratio, rtol=1e-6)
    assert len(np.unique(drawn["dof_damping"][0, :6] / PUSH_CUBE.dof_damping[:6])) == 6  # ur10.xml has it in the joints
    np.testing.assert_array_equal(drawn["dof_damping"][0, 6:], 0.0)


def test_links_are_chosen_by_pattern_or_by_name() -> None:
    event = of(
        "randomize_articulation_mass", entity_cfg=ROBOT, mass_range=[0.5, 1.0], relative=True, link_names="wrist.*"
    )
    drawn = parameters(push_cube(links=event))["body_mass"][0] - PUSH_CUBE.body_mass
    changed = {PUSH_CUBE.body(i).name for i in np.flatnonzero(np.abs(drawn) > 1e-5)}
    assert changed == {"wrist_1", "wrist_2", "wrist_3"} and (drawn[drawn > 1e-5] > 0.499).all()
    by_name = of("randomize_articulation_mass", entity_cfg={"uid": "base"}, mass_range={"forearm": [5.0, 5.0]})
    assert parameters(push_cube(links=by_name))["body_mass"][0, PUSH_CUBE.body("forearm").id] == 5.0


DRIVEN = """<mujoco><worldbody>
  <body name="drone"><freejoint/><geom size="0.1"/><site name="rotor"/></body>
  <body name="finger"><joint name="knuckle"/><geom size="0.1"/></body>
  <body name="arm"><joint name="elbow"/><geom size="0.1"/></body>
  <body name="ball"><freejoint/><geom size="0.1"/></body></worldbody>
<tendon><fixed name="string"><joint joint="knuckle" coef="1"/></fixed></tendon>
<actuator><motor site="rotor" gear="0 0 1 0 0 0"/><motor tendon="string"/><motor name="muscle" joint="elbow"/>
</actuator></mujoco>"""


def test_robots_are_what_drives_move_through_joints_sites_and_tendons() -> None:
    change = randomize_articulation_mass(load_model(DRIVEN), {"uid": "robot"}, (0.5, 2.0))
    assert change.writes["body_mass"].tolist() == [False, True, True, True, False]


def test_a_motor_has_no_stiffness_to_randomize() -> None:
    with pytest.raises(ValueError, match="drive 'muscle' of robot has no stiffness in the MJCF; leave its joint out"):
        randomize_drive_gains(load_model(DRIVEN), {"uid": "robot"}, stiffness_range=(0.5, 2.0))


@pytest.mark.slow
@cases("env", PickPlaceRL(physics="mujoco"), InstructedPlaceRL(physics="mujoco"), ids=["one", "two"])
def test_objects_of_other_tasks_are_found_by_name(env: Any) -> None:
    uid = "cube" if isinstance(env, PickPlaceRL) else "cube_2"
    com = of(
        "randomize_rigid_object_center_of_mass", entity_cfg={"uid": uid}, com_pos_offset_range=[[0.01] * 3, [0.02] * 3]
    )
    mass = of("randomize_rigid_object_mass", entity_cfg={"uid": uid}, mass_range=[2.0, 2.0], operation="scale")
    randomized = RandomizedEnv(env, {"com": com, "mass": mass, "gains": GAINS})
    body = load_model(asset_of(env) or "").body(uid).id
    state, _ = randomized.reset(KEY)
    assert (state.env.physics.parameters["body_ipos"][body] >= 0.01).all()
    np.testing.assert_allclose(state.env.physics.parameters["body_mass"][body], 0.2, rtol=1e-6)
    after, timestep = jax.jit(randomized.step)(state, jnp.zeros(4), KEY)
    assert np.isfinite(jax.tree.leaves(timestep.obs)[-1]).all()
    assert after.env.physics.parameters.keys() == state.env.physics.parameters.keys()


@pytest.mark.slow
def test_repeated_resets_never_compound_and_startup_outlives_them() -> None:
    events = {"mass": {**MASS, "mode": "startup"}, "friction": FRICTION, "noise": {**NOISE, "mode": "startup"}}
    env = push_cube(**events)
    carry = reset(env, KEY, 3)
    masses, frictions, biases = [], [], []
    for i in range(4):
        masses.append(carry.state.env.physics.parameters["body_mass"])
        frictions.append(carry.state.env.physics.parameters["pair_friction"][:, -1, 0])
        biases.append(carry.state.drawn["noise"])
        carry, steps = play(env, carry, 3, seed=i)
        assert steps[-1].truncated.all()
    assert all(np.array_equal(masses[0], each) for each in masses) and len(np.unique(masses[0][:, CUBE_ID])) == 3
    assert all(np.array_equal(biases[0], each) for each in biases)
    assert len(np.unique(frictions)) == 4 * 3  # one for each episode of each row
    assert np.min(frictions) >= 0.3 and np.max(frictions) <= 0.9


@pytest.mark.slow
def test_starts_that_are_drawn_beforehand_are_carried_over_alike() -> None:
    env = push_cube(mass={**MASS, "mode": "startup"}, noise=NOISE, later=of("delay_observation", steps_range=[0, 1]))
    carry, _ = play(env, reset(env, KEY, 2), 2)
    action, key = jnp.zeros((2, 6)), jax.random.key(5)
    start = jax.tree.map(lambda x: x[0], starts_of(env, key[None], 2))
    jitted = jax.jit(step, static_argnums=0)
    here, there = jitted(env, carry, action, key), jitted(env, carry, action, key, start)
    assert here[1].truncated.all()
    assert_same(here, there)


@pytest.mark.slow
def test_a_host_environment_carries_over_too() -> None:
    env = PureHostEnv(push_cube(mass={**MASS, "mode": "startup"}, friction=FRICTION), 2)
    env.reset(np.arange(2))
    before = env.get_state().state.env.physics.parameters
    for _ in range(3):
        timestep = env.step(np.zeros((2, 6), np.float32))
    assert timestep.truncated.all()
    after = env.get_state().state.env.physics.parameters
    np.testing.assert_array_equal(before["body_mass"], after["body_mass"])
    assert (before["pair_friction"][:, -1, 0] != after["pair_friction"][:, -1, 0]).all()


@pytest.mark.slow
def test_an_interval_event_acts_before_the_steps_after_each_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Physics, "step", lambda self, state, ctrl: state)
    push = of("push_rigid_object_by_setting_velocity", entity_cfg=CUBE, velocity_range={"x": [0.5, 0.5], "yaw": [1, 1]})
    env = RandomizedEnv(PushCubeRL(physics="mujoco"), {"push": {**push, "interval_step": 2}})
    state, _ = env.reset(KEY)
    speeds = []
    for _ in range(6):
        state, _ = env.step(state, jnp.zeros(6), KEY)
        speeds.append(float(state.env.physics.qvel[6]))
    assert speeds == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]
    np.testing.assert_allclose(state.env.physics.qvel[6:], [1.0, 0.0, 0.0, 0.0, 0.0, 2.0])


def test_a_push_turns_about_the_worlds_axes() -> None:
    push = of("push_rigid_object_by_setting_velocity", entity_cfg=CUBE, velocity_range={"roll": [1, 1]})
    change = push_cube(push=push).read.physics[0].does
    quarter = jnp.array([jnp.sqrt(0.5), 0.0, 0.0, jnp.sqrt(0.5)])  # about z: the world's x is the body's −y
    physics = PhysicsState(qpos=jnp.zeros(13).at[9:].set(quarter), qvel=jnp.zeros(12))
    np.testing.assert_allclose(change.apply(physics, KEY, None).qvel[9:], [0.0, -1.0, 0.0], atol=1e-6)


def test_joints_are_pushed_by_name() -> None:
    push = of("push_joints_by_setting_velocity", entity_cfg=ROBOT, velocity_range=[1, 1], joint_names=["elbow"])
    change = push_cube(push=push).read.physics[0].does
    physics = PhysicsState(qpos=jnp.zeros(13), qvel=jnp.zeros(12))
    np.testing.assert_array_equal(change.apply(physics, KEY, None).qvel, jnp.zeros(12).at[2].set(1.0))


@pytest.mark.slow
def test_a_heavier_cube_is_pushed_less_far_by_the_same_blow() -> None:
    push = {
        **of("push_rigid_object_by_setting_velocity", entity_cfg=CUBE, velocity_range={"x": [1, 1]}),
        "interval_step": 1,
    }
    slippery = of("randomize_rigid_object_friction", entity_cfg=CUBE, friction_range=[0.2, 0.2])
    rough = of("randomize_rigid_object_friction", entity_cfg=CUBE, friction_range=[0.5, 0.5])
    travelled = []
    for friction in (slippery, rough):
        state, _ = (env := push_cube(push=push, friction=friction)).reset(KEY)
        for _ in range(3):
            state, _ = jax.jit(env.step)(state, jnp.zeros(6), KEY)
        travelled.append(float(state.env.physics.qpos[6]) + 0.6)
    assert travelled[0] > travelled[1] > 0.0


@pytest.mark.slow
def test_noise_and_bias_have_the_size_that_is_asked_for() -> None:
    env = point_mass(noise=of("add_observation_noise", noise=0.1, bias_range=[0.5, 0.5]))
    keys = jax.random.split(KEY, 2000)
    seen, true = jax.vmap(env.reset)(keys)[1], jax.vmap(PointMassRL(max_episode_steps=3).reset)(keys)[1]
    np.testing.assert_allclose((seen - true).mean(axis=0), 0.5, atol=0.02)
    np.testing.assert_allclose((seen - true).std(axis=0), 0.1, rtol=0.1)


@pytest.mark.slow
def test_the_first_noise_is_not_made_of_the_numbers_that_made_the_bias() -> None:
    both = {"noise": 1.0, "bias_range": [-1.0, 1.0], "distribution": "uniform"}
    env, plain = point_mass(noise=of("add_observation_noise", **both)), PointMassRL()
    keys = jax.random.split(KEY, 256)
    state, seen = jax.vmap(env.reset)(keys)
    bias = np.asarray(state.drawn["noise"])
    noise = np.asarray(seen) - np.asarray(jax.vmap(plain.reset)(keys)[1]) - bias
    assert abs(np.corrcoef(bias[:, 0], noise[:, 0])[0, 1]) < 0.2 and np.abs(noise).max() <= 1.0 + 1e-6


@pytest.mark.slow
def test_an_action_comes_as_late_as_was_drawn_and_a_broken_step_mixes_two() -> None:
    done = []

    class Spy(PointMassRL):
        def step(self, state: Any, action: Any, key: Any) -> Any:
            done.append(float(action[0]))
            return super().step(state, action, key)

    for steps, expected in ((0.0, [1, 2, 3, 4]), (2.0, [0, 0, 1, 2]), (1.25, [0, 0.75, 1.75, 2.75])):
        done.clear()
        env = RandomizedEnv(Spy(), {"late": of("delay_action", steps_range=[steps, steps])})
        state, _ = env.reset(KEY)
        for i in range(4):
            state, _ = env.step(state, jnp.full(env.action_space.shape, i + 1.0), KEY)
        assert done == expected


def test_an_observation_comes_late_and_the_first_one_stands_before_it() -> None:
    plain, env = PointMassRL(), RandomizedEnv(PointMassRL(), {"late": of("delay_observation", steps_range=[1, 1])})
    state, first = env.reset(KEY)
    inner, true = plain.reset(KEY)
    np.testing.assert_array_equal(first, true)
    trues = [true]
    for _ in range(3):
        state, seen = env.step(state, jnp.ones(plain.action_space.shape), KEY)
        inner, timestep = plain.step(inner, jnp.ones(plain.action_space.shape), KEY)
        trues.append(timestep.obs)
        np.testing.assert_array_equal(seen.obs, trues[-2])
        np.testing.assert_array_equal(seen.reward, timestep.reward)


@pytest.mark.slow
def test_whole_delays_are_whole_and_each_as_likely() -> None:
    env = point_mass(late=of("delay_action", steps_range=[0, 2], whole=True))
    steps = jax.vmap(env.reset)(jax.random.split(KEY, 3000))[0].drawn["late"]
    values, counts = np.unique(steps, return_counts=True)
    assert values.tolist() == [0.0, 1.0, 2.0] and (np.abs(counts - 1000) < 120).all()


@pytest.mark.slow
def test_text_in_an_observation_is_not_delayed_nor_noised() -> None:
    late = of("delay_observation", steps_range=[1, 1])
    noise = of("add_observation_noise", noise=0.1, part="state")
    env = RandomizedEnv(InstructedPlaceRL(physics="mujoco"), {"late": late, "noise": noise})
    _, seen = env.reset(KEY)
    _, true = env.env.reset(KEY)
    np.testing.assert_array_equal(seen["instruction"], true["instruction"])
    np.testing.assert_array_equal(seen["scene"], true["scene"])
    assert (seen["state"] != true["state"]).all()


@pytest.mark.slow
def test_a_curriculum_by_steps_widens_what_is_drawn_and_outlives_episodes() -> None:
    harder = of("curriculum", by="steps", num_steps=12)
    env = push_cube(mass=of("randomize_rigid_object_mass", entity_cfg=CUBE, mass_range=[4.0, 4.0]), harder=harder)
    carry, masses, levels = reset(env, KEY, 1), [], []
    for i in range(5):
        masses.append(float(carry.state.env.physics.parameters["body_mass"][0, CUBE_ID]))
        carry, steps = play(env, carry, 3, seed=i)
        levels.append(float(steps[-1].info["metrics"][LEVEL][0]))
    np.testing.assert_allclose(masses, [2.0, 2.5, 3.0, 3.5, 4.0], rtol=1e-6)
    assert levels == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.slow
def test_a_group_that_shares_its_start_shares_what_outlasts_episodes() -> None:
    env = point_mass(harder=of("curriculum", by="success"))
    start = reset(env, KEY, 4, 2)
    level = jnp.array([0.1, 0.9, 0.3, 0.5])
    ended = replace(start, state=replace(start.state, level=level))
    np.testing.assert_array_equal(restart(env, ended, start).state.level, level)
    np.testing.assert_array_equal(restart(env, ended, start, 2).state.level, level[jnp.array([0, 0, 2, 2])])


def test_a_curriculum_by_success_is_refused_without_success() -> None:
    env = RandomizedEnv(VelocityRL(physics="mujoco"), {"harder": of("curriculum", by="success")})
    state = jax.eval_shape(env.reset, KEY)[0]
    with pytest.raises(ValueError, match=r"VelocityRL reports no success; use by: steps"):
        jax.eval_shape(env.step, state, jnp.zeros(12), KEY)


@pytest.mark.slow
def test_a_curriculum_by_success_follows_the_rows_own_episodes() -> None:
    class Lucky(PointMassRL):
        """A success in every second row's episodes."""

        def reset(self, key: Any) -> Any:
            return super().reset(key)

        def step(self, state: Any, action: Any, key: Any) -> Any:
            state, timestep = super().step(state, action, key)
            return state, replace(timestep, info={**timestep.info, "success": action[0] > 0.5})

    harder = of("curriculum", start=0.5, raise_by=0.25, lower_by=0.125)
    env = RandomizedEnv(Lucky(max_episode_steps=2), {"harder": harder, "noise": NOISE})
    carry = reset(env, KEY, 2)
    for i in range(4):
        action = jnp.array([[1.0] * 2, [0.0] * 2])[:, : env.action_space.shape[0]]
        carry, _ = step(env, carry, action, jax.random.key(i))
    np.testing.assert_allclose(carry.state.level, [1.0, 0.25])
    biases = jnp.abs(carry.state.drawn["noise"]).max(axis=1)
    assert biases[1] <= 0.025 < biases[0]


@pytest.mark.slow
def test_chunks_and_pictures_carry_over_what_is_inside() -> None:
    startup = {"mass": {**MASS, "mode": "startup"}}
    chunked = ActionChunk(push_cube(**startup), 3)
    carry = reset(chunked, KEY, 2)
    after, timestep = step(chunked, carry, jnp.zeros((2, 18)), KEY)
    assert timestep.truncated.all()
    np.testing.assert_array_equal(*(each.state.env.physics.parameters["body_mass"] for each in (carry, after)))
    inner = RandomizedEnv(PushCubeRL(episode_length=1, physics="mujoco"), startup)
    drawn = RenderedEnv(inner, blank=True, width=4, height=4)
    carry = reset(drawn, KEY, 2)
    after, timestep = step(drawn, carry, jnp.zeros((2, 6)), KEY)
    assert timestep.truncated.all() and after.obs.keys() == {"image", "state"}
    np.testing.assert_array_equal(*(each.state.env.physics.parameters["body_mass"] for each in (carry, after)))


GYM = json.loads((Path(__file__).parents[1] / "gym_configs" / "push_cube.json").read_text())


def gym_config(**events: Any) -> dict[str, Any]:
    data = copy.deepcopy(GYM)
    data["env"]["events"] = {**data["env"].get("events", {}), **events}
    return data


@pytest.mark.slow
def test_a_gym_configs_own_events_change_physics_and_startup_outlives_its_episodes() -> None:
    uid = next(each["uid"] for each in GYM["rigid_object"] if each.get("body_type", "dynamic") == "dynamic")
    mass = of("randomize_rigid_object_mass", "startup", entity_cfg={"uid": uid}, mass_range=[1.0, 9.0])
    friction = of("randomize_rigid_object_friction", "reset", entity_cfg={"uid": uid}, friction_range=[0.3, 0.9])
    robot = of(
        "randomize_articulation_mass",
        "reset",
        entity_cfg={"uid": GYM["robot"]["uid"]},
        mass_range=[0.9, 1.1],
        operation="scale",
    )
    env = EmbodiedEnv({**gym_config(mass=mass, friction=friction, robot=robot), "max_episode_steps": 1}, "mujoco")
    carry = reset(env, KEY, 2)
    after, timestep = step(env, carry, jnp.zeros((2, *env.action_space.shape)), KEY)
    assert timestep.truncated.all()
    before, now = (each.state.physics.parameters for each in (carry, after))
    body = env.spec.scene.model.body(uid).id
    np.testing.assert_array_equal(before["body_mass"][:, body], now["body_mass"][:, body])
    assert before["body_mass"][0, body] != before["body_mass"][1, body]
    assert (before["pair_friction"][:, :, 0].max(axis=1) != now["pair_friction"][:, :, 0].max(axis=1)).all()


def raw(tmp_path: Path | None = None, env: str = "PushCubeRL", **phases: Any) -> dict[str, Any]:
    data = tiny(tmp_path, env)
    data["env"]["cfg"] = {**data["env"]["cfg"], **({"physics": "mujoco"} if env == "PushCubeRL" else {})}
    data["trainer"]["events"] = copy.deepcopy(phases)
    return data


def test_training_and_evaluation_have_events_of_their_own() -> None:
    config = parse_config(
        raw(train={"mass": MASS}, eval={"mass": {**MASS, "params": {**MASS["params"], "mass_range": [5, 5]}}})
    )
    assert parameters(build_env(config, phase="eval"))["body_mass"][0, CUBE_ID] == 5.0
    assert 1.0 <= parameters(build_env(config))["body_mass"][0, CUBE_ID] <= 3.0
    assert parse_config(config.to_dict()) == config
    assert config.trainer.events.train["mass"].mode == "reset"


@pytest.mark.slow
def test_a_resumed_run_with_everything_random_ends_with_the_same_bits(tmp_path: Path) -> None:
    events = {
        "mass": of(
            "randomize_articulation_mass", "startup", entity_cfg=ROBOT, mass_range=[0.5, 2.0], operation="scale"
        ),
        "gravity": GRAVITY,
        "noise": NOISE,
        "late": of("delay_action", steps_range=[0, 1.5]),
        "harder": of("curriculum", by="steps", num_steps=30),
    }
    config = parse_config(
        {**(data := raw(tmp_path, "CartPoleRL", train=events)), "trainer": {**data["trainer"], "iterations": 4}}
    )
    train(config, run_dir=tmp_path / "whole")
    train(parse_config({**data, "trainer": {**data["trainer"], "iterations": 1}}), run_dir=tmp_path / "halves")
    train(config, resume="latest", run_dir=tmp_path / "halves")
    assert same(*(what_is_left(tmp_path / name, "tiny") for name in ("whole", "halves")))
    log = [json.loads(line) for line in (tmp_path / "whole" / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert any(f"metrics/{LEVEL}" in line for line in log)


OBJECT, LINKS = {"entity_cfg": CUBE}, {"entity_cfg": ROBOT, "mass_range": [1, 2]}
MOMENTS = [[1, 1, 1], [1, 1, 3]]


@refusals(
    ({"func": "randomize_rigid_object_mas"}, "func", "Did you mean 'randomize_rigid_object_mass'"),
    (of("push_articulation_by_setting_velocity"), "func", "robots have fixed bases here"),
    ({**MASS, "mode": "interva"}, "mode", "takes reset, startup, interval"),
    ({**NOISE, "mode": "interval"}, "mode", "add_observation_noise takes reset, startup"),
    ({**MASS, "interval": 3}, "interval", "unknown key"),
    (of("randomize_rigid_object_mass", **OBJECT), "params.mass_range", "is missing"),
    (of("randomize_rigid_object_mass", entity_cfg={"uid": "cub"}, mass_range=[1, 2]), "params", "mean 'cube'"),
    (of("randomize_rigid_object_mass", **OBJECT, mass_range=[2, 1]), "params.mass_range", "low <= high"),
    (of("randomize_rigid_object_mass", **OBJECT, mass_range=[-3, 0], relative=True), "params.mass_range", "allows -1"),
    (of("randomize_rigid_object_mass", **OBJECT, mass_range=[1, 2], operation="mul"), "params.operation", "'mul'"),
    (of("randomize_rigid_object_inertia", **OBJECT, inertia_range=MOMENTS), "params.inertia_range", "none is greater"),
    (of("randomize_articulation_mass", **OBJECT, mass_range=[1, 2]), "params", "there is robot, base"),
    (of("randomize_articulation_mass", **LINKS, link_names="writs.*"), "params", "no link 'writs"),
    (of("randomize_rigid_object_scale", **OBJECT, scale_factor_range=[0, 1]), "params.scale_factor_range", "> 0"),
    (of("randomize_joint_parameters", entity_cfg=ROBOT, friction_range=[1, 2]), "params.friction_range", "it is 0 in"),
    (of("randomize_drive_gains", entity_cfg=ROBOT), "params", "there is stiffness_range, damping_range"),
    (of("add_observation_noise"), "params", "neither noise nor bias_range"),
    (of("add_observation_noise", noise=0.1, part="image"), "params.part", "one array only"),
    (of("delay_action", steps_range=[-1, 1]), "params.steps_range", ">= 0"),
    (of("curriculum", by="luck"), "params.by", "allowed: steps, success"),
)
def test_a_wrong_event_is_refused_by_name(given: dict[str, Any], key: str, word: str) -> None:
    refused(push_cube, one=given, key=f"one.{key}", word=word)


def test_events_that_write_the_same_are_refused_together() -> None:
    scale = of("randomize_rigid_object_scale", entity_cfg=CUBE, scale_factor_range=[0.8, 1.2])
    refused(push_cube, mass=MASS, scale=scale, match=r"scale: writes the same body_inertia as mass; keep one of them")
    late = of("delay_action", steps_range=[0, 1])
    refused(push_cube, one=late, two=late, match=r"two: is a second delay_action, after one")


@refusals(
    (("PushCubeRL", {**MASS, "params": {**MASS["params"], "mass_range": [0, 1]}}), "params.mass_range", "allows 0"),
    (("PushCubeRL", {**MASS, "mode": "startu"}), "mode", "'startup'"),
    (("PointMassRL", MASS), "func", "PointMassRL has no MuJoCo physics"),
)
def test_a_config_refuses_before_anything_is_compiled(given: tuple[str, Any], key: str, word: str) -> None:
    env, event = given
    refused(parse_config, raw(env=env, train={"one": event}), key=f"trainer.events.train.one.{key}", word=word)


@pytest.mark.slow
def test_environments_outside_jax_and_pictures_of_scaled_things_are_refused() -> None:
    with pytest.raises(ConfigError, match="is stepped outside JAX: it takes no events"):
        build_env(parse_config(raw(env="gymnasium:Pendulum-v1", train={"one": NOISE})))
    scale = of("randomize_rigid_object_scale", entity_cfg=CUBE, scale_factor_range=[0.8, 1.2])
    refused(lambda: RenderedEnv(push_cube(scale=scale)), match="pictures show the sizes of the MJCF")
