"""Elements of a MuJoCo model by name, and the units of an element's numbers. The entity ``{uid: name}`` is a body that
moves freely, or the robot; its joints and links are named by regular expressions that match whole names."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import mujoco
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ejax.schema.registry import did_you_mean
from ejax.types import Array

Entity: TypeAlias = Mapping[str, str]
Kind: TypeAlias = Literal["body", "joint", "site", "geom", "sensor"]

ROBOT = "robot"
"""The ``uid`` of everything that drives move; a gym config's robot has a uid of its own beside it."""
FREE, BALL = int(mujoco.mjtJoint.mjJNT_FREE), int(mujoco.mjtJoint.mjJNT_BALL)
_SLIDE = int(mujoco.mjtJoint.mjJNT_SLIDE)


def find(model: mujoco.MjModel, kind: Kind, name: str) -> int:
    """Get the number of the element of this name. Raises ValueError, listing the names: there is none."""
    names = names_of(model, kind)
    if name not in names:
        there = f"there is {', '.join(names)}" if names else f"the model names no {kind}"
        raise ValueError(f"no {kind} '{name}'; {there}{did_you_mean(name, names)}")
    return names[name]


def names_of(model: mujoco.MjModel, kind: Kind) -> dict[str, int]:
    """Name -> number of every named element of a kind, in the model's order."""
    count = model.njnt if kind == "joint" else getattr(model, f"n{kind}")
    element = getattr(model, kind)
    return {name: i for i in range(count) if (name := element(i).name)}


def matching_names(what: str, patterns: Any, names: Mapping[str, int]) -> list[str]:
    """List the names that a regular expression matches as a whole, in the model's order. None: all."""
    if patterns is None:
        return list(names)
    given = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in given:
        if not any(re.fullmatch(pattern, name) for name in names):
            there = f"there is {', '.join(names)}{did_you_mean(pattern, names)}"
            raise ValueError(f"{what}_names: no {what} '{pattern}'; {there}")
    return [name for name in names if any(re.fullmatch(pattern, name) for pattern in given)]


def per_joint(joints: tuple[str, ...], values: Mapping[str, float]) -> tuple[float, ...]:
    """Give each joint the number of the last regular expression that fits, or 0. Raises ValueError: one fits no
    joint."""
    for pattern in values:
        if not any(re.fullmatch(pattern, joint) for joint in joints):
            raise ValueError(f"no joint is like '{pattern}'; there is {', '.join(joints)}")
    found = [[value for pattern, value in values.items() if re.fullmatch(pattern, joint)] for joint in joints]
    return tuple(float(each[-1]) if each else 0.0 for each in found)


def object_body(model: mujoco.MjModel, entity: Any) -> int:
    """Find the body of an object that moves freely."""
    uid, free = _uid(entity), _free_bodies(model)
    if uid not in free:
        there = f"there is {', '.join(free) or 'none'}{did_you_mean(uid, free)}"
        raise ValueError(f"entity_cfg: no object '{uid}' that moves; {there}")
    return free[uid]


def robot_links(model: mujoco.MjModel, entity: Any) -> list[int]:
    """List the bodies of the robot that have a mass."""
    uid = _uid(entity)
    roots = {int(model.body_rootid[body]) for body in _driven(model)}
    names = [ROBOT, *(model.body(root).name for root in sorted(roots))]
    if uid not in names:
        raise ValueError(f"entity_cfg: no robot '{uid}'; there is {', '.join(names)}{did_you_mean(uid, names)}")
    return [i for i in range(1, model.nbody) if model.body_rootid[i] in roots and model.body_mass[i] > 0.0]


def joint_dofs(model: mujoco.MjModel, entity: Any, joint_names: Any) -> NDArray[np.int_]:
    is_object = _uid(entity) in _free_bodies(model)
    bodies = [object_body(model, entity)] if is_object else robot_links(model, entity)
    joints = {model.joint(j).name: j for j in range(model.njnt) if model.jnt_bodyid[j] in bodies}
    chosen = {joints[name] for name in matching_names("joint", joint_names, joints)}
    return np.array([dof for dof in range(model.nv) if model.dof_jntid[dof] in chosen], int)


def drives_of_joints(model: mujoco.MjModel) -> list[int]:
    """List the actuators that act on joints, not on tendons or sites."""
    kinds = (int(mujoco.mjtTrn.mjTRN_JOINT), int(mujoco.mjtTrn.mjTRN_JOINTINPARENT))
    return [i for i in range(model.nu) if int(model.actuator_trntype[i]) in kinds]


