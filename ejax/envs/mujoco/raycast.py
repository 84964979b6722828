"""Pictures of MuJoCo models made of primitives, drawn in JAX: one ray per pixel, no callback; ``vmap`` it for many.

    p(t) = o + t·d,   o = Rᵀ(eye − c),   d = Rᵀ·frame·(x, y, 1)        in the frame (R, c) of each solid

Nearest hits are the minimum of one integer per pixel: the bits of t, which order like t, with the solid's number in the
lowest ones. Normal and colour follow once per pixel. The pass over the solids is a loop: unrolled, XLA's CPU compiler
fuses it into kernels that compute what is shared again for each of its uses, a hundred times slower.

All that nothing moves is a constant of the program, unless camera or lights are arrays.

As MuJoCo draws without effects: ambient light, Lambert's and Blinn's from directional lights with the eye infinitely
far away; no shadows, no reflections, no haze. Of solids with an alpha below 1 only the nearest is seen, blended.
"""

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ejax.envs.mujoco.drawing import Appearance
from ejax.envs.mujoco.kinematics import Pose, body_poses, times_constant
from ejax.envs.mujoco.scenery import KINDS, Camera, Lights, Scenery, Solid, Texture, place_camera, scenery
from ejax.numerics.platforms import by_platform
from ejax.types import Array, CameraView

_FAR = 1e6  # m: the depth of a miss
_TINY = 1e-12

Vec: TypeAlias = tuple[Array, ...]  # Three numbers, or three per pixel


class _Layer(NamedTuple):
    depth: Array
    rgb: Vec
    alpha: Array


@functools.partial(jax.jit, static_argnames=("view", "width", "height"))
def draw(
    appearance: Appearance,
    *,
    width: int,
    height: int,
    view: CameraView | None = None,
    camera: Camera | None = None,
    lights: Lights | None = None,
) -> Array:
    """Draw [height, width, 3] uint8, by default with the model's camera ``main`` and lights.

    ``view``: a constant, without ``effects``. ``camera`` instead of it, and ``lights``: their numbers may be traced.
    Raises ValueError: a solid that is not a primitive, see ``scenery``; a colour for a geom that the model lacks.
    """
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
    light = scene.lights if lights is None else lights
    rays = _Rays(_fixed_camera(appearance.asset, view, width, height) if camera is None else camera, width, height)
    if camera is None and lights is None:
        behind = _fixed_backdrop(appearance.asset, view, width, height, tuple(solid.name for solid in still))
    else:
        behind = _backdrop(scene, still, poses, rays, light)
    rgb, depth = behind.rgb, behind.depth
    if moving:
        front = _cast(moving, poses, appearance.rgba, rays, light)
        nearer = front.depth < depth
        rgb, depth = _select(nearer, front.rgb, rgb), jnp.where(nearer, front.depth, depth)
    if clear:
        film = _cast(clear, poses, appearance.rgba, rays, light)
        through = 1.0 - film.alpha
        alpha = jnp.where(film.depth < depth, 1.0 - through * through, 0.0)  # MuJoCo draws both of its sides
        rgb = tuple(old + alpha * (new - old) for old, new in zip(rgb, film.rgb, strict=True))
    levels = jnp.stack([jnp.clip(jnp.rint(255.0 * each), 0.0, 255.0).astype(jnp.uint8) for each in rgb], axis=-1)
    return levels.reshape(height, width, 3)


class _Rays:
    """A ray per pixel: the camera, and the pixels' centres in ±1, to the right and up, [P] each."""

    def __init__(self, camera: Camera, width: int, height: int) -> None:
        across = (np.arange(width, dtype=np.float32) + 0.5) * (2.0 / width) - 1.0
        down = 1.0 - (np.arange(height, dtype=np.float32) + 0.5) * (2.0 / height)
        self.camera, self.pixel = camera, 2.0 / height  # a pixel in ±1
        self.x = jnp.asarray(np.tile(across, height), jnp.float32)
        self.y = jnp.asarray(np.repeat(down, width), jnp.float32)

    def along(self, row: Array) -> Array:
        """Compute row·(x, y, 1), [P]."""
        return row[0] * self.x + row[1] * self.y + row[2]

    def directions(self) -> Vec:
        """Return directions in the world; the one forward has length 1 along the line of sight."""
        frame = self.camera.frame
        return self.along(frame[0]), self.along(frame[1]), self.along(frame[2])


