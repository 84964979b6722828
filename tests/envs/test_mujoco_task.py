"""A MuJoCo task of one's own in one class, and all that ejax does with a task."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from tiny import tiny

from ejax import MuJoCoTask, World, check_env
from ejax.config import parse_config
from ejax.envs.description import WHOLE, Feature, describe
from ejax.envs.task.terms import Outcome, Term
from ejax.envs.terms.registry import TERMS
from ejax.envs.wrappers.placing import with_events
from ejax.envs.wrappers.randomized import RandomizedEnv
from ejax.envs.wrappers.rendered import RenderedEnv
from ejax.play.saved_policy import record_video
from ejax.run import RunResult, train
from ejax.schema.trust import trust
from ejax.training.environments import build_env
from ejax.types import Array, Key

KEY = jax.random.key(0)
ENTITIES = {"source_entity_cfg": {"uid": "cart"}, "target_entity_cfg": {"uid": "goal"}}
MODEL = """<mujoco><option timestep="0.01"/><default><geom contype="0" conaffinity="0"/></default><worldbody>
  <geom type="plane" size="2 2 0.1"/>
  <body name="cart" pos="0 0 0.5"><joint name="rail" type="slide" axis="1 0 0" range="-1 1" limited="true"/>
    <geom type="box" size="0.1 0.1 0.05"/>
    <body name="pole"><joint name="hinge" axis="0 1 0" damping="0.1"/>
      <geom type="capsule" fromto="0 0 0 0 0 0.4" size="0.02"/>
      <site name="tip" pos="0 0 0.4"/></body></body>
  <body name="goal" mocap="true" pos="0.5 0 0.9"><geom type="sphere" size="0.03" rgba="0 1 0 1"/></body>
</worldbody><actuator>
  <motor name="push" joint="rail" gear="5" ctrlrange="-2 2" ctrllimited="true"/>
  <position name="lean" joint="hinge" kp="4" ctrlrange="-0.5 1" ctrllimited="true"/>
