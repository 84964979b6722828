"""A MuJoCo model from a robot and rigid objects, and the place of each in its state.

Contacts are listed pairs only: objects with the floor, with the robot's hull and with each other; the robot's feelers
with the floor. Their friction is the mean of both bodies' coefficients, PhysX's rule.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

import jax.numpy as jnp
import mujoco
import numpy as np
from numpy.typing import NDArray

from ejax.envs.manager.bodies import DEFAULT_FRICTION, RigidObject, Vector, add_body, to_text
from ejax.envs.manager.cameras import SensorCamera
from ejax.envs.manager.drives import Drives
from ejax.envs.manager.robots import Robot
from ejax.envs.mujoco.engine import PhysicsState, load_model
from ejax.envs.mujoco.kinematics import transform
from ejax.envs.mujoco.rotations import make_pose, matrix_from_euler, quaternion_from_matrix
from ejax.envs.task.states import SceneState, marker_name
from ejax.schema.registry import did_you_mean
from ejax.types import Array

_FRAME = Path(__file__).parents[1] / "assets" / "scene.xml"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The model as text, and where things are in qpos and qvel: joints first, then 7 and 6 numbers an object."""

    xml: str
    joints: tuple[str, ...]
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    """Control part -> joint indices."""
    tool_part: str | None
    """The control part that carries the tool centre point."""
    drives: Drives
    home: tuple[float, ...]
    """Joint positions of a new episode, m or rad."""
    objects: tuple[RigidObject, ...]
    followers: tuple[tuple[int, int], ...]
    """(joint, the joint whose command it takes where one number moves a gripper)."""
    base: str
    """The robot's body that stands in the arena."""
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

    def camera(self, uid: str) -> SensorCamera:
        """Raises ValueError: no such camera; the message lists the uids."""
        for each in self.cameras:
            if each.uid == uid:
                return each
        raise ValueError(f"no camera '{uid}'; there is {', '.join(each.uid for each in self.cameras) or 'none'}")

    def part(self, name: str) -> tuple[int, ...]:
        """Joint indices of a control part.

        Raises:
            ValueError: no such part.
        """
        parts = dict(self.parts)
        if name not in parts:
            there = f"it has {', '.join(parts)}{did_you_mean(str(name), parts)}"
            raise ValueError(f"the robot has no control part '{name}'; {there}")
        return parts[name]

    def check_tool(self, part: str | None) -> None:
        """Raises ValueError: the part has no tool centre point; None stands for the one that has it."""
        if part is not None:
            self.part(part)
        if self.tool_part is None or part not in (None, self.tool_part):
            where = f"; it is on '{self.tool_part}'" if self.tool_part else ": this robot has none"
            raise ValueError(f"control part '{part}' has no tool centre point{where}")

    @property
    def uids(self) -> tuple[str, ...]:
        """Names of the rigid objects."""
        return tuple(each.uid for each in self.objects)

    def find_object(self, uid: str) -> RigidObject:
        """Raises ValueError: no such object; the message lists the uids."""
        for each in self.objects:
            if each.uid == uid:
                return each
        raise ValueError(f"no rigid object '{uid}'; there is {', '.join(self.uids) or 'none'}")

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
            poses={},
            action=jnp.zeros(0),
            episode_step=jnp.zeros((), jnp.int32),
        )


def make_scene(
    robot: Robot,
    drives: Drives,
    objects: tuple[RigidObject, ...],
    *,
    position: Vector,
    rotation: Vector,
    home: tuple[float, ...],
    gravity: Vector,
    timestep: float,
    markers: tuple[str, ...] = (),
    cameras: tuple[SensorCamera, ...] = (),
) -> Scene:
    """Compose the model.

    Args:
        position, rotation: of the robot's base, m and rad (intrinsic x y z).
        home: [J].
        gravity: m/s².
        timestep: s.
        markers: keys of virtual targets, for each of which a disc is drawn.
    """
    root = ET.parse(_FRAME).getroot()
    _child(root, "option").attrib |= {"gravity": to_text(gravity), "timestep": str(timestep)}
    world = _child(root, "worldbody")
    robot.body.attrib |= {"pos": to_text(position), "euler": to_text(rotation)}
    world.append(robot.body)
    _add_drives(root, robot, drives)
    pairs = ET.SubElement(root, "contact")
    for each in objects:
        feet = add_body(world, each)
        for geom in feet if each.collides else ():
            _add_pair(pairs, "floor", geom, each.friction, DEFAULT_FRICTION)
        for geom in robot.hull if each.collides else ():
            _add_pair(pairs, geom, each.uid, each.friction, DEFAULT_FRICTION)
    for one, other in itertools.combinations(objects, 2):
        if (one.dynamic or other.dynamic) and one.collides and other.collides:
            _add_pair(pairs, one.uid, other.uid, one.friction, other.friction)
    for geom in robot.feelers:
        _add_pair(pairs, "floor", geom, DEFAULT_FRICTION, DEFAULT_FRICTION)
    for key in markers:
        disc = ET.SubElement(world, "body", {"name": marker_name(key), "mocap": "true"})
        visual = {"material": "marker", "contype": "0", "conaffinity": "0"}
        ET.SubElement(disc, "geom", visual, type="cylinder", size="0.1 0.001", pos="0 0 -0.049")
    return Scene(
        xml=ET.tostring(root, encoding="unicode"),
        joints=robot.joints,
        parts=_indices(robot.parts, robot.joints),
        tool_part=robot.tool_part,
        drives=drives,
        home=home,
        objects=objects,
        base=str(robot.body.get("name")),
        cameras=cameras,
        followers=tuple((robot.joints.index(one), robot.joints.index(other)) for one, other in robot.followers.items()),
    )


def _indices(parts: Mapping[str, tuple[str, ...]], joints: tuple[str, ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(joints.index(joint) for joint in members)) for name, members in parts.items())


def _add_drives(root: ET.Element, robot: Robot, drives: Drives) -> None:
    """See ``ejax.envs.manager.robots`` for the law."""
    actuators = ET.SubElement(root, "actuator")
    for i, name in enumerate(robot.joints):
        _child(robot.body, f".//joint[@name='{name}']").set("damping", str(drives.damping[i]))
        law = {"gainprm": "1", "biastype": "affine", "biasprm": to_text((0.0, -drives.stiffness[i], 0.0))}
        limit = {"forcelimited": "true", "forcerange": to_text((-drives.max_effort[i], drives.max_effort[i]))}
        ET.SubElement(actuators, "general", law | limit, name=name, joint=name)


def _add_pair(pairs: ET.Element, one: str, other: str, friction: float, other_friction: float) -> None:
    mean = (friction + other_friction) / 2.0
    ET.SubElement(pairs, "pair", geom1=one, geom2=other, condim="3", friction=to_text((mean, mean)))


def _child(element: ET.Element, path: str) -> ET.Element:
    child = element.find(path)
    if child is None:
        raise ValueError(f"the MJCF of <{element.tag}> has no {path}")
    return child
