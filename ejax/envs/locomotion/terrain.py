"""The ground that legged robots walk on: flat, a field of random heights, or a field of tiles, which all environments
share.

A field's heights are those of the corners of a square grid, bilinear between them (MuJoCo's are triangles: at most a
quarter of a cell's greatest difference apart). A vertical face is therefore a slope as wide as a cell.

Tiles: one column for each kind, one row for each level, from the lowest number of the kind's range to the highest.
Episodes start on a platform in the middle, 2 m wide; a tile's edge is at height 0, as is a border about the field:

    slope, hollow   n: the rise of a pyramid down from, or up from, its platform, m per m
    stairs, pit     n: the height of steps down from, or up from, it, m; they are 0.3 m long
    rough           n: the greatest height of its corners, uniform, m
    gaps            n: the width of trenches 0.5 m deep, at least two cells, m; they are 0.8 m apart
    stones          n: the width of such trenches between squares of 0.4 m, m

Levels move as legged_gym's and Isaac Lab's do, at an episode's end: up where the robot is more than half a tile away
from where it started; else down where it is less than half as far as its last command would have carried it in a
whole episode; rows that solve the last level begin at a random one.
Source: N. Rudin et al., "Learning to Walk in Minutes Using Massively Parallel Deep RL", 2021, sections 3.2 and 4.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal
from xml.etree import ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict
from numpy.typing import NDArray

from ejax.envs.task.mjcf import find_child
from ejax.envs.terms.commands import check_kind
from ejax.schema.frozen import freeze_fields
from ejax.schema.messages import did_you_mean
from ejax.schema.values import is_number
from ejax.types import Array, Key

KINDS = ("slope", "hollow", "stairs", "pit", "rough", "gaps", "stones")
PLATFORM = 1.0  # m, from its middle to its edge
_TREAD, _BANK, _STONE, _TRENCH = 0.3, 0.8, 0.4, 0.5  # m: lengths of a step, between gaps, of a stone; the depth
_TINY = 1e-6
_DEPTH = 0.5  # m, of the ground below its lowest place
_BORDER = 1.0  # m, about a field of tiles: who leaves it ends an episode, and should not fall before


@dataclass(frozen=True, kw_only=True)
class Terrain:
    """The ground that robots walk on; all lengths in m.

    Args:
        height: the greatest difference of heights of a rough field.
        cell: the distance of a field's corners. None: 0.25, of tiles 0.1.
        half_size: from a rough field's middle to its edge; beyond an edge there is nothing.
        seed: of random heights.
        tiles: of a field of tiles: kind -> (lowest, highest) number, a column each.
        levels: rows of tiles.
        deepening: trenches are 0.5·((level + 1) / levels)² m deep, so that robots can learn to cross them.
        tile: a tile's side.
        level: (lowest, highest) level of a row's first episode, uniform.
        promote: levels go up and down; else a row keeps its first one.
        scan: half the length and half the width of a grid of heights about the robot that is observed. None: none.
        spacing: the distance of the grid's points.
    """

    kind: Literal["flat", "rough", "tiles"] = "flat"
    height: float = 0.05
    cell: float | None = None
    half_size: float = 8.0
    seed: int = 0
    tiles: Mapping[str, tuple[float, float]] = FrozenDict(slope=(0.0, 0.4), stairs=(0.02, 0.12), rough=(0.0, 0.1))
    levels: int = 5
    deepening: bool = False
    tile: float = 8.0
    level: tuple[int, int] = (0, 0)
    promote: bool = True
    scan: tuple[float, float] | None = None
    spacing: float = 0.2

    def __post_init__(self) -> None:
        freeze_fields(self, "tiles", "level", "scan")
        optional: dict[str, Any] = {"cell": 0.1, "scan": None}
        for field in fields(self):
            if (value := getattr(self, field.name)) is not None or field.name not in optional:
                check_kind(f"terrain.{field.name}", value, optional.get(field.name, field.default))
        if self.seed < 0:
            raise ValueError(f"terrain.seed must be 0 or more, got {self.seed}")
        if self.kind not in ("flat", "rough", "tiles"):
            raise ValueError(f"terrain.kind must be 'flat', 'rough' or 'tiles', got {self.kind!r}")
        cell = self.grid
        lengths = {"height": self.height, "cell": cell, "half_size": self.half_size, "spacing": self.spacing}
        for name, x in lengths.items():
            if not x > 0.0:
                raise ValueError(f"terrain.{name} must be > 0, got {x}")
        if cell > self.half_size:
            raise ValueError(f"terrain.cell must be at most half_size {self.half_size}, got {cell}")
        for name, bounds in self.tiles.items():
            if name not in KINDS:
                raise ValueError(
                    f"terrain.tiles has no '{name}'; there is {', '.join(KINDS)}{did_you_mean(name, KINDS)}"
                )
            check_kind(f"terrain.tiles.{name}", bounds, (0.0, 0.0))
            if not 0.0 <= bounds[0] <= bounds[1]:
                raise ValueError(f"terrain.tiles.{name} must be [lowest, highest], 0 or more, got {bounds!r}")
            if self.kind == "tiles" and name in ("stairs", "pit") and 2.0 * cell > _TREAD + _TINY:
                text = f"has steps of {_TREAD} m, which a cell of {cell} shows as a slope"
                raise ValueError(f"terrain.tiles.{name} {text}; set terrain.cell to at most {0.5 * _TREAD}")
            if self.kind == "tiles" and name in ("gaps", "stones") and bounds[0] < 2.0 * cell - _TINY:
                text = f"must be at least two cells wide, {2.0 * cell:g} m, or the ground is flat; got {bounds!r}"
                raise ValueError(f"terrain.tiles.{name} {text}; raise it, or lower terrain.cell")
        if not self.tiles or self.levels < 1:
            raise ValueError(f"terrain needs a kind of tiles and a level, got {dict(self.tiles)} and {self.levels}")
        whole = np.isclose(self.tile / cell, round(self.tile / cell))
        if self.kind == "tiles" and not (self.tile >= 4.0 * PLATFORM and whole):
            text = f"at least {4.0 * PLATFORM} m, and a multiple of cell {cell}"
            raise ValueError(f"terrain.tile must be {text}; got {self.tile}")
        if not 0 <= self.level[0] <= self.level[1] < self.levels:
            raise ValueError(
                f"terrain.level must be [lowest, highest] within 0 … {self.levels - 1}, got {self.level!r}"
            )
        scan: Any = (0.0, 0.0) if self.scan is None else self.scan
        if not (isinstance(scan, tuple) and len(scan) == 2 and all(map(is_number, scan)) and min(scan) >= 0.0):
            raise ValueError(f"terrain.scan must be half the length and half the width, m, got {self.scan!r}")

    @property
    def grid(self) -> float:
        """m: ``cell``, or its default."""
        return self.cell if self.cell is not None else 0.1 if self.kind == "tiles" else 0.25

    @property
    def size(self) -> tuple[float, float]:
        """m: half the field's length along x, and along y."""
        if self.kind == "tiles":
            return 0.5 * self.tile * len(self.tiles), 0.5 * self.tile * self.levels
        return self.half_size, self.half_size

    @property
    def extent(self) -> tuple[float, float]:
        """m: as ``size``, with the border."""
        border = round(_BORDER / self.grid) * self.grid if self.kind == "tiles" else 0.0
        return self.size[0] + border, self.size[1] + border

    @property
    def scanned(self) -> NDArray[np.float64]:
        """[points, 2], m: places of the height scan, forward and left of the robot."""
        if self.scan is None:
            return np.zeros((0, 2))
        along, aside = (
            np.arange(-round(x / self.spacing), round(x / self.spacing) + 1) * self.spacing for x in self.scan
        )
        return np.stack(np.meshgrid(along, aside, indexing="ij"), axis=-1).reshape(-1, 2)

    @functools.lru_cache(maxsize=8)  # noqa: B019  # few, and each is asked for its heights several times
    def heights(self) -> NDArray[np.float64]:
        """[cells + 1 along y, cells + 1 along x], m; not to be changed."""
        nx, ny = (round(2.0 * half / self.grid) for half in self.size)
        rng = np.random.default_rng(self.seed)
        if self.kind == "rough":  # 0 and ``height`` are among them
            drawn = rng.random((ny + 1, nx + 1))
            return self.height * (drawn - drawn.min()) / (drawn.max() - drawn.min())
        heights, n = np.zeros((ny + 1, nx + 1)), round(self.tile / self.grid)
        for row in range(self.levels):
            for column, (kind, (low, high)) in enumerate(self.tiles.items()):
                number = low + (high - low) * row / max(1, self.levels - 1)
                # without its edges, which are at height 0 for all
                inner = np.s_[row * n + 1 : (row + 1) * n, column * n + 1 : (column + 1) * n]
                # robots stop for good at trenches that no foot has come out of
                depth = _TRENCH * (((row + 1) / self.levels) ** 2 if self.deepening else 1.0)
                heights[inner] = _tile(kind, number, depth, n, self.grid, rng)[1:-1, 1:-1]
        return np.pad(heights, round(_BORDER / self.grid))

    def origin(self, level: Array, column: Array) -> Array:
        """[2], m: the middle of a tile."""
        place = jnp.stack([column, level], axis=-1).astype(jnp.float32) + 0.5
        return place * self.tile - jnp.asarray(self.size, jnp.float32)

    def first_spot(self, key: Key) -> tuple[Array, Array]:
        """Draw the level and the column of a row, int32; the column is the row's for good."""
        key_level, key_column = jax.random.split(key)
        level = jax.random.randint(key_level, (), self.level[0], self.level[1] + 1)
        return level, jax.random.randint(key_column, (), 0, len(self.tiles))

    def crosses(self, distance: Array) -> Array:
        """Return whether a robot is off its tile, or nearly: ``distance``, m, from the middle."""
        return distance > 0.5 * self.tile

    def next_level(self, level: Array, distance: Array, commanded: Array, key: Key) -> Array:
        """Move a level at an episode's end. ``distance``, m: from its start to its end; ``commanded``, m: as far as its
        last command would have gone."""
        if not self.promote:
            return level
        up = self.crosses(distance)
        down = ~up & (distance < 0.5 * commanded)
        moved = level + up.astype(jnp.int32) - down.astype(jnp.int32)
        solved = jax.random.randint(key, (), 0, self.levels)
        return jnp.where(moved >= self.levels, solved, jnp.maximum(moved, 0))


