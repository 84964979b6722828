"""Reward functors: f(world, **params) -> float32 scalar, for the step that led to ``world``, before its weight.

``world.action``: [A], the policy's, as given. ``world.info``: ``success`` and ``fail``, bool.
"""

from collections.abc import Sequence

import jax.numpy as jnp

from ejax.envs.task.entities import Entity
from ejax.envs.task.scene import SceneWorld
from ejax.envs.task.world import World
from ejax.types import Array


def reaching_behind_object(
    world: World,
    object_cfg: Entity,
    target_pose_key: str = "goal_pose",
    behind_offset: float = 0.015,
    height_offset: float = 0.015,
    distance_scale: float = 5.0,
    part_name: str | None = None,
) -> Array:
    """1 − tanh(scale·‖ee − (o − behind·û + (0, 0, height))‖) with û = (g − o)/(‖g − o‖ + 1e-6).

    o, g, ee: the object, its goal and the tool, m.
    """
    there = _position(world, object_cfg)
    to_goal = world.pose(target_pose_key)[:3, 3] - there
    direction = to_goal / (jnp.linalg.norm(to_goal) + 1e-6)
    place = there - behind_offset * direction + jnp.array([0.0, 0.0, height_offset])
    distance = jnp.linalg.norm(world.eef_pose(part_name)[:3, 3] - place)
    return 1.0 - jnp.tanh(distance_scale * distance)


def distance_to_target(
    world: World,
    source_entity_cfg: Entity,
    target_pose_key: str = "target_pose",
    exponential: bool = False,
    sigma: float = 1.0,
    use_xy_only: bool = False,
) -> Array:
    """exp(−d²/2σ²) if ``exponential``, else −d, m."""
    return _shape(_target_distance(world, source_entity_cfg, target_pose_key, use_xy_only), exponential, sigma)


def incremental_distance_to_target(
    world: World,
    source_entity_cfg: Entity,
    target_pose_key: str = "target_pose",
    tanh_scale: float = 10.0,
    positive_weight: float = 1.0,
    negative_weight: float = 1.0,
    use_xy_only: bool = False,
) -> Array:
    """w·tanh(scale·(d_prev − d)), w the positive weight where that is ≥ 0, else the negative one; 0 in the first step.
    Differs from EmbodiChain, which remembers d_prev across episodes.
    """
    worlds = world.before, world
    before, now = (_target_distance(each, source_entity_cfg, target_pose_key, use_xy_only) for each in worlds)
    # bounded: a cube that is knocked far away in one step costs no more than the weight
    progress = jnp.tanh(tanh_scale * (before - now))
    reward = jnp.where(progress >= 0.0, positive_weight, negative_weight) * progress
    return jnp.where(world.state.episode_step > 1, reward, 0.0)


def distance_between_objects(
    world: World, source_entity_cfg: Entity, target_entity_cfg: Entity, exponential: bool = False, sigma: float = 1.0
) -> Array:
    """exp(−d²/2σ²) if ``exponential``, else −d, m."""
    offset = _position(world, source_entity_cfg) - _position(world, target_entity_cfg)
    return _shape(jnp.linalg.norm(offset), exponential, sigma)


def orientation_alignment(world: World, source_entity_cfg: Entity, target_entity_cfg: Entity) -> Array:
    """(trace(R_source·R_targetᵀ) − 1)/2: the cosine of the angle between two objects' orientations."""
    source, target = (world.object_pose(each["uid"])[:3, :3] for each in (source_entity_cfg, target_entity_cfg))
    return (jnp.trace(source @ target.T) - 1.0) / 2.0


def action_smoothness_penalty(world: World) -> Array:
    """Compute −‖a − a⁻‖, a⁻ the action before; 0 in an episode's first step.
    EmbodiChain compares the joint target with the former action, and has 0 in evaluation and at a rollout's start.
    """
    change = jnp.linalg.norm(world.action - world.before.action)
    return jnp.where(world.state.episode_step > 1, -change, 0.0)


def success_reward(world: World) -> Array:
    """1 where the task succeeded, else 0; 0 where the task has no notion of success."""
    return jnp.where(jnp.asarray(world.info.get("success", False)), 1.0, 0.0)


def joint_velocity_penalty(
    world: SceneWorld, robot_uid: str = "robot", joint_ids: Sequence[int] | None = None, part_name: str | None = None
) -> Array:
    """−‖q̇‖ of the joints given by index, by control part, or of all. There is one robot, of any uid."""
    num_joints = len(world.scene.joints)
    if joint_ids is not None:
        return -jnp.linalg.norm(world.state.physics.qvel[_joint_ids(joint_ids, num_joints)])
    if part_name is not None:
        return -jnp.linalg.norm(world.part_qvel(part_name))
    return -jnp.linalg.norm(world.state.physics.qvel[:num_joints])


def joint_limit_penalty(
    world: SceneWorld, robot_uid: str = "robot", joint_ids: Sequence[int] | None = None, margin: float = 0.1
) -> Array:
    """−Σ max(0, margin − min(q̂, 1 − q̂)) with q̂ the position as a part of the joint's range."""
    num_joints = len(world.scene.joints)
    ids = jnp.arange(num_joints) if joint_ids is None else _joint_ids(joint_ids, num_joints)
    low, high = jnp.asarray(world.scene.limits)[ids].T
    part = (world.state.physics.qpos[ids] - low) / (high - low)
    return -jnp.sum(jnp.maximum(0.0, margin - jnp.minimum(part, 1.0 - part)))


REWARDS = (
    *(reaching_behind_object, distance_to_target, incremental_distance_to_target, distance_between_objects),
    *(orientation_alignment, action_smoothness_penalty, success_reward, joint_velocity_penalty, joint_limit_penalty),
)


def _position(world: World, entity: Entity) -> Array:
    return world.object_pose(entity["uid"])[:3, 3]


def _target_distance(world: World, source: Entity, key: str, use_xy_only: bool) -> Array:
    offset = _position(world, source) - world.pose(key)[:3, 3]
    return jnp.linalg.norm(offset[:2] if use_xy_only else offset)


def _shape(distance: Array, exponential: bool, sigma: float) -> Array:
    return jnp.exp(-(distance**2) / (2.0 * sigma**2)) if exponential else -distance


def _joint_ids(joint_ids: Sequence[int], num_joints: int) -> Array:
    outside = [i for i in joint_ids if not -num_joints <= i < num_joints]
    if outside:
        raise ValueError(f"joint_ids {outside} are not there: the robot has {num_joints} joints")
    return jnp.array(tuple(joint_ids), jnp.int32)
