"""Kinematics of a MuJoCo model in jax.numpy: poses of a site or of all bodies from qpos alone, and their inverse.

MuJoCo's own frame sensors lag one physics step behind qpos; a further step costs a fifth of the C engine's time.
This costs a hundredth, needs no engine at reset, and is differentiable.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from numpy.typing import NDArray

from ejax.envs.mujoco.rotations import matrix_from_quaternion, rotation_vector
from ejax.numerics.platforms import solve_positive
from ejax.types import Array

Pose: TypeAlias = Array | NDArray[np.float64]  # [4, 4]; a NumPy array is a constant
_FREE, _BALL, _SLIDE, _HINGE = range(4)  # ``mujoco.mjtJoint``, whose members cannot be looked for by ``in``
_DAMPING = 0.02
_MAX_TURN = 0.5  # rad per iteration: keeps to the branch of solutions that the joints are on
_REACHED = 1e-3  # m and rad


def site_pose(model: mujoco.MjModel, site: str, qpos: Array) -> Array:
    """Return the pose [4, 4] of a site, m: T = ∏ C_b·J(q_b) over its bodies b, C constant and J the joint's motion.

        J = I + sin q·K + (1 − cos q)·K²  (hinge, Rodrigues)        J = I + q·K  (slide)

    Multiplied from the site inwards, constant matrices times the product so far: from the base outwards they would be
    batched 4×4 products, 15 times slower on XLA's CPU. Raises ValueError: a free or ball joint on the way.
    """
    site_id = model.site(site).id
    pose = jnp.asarray(transform(model.site_pos[site_id], model.site_quat[site_id]), qpos.dtype)
    body = int(model.site_bodyid[site_id])
    while body != 0:
        # a body's joints turn it one after the other, so from the site inwards the last comes first
        for joint in reversed(_joints(model, body)):
            if model.jnt_type[joint] not in (_HINGE, _SLIDE):
                name = model.joint(joint).name
                raise ValueError(f"site_pose follows hinge and slide joints; {name!r} is of another kind")
            travel, twist = _motion(model, joint, qpos)
            if model.jnt_type[joint] == _SLIDE:
                pose = pose + travel * (jnp.asarray(twist, qpos.dtype) @ pose)
            else:
                turned = jnp.asarray(np.concatenate([twist, twist @ twist]), qpos.dtype) @ pose
                pose = pose + jnp.sin(travel) * turned[:4] + (1.0 - jnp.cos(travel)) * turned[4:]
        pose = jnp.asarray(transform(model.body_pos[body], model.body_quat[body]), qpos.dtype) @ pose
        body = int(model.body_parentid[body])
    return pose


def body_poses(model: mujoco.MjModel, qpos: Array, mocap_pos: Mapping[str, Array] | None = None) -> list[Pose]:
    """Return the poses [4, 4] of all bodies, as ``mujoco.mj_kinematics``; those that never move as NumPy constants.

    T·J = T + sin q·(T·K) + (1 − cos q)·(T·K²), from the base outwards: no product of two batches but for ball joints.
    ``qpos``: m, rad, quaternions (w x y z), which are normalized. ``mocap_pos``: body name -> position [3], m, or pose
    [7] with a quaternion.
    """
    return list(_poses(model, range(1, model.nbody), qpos, mocap_pos or {}).values())


def body_pose(model: mujoco.MjModel, body: int, qpos: Array, mocap_pos: Mapping[str, Array] | None = None) -> Array:
    """Return one of ``body_poses``, visiting only the bodies between it and the world."""
    chain = [body]
    while chain[0] != 0:
        chain.insert(0, int(model.body_parentid[chain[0]]))
    return jnp.asarray(_poses(model, chain[1:], qpos, mocap_pos or {})[body], qpos.dtype)


def solve_site_pose(
    model: mujoco.MjModel, site: str, target: Array, qpos: Array, joints: tuple[int, ...], *, num_iterations: int = 20
) -> tuple[Array, Array]:
    """Bring a site to a pose [4, 4], m; return positions [joints], and whether it is reached within 1 mm and 1 mrad.

        Δq = Jᵀ(J·Jᵀ + λ²I)⁻¹·e,    e = (p* − p, rotation vector of R*·Rᵀ)

    ``qpos`` is where to start, and where the other joints stay. Δq is added ``num_iterations`` times; a target a few cm
    away needs 3.

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
    """Return one unbounded Δq [joints] of ``solve_site_pose`` towards a displacement; ``damping`` is λ.

    ``error``: [6]: translation, m, and rotation vector, rad, both in the world's frame.
    """
    ids = jnp.array(joints)
    return _damped_step(lambda angles: site_pose(model, site, qpos.at[ids].set(angles)), qpos[ids], error, damping)


