"""Bodies, joints and geoms of a model, by the names that a config gives: ``{uid: name}`` and regular expressions."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from ejax.schema.registry import did_you_mean

ROBOT = "robot"
"""The ``uid`` of everything that drives move; a gym config's robot has a uid of its own beside it."""
Entity = Mapping[str, str]


def object_body(model: mujoco.MjModel, entity: Any) -> int:
    """The body of an object that moves freely."""
    uid = _uid(entity)
    free = {model.body(i).name: i for i in range(1, model.nbody) if model.body_dofnum[i] == 6}
    if uid not in free:
        raise ValueError(
            f"entity_cfg: no object '{uid}' that moves; there is {', '.join(free) or 'none'}{did_you_mean(uid, free)}"
        )
    return free[uid]


def robot_links(model: mujoco.MjModel, entity: Any) -> list[int]:
    """The bodies of the robot that have a mass."""
    uid = _uid(entity)
    roots = {int(model.body_rootid[body]) for body in _driven(model)}
    names = [ROBOT, *(model.body(root).name for root in sorted(roots))]
    if uid not in names:
        raise ValueError(f"entity_cfg: no robot '{uid}'; there is {', '.join(names)}{did_you_mean(uid, names)}")
    return [i for i in range(1, model.nbody) if model.body_rootid[i] in roots and model.body_mass[i] > 0.0]


def joint_dofs(model: mujoco.MjModel, entity: Any, joint_names: Any) -> NDArray[np.int_]:
    """The degrees of freedom of a robot's joints, or of an object's."""
    free = [model.body(i).name for i in range(1, model.nbody) if model.body_dofnum[i] == 6]
    bodies = [object_body(model, entity)] if _uid(entity) in free else robot_links(model, entity)
    joints = {model.joint(j).name: j for j in range(model.njnt) if model.jnt_bodyid[j] in bodies}
    chosen = {joints[name] for name in matching_names("joint", joint_names, joints)}
    return np.array([dof for dof in range(model.nv) if model.dof_jntid[dof] in chosen], int)


def drives_of_joints(model: mujoco.MjModel) -> list[int]:
    """Actuators that act on joints, not on tendons or sites."""
    kinds = (int(mujoco.mjtTrn.mjTRN_JOINT), int(mujoco.mjtTrn.mjTRN_JOINTINPARENT))
    return [i for i in range(model.nu) if int(model.actuator_trntype[i]) in kinds]


def matching_names(what: str, patterns: Any, names: Mapping[str, int]) -> list[str]:
    """The names that a regular expression matches as a whole, in the model's order. None: all."""
    if patterns is None:
        return list(names)
    given = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in given:
        if not any(re.fullmatch(pattern, name) for name in names):
            there = f"there is {', '.join(names)}{did_you_mean(pattern, names)}"
            raise ValueError(f"{what}_names: no {what} '{pattern}'; {there}")
    return [name for name in names if any(re.fullmatch(pattern, name) for pattern in given)]


def body_geoms(model: mujoco.MjModel, body: int) -> NDArray[np.int_]:
    return np.flatnonzero(model.geom_bodyid == body)


def quaternion_slot(model: mujoco.MjModel, body: int) -> int:
    """Where a free body's quaternion is in qpos."""
    last = int(model.body_jntadr[body] + model.body_jntnum[body] - 1)
    free = model.jnt_type[last] == mujoco.mjtJoint.mjJNT_FREE
    return int(model.jnt_qposadr[last]) + (3 if free else 0)


def _uid(entity: Any) -> str:
    if not isinstance(entity, Mapping) or set(entity) != {"uid"} or not isinstance(entity["uid"], str):
        raise ValueError(f"entity_cfg: got {entity!r}; must be {{uid: name}}")
    return entity["uid"]


def _driven(model: mujoco.MjModel) -> Iterator[int]:
    """The bodies that actuators act on, through joints, sites or tendons of joints."""
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
