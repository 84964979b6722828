"""A MuJoCo model's primitive solids, lights, sky and camera, as constants for a ray caster."""

import functools
import math
from dataclasses import replace
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from flax import struct
from numpy.typing import NDArray

from ejax.envs.mujoco.drawing import apply_appearance, default_view, has_appearance, own_camera, triple
from ejax.envs.mujoco.kinematics import transform
from ejax.envs.mujoco.models import load_model
from ejax.types import Array, CameraView, PyTree

KINDS = ("plane", "box", "ellipsoid", "sphere", "capsule", "cylinder")
_SHOWN_GROUPS = 3  # MuJoCo draws groups 0, 1 and 2 by default
_GREY = (0.5, 0.5, 0.5, 1.0)  # MuJoCo's default colour of a geom: with it, the material's counts
_SKY_LEVELS = 33
_SEEN = 0.8  # of a picture's size: at its foot there may be a caption


class Texture(NamedTuple):
    texel: NDArray[np.float32]  # [H, W, 3] in 0 … 1
    repeat: tuple[float, float]  # texture coordinates per m


class Solid(NamedTuple):
    """A geom, or a site, which MuJoCo draws as well."""

    name: str
    kind: str
    geom: int | None  # None: a site
    body: int
    size: tuple[float, float, float]
    local: NDArray[np.float64]  # [4, 4]: its pose on the body
    rgba: tuple[float, float, float, float]
    surface: tuple[float, float, float]  # emission, specular, shininess
    texture: Texture | None


@struct.dataclass(kw_only=True)
class Lights:
    """Directional lights; the first shines along the line of sight, MuJoCo's headlight."""

    direction: Array  # [L, 3], of the light's rays; the headlight's follows from the camera, its row counts for nothing
    diffuse: Array  # [L, 3]
    specular: Array  # [L, 3]
    ambient: Array  # [3], all lights together


@struct.dataclass(kw_only=True)
class Camera:
    """A pinhole: what the picture shows at (x, y) in ±1, to the right and up, lies on eye + t·frame·(x, y, 1)."""

    eye: Array  # [3], m
    frame: Array
    """[3, 3]: columns right, up and forward, the first two as long as half the picture at unit distance; an off-centre
    line of sight is in the third."""


class Scenery(NamedTuple):
    """Constants of a model."""

    model: mujoco.MjModel
    solids: tuple[Solid, ...]
    sky: NDArray[np.float32]
    """[levels, 3]: the sky's colour from the nadir to the zenith, at equal steps of the direction's height in ±1."""
    light_names: tuple[str, ...]  # By row of ``lights``; the first is the headlight
    lights: Lights


@functools.cache
def scenery(asset: str) -> Scenery:
    """Read a model. Raises ValueError: a solid that is not a primitive, a texture that is not a plane's, or a light
    that is not directional."""
    model = load_model(asset, visual=True)
    solids = [_solid(model, "geom", i) for i in range(model.ngeom) if model.geom_group[i] < _SHOWN_GROUPS]
    solids += [_solid(model, "site", i) for i in range(model.nsite) if model.site_group[i] < _SHOWN_GROUPS]
    names, lights = _lights(model)
    return Scenery(model, tuple(solid for solid in solids if solid.rgba[3] > 0.0), _sky(model), names, lights)


def place_camera(asset: str, view: CameraView | None, aspect: float) -> Camera:
    """Place the camera of a view, or the model's own, or ``default_view``; ``aspect``: width over height."""
    view = view or default_view(asset)
    if view is not None:
        eye, target, up = (jnp.asarray(each, jnp.float32) for each in (view.eye, view.target, view.up))
        return look_at(eye, target, up, half_angles(view.fovy, view.fovx, aspect), view.center)
    model = load_model(asset, visual=True)
    camera = own_camera(model)
    if model.cam_mode[camera] != mujoco.mjtCamLight.mjCAMLIGHT_FIXED or model.cam_bodyid[camera] != 0:
        raise ValueError("the ray caster needs a camera fixed in the world; set the camera's position")
    pose = transform(model.cam_pos[camera], model.cam_quat[camera])
    frame = pose[:3, :3] * np.array([*half_angles(model.cam_fovy[camera], None, aspect), -1.0])
    return Camera(eye=jnp.asarray(pose[:3, 3], jnp.float32), frame=jnp.asarray(frame, jnp.float32))


