"""A MuJoCo model from a robot and rigid objects, and the place of each in its state.

A dynamic object moves on three slide joints and a ball joint, 7 numbers in qpos: its linear and angular damping are two
numbers, as in EmbodiChain. Contacts are listed pairs only: objects with the floor, the robot's hull and each other; the
robot's feelers with the floor. Their friction is the mean of both bodies' coefficients, PhysX's rule.
"""

import itertools
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree as ET

import jax.numpy as jnp
import mujoco
import numpy as np
from numpy.typing import NDArray

from ejax.envs.mujoco.engine import PhysicsState, load_model
from ejax.envs.mujoco.kinematics import transform
from ejax.envs.mujoco.models import ASSETS
from ejax.envs.mujoco.rotations import make_pose, matrix_from_euler, quaternion_from_matrix
from ejax.envs.task.entities import look_up
from ejax.envs.task.mjcf import find_child, to_text
from ejax.envs.task.robots import Drives, PlacedRobot, Robot, Vector
from ejax.envs.task.sensor_cameras import SensorCamera
from ejax.envs.task.states import SceneState, marker_name
from ejax.types import Array

DEFAULT_FRICTION = 0.5
_CORNER = 0.1
"""Radius of the balls a box stands on, as a part of its shortest half edge. Against a plane, MJX keeps only those
vertices of a box that lie within 1 mm of the deepest one: a tilting box would move differently in the two engines."""
_FREE_OF_CONTACTS = {"contype": "0", "conaffinity": "0"}


