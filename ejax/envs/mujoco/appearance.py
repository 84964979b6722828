"""What a picture of a simulated state depends on: places, and colours that an episode chooses."""

from flax import struct

from ejax.types import Array


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
    """Geom name -> colour [4] in 0 … 1, where it is not the model's."""
