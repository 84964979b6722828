"""The same twenty steps of every environment on every engine, as numbers to compare.

``cases`` is the table. ``run`` gives a case's arrays: of each leaf of reward, flags, observations and info some of its
numbers at every step. They are near to those of any machine, whose last bits differ.
"""

import atexit
import copy
import json
import math
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import stick_robots
from numpy.typing import NDArray

from ejax.envs.host.pure_host import PureHostEnv
from ejax.envs.mujoco.choice import how_to_install
from ejax.rollout import reset, step
from ejax.schema.trust import trust
from ejax.training.environments import make_env
from ejax.types import Env, HostEnv, PyTree

FILE = "env_steps.npz"
ENGINES = ("mujoco", "mjx", "warp")
NUM_STEPS = 20
MAX_NUMBERS = 8
"""Numbers that are kept of a leaf of one environment in one step."""
Steps: TypeAlias = dict[str, NDArray[Any]]
"""Leaf -> numbers [T, N, at most MAX_NUMBERS]."""
_TESTS = Path(__file__).parents[1]
_EXAMPLES = _TESTS.parent / "examples"


@dataclass(frozen=True, kw_only=True)
class Case:
    """An environment as a config names it."""

    env: str
    cfg: Mapping[str, Any] = field(default_factory=dict)
    wrappers: Sequence[tuple[str, Mapping[str, Any]]] = ()
    events: Mapping[str, Any] = field(default_factory=dict)
    """Events, as ``trainer.events`` has them."""
    engine: str | None = None
    """None: the environment has none to choose."""
    num_envs: int = 3
    on_host: bool = False
    """Behind ``PureHostEnv``."""
    links: str = ""
    """The function of ``stick_robots`` that makes the robot's file."""
    needs: str | None = None
    """A package."""
    slow: bool = False


def cases() -> dict[str, Case]:
    """Name -> case. On several engines the name ends in the engine's."""
    table = {**_plain(), **_on_engines(), **_robots(), **_gym_configs(), **_wrapped()}
    return {name: replace(case, slow=case.slow or name in _RARELY) for name, case in table.items()}


def lacking(case: Case) -> str | None:
    """Return the reason that a case cannot run here; None: it can."""
    if case.needs is not None and _version(case.needs) is None:
        return f"{case.needs} is not installed"
    return how_to_install(case.engine) if case.engine else None


def differences(name: str, got: Steps, recorded: Mapping[str, NDArray[Any]]) -> list[str]:
    """List what differs between a case's steps and the recorded ones, a line for each leaf: flags and whole numbers are
    the same on every machine, floating-point numbers near, since contact makes much of a last bit."""
    expected = unpacked(name, recorded)
    if missing := sorted(expected.keys() ^ got.keys()):
        return [f"only in one of the two: {', '.join(missing)}"]
    lines = []
    for leaf, there in expected.items():
        ours = got[leaf]
        if ours.dtype != there.dtype or ours.shape != there.shape:
            lines.append(f"{leaf}: {ours.dtype} {ours.shape}, recorded {there.dtype} {there.shape}")
            continue
        tolerance = 1e-3 if np.issubdtype(there.dtype, np.floating) else 0.0
        apart = ~np.isclose(ours.astype(float), there.astype(float), rtol=tolerance, atol=tolerance, equal_nan=True)
        if apart.any():
            size = np.nanmax(np.abs(ours.astype(float) - there.astype(float)))
            lines.append(f"{leaf}: from step {int(np.argwhere(apart)[0, 0])} on, at most {size:.3g} apart")
    return lines


def packed(name: str, steps: Steps) -> dict[str, NDArray[Any]]:
    """Arrays of a file for one case: few, since each costs 250 bytes."""
    leaves = [(leaf, x.dtype.str, x.shape) for leaf, x in steps.items()]
    return {
        f"{name}|leaves": np.array(json.dumps(leaves)),
        f"{name}|numbers": np.frombuffer(b"".join(x.tobytes() for x in steps.values()), np.uint8),
    }


def unpacked(name: str, recorded: Mapping[str, NDArray[Any]]) -> Steps:
    """Invert ``packed``."""
    steps, data = {}, recorded[f"{name}|numbers"].tobytes()
    for leaf, dtype, shape in json.loads(str(recorded[f"{name}|leaves"])):
        size = math.prod(shape)
        steps[leaf] = np.frombuffer(data, dtype, size).reshape(shape)
        data = data[size * np.dtype(dtype).itemsize :]
    return steps


