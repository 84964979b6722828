"""Light, camera and colours that differ from episode to episode, by EmbodiChain's functors and their parameters.

Refused is what a directional light, a camera that looks at a point and a plain colour lack. Each environment draws its
own, from its episode's key; most of EmbodiChain's functors draw one for all.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from ejax.envs.mujoco.drawing import default_view
from ejax.envs.mujoco.scenery import Camera, Lights, half_angles, look_at, model_lights, place_camera, scenery
from ejax.envs.randomization.draws import Draw, read_draw
from ejax.schema.registry import did_you_mean
from ejax.types import Array, CameraView, Key

CAMERA = "camera"
"""The ``uid`` of the one camera."""


@struct.dataclass(kw_only=True)
class Look:
    camera: Camera | None = None  # None: the camera stands still
    lights: Lights | None = None  # None: the model's
    rgba: dict[str, Array] = struct.field(default_factory=dict)  # geom name -> colour [4]


class _Functor(NamedTuple):
    key: str
    func: str
    uid: str
    ranges: dict[str, Draw]  # by parameter


_VECTOR, _NUMBER = (3,), ()
_PARAMETERS: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "randomize_camera_extrinsics": {"eye_range": _VECTOR, "target_range": _VECTOR, "up_range": _VECTOR},
    "randomize_camera_intrinsics": dict.fromkeys(("focal_x_range", "focal_y_range", "cx_range", "cy_range"), _NUMBER),
    "randomize_light": {"color_range": _VECTOR, "intensity_range": _NUMBER, "direction_range": _VECTOR},
    "randomize_emission_light": {"color_range": _VECTOR, "intensity_range": _NUMBER},
    "randomize_visual_material": {"base_color_range": _VECTOR},
}
"""Functor -> parameter -> shape of one end of its range."""
_REFUSED: Mapping[str, str] = {
    "randomize_indirect_lighting": "there are no HDR pictures of surroundings; use randomize_emission_light",
    "set_rigid_object_visual_material": "nothing is random in it; use a base_color_range of one colour",
    "set_rigid_object_group_visual_material": "there are no groups; name each geom in randomize_visual_material",
    "pos_range": "the camera looks at a point; use eye_range and target_range",
    "euler_range": "the camera looks at a point; use target_range and up_range",
    "position_range": "the lights are directional and have no place; use direction_range",
    **dict.fromkeys(
        ("metallic_range", "roughness_range", "ior_range"), "surfaces are matt with a highlight; use base_color_range"
    ),
    **dict.fromkeys(("texture_path", "random_texture_prob"), "geoms have plain colours; use base_color_range"),
}


@dataclass(frozen=True)
class Randomizers:
    """The changes that a config's ``randomizers`` make at the start of an episode.

    Args:
        entries: name -> {func, mode: reset, params: {entity_cfg: {uid}, …}}, as in ``env.events`` of a gym config.
        view: the camera that is randomized. None: the model's own.
        width, height: of the pictures, in which intrinsics are counted.
    Raises ValueError: a functor or parameter that is not supported, with the reason.
    """

    entries: Mapping[str, Any]
    view: CameraView | None
    width: int
    height: int

    def __post_init__(self) -> None:
        for functor in self._functors:
            if functor.func == "randomize_camera_extrinsics" and self.view is None:
                raise ValueError(f"{functor.key}: only a camera with camera_eye can be moved; give camera_eye")

    @property
    def _functors(self) -> list[_Functor]:
        return [_read(f"randomizers.{name}", entry) for name, entry in self.entries.items()]

    def draw(self, key: Key, asset: str) -> Look:
        """Draw the look of an episode. Raises ValueError: a light or geom that the model lacks."""
        lights, rgba = model_lights(asset), {}
        eyes: dict[str, Array] = {}
        lit = False
        for i, functor in enumerate(self._functors):
            own = jax.random.fold_in(key, i)
            drawn = {
                name: draw.sample(jax.random.fold_in(own, j), draw.low.shape)
                for j, (name, draw) in enumerate(sorted(functor.ranges.items()))
            }
            if functor.func in ("randomize_light", "randomize_emission_light"):
                lit = True
                lights = _relit(functor, drawn, lights, scenery(asset).light_names)
            elif functor.func == "randomize_visual_material":
                rgba[functor.uid] = _recoloured(functor, drawn["base_color_range"], asset)
            else:
                eyes |= {name: eyes.get(name, 0.0) + value for name, value in drawn.items()}
        return Look(camera=self._camera(eyes, asset) if eyes else None, lights=lights if lit else None, rgba=rgba)

    def _camera(self, moved: Mapping[str, Array], asset: str) -> Camera:
        """Add the ranges' values to the camera: m, and pixels."""
        aspect, model = self.width / self.height, scenery(asset).model
        view = self.view or default_view(asset)
        fovy = model.cam_fovy[model.camera("main").id] if view is None else view.fovy
        tan_x, tan_y = half_angles(math.radians(fovy), None, aspect)
        centre = (0.5, 0.5) if view is None else view.center
        focal_x = 0.5 * self.width / tan_x + moved.get("focal_x_range", 0.0)
        focal_y = 0.5 * self.height / tan_y + moved.get("focal_y_range", 0.0)
        tans = 0.5 * self.width / focal_x, 0.5 * self.height / focal_y
        x, y = centre[0] + moved.get("cx_range", 0.0) / self.width, centre[1] + moved.get("cy_range", 0.0) / self.height
        if self.view is None:
            fixed = place_camera(asset, None, aspect)
            across, high = fixed.frame[:, 0] * (tans[0] / tan_x), fixed.frame[:, 1] * (tans[1] / tan_y)
            aim = fixed.frame[:, 2] + across * (1.0 - 2.0 * x) + high * (2.0 * y - 1.0)
            return Camera(eye=fixed.eye, frame=jnp.stack([across, high, aim], axis=1))
        eye, target, up = (
            jnp.asarray(getattr(self.view, name), jnp.float32) + moved.get(f"{name}_range", 0.0)
            for name in ("eye", "target", "up")
        )
        return look_at(eye, target, up, tans, (x, y))


