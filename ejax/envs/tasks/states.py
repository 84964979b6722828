"""One episode of each of ejax's own tasks on MuJoCo models, with ``episode_step``: control steps done, int32."""

from flax import struct

from ejax.envs.mujoco.engine import PhysicsState
from ejax.types import Array


@struct.dataclass(kw_only=True)
class CartPoleState:
    physics: PhysicsState
    """qpos [2]: cart (m), pole (rad, 0 is upright); qvel [2]."""
    target: Array
    """[2]: the positions that the drives hold the joints at."""
    episode_step: Array


@struct.dataclass(kw_only=True)
class PushCubeState:
    physics: PhysicsState
    """qpos [13]: 6 joints, cube position, cube quaternion; qvel [12]."""
    goal: Array
    """[3], m"""
    episode_step: Array

    @property
    def cube(self) -> Array:
        """[3], m: the cube's centre."""
        return self.physics.qpos[6:9]


@struct.dataclass(kw_only=True)
class PickPlaceState:
    physics: PhysicsState
    """qpos [15]: 6 joints, 2 fingers, cube position, cube quaternion; qvel [14]."""
    goal: Array
    """[3], m: where the cube's centre should end up."""
    was_lifted: Array
    """bool: the cube has been 0.05 m above the floor in this episode."""
    episode_step: Array

    @property
    def cube(self) -> Array:
        """[3], m: the cube's centre."""
        return self.physics.qpos[8:11]


@struct.dataclass(kw_only=True)
class InstructedPlaceState:
    physics: PhysicsState
    """qpos [22]: 6 joints, 2 fingers, position and quaternion of each cube; qvel [20]."""
    zones: Array
    """[3, 3], m: where a cube's centre is that stands in the middle of a zone."""
    colours: Array
    """[2] int32: of the cubes, as indices into ``COLOURS``."""
    target_cube: Array
    """int32"""
    target_zone: Array
    """int32"""
    instruction: Array
    """[64] uint8"""
    was_lifted: Array
    """[2] bool: that cube has been 0.05 m above the floor in this episode."""
    episode_step: Array

    @property
    def cubes(self) -> Array:
        """[2, 3], m: the cubes' centres."""
        return self.physics.qpos[8:].reshape(2, 7)[:, :3]