@functools.lru_cache(maxsize=64)
def _fixed_camera(asset: str, view: CameraView | None, width: int, height: int) -> Camera:
    with jax.ensure_compile_time_eval():
        return jax.tree.map(np.asarray, place_camera(asset, view, width / height))


@functools.lru_cache(maxsize=64)
def _fixed_backdrop(asset: str, view: CameraView | None, width: int, height: int, names: tuple[str, ...]) -> _Layer:
    scene = scenery(asset)
    still = [solid for solid in scene.solids if solid.name in names]

    @jax.jit
    def make(camera: Camera, lights: Lights) -> _Layer:
        # any configuration serves: these solids are at the same place in all
        poses = body_poses(scene.model, jnp.asarray(scene.model.qpos0, jnp.float32))
        return _backdrop(scene, still, poses, _Rays(camera, width, height), lights)

    with jax.ensure_compile_time_eval():
        return jax.tree.map(np.asarray, make(_fixed_camera(asset, view, width, height), scene.lights))


def _backdrop(scene: Scenery, still: Sequence[Solid], poses: Sequence[Pose], rays: _Rays, lights: Lights) -> _Layer:
    direction = rays.directions()
    height = direction[2] * jax.lax.rsqrt(_dot(direction, direction))
    place = (height + 1.0) * (0.5 * (len(scene.sky) - 1))
    sky = tuple(jnp.interp(place, jnp.arange(len(scene.sky), dtype=jnp.float32), scene.sky[:, i]) for i in range(3))
    if not still:
        return _Layer(jnp.full_like(height, _FAR), sky, jnp.ones_like(height))
    front = _cast(still, poses, {}, rays, lights)
    return _Layer(front.depth, _select(front.depth < _FAR, front.rgb, sky), jnp.ones_like(height))


def _cast(
    solids: Sequence[Solid], poses: Sequence[Pose], tints: Mapping[str, Array], rays: _Rays, lights: Lights
) -> _Layer:
    solids = sorted(solids, key=lambda solid: KINDS.index(solid.kind))
    turns, centres = _placed(solids, poses)
    colours = jnp.stack([jnp.asarray(tints.get(solid.name, solid.rgba), jnp.float32) for solid in solids])
    mask = (1 << max(1, (len(solids) - 1).bit_length())) - 1  # the low bits of a depth: 2e-6 of it for 16 solids
    nearest = _nearest(solids, turns, centres, colours[:, 3] > 0.0, rays, mask)
    depth = jax.lax.bitcast_convert_type(nearest & ~mask, jnp.float32)
    looks = [(emission, specular, 128.0 * shininess) for emission, specular, shininess in (x.surface for x in solids)]
    table = {
        "centre": centres,
        "turn": turns.reshape(-1, 9),
        "size": jnp.asarray([solid.size for solid in solids], jnp.float32),
        "kind": jnp.asarray([[KINDS.index(solid.kind)] for solid in solids], jnp.float32),
        "colour": colours,
        "look": jnp.asarray(looks, jnp.float32),
    }
    mine = _gather(nearest & mask, table)
    direction = rays.directions()
    offset = tuple(rays.camera.eye[i] + depth * direction[i] - mine["centre"][i] for i in range(3))
    place = tuple(_dot(offset, mine["turn"][i::3]) for i in range(3))
    own = _solid_normal({solid.kind for solid in solids}, mine, place)
    normal = tuple(_dot(mine["turn"][3 * i : 3 * i + 3], own) for i in range(3))
    rgb = _shade(mine, normal, lights, rays.camera.frame)
    for i, solid in enumerate(solids):
        if solid.texture is not None:
            texel = _texel(solid.texture, place[0], place[1], depth * rays.pixel)
            seen = nearest & mask == i
            rgb = _select(seen, tuple(one * other for one, other in zip(rgb, texel, strict=True)), rgb)
    return _Layer(depth, rgb, mine["colour"][3])


