"""What a picture of a simulated state depends on: places, and colours that an episode chooses."""

from typing import Protocol, runtime_checkable

from flax import struct

from ejax.types import Array, PyTree


@struct.dataclass(kw_only=True)
class Appearance:
    """One state of a MuJoCo model, for whichever renderer draws it."""

    asset: str = struct.field(pytree_node=False)
    """The model, as in ``ejax.envs.mujoco.engine.Physics``."""
    qpos: Array
    """[nq]"""
    mocap_pos: dict[str, Array] = struct.field(default_factory=dict)
    """Body name -> position [3], m, of bodies that only mark something."""
    rgba: dict[str, Array] = struct.field(default_factory=dict)
    """Geom name -> colour [4] in 0 … 1, where it is not the model's. Alpha 0 hides the geom; between 0 and 1 it counts
    for those geoms only that the model has as transparent."""


@runtime_checkable
class AppearingEnv(Protocol):
    """An environment that says what its states look like."""

    def appearance(self, state: PyTree) -> Appearance:
        """Of one environment's state; pure."""
        ...
