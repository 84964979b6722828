"""Inverse kinematics of a MuJoCo model in jax.numpy: damped least squares from where the joints are."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import mujoco

from ejax.envs.mujoco.kinematics import site_pose
from ejax.envs.mujoco.rotations import rotation_vector
from ejax.types import Array

_NUM_ITERATIONS = 20
_DAMPING = 0.02
_MAX_TURN = 0.5
"""rad per iteration: keeps to the branch of solutions that the joints are on."""
_REACHED = 1e-3
"""m and rad"""


def solve_site_pose(
    model: mujoco.MjModel,
    site: str,
    target: Array,
    qpos: Array,
    joints: tuple[int, ...],
    *,
    num_iterations: int = _NUM_ITERATIONS,
) -> tuple[Array, Array]:
    """Joint positions that bring a site to a pose.

        Δq = Jᵀ(J·Jᵀ + λ²I)⁻¹·e,    e = (p* − p, rotation vector of R*·Rᵀ)

    Args:
        target: [4, 4], m.
        qpos: [≥ joints]; where to start, and where the other joints stay.
        joints: the joints to move.
        num_iterations: how often Δq is added; a target a few cm away needs 3.

    Returns:
        Their positions [joints], and whether the pose is reached within 1 mm and 1 mrad.

    Source: Buss, "Introduction to inverse kinematics with Jacobian transpose, pseudoinverse and damped least squares".
    """
    ids = jnp.array(joints)

    def pose(angles: Array) -> Array:
        return site_pose(model, site, qpos.at[ids].set(angles))

    def error(angles: Array) -> Array:
        now = pose(angles)
        return jnp.concatenate([target[:3, 3] - now[:3, 3], rotation_vector(target[:3, :3] @ now[:3, :3].T)])

    def improve(angles: Array, _: None) -> tuple[Array, None]:
        step = _damped_step(pose, angles, error(angles), _DAMPING)
        return angles + jnp.clip(step, -_MAX_TURN, _MAX_TURN), None

    angles, _ = jax.lax.scan(improve, qpos[ids], length=num_iterations)
    return angles, jnp.all(jnp.abs(error(angles)) < _REACHED)


def site_step(
    model: mujoco.MjModel, site: str, error: Array, qpos: Array, joints: tuple[int, ...], *, damping: float
) -> Array:
    """One Δq [joints] of ``solve_site_pose`` towards a displacement, not bounded.

    Args:
        error: [6]: translation, m, and rotation vector, rad, both in the world's frame.
        damping: λ.
    """
    ids = jnp.array(joints)
    return _damped_step(lambda angles: site_pose(model, site, qpos.at[ids].set(angles)), qpos[ids], error, damping)


def _damped_step(pose: Callable[[Array], Array], angles: Array, error: Array, damping: float) -> Array:
    jac = _jacobian(pose, angles)
    return jac.T @ jnp.linalg.solve(jac @ jac.T + damping**2 * jnp.eye(6), error)


def _jacobian(pose: Callable[[Array], Array], angles: Array) -> Array:
    """[6, joints]: linear and angular velocity by joint; ω is read off Ṙ·Rᵀ."""
    slope, now = jax.jacfwd(pose)(angles), pose(angles)
    spin = jnp.einsum("ijq,kj->ikq", slope[:3, :3], now[:3, :3])
    return jnp.concatenate([slope[:3, 3], jnp.stack([spin[2, 1], spin[0, 2], spin[1, 0]])])
