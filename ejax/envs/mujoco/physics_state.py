"""The state of a simulation."""

from flax import struct

from ejax.types import Array


@struct.dataclass(kw_only=True)
class PhysicsState:
    """Everything a physics step reads apart from the control."""

    qpos: Array
    """[nq], m, rad, unit quaternions (w x y z)"""
    qvel: Array
    """[nv], m/s, rad/s"""
    parameters: dict[str, Array] = struct.field(default_factory=dict)
    """Fields of the model that are not the MJCF's, whole and by name: ``ejax.envs.mujoco.parameters``."""