</actuator><sensor><jointvel name="speed" joint="rail"/></sensor>
<keyframe><key name="tilted" qpos="0.2 0.1"/><key name="home" qpos="0.3 0"/></keyframe></mujoco>"""


class Reach(MuJoCoTask):
    model = MODEL
    episode_length = 11
    control_period = 0.02
    weights = {"near": 2.0}
    randomization = {
        "drives": {
            "func": "randomize_drive_gains",
            "params": {"entity_cfg": {"uid": "robot"}, "joint_names": "hinge", "stiffness_range": [0.5, 2.0]},
        }
    }
    reach: float = 0.4

    def start(self, key: Key, world: World) -> World:
        goal = jax.random.uniform(key, (), minval=-self.reach, maxval=self.reach)
        return world.place("goal", jnp.stack([goal, jnp.zeros(()), jnp.full((), 0.9)])).keep(best=jnp.inf)

    def update(self, key: Key, world: World, before: World) -> World:
        return world.keep(best=jnp.minimum(before.kept["best"], _miss(world)))

    def observe(self, world: World) -> dict[str, Array]:
        to_goal = world.body("goal").position - world.site("tip").position
        return {**world.joint_positions(), "tip to goal [m]": to_goal, "speed": world.sensor("speed")}

    def rewards(self, world: World, before: World) -> dict[str, Array]:
        return {"near": -_miss(world), "effort": -jnp.square(world.action).sum()}

    def fails(self, world: World) -> Array:
        return jnp.abs(world.joint("rail").position) > 0.9

    def succeeds(self, world: World) -> Array:
        return _miss(world) < 0.02

    def metrics(self, world: World) -> dict[str, Array]:
        return {"miss": _miss(world)}


def _miss(world: World) -> Array:
    return jnp.abs(world.body("goal").position[0] - world.site("tip").position[0])


NAME = f"{__name__}:Reach"


@pytest.fixture(autouse=True)
def trusted() -> None:
    trust(NAME)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return train(parse_config(tiny(tmp_path_factory.mktemp("runs"), NAME)))


def test_the_task_passes_ejaxs_own_check() -> None:
    check_env(Reach(), num_steps=11)


@pytest.mark.slow
def test_it_trains_and_each_term_is_logged_with_its_weight(run: RunResult) -> None:
    assert {"rewards/near", "rewards/effort", "metrics/miss"} <= run.last_train_metrics.keys()
    state, _ = Reach().reset(KEY)
    _, timestep = Reach(weights={"effort": 0.5}).step(state, jnp.array([0.5, -1.0]), KEY)
    miss = timestep.info["metrics"]["miss"]
    assert timestep.info["rewards"] == {"near": pytest.approx(-2.0 * miss), "effort": pytest.approx(-0.625)}
    assert timestep.reward == pytest.approx(-2.0 * miss - 0.625)


@pytest.mark.slow
def test_it_is_filmed(run: RunResult, tmp_path: Path) -> None:
    path = record_video(run.policy, Reach(), run.params, KEY, tmp_path / "reach.mp4", num_envs=1)
    assert path.stat().st_size > 1000


@pytest.mark.slow
def test_it_is_drawn_for_a_policy_that_sees_and_its_marker_moves_in_the_picture() -> None:
    env = RenderedEnv(with_events(Reach(), {}), width=32, height=24, renderer="raycast")
    state, obs = jax.jit(env.reset)(KEY)
    assert obs["image"].shape == (24, 32, 3) and obs["state"].shape == Reach().observation_space.shape
    inner = state.env
    moved = replace(state, env=replace(inner, markers={"goal": inner.markers["goal"] + 0.3}))
    assert (np.asarray(obs["image"]) != np.asarray(env._pictures(moved)["image"])).any()


def test_its_randomization_is_part_of_it_and_events_of_the_config_come_in_addition() -> None:
    noise = {"noise": {"func": "add_observation_noise", "params": {"noise": 0.01}}}
    plain: Any = build_env(parse_config(tiny(env=NAME)))
    more: Any = build_env(parse_config(tiny(env=NAME, events={"train": noise})))
    none = build_env(parse_config(tiny(env=NAME, env_cfg={"randomization": {}})))
    pictures: Any = [{"RenderedEnv": {"renderer": "raycast"}}]
    drawn: Any = build_env(parse_config(tiny(env=NAME) | {"env": {"id": NAME, "wrappers": pictures}}))
    drawn = drawn.env
    assert isinstance(none, Reach)
    assert [list(env.events) for env in (plain, more, drawn)] == [["drives"], ["drives", "noise"], ["drives"]]
    gain = plain.reset(KEY)[0].env.physics.parameters["actuator_gainprm"][1, 0]
    assert 2.0 <= gain <= 8.0 and gain != 4.0
    assert isinstance(plain, RandomizedEnv)


def test_its_numbers_are_described_from_the_model() -> None:
    description = describe(Reach())
    assert description.observation[WHOLE] == (
        Feature("rail position", "m"),
        Feature("hinge angle", "rad"),
        *(Feature(f"tip to goal {axis}", "m") for axis in "xyz"),
        Feature("speed 0", "1"),
    )
    assert description.action == (
        Feature("push force, -1 to 1 for -10 to 10", "N"),
        Feature("lean target angle, -1 to 1 for -0.5 to 1", "rad"),
    )
    assert (
        description.control_period == 0.02
        and description.parameters is not None
        and description.parameters["reach"] == 0.4
    )
    assert "warm start is off" in description.notes[0]


@pytest.mark.slow
def test_its_contract_is_complete(run: RunResult) -> None:
    contract = pytest.importorskip("interop.artefacts.contract")
    spec_of = pytest.importorskip("interop.exporters.record").spec_of
    seen = {WHOLE: np.zeros((2, 6), np.float32)}
    made = contract.make_contract({"id": NAME, "cfg": {}}, Reach(), spec_of(run.policy, Reach()), seen, "none")
    assert made["control_rate_hz"] == 50.0
    assert made["observation"][0]["features"][2] == {"name": "tip to goal x", "unit": "m"}
    assert made["action"]["features"][0]["unit"] == "N"
    assert json.loads(json.dumps(made)) == made


@pytest.mark.slow
def test_the_c_engine_and_mjx_agree() -> None:
    """The same episode, three steps. Of 64 episodes the worst differ by 6e-8 and 2.4e-7."""
    ends = []
    for engine in ("mujoco", "mjx"):
        env = Reach(physics=engine)  # type: ignore[arg-type]  # one of the literals

        @jax.jit
        def play(key: Key, env: Reach = env) -> tuple[Array, Array]:
            state, _ = env.reset(key)
            for _ in range(3):
                state, timestep = env.step(state, jnp.array([0.7, -0.4]), key)
            return timestep.obs, timestep.reward

        ends.append(play(KEY))
    np.testing.assert_allclose(ends[0][0], ends[1][0], atol=2e-7)
    np.testing.assert_allclose(ends[0][1], ends[1][1], atol=8e-7)


@pytest.mark.slow
def test_an_episode_starts_at_the_keyframe_home_with_noise_in_the_joints_range() -> None:
    starts = jax.vmap(lambda key: Reach(start_noise=2.0).reset(key)[0].physics.qpos)(jax.random.split(KEY, 50))
    assert (jnp.abs(starts[:, 0]) <= 1.0).all() and (starts[:, 0] == 1.0).any()  # the rail's end
    assert (jnp.abs(starts[:, 1]) <= 2.0).all() and starts[:, 1].std() > 0.5
    np.testing.assert_allclose(Reach(start_noise=0.0).reset(KEY)[0].physics.qpos, [0.3, 0.0], atol=1e-7)


class Tilted(Reach):
    keyframe = "tilted"
    ends_on_success: bool = False

    def fails(self, world: World) -> Array:
        return jnp.ones((), bool)


def test_a_subclass_changes_what_it_names_and_keeps_the_rest() -> None:
    task = Tilted(start_noise=0.0)
    state, _ = task.reset(KEY)
    np.testing.assert_allclose(state.physics.qpos, [0.2, 0.1], atol=1e-7)
    assert (task.episode_length, task.weights["near"], task.reach) == (11, 2.0, 0.4)
    _, timestep = task.step(state, jnp.zeros(2), KEY)
    assert timestep.terminated and not timestep.info["success"]


def test_success_ends_an_episode_unless_it_is_to_go_on() -> None:
    for ends in (True, False):
        task = Reach(start_noise=0.0, reach=1e-6, ends_on_success=ends)
        state, _ = task.reset(KEY)
        state = replace(state, physics=replace(state.physics, qpos=jnp.zeros(2)))
        _, timestep = task.step(state, jnp.array([0.0, -1.0 / 3.0]), KEY)  # leans to 0
        assert timestep.info["success"] and timestep.terminated == ends


def test_a_broken_simulation_is_cut_off_and_no_failure() -> None:
    state, _ = Reach().reset(KEY)
    broken = replace(state, physics=replace(state.physics, qvel=jnp.full(2, jnp.nan)))
    _, timestep = Reach().step(broken, jnp.zeros(2), KEY)
    assert timestep.truncated and not timestep.terminated


class OfTerms(Reach):
    terms = (
        Term(name="apart", func=TERMS["rewards"]["distance_between_objects"], weight=3.0, params=ENTITIES),
        Term(name="over", kind="terminations", func=lambda world: Outcome(truncated=world.time > 0.03)),
        Term(name="shove", kind="events", mode="interval", func=lambda world, key: world.with_joint("rail", 0.5)),
    )


def test_terms_of_the_table_join_the_tasks_own() -> None:
    task = OfTerms(start_noise=0.0, weights={"apart": 2.0})
    state, _ = task.reset(KEY)
    state, first = task.step(state, jnp.zeros(2), KEY)
    assert state.physics.qpos[0] == 0.5 and not first.truncated
    apart = jnp.linalg.norm(task.world(state).body("cart").position - task.world(state).body("goal").position)
    assert first.info["rewards"]["apart"] == pytest.approx(-2.0 * float(apart), rel=1e-5)
    assert first.info["rewards"].keys() == {"near", "effort", "apart"}
    assert task.step(state, jnp.zeros(2), KEY)[1].truncated


def test_a_config_adds_terms_by_weights() -> None:
    apart = {"func": "distance_between_objects", "weight": 3.0, "params": ENTITIES}
    task = Reach(weights={"near": 1.0, "effort": {"weight": 0.5}, "apart": apart})
    info = task.step(task.reset(KEY)[0], jnp.array([0.5, -1.0]), KEY)[1].info
    weights = {"near": 1.0, "effort": 0.5, "apart": 3.0}
    assert info["rewards"] == {name: pytest.approx(weight * info["terms"][name]) for name, weight in weights.items()}


class Added(Reach):
    weights = {"near": 1.0, "apart": {"func": "distance_between_objects", "params": ENTITIES}}


def test_a_class_may_have_terms_in_its_weights() -> None:
    assert Added().added.rewards[0].name == "apart" and Added(weights={"near": 3.0}).added.weights == {"near": 3.0}


class Steered(Reach):
    actions = ("speed of the tip [m/s]",)

    def control(self, world: World, action: Array) -> Array:
        return jnp.stack([action[0], jnp.zeros(())])


def test_actions_of_ones_own_have_the_names_given() -> None:
    task = Steered()
    assert describe(task).action == (Feature("speed of the tip", "m/s"),)
    assert task.action_space.shape == (1,)
    task.step(task.reset(KEY)[0], jnp.ones(1), KEY)


def test_a_file_is_found_beside_the_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "robot.xml").write_text(MODEL)
    (tmp_path / "my_robot.py").write_text(
        "from test_mujoco_task import Reach\nclass Mine(Reach):\n    model = 'robot.xml'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from my_robot import Mine  # type: ignore[import-not-found]  # written above

    assert Mine().asset == str(tmp_path / "robot.xml")


@cases(
    "changes message",
    ({"model": ""}, "the task has no model; set model = 'robot.xml'"),
    ({"model": "no_such.xml"}, "no file no_such.xml in "),
    ({"model": "<mujoco><worldbody><bdy/></worldbody></mujoco>"}, "bdy"),
    ({"model": "<mujoco/>"}, "the model has no actuators"),
    ({"model": MODEL.replace('ctrlrange="-2 2" ctrllimited="true"', "")}, "actuator 'push' has no ctrlrange"),
    ({"keyframe": "homo"}, r"no keyframe 'homo'; there is tilted, home\. Did you mean 'home'\?"),
    ({"control_period": 0.025}, r"multiple of the model's timestep of 0.01 s, got 0.025; use 0.02 or 0.03"),
    ({"episode_length": 0}, "episode_length must be > 0, got 0"),
    ({"weights": {"near": "much"}}, "weights must be numbers, got {'near': 'much'}"),
    ({"weights": {"new": {"func": "sucess_reward"}}}, r"weights\.new\.func: .*Did you mean 'success_reward'"),
    ({"actions": ("one", "two", "three")}, "3 actions for 2 actuators; define control"),
    ({"physics": "bullet"}, "must be 'auto', 'mujoco'"),
    ({"start": lambda self, key, world: world.place("gaol", [0.0] * 3)}, r"line \d+: no body 'gaol'"),
    ({"observe": lambda self, world: {}}, "observe gave no numbers"),
    ({"observe": lambda self, world: {"pose": jnp.eye(3)}}, r"must be scalars and vectors, got pose \(3, 3\)"),
)
def test_what_cannot_be_a_task_is_refused_when_it_is_made(changes: dict[str, Any], message: str) -> None:
    refused(lambda: type("Odd", (Reach,), changes)(), match=message)


@cases(
    "changes message",
    ({"weights": {"naer": 1.0}}, r"weights names no term 'naer'; there is near, effort\. Did you mean 'near'\?"),
    ({"rewards": lambda self, world, before: {"a": world.qpos}}, r"must be a scalar; a has shape \(2,\)"),
    ({"rewards": lambda self, world, before: {}}, "rewards gave no terms"),
    ({"fails": lambda self, world: world.time}, r"fails must be true or false, got float32\[\]"),
    ({"control": lambda self, world, action: action[:1]}, r"control gave shape \(1,\); .* take \(2,\)"),
    (
        {"update": lambda self, key, world, before: world.keep(new=1)},
        r"state.kept\['new'\]: got int32\[\]; reset gives",
    ),
)
def test_what_a_step_gets_wrong_is_reported_before_it_is_compiled(changes: dict[str, Any], message: str) -> None:
    refused(lambda: check_env(type("Odd", (Reach,), changes)()), match=message)


@cases("name meant", ("fail", "fails"), ("episode_lenght", "episode_length"), ("reward", "rewards"))
def test_a_misspelt_method_or_attribute_is_refused(name: str, meant: str) -> None:
    refused(type, "Odd", (Reach,), {name: 1}, match=f"Odd.{name} is not used. Did you mean '{meant}'")


HINGE, OTHER, SLIDE = '<joint axis="0 1 0"/>', '<joint axis="1 0 0"/>', '<joint type="slide" axis="1 0 0"/>'


@cases(
    "joints names",
    (HINGE, ["pole angle [rad]"]),
    (HINGE + OTHER, ["pole 1 angle [rad]", "pole 2 angle [rad]"]),
    (SLIDE + HINGE, ["pole 1 position [m]", "pole 2 angle [rad]"]),
    ('<joint name="pole" axis="1 0 0"/>' + HINGE, ["pole angle [rad]", "pole 2 angle [rad]"]),
    ('<joint name="arm/pole" axis="1 0 0"/>' + HINGE, ["arm/pole angle [rad]", "pole angle [rad]"]),
    ('<joint type="ball"/>', ["pole quaternion [1]"]),
)
def test_each_joint_of_a_body_is_observed_under_a_name_of_its_own(joints: str, names: list[str]) -> None:
    model = MODEL.replace('<joint name="hinge" axis="0 1 0" damping="0.1"/>', joints)
    model = model.replace('<position name="lean" joint="hinge" kp="4" ctrlrange="-0.5 1" ctrllimited="true"/>', "")
    task = type("Odd", (MuJoCoTask,), {"model": re.sub("<keyframe>.*</keyframe>", "", model), "rewards": _one})()
    state, obs = task.reset(KEY)
    world = task.world(state)
    assert list(world.joint_positions()) == ["rail position [m]", *names]
    assert obs.shape == (world.model.nq + world.model.nv,)
    named = [(each.name, each.unit) for each in task.parts[WHOLE]]
    assert len(set(named)) == len(named)


def _one(self: Any, world: World, before: World) -> dict[str, Array]:
    return {"one": jnp.ones(())}


def test_joints_that_no_name_tells_apart_are_refused() -> None:
    twice = f'{HINGE}{OTHER}<joint name="pole 1" axis="0 0 1"/><joint name="hinge" type="slide"/>'
    model = MODEL.replace('<joint name="hinge" axis="0 1 0" damping="0.1"/>', twice)
    with pytest.raises(ValueError, match="two joints are called 'pole 1'"):
        type("Twice", (MuJoCoTask,), {"model": re.sub("<keyframe>.*</keyframe>", "", model), "rewards": _one})()


def test_two_terms_of_one_name_are_refused() -> None:
    near = Term(name="near", func=_miss)
    with pytest.raises(ValueError, match="two terms of the reward are called 'near'"):
        task = type("Twice", (Reach,), {"terms": (near,)})()
        jax.eval_shape(task.step, *jax.eval_shape(lambda: (task.reset(KEY)[0], jnp.zeros(2))), KEY)


def test_a_name_is_another_file_in_another_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "in_cwd.xml").write_text(MODEL)
        monkeypatch.chdir(tmp_path / folder)
        task = type("Here", (Reach,), {"model": "in_cwd.xml"})()
        assert task.asset == str(tmp_path / folder / "in_cwd.xml")
    monkeypatch.chdir(tmp_path)
    assert task.asset == str(tmp_path / "other" / "in_cwd.xml")  # which a task keeps
