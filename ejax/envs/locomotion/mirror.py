"""The mirror image of a legged robot, y → −y: what it would observe, and do, on the other side of its sagittal plane.

    v' = (v_x, −v_y, v_z)        ω' = (−ω_x, ω_y, −ω_z)        q'_j = s_j·q_j*        a'_j = s_j·a_j*

with j* the joint on the other side, by its name, and s_j = +1 where the axis of j* is the mirror image of that of j
(−1: its opposite), as the model has them. Source: Yu et al. 2018, "Learning symmetric and low-energy locomotion".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax.numpy as jnp
import mujoco
import numpy as np

from ejax.envs.locomotion.catalog import VelocityTask
from ejax.envs.locomotion.robots import LeggedRobot
from ejax.types import Array

Change: TypeAlias = tuple[tuple[int, ...], tuple[float, ...]]
"""Numbers [n] of a mirror image: which ones they are, and their signs."""
_SIDES = {"left": "right", "FL": "FR", "RL": "RR", "LF": "RF", "LH": "RH"}
_SIDES |= {right: left for left, right in _SIDES.items()}
_POLAR, _AXIAL = (1.0, -1.0, 1.0), (-1.0, 1.0, -1.0)
_OF_BODY = {
    "base_lin_vel": _POLAR,
    "base_ang_vel": _AXIAL,
    "projected_gravity": _POLAR,
    "command": (1.0, -1.0, -1.0),
    "phase": (-1.0, -1.0),  # half a period later: the legs of one side then do what those of the other did
}
_OF_JOINTS = ("joint_pos", "measured_joint_pos", "joint_vel", "action")
_OF_FEET = {"foot_height": (1.0,), "foot_air_time": (1.0,), "foot_contact": (1.0,), "foot_force": _POLAR}
_TOLERANCE = 0.02
"""Allowed error of the product of two axes, or of a position in rad: measured models are not exact."""


@dataclass(frozen=True, kw_only=True)
class Mirror:
    obs: Mapping[str, Change]  # Part of the observation -> its numbers
    action: Change
    feet: tuple[int, ...]  # For each foot that of the other side

    def observed(self, obs: Mapping[str, Array]) -> dict[str, Array]:
        """Mirror an observation, parts [..., n]."""
        return {name: changed(x, self.obs[name]) for name, x in obs.items()}

    def acted(self, action: Array) -> Array:
        """Mirror actions [..., A]."""
        return changed(action, self.action)


def changed(x: Array, change: Change) -> Array:
    x = x[..., jnp.array(change[0])]
    return x * jnp.broadcast_to(jnp.array(change[1], x.dtype), x.shape)


def make_mirror(task: VelocityTask, model: mujoco.MjModel, points: Sequence[Sequence[float]] = ()) -> Mirror:
    """Find the mirror image of a robot. ``points``: (forward, left), m, of the height scan. ValueError: it has none, or
    an observation has none that is known."""
    robot = task.robot
    places = {(round(x, 6), round(y, 6)): i for i, (x, y) in enumerate(points)}
    scan = tuple(places[x, -y] for x, y in places), (1.0,) * len(places)
    joints, feet = mirror_joints(robot, model), other_sides([foot.body for foot in robot.feet])
    known: dict[str, Change] = {"height_scan": scan, **dict.fromkeys(_OF_JOINTS, joints)}
    known |= {term: (tuple(range(len(signs))), signs) for term, signs in _OF_BODY.items()}
    for term, signs in _OF_FEET.items():
        numbers = tuple(len(signs) * foot + i for foot in feet for i in range(len(signs)))
        known[term] = numbers, signs * len(feet)

    def of_terms(terms: Sequence[str]) -> Change:
        index, sign = list[int](), list[float]()
        for term in terms:
            if term not in known:
                raise ValueError(f"the observation {term} has no known mirror image; leave it out")
            numbers, signs = known[term]
            index += [len(index) + i for i in numbers]
            sign += signs
        return tuple(index), tuple(sign)

    return Mirror(obs={"policy": of_terms(task.actor), "critic": of_terms(task.critic)}, action=joints, feet=feet)


def mirror_joints(robot: LeggedRobot, model: mujoco.MjModel) -> Change:
    """Find the joint of the other side for each joint, and the sign of its angle. ValueError: the two differ."""
    others = other_sides(robot.joints)
    data = mujoco.MjData(model)
    data.qpos[:7] = 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0
    mujoco.mj_kinematics(model, data)
    axes = np.array([data.xaxis[model.joint(name).id] for name in robot.joints])
    products = (axes[list(others)] * axes * _AXIAL).sum(axis=1)
    signs = np.sign(products)
    for i, other in enumerate(others):
        home, scale = robot.home, robot.drives.action_scale
        fits = abs(abs(products[i]) - 1.0), abs(home[other] - signs[i] * home[i]), abs(scale[other] - scale[i])
        if max(fits) > _TOLERANCE:
            text = "are not mirror images of each other: axes, home or action scale differ"
            raise ValueError(f"{robot.joints[i]} and {robot.joints[other]} {text}")
    return others, tuple(float(sign) for sign in signs)


def other_sides(names: Sequence[str]) -> tuple[int, ...]:
    """Find the name of the other side for each name; one without a side is its own."""
    others = ["_".join(_SIDES.get(part, part) for part in name.split("_")) for name in names]
    if missing := [other for other in others if other not in names]:
        raise ValueError(f"{missing[0]} is not among {', '.join(names)}")
    return tuple(names.index(other) for other in others)
