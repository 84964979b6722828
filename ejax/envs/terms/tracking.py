"""Rewards, ends and observations of a robot that tracks a motion: functions of ``world.legged`` and its ``reference``.

Source of the formulas: BeyondMimic (Liao et al. 2025, "From motion tracking to versatile humanoid control via guided
diffusion") as in mjlab 1.6's tracking task. x and R are positions and rotations of the K links that count, a is the
anchor, and a star the reference's. Links are compared after the reference has been moved to where the robot is, and
turned about the vertical by what its heading is off, ψ; anchors and velocities are compared in the world:

    x'_k = (x_a, y_a, z*_a) + Rz(ψ)·(x*_k − x*_a)        R'_k = Rz(ψ)·R*_k        ψ = yaw of R_a·R*_aᵀ
    angle(R, R') = 2·asin(‖R − R'‖ / √8)                 reward = exp(−mean_k ‖gap_k‖² / std²)
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ejax.envs.task.terms import Outcome
from ejax.envs.terms.legged import LeggedWorld, Motion, Numbers, Reference
from ejax.types import Array


def gaps(world: LeggedWorld) -> dict[str, Array]:
    """Compute how far the robot is from the reference: name -> [·, 3] m, m/s, rad/s, or angles [·, 1] rad."""
    motion, reference = _both(world)
    anchor, bodies = reference.anchor, jnp.array(reference.bodies)
    own, theirs, turn, wanted = motion.link_pos, reference.link_pos, motion.link_rotation, reference.link_rotation
    off = turn[anchor] @ wanted[anchor].T
    yaw = jnp.arctan2(off[1, 0], off[0, 0])
    cos, sin, zero, one = jnp.cos(yaw), jnp.sin(yaw), jnp.zeros_like(yaw), jnp.ones_like(yaw)
    about = jnp.array([[cos, -sin, zero], [sin, cos, zero], [zero, zero, one]])
    moved = jnp.append(own[anchor, :2], theirs[anchor, 2])[None] + (theirs - theirs[anchor][None]) @ about.T
    turned = jnp.einsum("ij,ljk->lik", about, wanted)
    ends, points = (jnp.array(each) for each in zip(*reference.ends, strict=True))
    reached, meant = (
        at[ends] + jnp.einsum("eij,ej->ei", by[ends], points) for at, by in ((own, turn), (moved, turned))
    )
    return {
        "motion_global_root_pos": (own[anchor] - theirs[anchor])[None],
        "motion_global_root_ori": _angle(turn[anchor], wanted[anchor])[None],
        "motion_body_pos": (own - moved)[bodies],
        "motion_body_ori": _angle(turn, turned)[bodies],
        "motion_body_lin_vel": (motion.link_vel - reference.link_vel)[bodies],
        "motion_body_ang_vel": (motion.link_ang_vel - reference.link_ang_vel)[bodies],
        "ends": reached - meant,
    }


def _reward_of(gap: str) -> Callable[..., Array]:
    def term(world: LeggedWorld, std: float) -> Array:
        return jnp.exp(-jnp.mean(jnp.sum(gaps(world)[gap] ** 2, axis=-1)) / std**2)

    term.__name__, term.__doc__ = gap, f"exp(−mean ‖{gap}‖² / std²)"
    return term


TRACKING_REWARDS = tuple(
    _reward_of(f"motion_{gap}")
    for gap in ("global_root_pos", "global_root_ori", "body_pos", "body_ori", "body_lin_vel", "body_ang_vel")
)


def anchor_pos(world: LeggedWorld, limit: float) -> Outcome:
    """Fail where |z_a − z*_a| is above ``limit``, m."""
    return Outcome(fail=jnp.abs(gaps(world)["motion_global_root_pos"][0, 2]) > limit)


def anchor_ori(world: LeggedWorld, limit: float) -> Outcome:
    """Fail where the anchors' z axes differ by more than ``limit`` along the vertical."""
    motion, reference = _both(world)
    apart = motion.link_rotation[reference.anchor, 2, 2] - reference.link_rotation[reference.anchor, 2, 2]
    return Outcome(fail=jnp.abs(apart) > limit)


