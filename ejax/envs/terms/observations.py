"""Observation functors: ``add``, f(world, obs, **params), and ``modify``, f(world, data, **params) -> array. The second
parameter's name declares the mode.

``obs`` is the nested observation so far, ``data`` the value to modify.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejax.envs.mujoco.kinematics import transform
from ejax.envs.mujoco.rotations import quaternion_from_matrix
from ejax.envs.task.entities import Entity
from ejax.envs.task.scene import SceneWorld
from ejax.envs.task.world import World
from ejax.types import Array


def normalize_robot_joint_data(
    world: SceneWorld,
    data: Array,
    joint_ids: Sequence[int] | None = None,
    limit: str = "qpos_limits",
    range: Sequence[float] = (0.0, 1.0),
    control_parts: Sequence[str] | None = None,
) -> Array:
    """(x − lo)/(hi − lo)·(r₁ − r₀) + r₀ in the selected columns of the active joints, as EmbodiChain's ``joint_ids``.
    Raises ValueError: no or two selections, columns that are not there, or limits other than those of positions.
    """
    if (joint_ids is None) == (control_parts is None):
        raise ValueError("set either joint_ids or control_parts")
    if limit != "qpos_limits":
        raise ValueError(f"limit '{limit}' is not known; ejax's robots have qpos_limits")
    if control_parts is not None:
        selected = {joint for part in control_parts for joint in world.scene.part(part)}
        joint_ids = [column for column, joint in enumerate(world.active) if joint in selected]
    # not ``isinstance``: true and false are integers to Python
    if any(type(i) is not int for i in joint_ids or ()):
        raise ValueError(f"joint_ids must be a list of integers, got {joint_ids!r}")
    outside = [i for i in joint_ids or () if not 0 <= i < len(world.active)]
    if outside:
        raise ValueError(f"joint_ids {outside} are not there: {len(world.active)} joints are observed")
    ids = jnp.array(tuple(joint_ids or ()), jnp.int32)
    low, high = world.limits[ids].T
    scaled = (data[ids] - low) / (high - low) * (range[1] - range[0]) + range[0]
    return data.at[ids].set(scaled)


def get_robot_eef_pose(
    world: World, obs: Mapping[str, Any], part_name: str | None = None, position_only: bool = False
) -> Array:
    """[4, 4] or [3]: the tool centre point, m."""
    pose = world.eef_pose(part_name)
    return pose[:3, 3] if position_only else pose


def get_rigid_object_pose(world: World, obs: Mapping[str, Any], entity_cfg: Entity, to_matrix: bool = True) -> Array:
    """[4, 4], or [7]: x y z (m), qw qx qy qz. Zeros for an object that is not there."""
    if not world.has_object(entity_cfg["uid"]):
        return jnp.zeros((4, 4) if to_matrix else 7)
    pose = world.object_pose(entity_cfg["uid"])
    return pose if to_matrix else jnp.concatenate([pose[:3, 3], quaternion_from_matrix(pose[:3, :3])])


def get_rigid_object_velocity(world: World, obs: Mapping[str, Any], entity_cfg: Entity) -> Array:
    """[6]: linear (m/s) and angular (rad/s) velocity. Zeros for an object that is not there."""
    return world.object_velocity(entity_cfg["uid"]) if world.has_object(entity_cfg["uid"]) else jnp.zeros(6)


def target_position(world: World, obs: Mapping[str, Any], target_pose_key: str = "goal_pose") -> Array:
    """[3], m: the position of a virtual target. Zeros where none is stored."""
    return world.pose(target_pose_key)[:3, 3] if target_pose_key in world.kept else jnp.zeros(3)


def get_sensor_pose_in_robot_frame(
    world: SceneWorld, obs: Mapping[str, Any], entity_cfg: Entity, robot_uid: str | None = None, is_right: bool = False
) -> Array:
    """[4, 4]: a camera in the frame of the robot's base, its line of sight along −z and y up, m."""
    base = world.model.body(world.scene.base)
    # a constant: the base is fixed
    in_base = jnp.asarray(np.linalg.inv(transform(base.pos, base.quat)), jnp.float32)
    return in_base @ world.camera_pose(entity_cfg["uid"], right=is_right)


def get_sensor_intrinsics(
    world: SceneWorld, obs: Mapping[str, Any], entity_cfg: Entity, is_right: bool = False
) -> Array:
    """[3, 3]: (fx, 0, cx), (0, fy, cy), (0, 0, 1) of a camera, pixels."""
    fx, fy, cx, cy = world.scene.camera(entity_cfg["uid"]).lens(right=is_right).intrinsics
    return jnp.array([[fx, 0.0, cx], [0.0, fy, cy], [0.0, 0.0, 1.0]])


OF_WORLD = (
    *(normalize_robot_joint_data, get_robot_eef_pose, get_rigid_object_pose),
    *(get_rigid_object_velocity, target_position),
)
OF_CAMERAS = (get_sensor_pose_in_robot_frame, get_sensor_intrinsics)  # Functors whose entity is a camera