def _tile(kind: str, number: float, depth: float, n: int, cell: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """[n + 1, n + 1], m. ``depth``: of trenches."""
    along = (np.arange(n + 1) - 0.5 * n) * cell
    x, y = np.meshgrid(along, along)
    # m, from the platform's edge outwards, there and at the tile's edge
    out, far = np.maximum(np.maximum(abs(x), abs(y)) - PLATFORM, 0.0), 0.5 * n * cell - PLATFORM
    beside = out > _TINY
    if kind in ("slope", "hollow"):
        height = number * (far - out)
    elif kind in ("stairs", "pit"):
        height = number * (np.ceil(far / _TREAD - _TINY) - np.ceil(out / _TREAD - _TINY))
    elif kind == "rough":
        height = number * rng.random(x.shape) * beside
    else:
        # walls are as wide as a cell: so the trench's upper edges are ``number`` apart
        length, across = (_BANK, [out]) if kind == "gaps" else (_STONE, [x, y])
        number = round(number / cell) * cell  # in whole cells: other widths would lose some trenches between corners
        beyond = [(each + _TINY) % (number + length) - length for each in across]
        deep = np.any([(each > cell - _TINY) & (each < number - cell + 2.0 * _TINY) for each in beyond], axis=0)
        height = -depth * (deep & beside)
    return -height if kind in ("hollow", "pit") else height


def height_below(terrain: Terrain, position: Array) -> Array:
    """[...], m: the ground's height at ``position`` [..., ≥ 2], x and y in m. Beyond the edge that of the edge."""
    if terrain.kind == "flat":
        return jnp.zeros(position.shape[:-1], position.dtype)
    # a constant of the program: all rows walk on the same field
    heights = jnp.asarray(terrain.heights(), position.dtype)

    def cell_at(axis: int) -> tuple[Array, Array]:
        """Return the corner before a place, by its number, and how far it is to the next one, 0 … 1."""
        half, cells = terrain.extent[axis], heights.shape[1 - axis] - 1
        place = jnp.clip((position[..., axis] + half) * (cells / (2.0 * half)), 0.0, cells)
        corner = jnp.minimum(place.astype(jnp.int32), cells - 1)
        return corner, place - corner

    (i, x), (j, y) = cell_at(0), cell_at(1)
    near, far = (heights[j + k, i] * (1.0 - x) + heights[j + k, i + 1] * x for k in (0, 1))
    return near * (1.0 - y) + far * y


def add_terrain(root: ET.Element, terrain: Terrain) -> None:
    """Make the floor of a scene the ground."""
    floor, assets = find_child(root, "worldbody/geom[@name='floor']"), find_child(root, "asset")
    floor.attrib |= {"contype": "1", "conaffinity": "0"}
    if terrain.kind == "flat":
        return
    lowest, (half_x, half_y) = terrain.heights().min(), terrain.extent
    heights = terrain.heights() - lowest
    # a field of one height has none to scale
    size = f"{half_x} {half_y} {max(heights.max(), 1e-3)} {_DEPTH}"
    field = {"nrow": str(heights.shape[0]), "ncol": str(heights.shape[1]), "size": size}
    # the first row of ``elevation`` is the far edge, of the greatest y
    elevation = " ".join(f"{height:.5f}" for height in heights[::-1].reshape(-1))
    ET.SubElement(assets, "hfield", field, name="ground", elevation=elevation)
    floor.attrib |= {"type": "hfield", "hfield": "ground"}
    # cameras draw nothing nearer than a share of the extent, which would be the field's: they missed the robot
    ET.SubElement(root, "statistic", extent="2")
    if lowest:
        floor.set("pos", f"0 0 {lowest}")
    del floor.attrib["size"]
