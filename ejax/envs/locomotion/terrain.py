"""The ground: flat, or a field of random heights that all environments share: uniform between 0 and ``height`` at the
corners of a square grid, bilinear between them (MuJoCo's are triangles: at most ``height`` / 4 apart)."""

from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree as ET

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.envs.task.mjcf import find_child
from ejax.types import Array

_DEPTH = 0.5  # m, of the ground below its lowest place


@dataclass(frozen=True, kw_only=True)
class Terrain:
    """The ground that robots walk on. ``height``: the greatest difference of heights of a rough field, ``cell``: the
    distance of its corners, ``half_size``: from its middle to its edge, beyond which there is nothing; all in m."""

    kind: Literal["flat", "rough"] = "flat"
    height: float = 0.05
    cell: float = 0.25
    half_size: float = 8.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("flat", "rough"):
            raise ValueError(f"terrain.kind must be 'flat' or 'rough', got {self.kind!r}")
        for name in ("height", "cell", "half_size"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"terrain.{name} must be > 0, got {getattr(self, name)}")
        if self.cell > self.half_size:
            raise ValueError(f"terrain.cell must be at most half_size {self.half_size}, got {self.cell}")

    @property
    def num_cells(self) -> int:
        return round(2.0 * self.half_size / self.cell)

    def heights(self) -> NDArray[np.float64]:
        """[cells + 1 along y, cells + 1 along x], m: 0 and ``height`` are among them."""
        drawn = np.random.default_rng(self.seed).random((self.num_cells + 1, self.num_cells + 1))
        return self.height * (drawn - drawn.min()) / (drawn.max() - drawn.min())


def height_below(terrain: Terrain, position: Array) -> Array:
    """[...], m: the ground's height at ``position`` [..., ≥ 2], x and y in m. Beyond the edge that of the edge."""
    if terrain.kind == "flat":
        return jnp.zeros(position.shape[:-1], position.dtype)
    # a constant of the program: all rows walk on the same field
    heights = jnp.asarray(terrain.heights(), position.dtype)
    place = (position[..., :2] + terrain.half_size) * (terrain.num_cells / (2.0 * terrain.half_size))
    place = jnp.clip(place, 0.0, terrain.num_cells)
    corner = jnp.minimum(place.astype(jnp.int32), terrain.num_cells - 1)
    x, y = jnp.moveaxis(place - corner, -1, 0)
    i, j = jnp.moveaxis(corner, -1, 0)
    near, far = (heights[j + k, i] * (1.0 - x) + heights[j + k, i + 1] * x for k in (0, 1))
    return near * (1.0 - y) + far * y


def add_terrain(root: ET.Element, terrain: Terrain) -> None:
    """Make the floor of a scene the ground."""
    floor, assets = find_child(root, "worldbody/geom[@name='floor']"), find_child(root, "asset")
    floor.attrib |= {"contype": "1", "conaffinity": "0"}
    if terrain.kind == "flat":
        return
    heights = terrain.heights()
    size = f"{terrain.half_size} {terrain.half_size} {terrain.height} {_DEPTH}"
    # the first row of ``elevation`` is the far edge, of the greatest y
    field = {"nrow": str(len(heights)), "ncol": str(len(heights)), "size": size}
    elevation = " ".join(f"{height:.5f}" for height in heights[::-1].reshape(-1))
    ET.SubElement(assets, "hfield", field, name="ground", elevation=elevation)
    floor.attrib |= {"type": "hfield", "hfield": "ground"}
    del floor.attrib["size"]
