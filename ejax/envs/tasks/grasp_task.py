"""The common part of PickPlaceRL and InstructedPlaceRL: a UR10 with a two-finger gripper and small cubes that it can
hold, actions that move the tool, where things may lie, when a cube is placed. qpos begins with 6 joints and 2 fingers.
"""

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from xml.etree import ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict

from ejax.envs.description import Feature
from ejax.envs.mujoco.choice import Engine
from ejax.envs.mujoco.kinematics import solve_site_pose
from ejax.envs.mujoco.rotations import make_pose
from ejax.envs.task.mjcf import find_child
from ejax.envs.task.robots import FINGER_TRAVEL, Drives, PlacedRobot, Vector, make_ur
from ejax.envs.task.scene import RigidObject, make_scene
from ejax.envs.task.world import World, marker_name
from ejax.envs.tasks.physics_task import PhysicsTask
from ejax.types import Array, Key

HALF_EDGE = 0.025  # Half edge of the cube, m. It is grasped with the tool centre point at its centre.
HOME = (-0.0215027, -1.5389777, 2.0042863, -2.036105, -1.5707964, -0.0215027, 0.0, 0.0)
"""The tool at (−0.65, −0.15, 0.25) m."""
_TOOL = ((1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.14), (0.0, 0.0, 0.0, 1.0))
"""The tool in the frame of the flange: amid the fingers' contact points."""
DRIVES = Drives(
    stiffness=(1e4, 1e4, 1e4, 5e3, 5e3, 5e3, 600.0, 600.0),
    damping=(300.0, 300.0, 200.0, 100.0, 100.0, 100.0, 40.0, 40.0),
    max_effort=(500.0, 500.0, 500.0, 500.0, 500.0, 500.0, 30.0, 30.0),
)
_ARMATURE = (2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 0.5, 0.5)
"""kg·m² and kg: rotors behind gears. Without the fingers' they would sink into the cube."""
GOAL_MARKER = marker_name("goal")
"""The body that is drawn where the goal is."""
WORKSPACE: tuple[Vector, Vector] = ((-0.95, -0.55, 0.02), (-0.4, 0.25, 0.45))
"""The box that targets of the tool are clipped to, m."""
ACTION = (
    *(Feature(f"tool centre point {axis} change / action_scale", "m") for axis in "xyz"),
    Feature("grip, -1 open and 1 closed", "1"),
)
ROBOT_NUMBERS = (
    *(f"{joint} angle" for joint in ("shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3")),
    *(f"finger {side} travel" for side in (1, 2)),
    *(f"tool {axis}" for axis in "xyz"),
)
"""The numbers of an observation that the robot itself measures; rad and m."""
LIFT = 0.05  # m above the floor at which a cube counts as lifted
CUBE_FELL = -0.1  # Height of a cube that fell off the scene, m

_ARM = tuple(range(6))
_DOWN = ((0.0, 1.0, 0.0), (1.0, 0.0, 0.0), (0.0, 0.0, -1.0))  # The tool's rotation; the fingers close along x
_IK_ITERATIONS = 3
_RELEASED = 0.008  # m: fingers that have closed by less are clear of the cube, by at least 7 mm each
_AT_REST = 0.05  # m/s
_STANDS = 0.01  # Largest distance of a cube's centre from its place on the floor, m


