"""The scene of a gym config: a MuJoCo model from a robot and rigid objects, the place of each in its state, cameras,
and the world. Axes of cameras are OpenGL's: x right, y up, the line of sight along −z.

A dynamic object moves on three slide joints and a ball joint, 7 numbers in qpos: its linear and angular damping are two
numbers, as in EmbodiChain. Contacts are listed pairs only: objects with the floor, the robot's hull and each other; the
robot's feelers with the floor. Their friction is the mean of both bodies' coefficients, PhysX's rule.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self
from xml.etree import ElementTree as ET

import jax.numpy as jnp
import mujoco
import numpy as np
from flax import struct
from flax.core import FrozenDict
from numpy.typing import NDArray

from ejax.envs.mujoco.drawing import triple
from ejax.envs.mujoco.engine import Engine, Physics, PhysicsState, load_model
from ejax.envs.mujoco.models import ASSETS
from ejax.envs.mujoco.rotations import make_pose, matrix_from_euler, quaternion_from_matrix
from ejax.envs.mujoco.scenery import Camera
from ejax.envs.task.entities import look_up
from ejax.envs.task.mjcf import find_child, to_text
from ejax.envs.task.robots import Drives, Matrix, PlacedRobot, Robot, Vector
from ejax.envs.task.world import SceneState, World, marker_name
from ejax.types import Array, CameraView

DEFAULT_FRICTION = 0.5
_CORNER = 0.1
"""Radius of the balls a box stands on, as a part of its shortest half edge. Against a plane, MJX keeps only those
vertices of a box that lie within 1 mm of the deepest one: a tilting box would move differently in the two engines."""
_FREE_OF_CONTACTS = {"contype": "0", "conaffinity": "0"}


class Lens(NamedTuple):
    """One picture of a camera."""

    name: str
    intrinsics: tuple[float, float, float, float]  # fx, fy, cx, cy in pixels, from the upper left corner
    shift: Vector  # Its place in the camera's frame, m


@dataclass(frozen=True, kw_only=True)
class SensorCamera:
    """A camera with one lens, or two if it is a stereo camera."""

    uid: str
    width: int
    height: int
    pose: Matrix  # [4, 4], in the arena or in the frame of the parent
    parent: str | None
    lenses: tuple[Lens, ...]
    pictures: bool

    def lens(self, *, right: bool = False) -> Lens:
        return self.lenses[-1 if right else 0]

    def lens_pose(self, lens: Lens) -> NDArray[np.float64]:
        """Return the lens's pose, [4, 4], in the frame of ``pose``."""
        shifted = np.eye(4)
        shifted[:3, 3] = lens.shift
        return np.asarray(self.pose) @ shifted

    def view(self, lens: Lens) -> CameraView:
        """Return the view of a camera without a parent, in constants: what never moves is drawn once."""
        pose, (half_width, half_height, x, y) = self.lens_pose(lens), self._opening(lens)
        return CameraView(
            triple(pose[:3, 3]),
            triple(pose[:3, 3] - pose[:3, 2]),
            math.degrees(2.0 * math.atan(half_height)),
            effects=False,
            up=triple(pose[:3, 1]),
            fovx=math.degrees(2.0 * math.atan(half_width)),
            center=(x, y),
        )

    def pinhole(self, lens: Lens, parent_pose: Array) -> Camera:
        """Return the view of a camera whose parent has the pose [4, 4]."""
        pose = parent_pose @ jnp.asarray(self.lens_pose(lens), parent_pose.dtype)
        half_width, half_height, x, y = self._opening(lens)
        across, high = half_width * pose[:3, 0], half_height * pose[:3, 1]
        # pixels count downwards, the camera's y upwards
        aim = across * (1.0 - 2.0 * x) + high * (2.0 * y - 1.0) - pose[:3, 2]
        return Camera(eye=pose[:3, 3], frame=jnp.stack([across, high, aim], axis=1))

    def _opening(self, lens: Lens) -> tuple[float, float, float, float]:
        fx, fy, cx, cy = lens.intrinsics
        return self.width / (2.0 * fx), self.height / (2.0 * fy), cx / self.width, cy / self.height


