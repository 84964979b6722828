"""Elements of a MuJoCo model by name, and the units of an element's numbers. The entity ``{uid: name}`` is a body that
moves freely, or the robot; its joints and links are named by regular expressions that match whole names."""

import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias, TypeVar

import jax.numpy as jnp
import mujoco
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ejax.envs.mujoco.engine import load_model
from ejax.envs.mujoco.models import mocap_bodies
from ejax.schema.messages import did_you_mean
from ejax.schema.paths import unique
from ejax.types import Array

_T = TypeVar("_T")
Entity: TypeAlias = Mapping[str, Any]  # ``{"uid": name}``
ElementKind: TypeAlias = Literal["body", "joint", "site", "geom", "sensor", "mesh", "key"]

ROBOT = "robot"  # The ``uid`` of everything that drives move; a gym config's robot has another uid too
FREE, BALL = int(mujoco.mjtJoint.mjJNT_FREE), int(mujoco.mjtJoint.mjJNT_BALL)
_SLIDE = int(mujoco.mjtJoint.mjJNT_SLIDE)


def find_entity(model: mujoco.MjModel, kind: ElementKind, name: str) -> int:
    """Get the number of the element of this name. Raises ValueError, listing the names: there is none."""
    count, element = model.njnt if kind == "joint" else getattr(model, f"n{kind}"), getattr(model, kind)
    return look_up(kind, name, {each: i for i in range(count) if (each := element(i).name)})


def look_up(what: str, name: Any, table: Mapping[str, _T], where: str = "") -> _T:
    """Get an entry by its name. Raises ValueError, listing the names: there is none."""
    if name not in table:
        there = ", ".join(table) or "none"
        raise ValueError(f"{where}no {what} '{name}'; there is {there}{did_you_mean(str(name), table)}")
    return table[name]


