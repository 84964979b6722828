"""The cameras of a gym config's scene. Axes are OpenGL's: x right, y up, the line of sight along −z."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.envs.mujoco.scenery import Camera
from ejax.envs.task.robots import Matrix, Vector
from ejax.types import Array, CameraView


class Lens(NamedTuple):
    """One picture of a camera."""

    name: str
    intrinsics: tuple[float, float, float, float]  # fx, fy, cx, cy in pixels, from the upper left corner
    shift: Vector  # Its place in the camera's frame, m


@dataclass(frozen=True, kw_only=True)
class SensorCamera:
    """A camera with one lens, or two if it is a stereo camera."""

    uid: str
    width: int
    height: int
    pose: Matrix  # [4, 4], in the arena or in the frame of the parent
    parent: str | None
    lenses: tuple[Lens, ...]
    pictures: bool

    def lens(self, *, right: bool = False) -> Lens:
        return self.lenses[-1 if right else 0]

    def lens_pose(self, lens: Lens) -> NDArray[np.float64]:
        """Return the lens's pose, [4, 4], in the frame of ``pose``."""
        shifted = np.eye(4)
        shifted[:3, 3] = lens.shift
        return np.asarray(self.pose) @ shifted

    def view(self, lens: Lens) -> CameraView:
        """Return the view of a camera without a parent, in constants: what never moves is drawn once."""
        pose, (half_width, half_height, x, y) = self.lens_pose(lens), self._opening(lens)
        return CameraView(
            _vector(pose[:3, 3]),
            _vector(pose[:3, 3] - pose[:3, 2]),
            math.degrees(2.0 * math.atan(half_height)),
            effects=False,
            up=_vector(pose[:3, 1]),
            fovx=math.degrees(2.0 * math.atan(half_width)),
            center=(x, y),
        )

    def pinhole(self, lens: Lens, parent_pose: Array) -> Camera:
        """Return the view of a camera whose parent has the pose [4, 4]."""
        pose = parent_pose @ jnp.asarray(self.lens_pose(lens), parent_pose.dtype)
        half_width, half_height, x, y = self._opening(lens)
        across, high = half_width * pose[:3, 0], half_height * pose[:3, 1]
        # pixels count downwards, the camera's y upwards
        aim = across * (1.0 - 2.0 * x) + high * (2.0 * y - 1.0) - pose[:3, 2]
        return Camera(eye=pose[:3, 3], frame=jnp.stack([across, high, aim], axis=1))

    def _opening(self, lens: Lens) -> tuple[float, float, float, float]:
        fx, fy, cx, cy = lens.intrinsics
        return self.width / (2.0 * fx), self.height / (2.0 * fy), cx / self.width, cy / self.height


def _vector(numbers: NDArray[np.float64]) -> Vector:
    x, y, z = map(float, numbers)
    return x, y, z