@dataclass(frozen=True, kw_only=True)
class RigidObject:
    """A primitive body."""

    uid: str
    shape: Literal["box", "sphere", "cylinder", "capsule"]
    size: tuple[float, ...]  # MuJoCo's sizes: half edges, or radius and half height, m
    dynamic: bool = True
    position: Vector = (0.0, 0.0, 0.0)
    rotation: Vector = (0.0, 0.0, 0.0)  # Intrinsic Euler angles, rad
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

    def camera(self, uid: str) -> SensorCamera:
        """Find a camera. Raises ValueError: no such camera."""
        return look_up("camera", uid, {each.uid: each for each in self.cameras})

    def find_object(self, uid: str) -> RigidObject:
        """Find an object. Raises ValueError: no such object."""
        return look_up("rigid object", uid, {each.uid: each for each in self.objects})

    def part(self, name: str) -> tuple[int, ...]:
        """Return the joints of a control part. Raises ValueError: no such part."""
        return look_up("control part", name, dict(self.parts))

    def tool_joints(self, part: str | None) -> tuple[int, ...]:
        """Return the joints of the part with the tool centre point, None or its name. Raises ValueError: another."""
        if part is not None:
            self.part(part)
        if self.tool_part is None or part not in (None, self.tool_part):
            where = f"; it is on '{self.tool_part}'" if self.tool_part else ": this robot has none"
            raise ValueError(f"control part '{part}' has no tool centre point{where}")
        return self.part(self.tool_part)

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


@struct.dataclass(kw_only=True)
class SceneWorld(World):
    """A gym config's scene at one moment, in the arena's frame."""

    scene: Scene = struct.field(pytree_node=False)
    selected: tuple[int, ...] = struct.field(pytree_node=False)
    """The joints that are observed and acted on: those of ``env.control_parts``."""
    extensions: Mapping[str, Any] = struct.field(pytree_node=False, default=FrozenDict())
    """``env.extensions`` of the gym config."""
    max_episode_steps: int = struct.field(pytree_node=False, default=0)  # 0 or less: no limit
    engine: Engine = struct.field(pytree_node=False, default="auto")

    @property
    def qpos(self) -> Array:
        """[active joints], m or rad."""
        return self.physics.qpos[jnp.array(self.selected)]

    @property
    def qvel(self) -> Array:
        """[active joints], m/s or rad/s."""
        return self.physics.qvel[jnp.array(self.selected)]

    @property
    def qf(self) -> Array:
        """[active joints]: the efforts that an action commands, N or N·m; zeros under position and velocity drives. As
        in PhysX, the drives' own are not included."""
        return self.state.effort[jnp.array(self.selected)]

    @property
    def joints(self) -> tuple[int, ...]:
        """Numbers of the robot's joints."""
        return tuple(range(len(self.scene.joints)))

    @property
    def active(self) -> tuple[int, ...]:
        return self.selected

    @property
    def ctrl(self) -> Array:
        """[J]: k·q* + c·q̇* + f, see ``ejax.envs.task.robots``."""
        state, drives = self.state, self.scene.drives
        stiffness, damping = (jnp.array(each, state.target.dtype) for each in (drives.stiffness, drives.damping))
        return stiffness * state.target + damping * state.velocity_target + state.effort

    def part_qpos(self, name: str) -> Array:
        """[joints of the control part]."""
        return self.physics.qpos[jnp.array(self.scene.part(name))]

    def part_qvel(self, name: str) -> Array:
        """[joints of the control part]."""
        return self.physics.qvel[jnp.array(self.scene.part(name))]

    def eef_pose(self, part: str | None = None, qpos: Array | None = None) -> Array:
        self.scene.tool_joints(part)
        return super().eef_pose(None, qpos)

    def camera_pose(self, uid: str, *, right: bool = False) -> Array:
        """[4, 4]: a camera in the arena, its line of sight along −z and y up; of a stereo camera, one of its lenses."""
        camera = self.scene.camera(uid)
        pose = jnp.asarray(camera.lens_pose(camera.lens(right=right)), jnp.float32)
        return pose if camera.parent is None else self.body_pose(camera.parent) @ pose

    def has_object(self, uid: str) -> bool:
        """Return whether the scene has this rigid object."""
        return any(each.uid == uid for each in self.scene.objects)

    def initial_pose(self, uid: str) -> Array:
        """[4, 4]: where the config puts an object."""
        return self.scene.initial_pose(uid)

    def object_pose(self, uid: str) -> Array:
        return self.initial_pose(uid) if self._slots(uid) is None else super().object_pose(uid)

    def with_qpos(self, joints: tuple[int, ...], qpos: Array) -> Self:
        """Move joints, by their numbers, to ``qpos`` [joints], rad or m, at rest; the drives hold them there."""
        state = super().with_qpos(joints, qpos).state
        # without new targets the drives would pull the joints back
        target = self.state.target.at[jnp.array(self.model.jnt_qposadr[list(joints)])].set(qpos)
        return replace(self, state=replace(state, target=target))

    def advance(self, num_substeps: int) -> Self:
        """Make physics steps under the drives' current targets."""
        physics = Physics(self.asset, self.engine, num_substeps).step(self.physics, self.ctrl)
        return replace(self, state=replace(self.state, physics=physics))

    def _slots(self, uid: str) -> tuple[int, int] | None:
        self.scene.find_object(uid)
        return super()._slots(uid)
