"""Pictures of MuJoCo models made of primitives, drawn in JAX: one ray per pixel, no callback; ``vmap`` it for many.

    p(t) = o + t·d,   o = Rᵀ(eye − c),   d = Rᵀ·frame·(x, y, 1)        in the frame (R, c) of each solid

so that d is linear in the pixel's place and t is the depth. Nearest hits are the minimum of one integer per pixel: the
bits of t, which order like t, with the solid's number in the lowest ones. So the pass over the solids carries one
array; the normal and the colour are computed once per pixel afterwards. The pass is a loop: unrolled, XLA's CPU
compiler fuses it into kernels that compute what is shared again for each of its uses, a hundred times slower.

What nothing moves is drawn when the program is traced and is a constant in it: sky, floor, the base of a robot; not so
where camera or lights are arrays of their own.

As MuJoCo draws without effects: ambient light, Lambert's and Blinn's from directional lights with the eye infinitely
far away, as OpenGL's fixed pipeline has it; no shadows, no reflections, no haze at the horizon. Solids with an alpha
below 1 are drawn last; only the nearest of them is seen, blended with what is behind.
"""

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.envs.mujoco.appearance import Appearance
from ejax.envs.mujoco.kinematics import body_poses, times
from ejax.envs.mujoco.scenery import KINDS, Camera, Lights, Scenery, Solid, Texture, model_lights, place_camera, scenery
from ejax.numerics.kernels import by_platform
from ejax.types import Array, CameraView

_FAR = 1e6
"""m: the depth of a miss."""
_TINY = 1e-12

Vec: TypeAlias = tuple[Array, ...]
"""Three numbers, or three per pixel."""
Placed: TypeAlias = Array | NDArray[np.float64]


class _Layer(NamedTuple):
    """What some solids show: their depth, m, and colour, per pixel."""

    depth: Array
    rgb: Vec
    alpha: Array


def draw(
    appearance: Appearance,
    *,
    width: int,
    height: int,
    camera: CameraView | Camera | None = None,
    lights: Lights | None = None,
) -> Array:
    """One picture: [height, width, 3] uint8.

    Args:
        camera: a view, whose ``effects`` are not looked at; or a pinhole whose numbers may be traced; None: the model's
            camera ``main``.
        lights: None: the model's.

    Raises:
        ValueError: a model with something that is no primitive, see ``scenery``; a colour for a geom that it lacks.
    """
    if isinstance(camera, Camera):
        return _draw(appearance, camera, lights, None, width, height)
    return _draw(appearance, None, lights, camera, width, height)


@functools.partial(jax.jit, static_argnames=("view", "width", "height"))
def _draw(
    appearance: Appearance,
    camera: Camera | None,
    lights: Lights | None,
    view: CameraView | None,
    width: int,
    height: int,
) -> Array:
    """``draw``, traced once for all its uses in a program."""
    scene = scenery(appearance.asset)
    names = [solid.name for solid in scene.solids if solid.geom is not None]
    if unknown := set(appearance.rgba) - set(names):
        raise ValueError(f"no geom {', '.join(sorted(unknown))} is drawn; there is {', '.join(names)}")
    poses = body_poses(scene.model, appearance.qpos, appearance.mocap_pos)
    still, moving, clear = [], [], []
    for solid in scene.solids:
        if solid.rgba[3] < 1.0:
            clear.append(solid)
        elif isinstance(poses[solid.body], np.ndarray) and solid.name not in appearance.rgba:
            still.append(solid)
        else:
            moving.append(solid)
    light = _fixed_lights(appearance.asset) if lights is None else lights
    rays = _Rays(_fixed_camera(appearance.asset, view, width, height) if camera is None else camera, width, height)
    if camera is None and lights is None:
        behind = _fixed_backdrop(appearance.asset, view, width, height, tuple(solid.name for solid in still))
    else:
        behind = _backdrop(scene, still, poses, rays, light)
    rgb, depth = behind.rgb, behind.depth
    if moving:
        front = _cast(moving, poses, appearance.rgba, rays, light)
        nearer = front.depth < depth
        rgb = _select(nearer, front.rgb, rgb)
        depth = jnp.where(nearer, front.depth, depth)
    if clear:
        film = _cast(clear, poses, appearance.rgba, rays, light)
        through = 1.0 - film.alpha
        alpha = jnp.where(film.depth < depth, 1.0 - through * through, 0.0)  # MuJoCo draws both of its sides
        rgb = tuple(old + alpha * (new - old) for old, new in zip(rgb, film.rgb, strict=True))
    levels = [jnp.clip(jnp.rint(255.0 * each), 0.0, 255.0).astype(jnp.uint8) for each in rgb]
    return jnp.stack(levels, axis=-1).reshape(height, width, 3)