def _nearest(solids: Sequence[Solid], turns: Array, centres: Array, shown: Array, rays: _Rays, mask: int) -> Array:
    """Return the bits of the nearest hit's depth, the solid's number in the lowest: [P] int32, a loop for each kind."""
    starts = jnp.einsum("gij,gi->gj", turns, rays.camera.eye[None] - centres, precision="highest")
    ways = jnp.einsum("gij,ik->gjk", turns, rays.camera.frame, precision="highest")
    sizes = jnp.asarray([solid.size for solid in solids], jnp.float32)
    numbers = jnp.arange(len(solids), dtype=jnp.int32)
    nearest = jnp.full(rays.x.shape, np.float32(_FAR).view(np.int32) | mask, jnp.int32)
    kinds = [solid.kind for solid in solids]  # sorted
    for kind in dict.fromkeys(kinds):
        first, last = kinds.index(kind), kinds.index(kind) + kinds.count(kind)

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


def _placed(solids: Sequence[Solid], poses: Sequence[Pose]) -> tuple[Array, Array]:
    """Place solids in the world: rotations [G, 3, 3] and centres [G, 3]."""
    found: dict[int, Array] = {}
    for body in {solid.body for solid in solids}:
        mine = [i for i, solid in enumerate(solids) if solid.body == body]
        there = times_constant(poses[body], np.concatenate([solids[i].local for i in mine], axis=1))  # one product
        found |= {i: jnp.asarray(there[:3, 4 * k : 4 * k + 4], jnp.float32) for k, i in enumerate(mine)}
    pose = jnp.stack([found[i] for i in range(len(solids))])
    return pose[:, :, :3], pose[:, :, 3]


def _gather(number: Array, table: Mapping[str, Array]) -> dict[str, list[Array]]:
    """Gather the rows [P] of a table by column; in a loop on a CPU, so that XLA cannot fuse it into each reader."""
    rows = jnp.concatenate(list(table.values()), axis=1)
    columns = rows[0]  # a single solid's numbers are the same in all pixels
    if len(rows) > 1:
        columns = by_platform(
            cpu=lambda number, rows: jax.lax.map(lambda column: column[number], rows.T),
            gpu=lambda number, rows: rows[number].T,
        )(number, rows)
    each = iter(columns)
    return {name: [next(each) for _ in range(values.shape[1])] for name, values in table.items()}


def _shade(mine: Mapping[str, Sequence[Array]], normal: Vec, lights: Lights, frame: Array) -> Vec:
    forward = jnp.cross(frame[:, 1], frame[:, 0])
    forward = forward / jnp.linalg.norm(forward)
    emission, gloss, power = mine["look"]
    bright = [emission + lights.ambient[c] for c in range(3)]
    shine = [jnp.zeros_like(emission)] * 3
    for i in range(lights.direction.shape[0]):
        towards = -forward if i == 0 else -lights.direction[i] / jnp.linalg.norm(lights.direction[i])
        facing = _larger(_dot(normal, towards), 0.0)
        bright = [each + facing * lights.diffuse[i, c] for c, each in enumerate(bright)]
        # of a constant; traced numbers may be anything
        if not (isinstance(lights.specular, np.ndarray) and not lights.specular[i].any()):
            half = towards - forward
            cosine = _larger(_dot(normal, half / jnp.linalg.norm(half)), 1e-6)
            spot = gloss * jnp.where(facing > 0.0, jnp.exp(power * jnp.log(cosine)), 0.0)
            shine = [each + spot * lights.specular[i, c] for c, each in enumerate(shine)]
    return tuple(base * light + spot for base, light, spot in zip(mine["colour"][:3], bright, shine, strict=True))


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