def ee_body_pos(world: LeggedWorld, limit: float) -> Outcome:
    """Fail where an end's height differs from that of the moved reference by more than ``limit``, m."""
    return Outcome(fail=jnp.any(jnp.abs(gaps(world)["ends"][:, 2]) > limit))


TRACKING_TERMINATIONS = (anchor_pos, anchor_ori, ee_body_pos)


def motion_command(world: LeggedWorld, obs: Any) -> Array:
    """[2A]: positions and velocities of the reference's joints."""
    reference = _both(world)[1]
    return jnp.concatenate([reference.joint_pos, reference.joint_vel])


def motion_anchor_pos_b(world: LeggedWorld, obs: Any) -> Array:
    """[3]: where the reference's anchor is, in the frame of the robot's."""
    motion, reference = _both(world)
    return -gaps(world)["motion_global_root_pos"][0] @ motion.link_rotation[reference.anchor]


def motion_anchor_ori_b(world: LeggedWorld, obs: Any) -> Array:
    """[6]: x and y axis of the reference's anchor, likewise."""
    motion, reference = _both(world)
    turn = motion.link_rotation[reference.anchor].T @ reference.link_rotation[reference.anchor]
    return turn.T[:2].reshape(-1)


def body_pos(world: LeggedWorld, obs: Any) -> Array:
    """[3K]: the links that count, in the frame of the anchor."""
    motion, reference = _both(world)
    offset = (motion.link_pos - motion.link_pos[reference.anchor][None])[jnp.array(reference.bodies)]
    return (offset @ motion.link_rotation[reference.anchor]).reshape(-1)


def body_ori(world: LeggedWorld, obs: Any) -> Array:
    """[6K]: their x and y axes, likewise."""
    motion, reference = _both(world)
    turns = motion.link_rotation[jnp.array(reference.bodies)]
    axes = jnp.einsum("ji,kja->kai", motion.link_rotation[reference.anchor], turns)
    return axes[:, :2].reshape(-1)


TRACKING_OBSERVATIONS = (motion_command, motion_anchor_pos_b, motion_anchor_ori_b, body_pos, body_ori)


def describe_tracking(bodies: tuple[str, ...]) -> dict[str, tuple[Numbers, ...]]:
    """Name the numbers of the observations above. ``bodies``: the links that count."""
    return {
        "motion_command": (("{joint} next position", "", "rad"), ("{joint} next velocity", "", "rad/s")),
        "motion_anchor_pos_b": (("reference in the anchor's frame", "xyz", "m"),),
        "motion_anchor_ori_b": tuple((f"{axis} axis of the reference", "xyz", "1") for axis in "xy"),
        "body_pos": tuple((f"{body} position", "xyz", "m") for body in bodies),
        "body_ori": tuple((f"{axis} axis of {body}", "xyz", "1") for body in bodies for axis in "xy"),
    }


def tracking_errors(world: LeggedWorld) -> Array:
    """[3 + A]: the anchor's distance, m, and angle, rad; the mean distance of links, m; |q_j − q*_j| of joints, rad."""
    motion, reference = _both(world)
    names = ("motion_global_root_pos", "motion_global_root_ori", "motion_body_pos")
    means = [jnp.linalg.norm(gaps(world)[name], axis=-1).mean() for name in names]
    return jnp.concatenate([jnp.stack(means), jnp.abs(motion.joint_pos - reference.joint_pos)])


def _both(world: LeggedWorld) -> tuple[Motion, Reference]:
    if world.legged.reference is None:
        raise ValueError("this task tracks no motion: only TrackingRL supports terms of a reference")
    return world.legged.motion, world.legged.reference


def _angle(one: Array, other: Array) -> Array:
    """[..., 1]; by the chord, which keeps its digits at small angles, where the trace's arc cosine loses them."""
    chord = jnp.sqrt(jnp.sum((one - other) ** 2, axis=(-2, -1)) / 8.0)
    return 2.0 * jnp.arcsin(jnp.minimum(chord, 1.0))[..., None]