class _Rays:
    """Where the rays go: the camera, and the pixels' centres in ±1, to the right and up; [P] each."""

    def __init__(self, camera: Camera, width: int, height: int) -> None:
        across = (np.arange(width, dtype=np.float32) + 0.5) * (2.0 / width) - 1.0
        down = 1.0 - (np.arange(height, dtype=np.float32) + 0.5) * (2.0 / height)
        self.camera = camera
        self.pixel = 2.0 / height
        self.x = jnp.asarray(np.tile(across, height), jnp.float32)
        self.y = jnp.asarray(np.repeat(down, width), jnp.float32)

    def along(self, row: Array) -> Array:
        """row·(x, y, 1), [P]."""
        return row[0] * self.x + row[1] * self.y + row[2]

    def directions(self) -> Vec:
        """In the world; the one forward has length 1 along the line of sight."""
        frame = self.camera.frame
        return self.along(frame[0]), self.along(frame[1]), self.along(frame[2])


# What never moves


@functools.lru_cache(maxsize=64)
def _fixed_camera(asset: str, view: CameraView | None, width: int, height: int) -> Camera:
    with jax.ensure_compile_time_eval():
        return jax.tree.map(np.asarray, place_camera(asset, view, width / height))


@functools.lru_cache(maxsize=64)
def _fixed_lights(asset: str) -> Lights:
    with jax.ensure_compile_time_eval():
        return jax.tree.map(np.asarray, model_lights(asset))


@functools.lru_cache(maxsize=64)
def _fixed_backdrop(asset: str, view: CameraView | None, width: int, height: int, names: tuple[str, ...]) -> _Layer:
    """The backdrop as a constant."""
    scene = scenery(asset)
    still = [solid for solid in scene.solids if solid.name in names]

    @jax.jit
    def make(camera: Camera, lights: Lights) -> _Layer:
        # at the model's start, where what never moves is as everywhere
        poses = body_poses(scene.model, jnp.asarray(scene.model.qpos0, jnp.float32))
        return _backdrop(scene, still, poses, _Rays(camera, width, height), lights)

    with jax.ensure_compile_time_eval():
        return jax.tree.map(np.asarray, make(_fixed_camera(asset, view, width, height), _fixed_lights(asset)))


def _backdrop(scene: Scenery, still: Sequence[Solid], poses: Sequence[Placed], rays: _Rays, lights: Lights) -> _Layer:
    """The sky with the solids before it."""
    direction = rays.directions()
    height = direction[2] * jax.lax.rsqrt(_dot(direction, direction))
    place = (height + 1.0) * (0.5 * (len(scene.sky) - 1))
    sky = tuple(jnp.interp(place, jnp.arange(len(scene.sky), dtype=jnp.float32), scene.sky[:, i]) for i in range(3))
    if not still:
        return _Layer(jnp.full_like(height, _FAR), sky, jnp.ones_like(height))
    front = _cast(still, poses, {}, rays, lights)
    return _Layer(front.depth, _select(front.depth < _FAR, front.rgb, sky), jnp.ones_like(height))


# One layer


def _cast(
    solids: Sequence[Solid], poses: Sequence[Placed], tints: Mapping[str, Array], rays: _Rays, lights: Lights
) -> _Layer:
    solids = sorted(solids, key=lambda solid: KINDS.index(solid.kind))
    turns, centres = _placed(solids, poses)
    colours = jnp.stack([_colour(solid, tints) for solid in solids])
    mask = (1 << max(1, (len(solids) - 1).bit_length())) - 1
    nearest = _nearest(solids, turns, centres, colours[:, 3] > 0.0, rays, mask)
    depth = jax.lax.bitcast_convert_type(nearest & ~mask, jnp.float32)
    mine = _gather(nearest & mask, _table(solids, turns, centres, colours))
    direction = rays.directions()
    offset = tuple(rays.camera.eye[i] + depth * direction[i] - mine["centre"][i] for i in range(3))
    place = tuple(_dot(offset, mine["turn"][i::3]) for i in range(3))
    own = _normal({solid.kind for solid in solids}, mine, place)
    normal = tuple(_dot(mine["turn"][3 * i : 3 * i + 3], own) for i in range(3))
    rgb = _shade(mine, normal, lights, rays.camera.frame)
    for i, solid in enumerate(solids):
        if solid.texture is not None:
            texel = _texel(solid.texture, place[0], place[1], depth * rays.pixel)
            seen = nearest & mask == i
            rgb = _select(seen, tuple(one * other for one, other in zip(rgb, texel, strict=True)), rgb)
    return _Layer(depth, rgb, mine["colour"][3])


