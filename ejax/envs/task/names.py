"""Names of a MuJoCo model: where what they stand for is in its arrays, and the units of its numbers."""

import jax.numpy as jnp
import mujoco
from numpy.typing import ArrayLike

from ejax.schema.registry import did_you_mean
from ejax.types import Array

FREE, BALL = int(mujoco.mjtJoint.mjJNT_FREE), int(mujoco.mjtJoint.mjJNT_BALL)
_SLIDE = int(mujoco.mjtJoint.mjJNT_SLIDE)
_OBJECTS = {
    "body": mujoco.mjtObj.mjOBJ_BODY,
    "joint": mujoco.mjtObj.mjOBJ_JOINT,
    "site": mujoco.mjtObj.mjOBJ_SITE,
    "geom": mujoco.mjtObj.mjOBJ_GEOM,
    "sensor": mujoco.mjtObj.mjOBJ_SENSOR,
}


def find(model: mujoco.MjModel, kind: str, name: str) -> int:
    """The number of what has this name.

    Raises:
        ValueError: there is none; the message has those that there are.
    """
    index = mujoco.mj_name2id(model, _OBJECTS[kind], name)
    if index >= 0:
        return int(index)
    known = names_of(model, kind)
    there = f"there is {', '.join(known)}" if known else f"the model names no {kind}"
    raise ValueError(f"no {kind} '{name}'; {there}{did_you_mean(name, known)}")


def names_of(model: mujoco.MjModel, kind: str) -> dict[str, int]:
    """Name -> number of every named element of a kind, in the model's order."""
    count = {
        "body": model.nbody,
        "joint": model.njnt,
        "site": model.nsite,
        "geom": model.ngeom,
        "sensor": model.nsensor,
    }[kind]
    return {n: i for i in range(count) if (n := mujoco.mj_id2name(model, _OBJECTS[kind], i))}


def joint_slices(model: mujoco.MjModel, joint: int) -> tuple[slice, slice]:
    """Where a joint's numbers are in qpos and in qvel."""
    sizes = {FREE: (7, 6), BALL: (4, 3)}.get(int(model.jnt_type[joint]), (1, 1))
    at, start = int(model.jnt_qposadr[joint]), int(model.jnt_dofadr[joint])
    return slice(at, at + sizes[0]), slice(start, start + sizes[1])


def pose_slots(model: mujoco.MjModel, body: int) -> tuple[int, int] | None:
    """Where the pose [7] of a body that moves freely begins in qpos, and its velocity [6] in qvel; None: it does not.

    Such a body has a free joint, or three slides and a ball joint at the world's origin, as a gym config's objects.
    """
    joint = int(model.body_jntadr[body])
    if joint < 0 or model.body_dofnum[body] != 6:
        return None
    kinds = model.jnt_type[joint : joint + int(model.body_jntnum[body])].tolist()
    if kinds != [FREE] and (kinds != [_SLIDE, _SLIDE, _SLIDE, BALL] or model.body_pos[body].any()):
        return None
    return int(model.jnt_qposadr[joint]), int(model.jnt_dofadr[joint])


def is_placeable(model: mujoco.MjModel, body: int) -> bool:
    """A body that moves freely, or a marker."""
    return bool(model.body_mocapid[body] >= 0) or pose_slots(model, body) is not None


def joint_name(model: mujoco.MjModel, joint: int) -> str:
    """A joint's name; where it has none, and of free joints, its body's."""
    name = model.joint(joint).name
    body = model.body(int(model.jnt_bodyid[joint])).name
    return (body or name if model.jnt_type[joint] == FREE else name or body) or f"joint {joint}"


def position_names(model: mujoco.MjModel, joint: int) -> list[tuple[str, int]]:
    """The names with units of a joint's numbers in qpos, and how many numbers each has."""
    name, kind = joint_name(model, joint), int(model.jnt_type[joint])
    if kind == FREE:
        return [(f"{name} position [m]", 3), (f"{name} quaternion [1]", 4)]
    if kind == BALL:
        return [(f"{name} quaternion [1]", 4)]
    return [(f"{name} position [m]" if kind == _SLIDE else f"{name} angle [rad]", 1)]


def velocity_names(model: mujoco.MjModel, joint: int) -> list[tuple[str, int]]:
    """The names with units of a joint's numbers in qvel, and how many numbers each has."""
    name, kind = joint_name(model, joint), int(model.jnt_type[joint])
    if kind == FREE:
        return [(f"{name} velocity [m/s]", 3), (f"{name} angular velocity in its own frame [rad/s]", 3)]
    if kind == BALL:
        return [(f"{name} angular velocity in its own frame [rad/s]", 3)]
    return [(f"{name} velocity [{'m/s' if kind == _SLIDE else 'rad/s'}]", 1)]


def fitting(what: str, value: ArrayLike, where: slice, like: Array) -> Array:
    """The value in the shape [its numbers]; a scalar for one.

    Raises:
        ValueError: another shape; ``what`` names the value.
    """
    given, size = jnp.asarray(value, like.dtype), where.stop - where.start
    if given.shape not in ((size,), *([()] if size == 1 else [])):
        wanted = "one number" if size == 1 else f"shape ({size},)"
        raise ValueError(f"{what}: got shape {given.shape}; must be {wanted}")
    return given.reshape(size)