@dataclass(frozen=True, kw_only=True)
class RigidObject:
    """A primitive body."""

    uid: str
    shape: Literal["box", "sphere", "cylinder", "capsule"]
    size: tuple[float, ...]  # MuJoCo's sizes: half edges, or radius and half height, m
    dynamic: bool = True
    position: Vector = (0.0, 0.0, 0.0)
    rotation: Vector = (0.0, 0.0, 0.0)
    """Intrinsic Euler angles, rad."""
    mass: float
    friction: float = DEFAULT_FRICTION
    linear_damping: float = 0.0  # 1/s
    angular_damping: float = 0.0  # likewise
    collides: bool = True


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The model as text, and where things are in qpos and qvel: joints first, then 7 and 6 numbers an object."""

    xml: str
    joints: tuple[str, ...]
    parts: tuple[tuple[str, tuple[int, ...]], ...]  # Control part -> joint indices
    tool_part: str | None
    drives: Drives
    home: tuple[float, ...]  # Joint positions of a new episode, m or rad
    objects: tuple[RigidObject, ...]
    followers: tuple[tuple[int, int], ...]  # (joint, the joint whose command it takes where one number moves a gripper)
    base: str
    cameras: tuple[SensorCamera, ...]

    @property
    def model(self) -> mujoco.MjModel:
        return load_model(self.xml)

    @property
    def limits(self) -> NDArray[np.float32]:
        """[J, 2]: lowest and highest position of each joint, m or rad."""
        return self.model.jnt_range[: len(self.joints)].astype(np.float32)

    @property
    def base_pose(self) -> NDArray[np.float64]:
        """[4, 4]: where the robot stands, in the arena."""
        body = self.model.body(self.base).id
        return transform(self.model.body_pos[body], self.model.body_quat[body])

    @property
    def uids(self) -> tuple[str, ...]:
        return tuple(each.uid for each in self.objects)

    def camera(self, uid: str) -> SensorCamera:
        """Find a camera. Raises ValueError: no such camera."""
        return look_up("camera", uid, {each.uid: each for each in self.cameras})

    def find_object(self, uid: str) -> RigidObject:
        """Find an object. Raises ValueError: no such object."""
        return look_up("rigid object", uid, {each.uid: each for each in self.objects})

    def part(self, name: str) -> tuple[int, ...]:
        """Return the joints of a control part. Raises ValueError: no such part."""
        return look_up("control part", name, dict(self.parts))

    def check_tool(self, part: str | None) -> None:
        """Raise ValueError at a part without a tool centre point; None means the one that has it."""
        if part is not None:
            self.part(part)
        if self.tool_part is None or part not in (None, self.tool_part):
            where = f"; it is on '{self.tool_part}'" if self.tool_part else ": this robot has none"
            raise ValueError(f"control part '{part}' has no tool centre point{where}")

    def initial_pose(self, uid: str) -> Array:
        """[4, 4]: where the config puts an object."""
        each = self.find_object(uid)
        rotation = matrix_from_euler(jnp.array(each.rotation, jnp.float32))
        return make_pose(jnp.array(each.position, jnp.float32), rotation)

    def initial_state(self) -> SceneState:
        """Everything where the config puts it, before any event; the action has no width yet."""
        home = jnp.array(self.home, jnp.float32)
        qpos = [home]
        for each in self.objects:
            if each.dynamic:
                pose = self.initial_pose(each.uid)
                qpos += [pose[:3, 3], quaternion_from_matrix(pose[:3, :3])]
        return SceneState(
            physics=PhysicsState(qpos=jnp.concatenate(qpos), qvel=jnp.zeros(self.model.nv)),
            target=home,
            velocity_target=jnp.zeros_like(home),
            effort=jnp.zeros_like(home),
            kept={},
            action=jnp.zeros(0),
            episode_step=jnp.zeros((), jnp.int32),
        )


def make_scene(
    placed: PlacedRobot,
    objects: tuple[RigidObject, ...],
    gravity: Vector,
    timestep: float,
    *,
    markers: tuple[str, ...] = (),
    cameras: tuple[SensorCamera, ...] = (),
) -> Scene:
    """Compose the model, with a disc for each key of a virtual target (``markers``). m/s², s."""
    robot = placed.robot
    root = ET.parse(ASSETS / "scene.xml").getroot()
    find_child(root, "option").attrib |= {"gravity": to_text(gravity), "timestep": str(timestep)}
    world = find_child(root, "worldbody")
    robot.body.attrib |= {"pos": to_text(placed.position), "euler": to_text(placed.rotation)}
    world.append(robot.body)
    _add_drives(root, robot, placed.drives)
    pairs = ET.SubElement(root, "contact")
    for each in objects:
        feet = _add_body(world, each)
        for geom in feet if each.collides else ():
            _add_pair(pairs, "floor", geom, each.friction, DEFAULT_FRICTION)
        # few geoms represent the arm: each pair costs the solver rows
        for geom in robot.hull if each.collides else ():
            _add_pair(pairs, geom, each.uid, each.friction, DEFAULT_FRICTION)
    for one, other in itertools.combinations(objects, 2):
        if (one.dynamic or other.dynamic) and one.collides and other.collides:
            _add_pair(pairs, one.uid, other.uid, one.friction, other.friction)
    # only what reaches the floor first: each pair costs the solver rows
    for geom in robot.feelers:
        _add_pair(pairs, "floor", geom, DEFAULT_FRICTION, DEFAULT_FRICTION)
    for key in markers:
        disc = ET.SubElement(world, "body", name=marker_name(key), mocap="true")
        visual = {"material": "marker", "type": "cylinder", "size": "0.1 0.001", "pos": "0 0 -0.049"}
        ET.SubElement(disc, "geom", visual | _FREE_OF_CONTACTS)
    index = {joint: i for i, joint in enumerate(robot.joints)}
    return Scene(
        xml=ET.tostring(root, encoding="unicode"),
        joints=robot.joints,
        parts=tuple((name, tuple(index[each] for each in members)) for name, members in robot.parts.items()),
        tool_part=robot.tool_part,
        drives=placed.drives,
        home=placed.home,
        objects=objects,
        base=str(robot.body.get("name")),
        cameras=cameras,
        followers=tuple((index[one], index[other]) for one, other in robot.followers.items()),
    )


def _add_drives(root: ET.Element, robot: Robot, drives: Drives) -> None:
    actuators = ET.SubElement(root, "actuator")
    for i, name in enumerate(robot.joints):
        find_child(robot.body, f".//joint[@name='{name}']").set("damping", str(drives.damping[i]))
        law = {"gainprm": "1", "biastype": "affine", "biasprm": to_text((0.0, -drives.stiffness[i], 0.0))}
        limit = {"forcelimited": "true", "forcerange": to_text((-drives.max_effort[i], drives.max_effort[i]))}
        ET.SubElement(actuators, "general", law | limit, name=name, joint=name)


def _add_body(world: ET.Element, each: RigidObject) -> list[str]:
    """Add an object; return the geoms that rest on the floor."""
    body = ET.SubElement(world, "body", name=each.uid)
    if each.dynamic:  # the body is at the origin, so that its part of qpos is its pose in the world
        damping = str(each.mass * each.linear_damping)  # 1/s · kg = N·s/m
        for axis, direction in (("x", "1 0 0"), ("y", "0 1 0"), ("z", "0 0 1")):
            ET.SubElement(body, "joint", name=f"{each.uid}_{axis}", type="slide", axis=direction, damping=damping)
        damping = str(_mean_inertia(each) * each.angular_damping)
        ET.SubElement(body, "joint", name=f"{each.uid}_turn", type="ball", damping=damping)
    else:
        body.attrib |= {"pos": to_text(each.position), "euler": to_text(each.rotation)}
    look = {"type": each.shape, "size": to_text(each.size), "material": "object"}
    ET.SubElement(body, "geom", look | _FREE_OF_CONTACTS, name=each.uid, mass=str(each.mass))
    if not each.dynamic or each.shape != "box":
        return [each.uid] if each.dynamic else []
    # inset by their radius, so that the box stands as high as without them
    radius = _CORNER * min(each.size)
    feet = [f"{each.uid}_corner_{i}" for i in range(8)]
    for name, signs in zip(feet, itertools.product((-1.0, 1.0), repeat=3), strict=True):
        place = to_text(np.array(signs) * (np.array(each.size) - radius))
        ball = {"type": "sphere", "size": str(radius), "pos": place, "group": "3", "mass": "0"}
        ET.SubElement(body, "geom", ball | _FREE_OF_CONTACTS, name=name)
    return feet


def _mean_inertia(each: RigidObject) -> float:
    if each.shape == "box":
        return each.mass * 2.0 * sum(half**2 for half in each.size) / 9.0
    if each.shape == "sphere":
        return 0.4 * each.mass * each.size[0] ** 2
    radius, half = each.size
    return each.mass * (radius**2 + 2.0 * half**2 / 3.0) / 3.0


def _add_pair(pairs: ET.Element, one: str, other: str, friction: float, other_friction: float) -> None:
    mean = (friction + other_friction) / 2.0
    ET.SubElement(pairs, "pair", geom1=one, geom2=other, condim="3", friction=to_text((mean, mean)))
