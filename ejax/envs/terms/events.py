"""Event functors: f(world, key, **params) -> the world after it, or its state. No other environment is disturbed."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejax.envs.mujoco.rotations import make_pose, matrix_from_euler
from ejax.envs.randomization.physics import Change
from ejax.envs.task.entities import Entity, refuse_constrained
from ejax.envs.task.scene import SceneWorld
from ejax.envs.task.world import World
from ejax.types import Array, Key

AxisBounds = Sequence[Sequence[float]]  # [lowest, highest]


@dataclass(frozen=True)
class PhysicsEvent:
    """An event of ``ejax.envs.randomization.physics`` as a functor."""

    name: str
    change: Callable[..., Change]  # ``change(model, **params)``

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def __signature__(self) -> inspect.Signature:
        # a config's parameters are checked by this: world and key, then the arguments of ``change`` after the model
        given = list(inspect.signature(PhysicsEvent.__call__).parameters.values())[1:3]
        return inspect.Signature([*given, *list(inspect.signature(self.change).parameters.values())[1:]])

    def __call__(self, world: World, key: Key, **params: Any) -> World:
        physics = self.change(world.model, **params).apply(world.physics, key, None)
        return replace(world, state=replace(world.state, physics=physics))


def randomize_rigid_object_pose(
    world: SceneWorld,
    key: Key,
    entity_cfg: Entity,
    position_range: AxisBounds | None = None,
    rotation_range: AxisBounds | None = None,
    relative_position: bool = True,
    relative_rotation: bool = False,
    physics_update_step: int = -1,
) -> SceneWorld:
    """Put an object at a uniformly drawn pose, at rest.

    Args:
        position_range: m, added to the initial position, or absolute.
        rotation_range: Euler angles in degrees; alone, or turned from the initial rotation.
        physics_update_step: physics steps that follow, in a gym config. In EmbodiChain they move, and stop, all
            environments.
    Raises ValueError: no such object.
    """
    uid = entity_cfg["uid"]
    start = world.initial_pose(uid)
    pose = _draw(key, start, position_range, rotation_range, relative_position, relative_rotation)
    body = world.model.body(uid)
    refuse_constrained(world.model, slice(body.dofadr[0], body.dofadr[0] + body.dofnum[0]), "draw another object")
    # at rest: an object that is put somewhere must not keep moving
    world = world.with_object_pose(uid, pose)
    return world.advance(physics_update_step) if physics_update_step > 0 else world


def randomize_target_pose(
    world: World,
    key: Key,
    position_range: AxisBounds,
    rotation_range: AxisBounds | None = None,
    relative_position: bool = False,
    relative_rotation: bool = False,
    reference_entity_cfg: Entity | None = None,
    store_key: str = "target_pose",
) -> World:
    """Store a uniformly drawn pose under ``store_key``: absolute, or relative to an object's pose or to the origin.
    If its position is relative, it has the object's orientation unless ``rotation_range`` draws one.
    """
    reference = jnp.eye(4)
    if reference_entity_cfg is not None and (relative_position or relative_rotation):
        reference = world.object_pose(reference_entity_cfg["uid"])
    pose = _draw(key, reference, position_range, rotation_range, relative_position, relative_rotation)
    return world.keep(**{store_key: pose})


def randomize_robot_qpos(
    world: World,
    key: Key,
    entity_cfg: Entity | None = None,
    qpos_range: AxisBounds | None = None,
    relative_qpos: bool = True,
    joint_ids: Sequence[int] | None = None,
) -> World:
    """Put joints at uniformly drawn positions, at rest: added to the present ones, or absolute; within their limits.
    Raises ValueError: a range that does not have a number for each joint; a joint under an equality.
    """
    if qpos_range is None:
        return world
    joints = world.joints if joint_ids is None else tuple(world.joints[i] for i in joint_ids)
    refuse_constrained(world.model, world.model.jnt_dofadr[list(joints)], "choose other joint_ids")
    low, high = (jnp.array(bound, jnp.float32) for bound in qpos_range)
    if low.shape != (len(joints),) or high.shape != (len(joints),):
        raise ValueError(f"qpos_range has {low.size} and {high.size} numbers, but moves {len(joints)} joints")
    drawn = jax.random.uniform(key, (len(joints),), minval=low, maxval=high)
    places, limits = (x[list(joints)] for x in (world.model.jnt_qposadr, world.model.jnt_range))
    limits = np.where(world.model.jnt_limited[list(joints), None], limits, [-np.inf, np.inf]).astype(np.float32)
    drawn = drawn + world.physics.qpos[jnp.array(places)] if relative_qpos else drawn
    return world.with_qpos(joints, jnp.clip(drawn, *limits.T))


EVENTS = (randomize_rigid_object_pose, randomize_target_pose, randomize_robot_qpos)


def _draw(
    key: Key,
    reference: Array,
    position_range: AxisBounds | None,
    rotation_range: AxisBounds | None,
    relative_position: bool,
    relative_rotation: bool,
) -> Array:
    key_position, key_rotation = jax.random.split(key)
    position, rotation = reference[:3, 3], reference[:3, :3]
    # an empty list is not a range
    if position_range:
        drawn = _uniform(key_position, position_range)
        position = position + drawn if relative_position else drawn
    if rotation_range:
        drawn = matrix_from_euler(jnp.radians(_uniform(key_rotation, rotation_range)))
        rotation = rotation @ drawn if relative_rotation else drawn
    return make_pose(position, rotation)


def _uniform(key: Key, bounds: AxisBounds) -> Array:
    if np.shape(bounds) != (2, 3):
        raise ValueError(f"a range is two lists of three numbers, got {bounds}")
    low, high = (jnp.array(bound, jnp.float32) for bound in bounds)
    return jax.random.uniform(key, (3,), minval=low, maxval=high)