@functools.cache
def make_grasp_model(
    cubes: tuple[str, ...] = ("cube",), zones: tuple[str, ...] = ("goal",), zone_rgba: str | None = None
) -> str:
    """Compose the MJCF: cubes that can be grasped, and a disc for each zone (``marker_name``). Without the friction
    cone's ``impratio`` a cube creeps down between the fingers by 5 mm/s; with Euler's implicit damping a shaken one
    slides by 1 cm."""
    size = (HALF_EDGE, HALF_EDGE, HALF_EDGE)
    objects = tuple(RigidObject(uid=name, shape="box", size=size, mass=0.1, friction=1.0) for name in cubes)
    robot = PlacedRobot(robot=make_ur("ur10", _TOOL, gripper=True), drives=DRIVES, home=HOME)
    scene = make_scene(robot, objects, (0.0, 0.0, -9.81), 0.01, markers=zones)
    root = ET.fromstring(scene.xml)
    for name, armature in zip(scene.joints, _ARMATURE, strict=True):
        find_child(root, f".//joint[@name='{name}']").set("armature", str(armature))
    contacts = {"cone": "elliptic", "impratio": "10"}
    find_child(root, "option").attrib |= {**contacts, "iterations": "10", "ls_iterations": "20"}
    find_child(root, "option/flag").set("eulerdamp", "disable")
    pairs = find_child(root, "contact")
    # two boxes collide as corner balls against the other box: engines agree on them, and MJX compiles sooner
    for one, other in itertools.combinations(cubes, 2):
        pair = find_child(pairs, f"pair[@geom1='{one}'][@geom2='{other}']")
        pairs.remove(pair)
        for (box, cube), corner in itertools.product(((one, other), (other, one)), range(8)):
            ET.SubElement(pairs, "pair", {**pair.attrib, "geom1": f"{cube}_corner_{corner}", "geom2": box})
    for zone in zones:
        disc = find_child(root, f".//body[@name='{marker_name(zone)}']/geom")
        disc.attrib |= {"size": "0.055 0.001", "pos": f"0 0 {0.001 - HALF_EDGE}"}
        if zone_rgba is not None:
            disc.set("rgba", zone_rgba)
    return ET.tostring(root, encoding="unicode")


@dataclass(frozen=True)
class GraspTask(PhysicsTask):
    """Task of a UR10 with a gripper that grasps a cube: the base of ``PickPlaceRL`` and ``InstructedPlaceRL``.

        r = Φ(s') − Φ(s) − w_action·‖Δ‖ + w_success·[success]
        Φ = w_reaching·(1 − tanh 5‖tool − cube‖) + w_lifting·ℓ + w_placing·[lifted]·(1 − tanh 5‖cube − goal‖)

    with ℓ the cube's height as a part of 0.05 m, and 1 once it was lifted; lengths in m. A difference of potentials
    leaves the best policy as it is (Ng, Harada and Russell 1999).

    Action [4] in ±1: the tool's target is where it is now plus action_scale·a[:3] m, pointing down, and the fingers' is
    0.02·(1 + a[3]) m: −1 is open, 1 closed. Damped least squares turn the tool's target into joint angles, which the
    drives hold for one control step of 0.04 s. A state has ``cubes`` [..., 3], m, their centres, and ``was_lifted``, a
    bool for each. Truncated: when a cube fell below −0.1 m.
    """

    episode_length: int = 100
    action_scale: float = 0.04
    success_threshold: float = 0.03
    reaching_weight: float = 0.0
    lifting_weight: float = 0.0
    placing_weight: float = 0.0
    action_penalty_weight: float = 0.0
    success_weight: float = 1.0
    physics: Engine = "auto"
    sim_steps_per_control: int = 4
    cube_turn: float = 0.2
    rewards: Mapping[str, Any] = FrozenDict()
    functor_events: Mapping[str, Any] = FrozenDict()
    action_features = ACTION
    clips_actions = True
    positive = ("episode_length", "action_scale", "success_threshold")
    weighted = ("reaching", "lifting", "placing", "action_penalty", "success")

    def check_fields(self) -> None:
        super().check_fields()
        if not 0.0 <= self.cube_turn <= 0.3:
            raise ValueError(f"cube_turn must be in [0, 0.3] rad, got {self.cube_turn}: the gripper does not turn")

    def target(self, state: Any) -> tuple[Array, Array, Array]:
        """Return the cube that is meant [3], m, its goal [3], m, and True where it was lifted."""
        raise NotImplementedError

    def distance(self, state: Any) -> Array:
        """Horizontal, from the cube that is meant to its goal, m."""
        cube, goal, _ = self.target(state)
        return horizontal_distance(cube, goal)

    def metrics(self, world: World) -> dict[str, Array]:
        return {"distance_to_goal": self.distance(world.state)}

    def potential(self, state: Any) -> dict[str, Array]:
        """Compute Φ's terms: near to the tool; lifted by ``LIFT``, or once; lifted and near to the goal."""
        cube, goal, was_lifted = self.target(state)
        reached = 1.0 - jnp.tanh(5.0 * jnp.linalg.norm(self.tool_position(state) - cube))
        # once lifted counts as lifted: setting the cube down must not cost what lifting earned
        height = jnp.where(was_lifted, 1.0, jnp.clip(height_of(cube) / LIFT, 0.0, 1.0))
        placed = 1.0 - jnp.tanh(5.0 * jnp.linalg.norm(cube - goal))
        return {"reaching": reached, "lifting": height, "placing": was_lifted * placed}

    def tool_position(self, state: Any) -> Array:
        """[3], m: the tool centre point."""
        return self.world(state).eef_pose()[:3, 3]

    def control(self, world: World, action: Array) -> Array:
        """[8]: the signal of the drives that hold the action's targets, see ``ejax.envs.task.robots``."""
        low, high = jnp.asarray(WORKSPACE)
        # from where the tool is, not from its last target: targets that the arm cannot follow do not run away
        position = jnp.clip(self.tool_position(world.state) + self.action_scale * action[:3], low, high)
        pose = make_pose(position, jnp.asarray(_DOWN))
        # few iterations do, from the angles of the step before
        angles, _ = solve_site_pose(world.model, "tcp", pose, world.qpos, _ARM, num_iterations=_IK_ITERATIONS)
        travel = jnp.full(2, 0.5 * FINGER_TRAVEL) * (1.0 + action[3])
        return jnp.asarray(DRIVES.stiffness) * jnp.concatenate([angles, travel])

    def update(self, key: Key, world: World, before: World) -> World:
        state = world.state
        was_lifted = state.was_lifted | (height_of(state.cubes) > LIFT)
        return replace(world, state=replace(state, was_lifted=was_lifted))

    def truncates(self, world: World) -> Array:
        return (world.state.cubes[..., 2] < CUBE_FELL).any()

    def reward_terms(self, world: World, before: World) -> dict[str, Array]:
        former = self.potential(before.state)
        return {name: after - former[name] for name, after in self.potential(world.state).items()} | {
            "action_penalty": -jnp.linalg.norm(self.action_scale * world.executed[:3]),
            "success": world.info["success"],
        }