def joint_slices(model: mujoco.MjModel, joint: int) -> tuple[slice, slice]:
    """Locate a joint's numbers in qpos and in qvel."""
    sizes = {FREE: (7, 6), BALL: (4, 3)}.get(int(model.jnt_type[joint]), (1, 1))
    at, start = int(model.jnt_qposadr[joint]), int(model.jnt_dofadr[joint])
    return slice(at, at + sizes[0]), slice(start, start + sizes[1])


def pose_slots(model: mujoco.MjModel, body: int) -> tuple[int, int] | None:
    """Find where the pose [7] of a body that moves freely begins in qpos, and its velocity [6] in qvel; None: it does
    not. Such a body has a free joint, or three slides and a ball joint at the world's origin, as a gym config's
    objects."""
    joint = int(model.body_jntadr[body])
    if joint < 0 or model.body_dofnum[body] != 6:
        return None
    kinds = model.jnt_type[joint : joint + int(model.body_jntnum[body])].tolist()
    if kinds != [FREE] and (kinds != [_SLIDE, _SLIDE, _SLIDE, BALL] or model.body_pos[body].any()):
        return None
    return int(model.jnt_qposadr[joint]), int(model.jnt_dofadr[joint])


def position_names(model: mujoco.MjModel, joint: int) -> list[tuple[str, int]]:
    """Name, with units, a joint's numbers in qpos, and how many numbers each has."""
    name, kind = _joint_name(model, joint), int(model.jnt_type[joint])
    if kind == FREE:
        return [(f"{name} position [m]", 3), (f"{name} quaternion [1]", 4)]
    if kind == BALL:
        return [(f"{name} quaternion [1]", 4)]
    return [(f"{name} position [m]" if kind == _SLIDE else f"{name} angle [rad]", 1)]


def velocity_names(model: mujoco.MjModel, joint: int) -> list[tuple[str, int]]:
    """Name, with units, a joint's numbers in qvel, and how many numbers each has."""
    name, kind = _joint_name(model, joint), int(model.jnt_type[joint])
    turning = (f"{name} angular velocity in its own frame [rad/s]", 3)
    if kind == FREE:
        return [(f"{name} velocity [m/s]", 3), turning]
    return [turning] if kind == BALL else [(f"{name} velocity [{'m/s' if kind == _SLIDE else 'rad/s'}]", 1)]


def fitting(what: str, value: ArrayLike, where: slice, like: Array) -> Array:
    """Shape the value as [its numbers]; a scalar for one. Raises ValueError, naming ``what``: another shape."""
    given, size = jnp.asarray(value, like.dtype), where.stop - where.start
    if given.shape not in ((size,), *([()] if size == 1 else [])):
        wanted = "one number" if size == 1 else f"shape ({size},)"
        raise ValueError(f"{what}: got shape {given.shape}; must be {wanted}")
    return given.reshape(size)


def _joint_name(model: mujoco.MjModel, joint: int) -> str:
    name = model.joint(joint).name
    body = model.body(int(model.jnt_bodyid[joint])).name
    return (body or name if model.jnt_type[joint] == FREE else name or body) or f"joint {joint}"


def _uid(entity: Any) -> str:
    if not isinstance(entity, Mapping) or set(entity) != {"uid"} or not isinstance(entity["uid"], str):
        raise ValueError(f"entity_cfg: got {entity!r}; must be {{uid: name}}")
    return entity["uid"]


def _free_bodies(model: mujoco.MjModel) -> dict[str, int]:
    return {model.body(i).name: i for i in range(1, model.nbody) if model.body_dofnum[i] == 6}


def _driven(model: mujoco.MjModel) -> Iterator[int]:
    on_joints = drives_of_joints(model)
    for i in range(model.nu):
        target, kind = int(model.actuator_trnid[i, 0]), model.actuator_trntype[i]
        if i in on_joints:
            yield int(model.jnt_bodyid[target])
        elif kind == mujoco.mjtTrn.mjTRN_SITE:
            yield int(model.site_bodyid[target])
        elif kind == mujoco.mjtTrn.mjTRN_BODY:
            yield target
        elif kind == mujoco.mjtTrn.mjTRN_TENDON:
            first = int(model.tendon_adr[target])
            for j in range(first, first + int(model.tendon_num[target])):
                if model.wrap_type[j] == mujoco.mjtWrap.mjWRAP_JOINT:
                    yield int(model.jnt_bodyid[model.wrap_objid[j]])
                elif model.wrap_type[j] == mujoco.mjtWrap.mjWRAP_SITE:
                    yield int(model.site_bodyid[model.wrap_objid[j]])
