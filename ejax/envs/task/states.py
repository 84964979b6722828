"""States of an episode: arrays only. Each has ``physics``, ``action``, ``episode_step``, ``markers`` (mocap body ->
place [3], m) and ``kept`` (what ``World.keep`` stores); the rest is the task's own."""

from flax import struct

from ejax.envs.mujoco.engine import PhysicsState
from ejax.types import Array


@struct.dataclass(kw_only=True)
class TaskState:
    """One episode of a ``MuJoCoTask``."""

    physics: PhysicsState
    markers: dict[str, Array]  # Mocap body -> its place [3], m; with its quaternion, [7], where a keyframe turns it
    kept: dict[str, Array]  # Numbers that the task remembers, by its own names
    action: Array  # [A]: the last, within ±1; zeros at the start
    readings: Array  # [nsensordata]: see ``World.sensor``
    episode_step: Array  # Control steps done, int32


@struct.dataclass(kw_only=True)
class SceneState:
    """One episode of a gym config's scene, whose joints have drives."""

    physics: PhysicsState
    """qpos: joints, then position and quaternion (w x y z) of each dynamic object; qvel likewise, 6 an object."""
    target: Array  # [J]: target positions of the drives, m or rad
    velocity_target: Array  # [J], m/s or rad/s
    effort: Array  # [J]: efforts added to the drives' forces, N or N·m
    kept: dict[str, Array]  # Virtual targets by their key, [4, 4]: all that a gym config's events store
    action: Array  # [A]: the policy's last action, as it gave it; zeros before the first step
    episode_step: Array  # Control steps done, int32
    history: dict[str, Array] = struct.field(default_factory=dict)
    """Observation with a history -> its last values, [history_length, ...], the newest at the end."""

    @property
    def markers(self) -> dict[str, Array]:
        """A disc is drawn at each virtual target."""
        return {marker_name(key): pose[:3, 3] for key, pose in self.kept.items()}


def marker_name(key: str) -> str:
    """Name the body that is drawn where the virtual target ``key`` is."""
    return f"target {key}"