def matching_names(what: str, patterns: Any, names: Mapping[str, int]) -> list[str]:
    """List the names that a regular expression matches as a whole, in the model's order. None: all."""
    given = [".*"] if patterns is None else [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in given if patterns is not None else ():
        if not any(re.fullmatch(pattern, name) for name in names):
            look_up(what, pattern, dict.fromkeys(names, 0), f"{what}_names: ")
    return [name for name in names if any(re.fullmatch(pattern, name) for pattern in given)]


def per_joint(joints: tuple[str, ...], values: Mapping[str, float]) -> tuple[float, ...]:
    """Assign to each joint the number of the last pattern that fits, or 0. Raises ValueError: one fits no joint."""
    for pattern in values:
        if not any(re.fullmatch(pattern, joint) for joint in joints):
            raise ValueError(f"no joint matches '{pattern}'; there is {', '.join(joints)}")
    # the last counts, so that a general pattern may stand first and exceptions after it
    found = [[value for pattern, value in values.items() if re.fullmatch(pattern, joint)] for joint in joints]
    return tuple(float(each[-1]) if each else 0.0 for each in found)


def object_body(model: mujoco.MjModel, entity: Any) -> int:
    """Find the body of an object that moves freely."""
    return look_up("object that moves", _uid(entity), free_bodies(model), "entity_cfg: ")


def free_bodies(model: mujoco.MjModel) -> dict[str, int]:
    """Name -> number of every body that moves freely, a legged robot's base among them."""
    return {label(model, "body", i): i for i in range(1, model.nbody) if model.body_dofnum[i] == 6}


def robot_links(model: mujoco.MjModel, entity: Any) -> list[int]:
    """List the bodies of the robot that have a mass."""
    roots = {int(model.body_rootid[body]) for body in _driven(model)}
    names = {ROBOT: 0, **{label(model, "body", root): root for root in sorted(roots)}}
    look_up("robot", _uid(entity), names, "entity_cfg: ")
    return [i for i in range(1, model.nbody) if model.body_rootid[i] in roots and model.body_mass[i] > 0.0]


def bodies_of(model: mujoco.MjModel, entity: Any) -> list[int]:
    """List an entity's bodies: an object, or the robot's links."""
    is_object = _uid(entity) in free_bodies(model)
    return [object_body(model, entity)] if is_object else robot_links(model, entity)


def joint_dofs(model: mujoco.MjModel, entity: Any, joint_names: Any) -> NDArray[np.int_]:
    """List the numbers in qvel of an entity's joints of these names."""
    bodies = bodies_of(model, entity)
    joints = {label(model, "joint", j): j for j in range(model.njnt) if model.jnt_bodyid[j] in bodies}
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
    # slides of a body that stands elsewhere start from there: their numbers are then no place in the world
    if kinds != [FREE] and (kinds != [_SLIDE, _SLIDE, _SLIDE, BALL] or model.body_pos[body].any()):
        return None
    return int(model.jnt_qposadr[joint]), int(model.jnt_dofadr[joint])


@functools.lru_cache(maxsize=64)
def constrained_joints(model: mujoco.MjModel) -> dict[int, str]:
    """Find the joints under an active equality or a tendon's limits, by name: moved alone they break the constraint."""
    data, limited, found = mujoco.MjData(model), model.tendon_limited != 0, {}

    def gaps() -> NDArray[np.float64]:
        mujoco.mj_fwdPosition(model, data)
        rows = data.efc_type == mujoco.mjtConstraint.mjCNSTR_EQUALITY
        # of a whole equality: what moves both its ends turns the gap, and leaves its size
        gap = np.bincount(data.efc_id[rows], np.square(data.efc_pos[rows]), model.neq)
        return np.concatenate([np.sqrt(gap), data.ten_length[limited]])

    closed = gaps()
    for i in range(model.njnt) if closed.size else ():
        data.qpos[joint_slices(model, i)[0]] += 0.1
        mujoco.mj_normalizeQuat(model, data.qpos)
        if np.abs(gaps() - closed).max() > 1e-6:
            found[i] = model.joint(i).name or f"joint {i}"
        data.qpos[:] = model.qpos0
    return found


def refuse_constrained(model: mujoco.MjModel, dofs: Any, remedy: str) -> None:
    """Raise ValueError at numbers of qvel that cannot be drawn by themselves: see ``constrained_joints``."""
    if held := [name for i, name in constrained_joints(model).items() if i in model.dof_jntid[dofs]]:
        raise ValueError(f"would break an equality or a tendon's limits at {', '.join(held)}; {remedy}")


def name_joint(model: mujoco.MjModel, joint: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Name, with units, a joint's numbers in qpos and in qvel, and how many numbers each name has."""
    kind, name = int(model.jnt_type[joint]), joint_names(model)[joint]
    turned, turning = (f"{name} quaternion [1]", 4), (f"{name} angular velocity in its own frame [rad/s]", 3)
    if kind == FREE:
        return [(f"{name} position [m]", 3), turned], [(f"{name} velocity [m/s]", 3), turning]
    if kind == BALL:
        return [turned], [turning]
    what, unit = ("position", "m") if kind == _SLIDE else ("angle", "rad")
    return [(f"{name} {what} [{unit}]", 1)], [(f"{name} velocity [{unit}/s]", 1)]


def joint_names(model: mujoco.MjModel) -> list[str]:
    """Name every joint: a free one like its body, another like itself or, without a name, like its body. Those that
    would be called like another one so get their place in the body too."""
    own = [model.joint(joint).name for joint in range(model.njnt)]
    bodies = [model.body(int(body)).name for body in model.jnt_bodyid]
    names = [
        (bodies[i] or own[i] if model.jnt_type[i] == FREE else own[i] or bodies[i]) or f"joint {i}"
        for i in range(model.njnt)
    ]
    counts, places = Counter(names), np.arange(model.njnt) - model.body_jntadr[model.jnt_bodyid] + 1
    apart = (own[i] or f"{x} {places[i]}" if counts[x] > 1 and x != own[i] else x for i, x in enumerate(names))
    return list(unique(((name, name) for name in apart), "joints"))


@functools.lru_cache(maxsize=64)
def home_of(asset: str, keyframe: str | int | None) -> tuple[mujoco.MjData, dict[str, Any]]:
    """Reset to where episodes start, None: the reference pose. Also returns mocap bodies' places [3], m, or poses [7]
    (w x y z) where the keyframe turns them. Raises ValueError: no such keyframe, or it moves a nameless mocap body."""
    model = load_model(asset)
    data = mujoco.MjData(model)
    keys = unique(((model.key(i).name or str(i), i) for i in range(model.nkey)), "keyframes")
    if keyframe is not None and (keys or keyframe != ""):
        by = keys if isinstance(keyframe, str) else {str(i): i for i in range(model.nkey)}
        at = keys.get("home", 0) if keyframe == "" else look_up("keyframe", str(keyframe), by)
        mujoco.mj_resetDataKeyframe(model, data, at)
    markers: dict[str, Any] = {}
    for body, place, turn in zip(mocap_bodies(model), data.mocap_pos, data.mocap_quat, strict=True):
        turns = [] if np.allclose(turn, model.body_quat[body]) else turn
        if name := model.body(body).name:
            markers[name] = np.concatenate([place, turns])
        elif len(turns) or not np.allclose(place, model.body_pos[body]):
            raise ValueError(f"the keyframe moves mocap body {body}, which has no name; name it")
    return data, markers


def label(model: mujoco.MjModel, kind: ElementKind, index: int) -> str:
    """Get the name of an element; of one without a name its kind and number."""
    return getattr(model, kind)(index).name or f"{kind} {index}"


def fitting(what: str, value: ArrayLike, where: slice, like: Array) -> Array:
    """Shape the value as [its numbers]; a scalar for one. Raises ValueError, naming ``what``: another shape."""
    given, size = jnp.asarray(value, like.dtype), where.stop - where.start
    if given.shape not in ((size,), *([()] if size == 1 else [])):
        wanted = "one number" if size == 1 else f"shape ({size},)"
        raise ValueError(f"{what}: got shape {given.shape}; must be {wanted}")
    return given.reshape(size)


def _uid(entity: Any) -> str:
    if not isinstance(entity, Mapping) or set(entity) != {"uid"} or not isinstance(entity["uid"], str):
        raise ValueError(f"entity_cfg: got {entity!r}; must be {{uid: name}}")
    return entity["uid"]


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
        # a tendon pulls at every joint and site that it runs over
        elif kind == mujoco.mjtTrn.mjTRN_TENDON:
            first = int(model.tendon_adr[target])
            for j in range(first, first + int(model.tendon_num[target])):
                if model.wrap_type[j] == mujoco.mjtWrap.mjWRAP_JOINT:
                    yield int(model.jnt_bodyid[model.wrap_objid[j]])
                elif model.wrap_type[j] == mujoco.mjtWrap.mjWRAP_SITE:
                    yield int(model.site_bodyid[model.wrap_objid[j]])