def _nearest(solids: Sequence[Solid], turns: Array, centres: Array, shown: Array, rays: _Rays, mask: int) -> Array:
    """[P] int32: the bits of the nearest hit's depth, with the solid's number in the lowest.

    One loop for each kind of solid: a program of the same size for any number of them.
    """
    starts = jnp.einsum("gij,gi->gj", turns, rays.camera.eye[None] - centres, precision="highest")
    ways = jnp.einsum("gij,ik->gjk", turns, rays.camera.frame, precision="highest")
    sizes = jnp.asarray([solid.size for solid in solids], jnp.float32)
    numbers = jnp.arange(len(solids), dtype=jnp.int32)
    nearest = jnp.full(rays.x.shape, np.float32(_FAR).view(np.int32) | mask, jnp.int32)
    for kind in dict.fromkeys(solid.kind for solid in solids):
        first = next(i for i, solid in enumerate(solids) if solid.kind == kind)
        last = first + sum(solid.kind == kind for solid in solids)

        def one_more(nearest: Array, solid: tuple[Array, ...], kind: str = kind) -> tuple[Array, None]:
            number, shown, start, way, size = solid
            direction = (rays.along(way[0]), rays.along(way[1]), rays.along(way[2]))
            depth, hit = _ENTER[kind]((start[0], start[1], start[2]), direction, (size[0], size[1], size[2]))
            bits = (jax.lax.bitcast_convert_type(depth, jnp.int32) & ~mask) | number
            hit &= (depth > 0.0) & shown
            return jnp.minimum(nearest, jnp.where(hit, bits, np.iinfo(np.int32).max)), None

        these = jax.tree.map(lambda x, part=slice(first, last): x[part], (numbers, shown, starts, ways, sizes))
        nearest, _ = jax.lax.scan(one_more, nearest, these)
    return nearest


def _placed(solids: Sequence[Solid], poses: Sequence[Placed]) -> tuple[Array, Array]:
    """Rotations [G, 3, 3] and positions [G, 3] in the world."""
    found: dict[int, Array] = {}
    for body in {solid.body for solid in solids}:
        mine = [i for i, solid in enumerate(solids) if solid.body == body]
        there = times(poses[body], np.concatenate([solids[i].local for i in mine], axis=1))  # one product
        for place, i in enumerate(mine):
            found[i] = jnp.asarray(there[:3, 4 * place : 4 * place + 4], jnp.float32)
    pose = jnp.stack([found[i] for i in range(len(solids))])
    return pose[:, :, :3], pose[:, :, 3]


def _colour(solid: Solid, tints: Mapping[str, Array]) -> Array:
    """[4]"""
    if solid.geom is None or solid.name not in tints:
        return jnp.asarray(solid.rgba, jnp.float32)
    return tints[solid.name].astype(jnp.float32)


def _table(solids: Sequence[Solid], turns: Array, centres: Array, colours: Array) -> dict[str, Array]:
    """What the shading of a hit needs to know of the solid: [G, …] each."""
    look = [(solid.emission, solid.specular, 128.0 * solid.shininess) for solid in solids]
    return {
        "centre": centres,
        "turn": turns.reshape(-1, 9),
        "size": jnp.asarray([solid.size for solid in solids], jnp.float32),
        "kind": jnp.asarray([[KINDS.index(solid.kind)] for solid in solids], jnp.float32),
        "colour": colours,
        "look": jnp.asarray(look, jnp.float32),
    }


def _gather(number: Array, table: Mapping[str, Array]) -> dict[str, list[Array]]:
    """The rows [P] of a table, by column.

    In a loop on a CPU, so that XLA cannot fuse the gathering into whatever reads it and do it again there.
    """
    rows = jnp.concatenate(list(table.values()), axis=1)
    if len(rows) == 1:
        columns = iter(rows[0])
    else:
        columns = iter(
            by_platform(
                number,
                rows,
                cpu=lambda number, rows: jax.lax.map(lambda column: column[number], rows.T),
                gpu=lambda number, rows: rows[number].T,
            )
        )
    return {name: [next(columns) for _ in range(values.shape[1])] for name, values in table.items()}