def _read(key: str, entry: Any) -> _Functor:
    if not isinstance(entry, Mapping) or "func" not in entry:
        raise ValueError(f"{key} takes {{func: …, params: {{…}}}}, got {entry!r}")
    func, params = entry["func"], dict(entry.get("params", {}))
    if extra := set(entry) - {"func", "mode", "params"}:
        raise ValueError(f"{key} takes func, mode and params, got {', '.join(sorted(extra))} as well")
    if func not in _PARAMETERS:
        why = _REFUSED.get(func, f"there is {', '.join(_PARAMETERS)}{did_you_mean(str(func), _PARAMETERS)}")
        raise ValueError(f"{key}.func: {func} is not supported: {why}")
    if entry.get("mode", "reset") != "reset":
        text = f"got {entry['mode']!r}: a picture's look is drawn once per episode"
        raise ValueError(f"{key}.mode must be 'reset', {text}")
    uid = _uid(key, func, params.pop("entity_cfg", None))
    known = _PARAMETERS[func]
    for name in (name for name in params if name not in known):
        why = _REFUSED.get(name, f"{func} takes {', '.join(known)}{did_you_mean(str(name), known)}")
        raise ValueError(f"{key}.params.{name} is not supported: {why}")
    given = {name: value for name, value in params.items() if value is not None}
    if not given:
        raise ValueError(f"{key}.params gives no range; {func} takes {', '.join(known)}")
    ranges = {name: read_draw(f"{key}.params.{name}", value, shape=known[name]) for name, value in given.items()}
    return _Functor(key, func, uid, ranges)


def _uid(key: str, func: str, entity: Any) -> str:
    camera = func.startswith("randomize_camera")
    if func == "randomize_emission_light":
        if entity is not None:
            raise ValueError(f"{key}.params.entity_cfg: {func} takes none")
        return ""
    if entity is None and camera:
        return CAMERA
    if not isinstance(entity, Mapping) or set(entity) != {"uid"}:
        raise ValueError(f"{key}.params.entity_cfg takes {{uid: …}}, got {entity!r}")
    if camera and entity["uid"] != CAMERA:
        raise ValueError(f"{key}.params.entity_cfg.uid: the one camera is '{CAMERA}', got {entity['uid']!r}")
    return str(entity["uid"])


def _relit(functor: _Functor, drawn: Mapping[str, Array], lights: Lights, names: tuple[str, ...]) -> Lights:
    colour, stronger = drawn.get("color_range"), drawn.get("intensity_range")
    if functor.func == "randomize_emission_light":  # both absolute: the light that is everywhere
        colour = lights.ambient if colour is None else colour
        return replace(lights, ambient=colour if stronger is None else colour * stronger)
    if functor.uid not in names:
        raise ValueError(f"{functor.key}: the model has no light '{functor.uid}'; there is {', '.join(names)}")
    row = names.index(functor.uid)
    diffuse = lights.diffuse[row] if colour is None else colour
    diffuse = diffuse if stronger is None else diffuse * jnp.maximum(1.0 + stronger, 0.0)
    lights = replace(lights, diffuse=lights.diffuse.at[row].set(diffuse))
    if "direction_range" not in drawn:
        return lights
    if row == 0:
        raise ValueError(f"{functor.key}: the headlight shines where the camera looks; it takes no direction_range")
    return replace(lights, direction=lights.direction.at[row].add(drawn["direction_range"]))


def _recoloured(functor: _Functor, colour: Array, asset: str) -> Array:
    solids = {solid.name: solid for solid in scenery(asset).solids if solid.geom is not None}
    if functor.uid not in solids:
        hint = did_you_mean(functor.uid, solids)
        raise ValueError(f"{functor.key}: no geom '{functor.uid}' is drawn; there is {', '.join(solids)}{hint}")
    return jnp.append(colour, solids[functor.uid].rgba[3])