def film_view(env: Any, states: PyTree, aspect: float, view: CameraView | None = None) -> CameraView | None:
    """Choose the camera of a film of states [T, ...]: ``view``, or None, the model's own, if all that moves, markers,
    and sites are in it in all states; else one so far behind that they are. A model's ``main`` stays."""
    if not has_appearance(env):  # it has no model
        return view
    seen = jax.device_get(jax.vmap(env.appearance)(states))
    model = load_model(seen.asset, visual=True)
    if view is None and mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, "main") >= 0:
        return None
    data, bodies, balls = mujoco.MjData(model), model.geom_bodyid, []
    moves = (model.body_weldid[bodies] > 0) | (model.body_mocapid[model.body_rootid[bodies]] >= 0)
    moves &= model.geom_rbound > 0.0
    for i in range(len(seen.qpos)):
        apply_appearance(model, data, replace(jax.tree.map(lambda x, i=i: x[i], seen), rgba={}))
        mujoco.mj_kinematics(model, data)
        balls.append(np.nan_to_num(np.concatenate([data.geom_xpos[moves], data.site_xpos])))
    radius = np.concatenate([model.geom_rbound[moves], model.site_size.max(axis=1)])

    placed = place_camera(seen.asset, view, aspect)
    frame = np.asarray(placed.frame, np.float64)
    half = np.linalg.norm(frame[:, :2], axis=0)
    seen_at = (balls - np.asarray(placed.eye)) @ np.linalg.inv(frame).T
    if (np.abs(seen_at[..., :2]) + radius[:, None] / half <= _SEEN * seen_at[..., 2:]).all():
        return view
    centre = 0.5 * (np.min(balls, axis=(0, 1)) + np.max(balls, axis=(0, 1)))
    size = (np.linalg.norm(balls - centre, axis=-1) + radius).max()
    distance = size / math.sin(math.atan(_SEEN * half.min()))
    eye = centre - distance * frame[:, 2] / np.linalg.norm(frame[:, 2])
    return (view or as_view(placed)._replace(effects=True))._replace(eye=triple(eye), target=triple(centre))


def half_angles(fovy: float, fovx: float | None, aspect: float) -> tuple[float, float]:
    """Return half the picture's width and height at unit distance; angles in degrees, ``fovx`` None: square pixels."""
    tan_y = math.tan(math.radians(fovy) / 2.0)
    return tan_y * aspect if fovx is None else math.tan(math.radians(fovx) / 2.0), tan_y


def look_at(eye: Array, target: Array, up: Array, half_size: tuple[Any, Any], center: tuple[Any, Any]) -> Camera:
    """Look from ``eye`` [3] at ``target`` [3]; the rest as in ``half_angles`` and ``CameraView``."""
    forward = (target - eye) / jnp.linalg.norm(target - eye)
    upward = up - jnp.dot(up, forward) * forward
    length = jnp.linalg.norm(upward)
    # straight along ``up`` MuJoCo's free camera has the world's x upwards
    upward = jnp.where(length > 1e-6, upward / jnp.maximum(length, 1e-6), jnp.array([1.0, 0.0, 0.0]))
    right = jnp.cross(forward, upward)
    x, y = center
    across, high = right * half_size[0], upward * half_size[1]
    aim = forward + across * (1.0 - 2.0 * x) + high * (2.0 * y - 1.0)
    return Camera(eye=eye, frame=jnp.stack([across, high, aim], axis=1))


def as_view(camera: Camera) -> CameraView:
    """Return a pinhole of known numbers as MuJoCo's renderer takes it, without effects."""
    eye = np.asarray(camera.eye, np.float64)
    across, high, aim = np.asarray(camera.frame, np.float64).T
    wide, tall = np.linalg.norm(across), np.linalg.norm(high)
    right, up = across / wide, high / tall
    fovx, fovy = (math.degrees(2.0 * math.atan(half)) for half in (wide, tall))
    center = (0.5 - 0.5 * float(aim @ right / wide), 0.5 + 0.5 * float(aim @ up / tall))
    target = triple(eye + np.cross(up, right))
    return CameraView(triple(eye), target, fovy, effects=False, up=triple(up), fovx=fovx, center=center)


