"""``record_camera_data_async``: which camera records the run, and from where."""

import math

from pydantic import PositiveInt, model_validator

from ejax.schema.frozen import StrictModel
from ejax.types import CameraView, Phase

Vector = tuple[float, float, float]


class CameraConfig(StrictModel):
    """``params`` of ``record_camera_data_async``."""

    phase: Phase = "eval"
    """The recorded policy: ``eval`` the distribution's mode in the evaluation's environment, ``train`` its samples in
    the training's; the section of ``events`` that the event is in."""
    name: str = "cam"
    """Part of the videos' file names."""
    resolution: tuple[PositiveInt, PositiveInt] = (640, 480)
    """(width, height) of one environment's picture."""
    eye: Vector = (-1.4, 1.4, 2.0)
    """Position of the camera, m, in the world."""
    target: Vector = (0.0, 0.0, 0.0)
    """The point that it looks at, m."""
    up: Vector = (0.0, 0.0, 1.0)
    """Direction that points up in the picture; without effect where the camera looks along it."""
    intrinsics: tuple[float, float, float, float] | None = None
    """(fx, fy, cx, cy) in pixels, from the upper left corner. None: (600, 600, w/2, h/2)."""
    max_env_num: PositiveInt = 16
    """Environments in the video, side by side."""
    save_path: str | None = None
    """Folder, in which no video replaces another. None: ``videos/<phase>`` in the run's folder."""
    interval_step: PositiveInt = 1
    """Every how many steps a frame is taken; the event's key of this name."""

    @property
    def view(self) -> CameraView:
        width, height = self.resolution
        fx, fy, cx, cy = self.intrinsics or (600.0, 600.0, width / 2.0, height / 2.0)
        fovx, fovy = (math.degrees(2.0 * math.atan(size / (2.0 * f))) for size, f in ((width, fx), (height, fy)))
        center = (cx / width, cy / height)
        return CameraView(self.eye, self.target, fovy, effects=False, up=self.up, fovx=fovx, center=center)

    @model_validator(mode="after")
    def _sees_something(self) -> "CameraConfig":
        if self.eye == self.target:
            raise ValueError(f"eye and target are both {self.eye}; give a target to look at")
        if self.intrinsics is not None and not min(self.intrinsics[:2]) > 0.0:
            raise ValueError(f"intrinsics {self.intrinsics}: fx and fy must be > 0, in pixels")
        return self