def _enter_plane(origin: Vec, direction: Vec, size: Vec) -> tuple[Array, Array]:
    depth = -origin[2] / _not_zero(direction[2])
    hit = depth > 0.0
    for i in (0, 1):
        hit &= (jnp.abs(origin[i] + depth * direction[i]) <= size[i]) | (size[i] <= 0.0)
    return depth, hit


def _enter_box(origin: Vec, direction: Vec, size: Vec) -> tuple[Array, Array]:
    enters, leaves = zip(*(_slab(*each) for each in zip(origin, direction, size, strict=True)), strict=True)
    enter = _larger(_larger(enters[0], enters[1]), enters[2])
    leave = _smaller(_smaller(leaves[0], leaves[1]), leaves[2])
    return enter, enter < leave


def _enter_ball(origin: Vec, direction: Vec, radius: Array | float) -> tuple[Array, Array]:
    a, b, c = _dot(direction, direction), _dot(origin, direction), _dot(origin, origin) - radius**2
    inside = b * b - a * c
    return (-b - jnp.sqrt(_larger(inside, 0.0))) / a, inside > 0.0


def _enter_sphere(origin: Vec, direction: Vec, size: Vec) -> tuple[Array, Array]:
    return _enter_ball(origin, direction, size[0])


def _enter_ellipsoid(origin: Vec, direction: Vec, size: Vec) -> tuple[Array, Array]:
    """A ball of radius 1 where lengths are measured by the semi-axes."""
    (x, y, z), (u, v, w), (a, b, c) = origin, direction, size
    return _enter_ball((x / a, y / b, z / c), (u / a, v / b, w / c), 1.0)


def _enter_cylinder(origin: Vec, direction: Vec, size: Vec) -> tuple[Array, Array]:
    """Where the ray is inside both the endless cylinder and the slab between the caps."""
    radius, half, _ = size
    enter, leave, inside = _endless(origin, direction, radius)
    bottom, top = _slab(origin[2], direction[2], half)
    enter = _larger(enter, bottom)
    return enter, (enter < _smaller(leave, top)) & (inside > 0.0)


def _enter_capsule(origin: Vec, direction: Vec, size: Vec) -> tuple[Array, Array]:
    """The endless cylinder between the caps' centres, else the ball at the nearer end."""
    radius, half, _ = size
    side, _, inside = _endless(origin, direction, radius)
    z = origin[2] + side * direction[2]
    end, round_hit = _enter_ball((origin[0], origin[1], origin[2] - jnp.where(z > 0.0, half, -half)), direction, radius)
    on_side = (jnp.abs(z) < half) & (inside > 0.0)
    return jnp.where(on_side, side, end), on_side | (round_hit & (inside > 0.0))


def _endless(origin: Vec, direction: Vec, radius: Array) -> tuple[Array, Array, Array]:
    """Depths at which the ray enters and leaves the cylinder about z, and a number > 0 where it does."""
    (x, y, _), (u, v, _) = origin, direction
    a = u * u + v * v + _TINY
    b = x * u + y * v
    cross = x * v - y * u
    inside = radius**2 * a - cross * cross  # = b² − a·(x² + y² − r²), without its cancellation
    root, scale = jnp.sqrt(_larger(inside, 0.0)), 1.0 / a
    return (-b - root) * scale, (-b + root) * scale, inside


def _slab(start: Array, rate: Array, half: Array) -> tuple[Array, Array]:
    """Depths between which |start + t·rate| ≤ half."""
    inverse = 1.0 / _not_zero(rate)
    middle, width = -start * inverse, jnp.abs(inverse) * half
    return middle - width, middle + width


_ENTER: dict[str, Callable[[Vec, Vec, Vec], tuple[Array, Array]]] = {
    "plane": _enter_plane,
    "box": _enter_box,
    "ellipsoid": _enter_ellipsoid,
    "sphere": _enter_sphere,
    "capsule": _enter_capsule,
    "cylinder": _enter_cylinder,
}
"""Depth at which a ray enters a solid of (origin, direction, size) in the solid's frame, and whether it does."""


# Colour