def recorded_cases(recorded: Mapping[str, NDArray[Any]]) -> set[str]:
    return {key.partition("|")[0] for key in recorded}


def run(name: str) -> Steps:
    """Return the first observations of a case, and the result of each step.

    Every row starts again where its episode ends. Actions are uniform in their space, the same on all engines.
    """
    case = cases()[name]
    env = build(case)
    rng = np.random.default_rng(zlib.crc32(name.partition("@")[0].encode()))
    actions = np.stack([_draw(env.action_space, case.num_envs, rng) for _ in range(NUM_STEPS)])
    if isinstance(env, HostEnv):
        first, steps = _host_steps(env, actions)
    else:
        first, steps = jax.tree.map(np.asarray, _pure_steps(env, case.num_envs, actions))
    one = jax.tree.map(lambda x: x[None], first)
    return {leaf: _some(x) for leaf, x in _leaves({"first_obs": one, **steps})}


def build(case: Case) -> Any:
    """Build the environment of a case, as a run makes it."""
    cfg = dict(case.cfg)
    if case.engine is not None:
        cfg |= {"physics": case.engine}
    if str(_EXAMPLES) not in sys.path:
        sys.path.append(str(_EXAMPLES))
    trust("own_mujoco_task:DeskLamp")
    if case.links:
        cfg["model"] = str(_stick_file(case.links))
    env = make_env(case.env, cfg, num_envs=case.num_envs, wrappers=case.wrappers, events=case.events)
    return PureHostEnv(env, case.num_envs) if case.on_host else env