def _solid_normal(kinds: Set[str], mine: Mapping[str, Sequence[Array]], place: Vec) -> Vec:
    """Return unit normals at ``place``, both in the solid's frame."""
    (x, y, z), (a, b, c) = place, mine["size"]
    zero, one = jnp.zeros_like(x), jnp.ones_like(x)
    up: Vec = (zero, zero, one)
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
        up = _select(mine["kind"][0] == KINDS.index(kind), own, up)
    return up


def _unit(vector: Vec) -> Vec:
    scale = jax.lax.rsqrt(_dot(vector, vector) + _TINY)
    return vector[0] * scale, vector[1] * scale, vector[2] * scale


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


def _enter_ellipsoid(origin: Vec, direction: Vec, size: Vec) -> tuple[Array, Array]:
    (x, y, z), (u, v, w), (a, b, c) = origin, direction, size
    return _enter_ball((x / a, y / b, z / c), (u / a, v / b, w / c), 1.0)  # t is the same in the scaled space


def _enter_cylinder(origin: Vec, direction: Vec, size: Vec) -> tuple[Array, Array]:
    radius, half, _ = size
    enter, leave, inside = _endless(origin, direction, radius)
    bottom, top = _slab(origin[2], direction[2], half)
    enter = _larger(enter, bottom)
    return enter, (enter < _smaller(leave, top)) & (inside > 0.0)


def _enter_capsule(origin: Vec, direction: Vec, size: Vec) -> tuple[Array, Array]:
    radius, half, _ = size
    side, _, inside = _endless(origin, direction, radius)
    z = origin[2] + side * direction[2]
    end, round_hit = _enter_ball((origin[0], origin[1], origin[2] - jnp.where(z > 0.0, half, -half)), direction, radius)
    on_side = (jnp.abs(z) < half) & (inside > 0.0)
    return jnp.where(on_side, side, end), on_side | (round_hit & (inside > 0.0))


def _endless(origin: Vec, direction: Vec, radius: Array) -> tuple[Array, Array, Array]:
    """Return depths at which the ray enters and leaves the cylinder about z, and a number > 0 where it does."""
    (x, y, _), (u, v, _) = origin, direction
    a = u * u + v * v + _TINY
    b = x * u + y * v
    cross = x * v - y * u
    inside = radius**2 * a - cross * cross  # = b² − a·(x² + y² − r²), without its cancellation
    root, scale = jnp.sqrt(_larger(inside, 0.0)), 1.0 / a
    return (-b - root) * scale, (-b + root) * scale, inside


def _slab(start: Array, rate: Array, half: Array) -> tuple[Array, Array]:
    inverse = 1.0 / _not_zero(rate)
    middle, width = -start * inverse, jnp.abs(inverse) * half
    return middle - width, middle + width


_ENTER: dict[str, Callable[[Vec, Vec, Vec], tuple[Array, Array]]] = {
    "plane": _enter_plane,
    "box": _enter_box,
    "ellipsoid": _enter_ellipsoid,
    "sphere": lambda origin, direction, size: _enter_ball(origin, direction, size[0]),
    "capsule": _enter_capsule,
    "cylinder": _enter_cylinder,
}
"""(origin, direction, size) in the solid's frame -> depth where the ray enters, and whether it does."""


def _select(condition: Array, new: Vec, old: Vec) -> Vec:
    return tuple(jnp.where(condition, one, other) for one, other in zip(new, old, strict=True))


def _dot(one: Sequence[Array], other: Sequence[Array]) -> Array:
    return one[0] * other[0] + one[1] * other[1] + one[2] * other[2]


def _larger(one: Array, other: Array | float) -> Array:
    """Return the maximum without ``jnp.maximum``'s care for NaN, which costs as much again."""
    return jnp.where(one > other, one, other)


def _smaller(one: Array, other: Array | float) -> Array:
    return jnp.where(one < other, one, other)


def _not_zero(x: Array) -> Array:
    return jnp.where(jnp.abs(x) > _TINY, x, _TINY)