def _normal(kinds: Set[str], mine: Mapping[str, Sequence[Array]], place: Vec) -> Vec:
    """Unit normals at ``place``, both in the solid's frame."""
    (x, y, z), (a, b, c) = place, mine["size"]
    zero, one = jnp.zeros_like(x), jnp.ones_like(x)
    normal: Vec = (zero, zero, one)
    found: dict[str, Vec] = {}
    if "box" in kinds:  # of the face that is nearest
        inside = a - jnp.abs(x), b - jnp.abs(y), c - jnp.abs(z)
        on_x = (inside[0] <= inside[1]) & (inside[0] <= inside[2])
        on_y = ~on_x & (inside[1] <= inside[2])
        on = on_x, on_y, ~on_x & ~on_y
        found["box"] = tuple(jnp.where(face, jnp.sign(each), 0.0) for face, each in zip(on, place, strict=True))
    if "ellipsoid" in kinds:
        found["ellipsoid"] = _unit((x / (a * a), y / (b * b), z / (c * c)))
    if "sphere" in kinds:
        found["sphere"] = _unit(place)
    if "capsule" in kinds:
        found["capsule"] = _unit((x, y, z - jnp.clip(z, -b, b)))
    if "cylinder" in kinds:
        on_cap = b - jnp.abs(z) < a - jnp.sqrt(x * x + y * y)
        found["cylinder"] = _select(on_cap, (zero, zero, jnp.sign(z)), _unit((x, y, zero)))
    for kind, own in found.items():
        normal = _select(mine["kind"][0] == KINDS.index(kind), own, normal)
    return normal


def _unit(vector: Vec) -> Vec:
    scale = jax.lax.rsqrt(_dot(vector, vector) + _TINY)
    return vector[0] * scale, vector[1] * scale, vector[2] * scale


def _shade(mine: Mapping[str, Sequence[Array]], normal: Vec, lights: Lights, frame: Array) -> Vec:
    """Colours in 0 … 1, or above."""
    forward = jnp.cross(frame[:, 1], frame[:, 0])
    forward = forward / jnp.linalg.norm(forward)
    emission, gloss, power = mine["look"]
    bright = [emission + lights.ambient[c] for c in range(3)]
    shine = [jnp.zeros_like(emission)] * 3
    for i in range(lights.direction.shape[0]):
        towards = -forward if i == 0 else -lights.direction[i] / jnp.linalg.norm(lights.direction[i])
        facing = _larger(_dot(normal, towards), 0.0)
        bright = [each + facing * lights.diffuse[i, c] for c, each in enumerate(bright)]
        if not _is_zero(lights.specular[i]):
            half = towards - forward
            cosine = _larger(_dot(normal, half / jnp.linalg.norm(half)), 1e-6)
            spot = gloss * jnp.where(facing > 0.0, jnp.exp(power * jnp.log(cosine)), 0.0)
            shine = [each + spot * lights.specular[i, c] for c, each in enumerate(shine)]
    red, green, blue = (
        base * light + spot for base, light, spot in zip(mine["colour"][:3], bright, shine, strict=True)
    )
    return red, green, blue


def _texel(texture: Texture, x: Array, y: Array, footprint: Array) -> Vec:
    """Nearest texel, which fades to the mean colour where a pixel covers more than half the picture."""
    height, width, _ = texture.texel.shape
    s, t = texture.repeat[0] * x - 0.5, texture.repeat[1] * y
    column = (jnp.floor((s - jnp.floor(s)) * width).astype(jnp.int32)) % width
    row = (jnp.floor((t - jnp.floor(t)) * height).astype(jnp.int32)) % height
    flat = jnp.asarray(texture.texel.reshape(-1, 3))
    index = row * width + column
    mean = texture.texel.reshape(-1, 3).mean(axis=0)
    fade = jnp.clip(2.0 * footprint * max(texture.repeat), 0.0, 1.0)
    return tuple(flat[index, c] + fade * (mean[c] - flat[index, c]) for c in range(3))


def _select(condition: Array, new: Vec, old: Vec) -> Vec:
    return tuple(jnp.where(condition, one, other) for one, other in zip(new, old, strict=True))


def _dot(one: Sequence[Array], other: Sequence[Array]) -> Array:
    return one[0] * other[0] + one[1] * other[1] + one[2] * other[2]


def _larger(one: Array, other: Array | float) -> Array:
    """Without ``jnp.maximum``'s care for NaN, which costs as much again."""
    return jnp.where(one > other, one, other)


def _smaller(one: Array, other: Array | float) -> Array:
    return jnp.where(one < other, one, other)


def _not_zero(x: Array) -> Array:
    return jnp.where(jnp.abs(x) > _TINY, x, _TINY)


def _is_zero(x: Array | NDArray[np.float32]) -> bool:
    """Of a constant; what is traced may be anything."""
    return isinstance(x, np.ndarray) and not x.any()