@cache
def _stick_file(name: str) -> Path:
    """Write the file of a robot of sticks, which stays until this process ends."""
    folder = tempfile.mkdtemp(prefix="ejax-tests-sticks-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = Path(folder) / f"{name}.xml"
    file.write_text(getattr(stick_robots, name)())
    return file


def _pure_steps(env: Env, num_envs: int, actions: NDArray[Any]) -> PyTree:
    """``(first observations, time steps [T, N, ...])``, stepped as collectors do, in one scan."""

    @jax.jit
    def scan(actions: PyTree) -> PyTree:
        key_reset, key_steps = jax.random.split(jax.random.key(27))
        carry = reset(env, key_reset, num_envs)
        keys = jax.random.split(key_steps, NUM_STEPS)
        steps = jax.lax.scan(lambda carry, x: step(env, carry, *x), carry, (actions, keys))[1]
        return carry.obs, vars(steps)

    return scan(jnp.asarray(actions))


def _host_steps(env: HostEnv, actions: NDArray[Any]) -> PyTree:
    first = jax.tree.map(np.array, env.reset(np.arange(env.num_envs, dtype=np.uint32)))
    steps = [jax.tree.map(np.array, vars(env.step(action))) for action in actions]
    env.close()
    return first, jax.tree.map(lambda *rows: np.stack(rows), *steps)


def _draw(space: Any, num_envs: int, rng: np.random.Generator) -> NDArray[Any]:
    if isinstance(space, gymnasium.spaces.Discrete):
        return rng.integers(space.n, size=num_envs)
    low, high = np.maximum(space.low, -1.0), np.minimum(space.high, 1.0)
    return rng.uniform(low, high, (num_envs, *space.shape)).astype(np.float32)


def _leaves(tree: PyTree) -> Iterator[tuple[str, NDArray[Any]]]:
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield jax.tree_util.keystr(path, simple=True, separator="/"), np.asarray(x)


def _some(x: NDArray[Any]) -> NDArray[Any]:
    """Keep some numbers of the steps [T, N, ...]."""
    flat = x.reshape(*x.shape[:2], -1)
    return flat[:, :, :: max(1, -(-flat.shape[2] // MAX_NUMBERS))]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


_RARELY = {
    "go2 of sticks@mujoco",
    "h1_2 of sticks@mujoco",
    "gym config with EefPoseTerm@mujoco",
    "randomized push_cube in chunks@mujoco",
}
"""Slow only so that an everyday run stays under 40 s: others are much like them."""


def _plain() -> dict[str, Case]:
    """List the cases without an engine."""
    point_mass = Case(
        env="PointMassRL", cfg={"max_episode_steps": 7, "success_threshold": 0.6, "success_bonus": 2.5}, num_envs=4
    )
    return {
        "point_mass": point_mass,
        "point_mass on the host": replace(point_mass, on_host=True),
        "planar_reach": Case(env="PlanarReachRL", cfg={"max_episode_steps": 8, "success_threshold": 0.3}),
        "gymnax": Case(env="gymnax:CartPole-v1", needs="gymnax"),
        "gymnasium": Case(env="gymnasium:CartPole-v1", needs="gymnasium"),
    }


_SMALL_RANGE = [[-0.05, -0.05, 0.0], [0.05, 0.05, 0.0]]
_PUSH_CUBE = {
    "episode_length": 8,
    "success_threshold": 0.36,
    "cube_position_range": _SMALL_RANGE,
    "goal_position_range": _SMALL_RANGE,
}
_INSTRUCTED = {
    "episode_length": 8,
    "success_threshold": 0.3,
    "reaching_weight": 0.5,
    "lifting_weight": 0.5,
    "placing_weight": 0.5,
}


def _on_engines() -> dict[str, Case]:
    """List every task with physics, on every engine that it can have."""
    tasks = {
        "cart_pole": Case(env="CartPoleRL", cfg={"max_episode_steps": 8, "reset_range": 0.1}),
        "push and leave": Case(env="PushCube", cfg={"episode_length": 8, "success_threshold": 0.36}),
        "push_cube": Case(env="PushCubeRL", cfg=_PUSH_CUBE),
        "pick_place": Case(env="PickPlaceRL", cfg={"episode_length": 8, "success_threshold": 0.37}),
        "instructed_place": Case(env="InstructedPlaceRL", cfg=_INSTRUCTED),
        "own task": Case(env="own_mujoco_task:DeskLamp", cfg={"episode_length": 8}),
        "gym config cart_pole": Case(env="EmbodiedEnv", cfg={"gym_config": gym_config("cart_pole")}),
        "gym config push_cube": Case(env="EmbodiedEnv", cfg={"gym_config": gym_config("push_cube")}),
        "quadruped": Case(env="VelocityRL", cfg={"robot": "quadruped", "max_episode_steps": 8}),
        "tracking": Case(env="TrackingRL", cfg={"push": {"interval": [0.02, 0.1]}, "max_episode_steps": 8}),
    }
    quick = ("mujoco", "cart_pole@mjx")
    cases = {f"{name}@{engine}": (case, engine) for name, case in tasks.items() for engine in ENGINES}
    return {
        name: replace(case, engine=engine, num_envs=2, slow=not name.endswith(quick))
        for name, (case, engine) in cases.items()
    }


def _robots() -> dict[str, Case]:
    """List each robot's task, on the C engine; made of sticks where its file is in no package that tests have."""
    pushed = {
        "robot": "quadruped",
        "max_episode_steps": 15,
        "push": {"interval": [0.02, 0.1], "roll": [-30.0, 30.0]},
        "terrain": {"kind": "rough", "half_size": 2.0},
        "command": {"standing": 0.3, "resampling_time": [0.05, 0.2]},
    }
    cases = {
        f"{robot} of sticks": Case(
            env="VelocityRL", cfg={"robot": robot, "max_episode_steps": 15}, links=f"{robot}_sticks"
        )
        for robot in ("go1", "go2", "anymal_c", "g1", "h1_2", "microduck")
    }
    cases["quadruped pushed on rough ground"] = Case(env="VelocityRL", cfg=pushed)
    return {f"{name}@mujoco": replace(case, engine="mujoco", num_envs=2) for name, case in cases.items()}


def _gym_configs() -> dict[str, Case]:
    """Gym configs that use most functors."""
    seeing = copy.deepcopy(gym_config("cart_pole"))
    seeing["sensor"] = [
        {
            "sensor_type": "Camera",
            "uid": "cam",
            "width": 12,
            "height": 8,
            "intrinsics": [10.0, 12.0, 5.0, 4.5],
            "extrinsics": {"eye": [2.6, -0.7, 1.3], "target": [0.0, 0.0, 0.7]},
        }
    ]
    cases = {
        "gym config with a camera": Case(env="EmbodiedEnv", cfg={"gym_config": seeing, "renderer": "raycast"}),
        "gym config of many terms": Case(env="EmbodiedEnv", cfg={"gym_config": _many_terms()}),
        "gym config of poses and a gripper": Case(env="EmbodiedEnv", cfg={"gym_config": _poses_and_gripper()}),
    }
    backwards = {"joint_names": ["cart_to_pole", "slider_to_cart"], "preserve_order": True}
    actions = {
        **{func: ("cart_pole", {"scale": 0.1}) for func in _TERMS},
        **{func: ("cart_pole", {"scale": 0.1, **backwards}) for func in _JOINT_ACTIONS},
        **{func: ("push_cube", {"part_name": "arm"}) for func in ("EefPoseTerm", "EefPoseAction")},
    }
    for func, (name, params) in actions.items():
        config = copy.deepcopy(gym_config(name))
        config["env"]["actions"] = {"one": {"func": func, "params": params}}
        cases[f"gym config with {func}"] = Case(env="EmbodiedEnv", cfg={"gym_config": config})
    return {f"{name}@mujoco": replace(case, engine="mujoco", num_envs=2) for name, case in cases.items()}


_TERMS = ("QposTerm", "QposDenormalizedTerm", "QposNormalizedTerm", "QvelTerm", "QfTerm")
_JOINT_ACTIONS = (
    *("JointPositionAction", "RelativeJointPositionAction", "JointPositionToLimitsAction"),
    *("DefaultJointPositionAction", "JointVelocityAction", "JointEffortAction", "DefaultJointPositionTerm"),
)


def _many_terms() -> dict[str, Any]:
    config = copy.deepcopy(gym_config("push_cube"))
    cube, goal = {"uid": "cube"}, {"target_pose_key": "goal_pose"}
    config["env"]["observations"] |= {
        "cube_vel": _seen("get_rigid_object_velocity", "object/cube_vel", entity_cfg=cube),
        "cube_again": _seen("get_object_pose", "object/cube_again", entity_cfg=cube),
        "ee": _seen("get_robot_eef_pose", "robot/ee", part_name="arm", position_only=True),
    }
    source = {"source_entity_cfg": cube}
    config["env"]["rewards"] |= {
        "nearer": _weighed("incremental_distance_to_target", 0.5, **source, **goal),
        "between": _weighed("distance_between_objects", 0.5, **source, target_entity_cfg=cube),
        "alike": _weighed("orientation_alignment", 0.5, **source, target_entity_cfg=cube),
        "speed": _weighed("joint_velocity_penalty", -0.1, robot_uid="Manipulator"),
        "limits": _weighed("joint_limit_penalty", -0.1, robot_uid="Manipulator", margin=0.3),
    }
    bounds = {"qpos_range": [[-0.05] * 8, [0.05] * 8]}
    config["env"]["events"] |= {
        "posture": _event("randomize_robot_qpos", "reset", entity_cfg={"uid": "Manipulator"}, **bounds),
        "mass": _event("randomize_rigid_object_mass", "startup", entity_cfg=cube, mass_range=[1.0, 3.0]),
        "again": {
            **_event("randomize_target_pose", "interval", position_range=[[-0.3] * 3, [0.3] * 3]),
            "interval_step": 3,
        },
    }
    return config


def _poses_and_gripper() -> dict[str, Any]:
    config = copy.deepcopy(gym_config("push_cube"))
    arm = {"contract": "eef_pose.relative@1", "params": {"part_name": "arm"}}
    hand = {"contract": "gripper.parallel@1", "params": {"part_name": "hand", "use_joint_limits": True}}
    config["env"]["actions"] = {"arm": arm, "hand": hand}
    return config


def _seen(func: str, name: str, **params: Any) -> dict[str, Any]:
    return {"func": func, "mode": "add", "name": name, "params": params}


def _weighed(func: str, weight: float, **params: Any) -> dict[str, Any]:
    return {"func": func, "mode": "add", "weight": weight, "params": params}


def gym_config(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((_TESTS / "gym_configs" / f"{name}.json").read_text())
    return config | {"max_episode_steps": 8}


def _wrapped() -> dict[str, Case]:
    """Environments around others, on the C engine."""
    cart_pole = {"max_episode_steps": 8, "reset_range": 0.1}
    seen = {"renderer": "raycast", "width": 12, "height": 8}
    place = {"camera_eye": [-1.55, -0.15, 0.75], "camera_target": [-0.70, -0.15, 0.03], "camera_fovy": 22.0}
    wrist = {"wrist": {"width": 6, "height": 6, "fovy": 60.0}}
    drawn = ("RenderedEnv", {**seen, **place, **wrist})
    sensors = {"camera": _event("add_observation_noise", part="policy", noise=[0.01, 0.1])}
    tasks = {
        "action_chunk": Case(env="CartPoleRL", cfg={**cart_pole, "action_chunk": 3}),
        "raycast": Case(
            env="CartPoleRL",
            cfg=cart_pole,
            wrappers=[("RenderedEnv", {**seen, "randomizers": _LOOKS, "camera_eye": [2.0, 1.0, 1.5]})],
        ),
        "raycast, wrist and action_chunk": Case(
            env="InstructedPlaceRL", cfg=_INSTRUCTED, wrappers=[("ActionChunk", {"size": 4}), drawn], slow=True
        ),
        "blank pictures": Case(env="CartPoleRL", cfg=cart_pole, wrappers=[("RenderedEnv", {**seen, "blank": True})]),
        "asymmetric": Case(
            env="CartPoleRL",
            cfg=cart_pole,
            wrappers=[("AsymmetricEnv", {"observation_indices": [1, 0]})],
            events=sensors,
        ),
        "randomized cart_pole": Case(env="CartPoleRL", cfg=cart_pole, events=_CART_POLE_EVENTS),
        "randomized push_cube": Case(env="PushCubeRL", cfg=_PUSH_CUBE, events=_PUSH_CUBE_EVENTS),
        "randomized push_cube in chunks": Case(
            env="PushCubeRL", cfg={**_PUSH_CUBE, "action_chunk": 2}, events=_PUSH_CUBE_EVENTS
        ),
    }
    cases = {f"{name}@mujoco": replace(case, engine="mujoco", num_envs=2) for name, case in tasks.items()}
    mjx = replace(cases["randomized push_cube@mujoco"], engine="mjx", slow=True)
    return {**cases, "randomized push_cube@mjx": mjx}


def _event(func: str, mode: str | None = None, **params: Any) -> dict[str, Any]:
    return {"func": func, "params": params, **({"mode": mode} if mode else {})}


def _of_camera(func: str, uid: str = "camera", **ranges: Any) -> dict[str, Any]:
    return _event(func, entity_cfg={"uid": uid}, **ranges)


_LOOKS = {
    "camera": _of_camera("randomize_camera_extrinsics", eye_range=[[-0.2] * 3, [0.2] * 3]),
    "lens": _of_camera("randomize_camera_intrinsics", focal_x_range=[-2, 2], cy_range=[-1, 1]),
    "key": _of_camera("randomize_light", "key", color_range=[[0.2] * 3, [0.8] * 3]),
    "glow": _event("randomize_emission_light", intensity_range=[0.5, 1.5]),
    "floor": _of_camera("randomize_visual_material", "floor", base_color_range=[[0.3] * 3, [1.0] * 3]),
}
_CUBE, _ROBOT = {"uid": "cube"}, {"uid": "robot"}
_CART_POLE_EVENTS = {
    "sensors": _event("add_observation_noise", noise=0.01, bias_range=[-0.1, 0.1], distribution="uniform"),
    "motors": _event("add_action_noise", noise=0.05),
    "late": _event("delay_observation", "startup", steps_range=[0.0, 1.5]),
    "gains": _event("randomize_drive_gains", "startup", entity_cfg=_ROBOT, stiffness_range=[0.5, 1.5]),
    "harder": _event("curriculum", by="steps", start=0.5, num_steps=10),
}
_PUSH_CUBE_EVENTS = {
    "mass": _event("randomize_rigid_object_mass", entity_cfg=_CUBE, mass_range=[1.0, 3.0]),
    "friction": _event("randomize_rigid_object_friction", "startup", entity_cfg=_CUBE, friction_range=[0.3, 0.9]),
    "links": _event("randomize_articulation_mass", entity_cfg=_ROBOT, mass_range=[0.8, 1.2], operation="scale"),
    "gains": _event("randomize_drive_gains", entity_cfg=_ROBOT, stiffness_range=[0.7, 1.3], distribution="log_uniform"),
    "joints": _event("randomize_joint_parameters", entity_cfg=_ROBOT, armature_range=[0.01, 0.02]),
    "gravity": _event("randomize_gravity", gravity_range=[[0, 0, -1], [0, 0, 1]]),
    "centre": _event(
        "randomize_rigid_object_center_of_mass", entity_cfg=_CUBE, com_pos_offset_range=[[-0.01] * 3, [0.01] * 3]
    ),
    "blow": {
        **_event("push_rigid_object_by_setting_velocity", entity_cfg=_CUBE, velocity_range={"x": [-0.5, 0.5]}),
        "interval_step": 3,
    },
    "delay": _event("delay_action", steps_range=[0.0, 1.5]),
    "harder": _event("curriculum", by="success", start=0.5, raise_by=0.2),
}
