"""Rotations in jax.numpy: unit quaternions (w x y z) [4], matrices [3, 3], Euler angles [3]; ``vmap`` for more."""

import jax.numpy as jnp

from ejax.types import Array


def matrix_from_quaternion(quaternion: Array) -> Array:
    """Return the rotation matrix [3, 3] of a unit quaternion (w x y z)."""
    w, x, y, z = quaternion
    return jnp.array(
        [
            [1.0 - 2.0 * (y * y + z * z), 2.0 * (x * y - w * z), 2.0 * (x * z + w * y)],
            [2.0 * (x * y + w * z), 1.0 - 2.0 * (x * x + z * z), 2.0 * (y * z - w * x)],
            [2.0 * (x * z - w * y), 2.0 * (y * z + w * x), 1.0 - 2.0 * (x * x + y * y)],
        ]
    )


def quaternion_from_matrix(matrix: Array) -> Array:
    """Return the unit quaternion (w x y z), w ≥ 0, of a rotation matrix.

    4·q qᵀ = [[1 + m00 + m11 + m22, m21 − m12, …], …]: the row of the largest diagonal entry is the best conditioned.
    """
    (m00, m01, m02), (m10, m11, m12), (m20, m21, m22) = matrix
    outer = jnp.array(
        [
            [1.0 + m00 + m11 + m22, m21 - m12, m02 - m20, m10 - m01],
            [m21 - m12, 1.0 + m00 - m11 - m22, m01 + m10, m02 + m20],
            [m02 - m20, m01 + m10, 1.0 - m00 + m11 - m22, m12 + m21],
            [m10 - m01, m02 + m20, m12 + m21, 1.0 - m00 - m11 + m22],
        ]
    )
    row = outer[jnp.argmax(jnp.diagonal(outer))]
    quaternion = row / jnp.linalg.norm(row)
    return jnp.where(quaternion[0] < 0.0, -quaternion, quaternion)


def matrix_from_euler(angles: Array) -> Array:
    """Compute Rx(α)·Ry(β)·Rz(γ): intrinsic rotations about x, then y, then z, rad; EmbodiChain's convention."""
    (cx, cy, cz), (sx, sy, sz) = jnp.cos(angles), jnp.sin(angles)
    zero, one = jnp.zeros_like(cx), jnp.ones_like(cx)
    about_x = jnp.array([[one, zero, zero], [zero, cx, -sx], [zero, sx, cx]])
    about_y = jnp.array([[cy, zero, sy], [zero, one, zero], [-sy, zero, cy]])
    about_z = jnp.array([[cz, -sz, zero], [sz, cz, zero], [zero, zero, one]])
    return about_x @ about_y @ about_z


def rotation_vector(matrix: Array) -> Array:
    """Return axis times angle (rad) of a rotation matrix."""
    quaternion = quaternion_from_matrix(matrix)
    w, axis = quaternion[0], quaternion[1:]
    sine = jnp.linalg.norm(axis)
    small = sine < 1e-6
    return axis * jnp.where(small, 2.0, 2.0 * jnp.arctan2(sine, w) / jnp.where(small, 1.0, sine))


def matrix_from_rotation_vector(vector: Array) -> Array:
    """Compute I + sin θ/θ·K + (1 − cos θ)/θ²·K² (Rodrigues): θ = ‖axis times angle‖, rad, K·x = vector × x."""
    square = jnp.dot(vector, vector)
    small = square < 1e-8
    angle = jnp.sqrt(jnp.where(small, 1.0, square))
    first = jnp.where(small, 1.0 - square / 6.0, jnp.sin(angle) / angle)
    second = jnp.where(small, 0.5 - square / 24.0, (1.0 - jnp.cos(angle)) / angle**2)
    x, y, z = vector
    zero = jnp.zeros_like(x)
    cross = jnp.array([[zero, -z, y], [z, zero, -x], [-y, x, zero]])
    return jnp.eye(3, dtype=vector.dtype) + first * cross + second * (cross @ cross)


def make_pose(position: Array, rotation: Array) -> Array:
    """Make the pose [4, 4] of a position [3], m, and a rotation [3, 3]."""
    return jnp.eye(4, dtype=rotation.dtype).at[:3, :3].set(rotation).at[:3, 3].set(position)
