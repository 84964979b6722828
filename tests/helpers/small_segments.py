"""PointMass in processes whose checkpoints have small files of replay rows: a save writes some and links others."""

from ejax.envs.tasks.point_mass import PointMassRL
from ejax.store import replay_rows

replay_rows.SEGMENT_BYTES = 1024


class PointMass(PointMassRL):
    """PointMassRL, from this module."""
