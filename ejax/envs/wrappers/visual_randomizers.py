"""Light, camera and colours that differ from episode to episode, by EmbodiChain's functors and their parameters.

Refused is what a directional light, a camera that looks at a point and a plain colour lack. Each environment draws its
own, from its episode's key; most of EmbodiChain's functors draw one for all.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from ejax.envs.mujoco.drawing import default_view, own_camera
from ejax.envs.mujoco.scenery import Camera, Lights, half_angles, look_at, place_camera, scenery
from ejax.envs.randomization.draws import Draw, read_draw
from ejax.schema.frozen import thaw
from ejax.schema.messages import did_you_mean, short_repr
from ejax.schema.tables import tables_beside
from ejax.types import Array, CameraView, Key

_CAMERA = "camera"
"""The ``uid`` of the one camera."""


@struct.dataclass(kw_only=True)
class Look:
    camera: Camera | None = None  # None: the camera stands still
    lights: Lights | None = None  # None: the model's
    rgba: dict[str, Array] = struct.field(default_factory=dict)  # geom name -> colour [4]


class VisualFunctor(NamedTuple):
    key: str
    func: str
    uid: str
    ranges: dict[str, Draw]  # by parameter


_TABLES = tables_beside(__file__)
_PARAMETERS: Mapping[str, Mapping[str, int]] = _TABLES["parameters"]
_REFUSED: Mapping[str, str] = _TABLES["refused"]


def read_randomizers(entries: Mapping[str, Any], view: CameraView | None) -> list[VisualFunctor]:
    """Read a config's ``randomizers``: name -> {func, mode: reset, params: {entity_cfg: {uid}, …}}, as in
    ``env.events`` of a gym config. ``view``: the camera that is randomized; None: the model's own.

    Raises ValueError: a functor or parameter that is not supported, with the reason.
    """
    functors = [_read(f"randomizers.{name}", entry) for name, entry in entries.items()]
    for functor in functors:
        if functor.func == "randomize_camera_extrinsics" and view is None:
            raise ValueError(f"{functor.key}: only a camera with camera_eye can be moved; set camera_eye")
    return functors


def draw_look(
    functors: Iterable[VisualFunctor], key: Key, asset: str, view: CameraView | None, width: int, height: int
) -> Look:
    """Draw the look of an episode, in pictures of this size. Raises ValueError: a light or geom that the model
    lacks."""
    given = jax.tree.map(jnp.asarray, scenery(asset).lights)
    lights, rgba, moved = given, dict[str, Array](), dict[str, Any]()
    for i, functor in enumerate(functors):
        own = jax.random.fold_in(key, i)  # by number, so that a later functor changes no earlier one's draws
        drawn = {
            name: draw.sample(jax.random.fold_in(own, j), draw.low.shape)
            for j, (name, draw) in enumerate(sorted(functor.ranges.items()))
        }
        if functor.func in ("randomize_light", "randomize_emission_light"):
            lights = _relit(functor, drawn, lights, scenery(asset).light_names)
        elif functor.func == "randomize_visual_material":
            solids = {solid.name: solid for solid in scenery(asset).solids if solid.geom is not None}
            if functor.uid not in solids:
                there = f"there is {', '.join(solids)}{did_you_mean(functor.uid, solids)}"
                raise ValueError(f"{functor.key}: no geom '{functor.uid}' is drawn; {there}")
            rgba[functor.uid] = jnp.append(drawn["base_color_range"], solids[functor.uid].rgba[3])
        else:
            moved |= {name: moved.get(name, 0.0) + value for name, value in drawn.items()}
    camera = _moved(moved, asset, view, width, height) if moved else None
    return Look(camera=camera, lights=None if lights is given else lights, rgba=rgba)


def _moved(moved: Mapping[str, Array], asset: str, view: CameraView | None, width: int, height: int) -> Camera:
    """Add the ranges' values to the camera: m, and pixels."""
    aspect, model = width / height, scenery(asset).model
    start = view or default_view(asset)  # None: the model's own has a place and frame
    fovy = model.cam_fovy[own_camera(model)] if start is None else start.fovy
    tan_x, tan_y = half_angles(fovy, None, aspect)
    centre = (0.5, 0.5) if start is None else start.center
    focal_x = 0.5 * width / tan_x + moved.get("focal_x_range", 0.0)
    focal_y = 0.5 * height / tan_y + moved.get("focal_y_range", 0.0)
    tans = 0.5 * width / focal_x, 0.5 * height / focal_y
    x, y = centre[0] + moved.get("cx_range", 0.0) / width, centre[1] + moved.get("cy_range", 0.0) / height
    if view is None:
        fixed = place_camera(asset, None, aspect)
        across, high = fixed.frame[:, 0] * (tans[0] / tan_x), fixed.frame[:, 1] * (tans[1] / tan_y)
        aim = fixed.frame[:, 2] + across * (1.0 - 2.0 * x) + high * (2.0 * y - 1.0)
        return Camera(eye=fixed.eye, frame=jnp.stack([across, high, aim], axis=1))
    eye, target, up = (
        jnp.asarray(getattr(view, name), jnp.float32) + moved.get(f"{name}_range", 0.0)
        for name in ("eye", "target", "up")
    )
    return look_at(eye, target, up, tans, (x, y))


def _read(key: str, entry: Any) -> VisualFunctor:
    if not isinstance(entry, Mapping) or "func" not in entry or set(entry) - {"func", "mode", "params"}:
        raise ValueError(f"{key} takes {{func: …, mode: reset, params: {{…}}}}, got {short_repr(thaw(entry))}")
    func, mode = entry["func"], entry.get("mode", "reset")
    known = _known(f"{key}.func", func, _PARAMETERS)
    if mode != "reset":
        raise ValueError(f"{key}.mode must be 'reset', got {mode!r}: a picture's look is drawn once per episode")
    params = {name: value for name, value in entry.get("params", {}).items() if value is not None}
    entity = params.pop("entity_cfg", {"uid": _CAMERA} if func.startswith("randomize_camera") else None)
    if func == "randomize_emission_light" and entity is None:
        entity = {"uid": ""}  # the light that is everywhere
    elif not isinstance(entity, Mapping) or set(entity) != {"uid"} or func == "randomize_emission_light":
        takes = "none" if func == "randomize_emission_light" else "{uid: …}"
        raise ValueError(f"{key}.params.entity_cfg takes {takes}, got {entity!r}")
    if func.startswith("randomize_camera") and entity["uid"] != _CAMERA:
        raise ValueError(f"{key}.params.entity_cfg.uid: the one camera is '{_CAMERA}', got {entity['uid']!r}")
    sizes = {name: _known(f"{key}.params", name, known) for name in params}
    if not params:
        raise ValueError(f"{key}.params gives no range; {func} takes {', '.join(known)}")
    shapes = {name: () if size == 1 else (size,) for name, size in sizes.items()}
    ranges = {name: read_draw(f"{key}.params.{name}", value, shape=shapes[name]) for name, value in params.items()}
    return VisualFunctor(key, func, str(entity["uid"]), ranges)


def _known(key: str, name: Any, table: Mapping[str, Any]) -> Any:
    if name not in table:
        why = _REFUSED.get(name, f"there is {', '.join(table)}{did_you_mean(str(name), table)}")
        raise ValueError(f"{key}: {name} is not supported: {why}")
    return table[name]


def _relit(functor: VisualFunctor, drawn: Mapping[str, Array], lights: Lights, names: tuple[str, ...]) -> Lights:
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