def describe_numbers(names: tuple[str, ...]) -> tuple[Feature, ...]:
    """Names with their units: angles are in rad, what was lifted and which one it is have none, the rest is in m."""
    units = {"angle": "rad", "lifted": "1", "index": "1"}
    return tuple(Feature(name, units.get(name.rpartition(" ")[2], "m")) for name in names)


def is_set_down(cube: Array, velocity: Array, fingers: Array) -> Array:
    """bool: the cube [3], m, stands on the floor, at rest ([3], m/s) and released by the fingers (travel [2], m)."""
    stands, rests = jnp.abs(height_of(cube)) < _STANDS, jnp.linalg.norm(velocity) < _AT_REST
    return stands & rests & (jnp.max(fingers) < _RELEASED)


def height_of(cube: Array) -> Array:
    """m, above a cube's place on the floor."""
    return cube[..., 2] - HALF_EDGE


def horizontal_distance(one: Array, other: Array) -> Array:
    """m"""
    return jnp.linalg.norm((one - other)[..., :2], axis=-1)


def draw_place(key: Key, centre: tuple[float, float], bound: tuple[float, float]) -> Array:
    """[3], m: a place of a cube on the floor, uniform in the rectangle ``centre`` ± ``bound``."""
    offset = jax.random.uniform(key, (2,), minval=-1.0, maxval=1.0) * jnp.asarray(bound)
    return jnp.append(jnp.asarray(centre) + offset, HALF_EDGE)


def draw_turn(key: Key, bound: float) -> Array:
    """[4]: the quaternion of a turn about the vertical, uniform in ± ``bound`` rad."""
    half_turn = 0.5 * jax.random.uniform(key, minval=-bound, maxval=bound)
    return jnp.stack([jnp.cos(half_turn), jnp.zeros(()), jnp.zeros(()), jnp.sin(half_turn)])


def check_reachable(name: str, centre: tuple[float, float], bound: tuple[float, float]) -> None:
    """Raise ValueError where ``centre`` ± ``bound`` m leaves the workspace."""
    low, high = np.subtract(centre, bound), np.add(centre, bound)
    if (np.array(bound) < 0.0).any():
        raise ValueError(f"{name}_position_range must be >= 0, got {bound}")
    first, last = (corner[:2] for corner in WORKSPACE)
    if (low < first).any() or (high > last).any():
        text = f"{centre} ± {bound} m leaves the tool's workspace, which goes from {first} to {last} m"
        raise ValueError(f"{name}_position {text}")