def _solid(model: mujoco.MjModel, what: Literal["geom", "site"], index: int) -> Solid:
    def of(field: str) -> Any:
        return getattr(model, f"{what}_{field}")[index]

    body, own = int(of("bodyid")), getattr(model, what)(index).name
    name = f"site {own!r}" if what == "site" else own or f"geom {index} of body {model.body(body).name!r}"
    kind = mujoco.mjtGeom(int(of("type"))).name.removeprefix("mjGEOM_").lower()
    if kind not in KINDS:
        raise _refused(f"draws {', '.join(KINDS)}; {name} is a {kind}")
    rgba, surface, texture, material = of("rgba"), (0.0, 0.5, 0.5), None, int(of("matid"))
    if material >= 0:
        rgba = rgba if tuple(rgba.tolist()) != _GREY else model.mat_rgba[material]
        surface = model.mat_emission[material], model.mat_specular[material], model.mat_shininess[material]
        texture = _texture(model, material, kind, name)
    return Solid(
        name=name,
        kind=kind,
        geom=index if what == "geom" else None,
        body=body,
        size=triple(of("size")),
        local=transform(of("pos"), of("quat")),
        rgba=cast(Any, tuple(map(float, rgba))),
        surface=cast(Any, tuple(map(float, surface))),
        texture=texture,
    )


def _texture(model: mujoco.MjModel, material: int, kind: str, name: str) -> Texture | None:
    roles = model.mat_texid[material]
    index = int(roles[mujoco.mjtTextureRole.mjTEXROLE_RGB])
    if (roles >= 0).sum() > (index >= 0):
        raise _refused(f"knows textures of colour only; {name} has another")
    if index < 0:
        return None
    if kind != "plane" or model.tex_type[index] != mujoco.mjtTexture.mjTEXTURE_2D or not model.mat_texuniform[material]:
        raise _refused(f"draws textures on planes, of type 2d with texuniform; {name} has another one")
    x, y = 0.5 * model.mat_texrepeat[material]
    return Texture(_texels(model, index), (float(x), float(y)))


def _texels(model: mujoco.MjModel, index: int) -> NDArray[np.float32]:
    shape = model.tex_height[index], model.tex_width[index], model.tex_nchannel[index]
    start = model.tex_adr[index]
    return model.tex_data[start : start + math.prod(shape)].reshape(shape)[..., :3].astype(np.float32) / 255.0


def _sky(model: mujoco.MjModel) -> NDArray[np.float32]:
    boxes = np.flatnonzero(model.tex_type == mujoco.mjtTexture.mjTEXTURE_SKYBOX)
    if not len(boxes):
        return np.zeros((_SKY_LEVELS, 3), np.float32)
    texels = _texels(model, int(boxes[0]))
    edge = texels.shape[1]
    # faces: right, left, up, down, front, back; up is a face, not an axis of the world. One side represents all four
    faces = np.concatenate([texels[i * edge : (i + 1) * edge].reshape(-1, 3) for i in (0, 2, 3)])
    centre = (np.arange(edge) + 0.5) / edge * 2.0 - 1.0
    across, along = np.meshgrid(centre, centre)
    heights = np.stack([-along, np.ones_like(along), -np.ones_like(along)])
    height = (heights / np.sqrt(1.0 + across**2 + along**2)).ravel()
    level = np.rint((height + 1.0) / 2.0 * (_SKY_LEVELS - 1)).astype(int)
    total = np.stack([np.bincount(level, faces[:, i], _SKY_LEVELS) for i in range(3)], axis=1)
    return (total / np.bincount(level, minlength=_SKY_LEVELS)[:, None]).astype(np.float32)


def _lights(model: mujoco.MjModel) -> tuple[tuple[str, ...], Lights]:
    head = model.vis.headlight
    active = bool(head.active)
    rows = [("headlight", np.zeros(3), head.diffuse * active, head.specular * active, head.ambient * active)]
    for i in np.flatnonzero(model.light_active):
        name = model.light(i).name
        if model.light_type[i] != mujoco.mjtLightType.mjLIGHT_DIRECTIONAL or model.light_bodyid[i] != 0:
            raise _refused(f"knows directional lights that are fixed in the world; light {name!r} is another")
        shine = model.light_diffuse[i], model.light_specular[i], model.light_ambient[i]
        rows.append((name, model.light_dir[i], *shine))
    names, *arrays = zip(*rows, strict=True)
    direction, diffuse, specular, ambient = (cast(Any, np.asarray(each, np.float32)) for each in arrays)
    return names, Lights(direction=direction, diffuse=diffuse, specular=specular, ambient=ambient.sum(axis=0))


def _refused(text: str) -> ValueError:
    return ValueError(f"the ray caster {text}. Draw this model with renderer: mujoco")