def rate_of_qpos(model: mujoco.MjModel, qpos: Array, qvel: Array) -> Array:
    """Return dq/dt [nq]: velocities, and for quaternions ½ q ⊗ (0, ω), ω in the body's frame."""
    rates = []
    for kind, at, start in zip(model.jnt_type, model.jnt_qposadr, model.jnt_dofadr, strict=True):
        at, start = int(at), int(start)
        if kind == _FREE:
            rates.append(qvel[start : start + 3])
            at, start = at + 3, start + 3
        if kind in (_FREE, _BALL):
            (w, x, y, z), (a, b, c) = qpos[at : at + 4], qvel[start : start + 3]
            turned = -x * a - y * b - z * c, w * a + y * c - z * b, w * b + z * a - x * c, w * c + x * b - y * a
            rates.append(0.5 * jnp.stack(turned))
        else:
            rates.append(qvel[start : start + 1])
    return jnp.concatenate(rates) if rates else jnp.zeros_like(qpos)


def times_constant(pose: Pose, constant: NDArray[np.float64]) -> Pose:
    """Multiply ``pose @ constant``, in float64 and as a constant where the pose is one."""
    if isinstance(pose, np.ndarray):
        return pose @ constant
    return jnp.matmul(pose, jnp.asarray(constant, pose.dtype), precision="highest")


def transform(position: NDArray[np.float64], quaternion: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a constant pose [4, 4]; quaternion (w x y z)."""
    rotation, pose = np.zeros(9), np.eye(4)
    mujoco.mju_quat2Mat(rotation, quaternion)
    pose[:3, :3], pose[:3, 3] = rotation.reshape(3, 3), position
    return pose


def _damped_step(pose: Callable[[Array], Array], angles: Array, error: Array, damping: float) -> Array:
    slope, now = jax.jacfwd(pose)(angles), pose(angles)
    spin = jnp.einsum("ijq,kj->ikq", slope[:3, :3], now[:3, :3])  # Ṙ·Rᵀ by joint: ω's cross product
    jac = jnp.concatenate([slope[:3, 3], jnp.stack([spin[2, 1], spin[0, 2], spin[1, 0]])])  # [6, joints]
    return jac.T @ solve_positive(jac @ jac.T + damping**2 * jnp.eye(6), error)


def _joints(model: mujoco.MjModel, body: int) -> range:
    first = int(model.body_jntadr[body])
    return range(first, first + int(model.body_jntnum[body]))


def _poses(
    model: mujoco.MjModel, bodies: Iterable[int], qpos: Array, mocap_pos: Mapping[str, Array]
) -> dict[int, Pose]:
    poses: dict[int, Pose] = {0: np.eye(4)}
    for body in bodies:
        local, joints = transform(model.body_pos[body], model.body_quat[body]), _joints(model, body)
        if model.body(body).name in mocap_pos:
            place = mocap_pos[model.body(body).name]
            turned = _turn(jnp.asarray(place[3:], qpos.dtype)) if len(place) > 3 else jnp.asarray(local, qpos.dtype)
            poses[body] = turned.at[:3, 3].set(place[:3])
        elif joints and model.jnt_type[joints[0]] == _FREE:
            start = int(model.jnt_qposadr[joints[0]])
            poses[body] = _turn(qpos[start + 3 : start + 7]).at[:3, 3].set(qpos[start : start + 3])
        else:
            poses[body] = times_constant(poses[int(model.body_parentid[body])], local)
            for joint in joints:
                poses[body] = _moved(model, joint, qpos, poses[body])
    return poses


def _moved(model: mujoco.MjModel, joint: int, qpos: Array, pose: Pose) -> Array:
    if model.jnt_type[joint] == _BALL:  # about its anchor, which need not be the body's origin
        start, there, back = int(model.jnt_qposadr[joint]), np.eye(4), np.eye(4)
        there[:3, 3], back[:3, 3] = model.jnt_pos[joint], -model.jnt_pos[joint]
        at_anchor = jnp.asarray(times_constant(pose, there), qpos.dtype)
        turned = jnp.matmul(at_anchor, _turn(qpos[start : start + 4]), precision="highest")
        return jnp.asarray(times_constant(turned, back))
    travel, twist = _motion(model, joint, qpos)
    if model.jnt_type[joint] == _SLIDE:
        return jnp.asarray(pose, qpos.dtype) + travel * jnp.asarray(times_constant(pose, twist), qpos.dtype)
    turned = jnp.asarray(times_constant(pose, np.concatenate([np.eye(4), twist, twist @ twist], axis=1)), qpos.dtype)
    return turned[:, :4] + jnp.sin(travel) * turned[:, 4:8] + (1.0 - jnp.cos(travel)) * turned[:, 8:]


def _motion(model: mujoco.MjModel, joint: int, qpos: Array) -> tuple[Array, NDArray[np.float64]]:
    """Return the travel q − q0 of a hinge or slide, and its twist K [4, 4]."""
    axis, start, twist = model.jnt_axis[joint], int(model.jnt_qposadr[joint]), np.zeros((4, 4))
    if model.jnt_type[joint] == _SLIDE:
        twist[:3, 3] = axis
    else:
        twist[:3, :3] = np.cross(axis, np.eye(3)).T
        twist[:3, 3] = -twist[:3, :3] @ model.jnt_pos[joint]
    return qpos[start] - model.qpos0[start].astype(qpos.dtype), twist


def _turn(quaternion: Array) -> Array:
    rotation = matrix_from_quaternion(quaternion / jnp.linalg.norm(quaternion))
    return jnp.zeros((4, 4), quaternion.dtype).at[:3, :3].set(rotation).at[3, 3].set(1.0)
