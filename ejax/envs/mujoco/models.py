"""MuJoCo models from MJCF: for the physics, for pictures, and ready for parameters that differ from row to row.

A step is a pure function of qpos and qvel: the solver's warm start is off, and models with activations are refused.
"""

import copy
import functools
import os
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import mujoco
import numpy as np
from numpy.typing import NDArray

from ejax.envs.mujoco.parameters import displace
from ejax.schema.plain_files import check_plain, read_text

ASSETS = Path(__file__).parents[1] / "assets"
_SENSOR = mujoco.mjtSensor
_SEEING = _SENSOR.mjSENS_RANGEFINDER, _SENSOR.mjSENS_GEOMDIST, _SENSOR.mjSENS_GEOMNORMAL, _SENSOR.mjSENS_GEOMFROMTO
"""Sensors that read geoms which collide with nothing, too."""
_DISTANCE = 1  # a rangefinder's ``data`` of nothing else
_WARM_START, _SLEEP = int(mujoco.mjtDisableBit.mjDSBL_WARMSTART), int(mujoco.mjtEnableBit.mjENBL_SLEEP)
_MAX_XML = 16 << 20
_MAX_ASSET = 1 << 30  # bytes of a mesh, a texture or a height field
_FOLDERS = ("meshdir", "texturedir", "assetdir")
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors of the places where a file may be: most are not there, which MuJoCo reports itself."""


def load_model(asset: str) -> mujoco.MjModel:
    """Load the simulated model, the MJCF without its visual geoms; ``asset`` as in ``Physics``."""
    return _load_model(asset, visual=False)


def load_parametric_model(asset: str, names: tuple[str, ...]) -> mujoco.MjModel:
    """Load the simulated model, ready for the parameters of these names to be changed."""
    return _load_model(asset, visual=False, displaced=True) if "body_ipos" in names else load_model(asset)


def load_accelerated_model(asset: str, names: tuple[str, ...]) -> mujoco.MjModel:
    """Load the parametric model for MJX and Warp, which ask only once which joints have dry friction."""
    model = load_parametric_model(asset, names)
    odd = (model.sensor_objtype != int(mujoco.mjtObj.mjOBJ_SITE)) | (model.sensor_intprm[:, 0] != _DISTANCE)
    wide = (model.sensor_type == int(_SENSOR.mjSENS_RANGEFINDER)) & (odd | (model.sensor_dim != 1))
    if wide.any():
        which = ", ".join(repr(model.sensor(i).name or int(i)) for i in np.flatnonzero(wide))
        text = "reads more than one distance; give it a site and no data, or physics: mujoco"
        raise ValueError(f"rangefinder {which} {text}")
    if "dof_frictionloss" not in names:
        return model
    model = copy.copy(model)
    model.dof_frictionloss[:] = 1.0  # so that they make a row of the solver for each joint's friction, 0 or not
    return model


def load_drawn_model(asset: str) -> mujoco.MjModel:
    """Load the model with everything that can be seen; not to be changed."""
    return _load_model(asset, visual=True)


def mocap_bodies(model: Any) -> NDArray[np.int_]:
    """Return the mocap bodies, in the order of ``mocap_pos``."""
    return np.flatnonzero(np.asarray(model.body_mocapid) >= 0)


@functools.cache
def _load_model(asset: str, *, visual: bool, displaced: bool = False) -> mujoco.MjModel:
    spec = _read_spec(asset)
    # either would make a step depend on the steps before it
    spec.option.disableflags |= _WARM_START
    spec.option.enableflags &= ~_SLEEP
    spec.compiler.discardvisual = not visual and all(each.type not in _SEEING for each in spec.sensors)
    model = spec.compile()
    _refuse_memory(asset, model)
    return displace(spec, model) if displaced else model


def settings_changed(asset: str) -> tuple[str, ...]:
    """Name settings of the MJCF that the model is simulated without."""
    option, texts = _read_spec(asset).option, []
    if not option.disableflags & _WARM_START:
        text = "the solver's warm start is off, as if <option><flag warmstart='disable'/></option> were in the MJCF"
        texts.append(f"{text}: a step depends on the state alone")
    if option.enableflags & _SLEEP:
        texts.append("sleeping bodies (<flag sleep>) are off: a step depends on the state alone")
    return tuple(texts)


def check_model_files(model: Path | str) -> None:
    """Refuse a model that is, or names, other things than regular files of bounded size, by a ValueError naming it.

    MuJoCo would wait for a named pipe for ever. Missing files and broken XML are left to it. Files of MJCF text are
    looked for from the working directory.
    """
    try:
        _check_files(model)
    except OSError as error:
        raise ValueError(f"the model's file {error.filename} {error.strerror}") from None


def _check_files(model: Path | str) -> None:
    texts, folders, seen = [model], {Path() if isinstance(model, str) else model.parent}, set[Path]()
    while texts:
        given = texts.pop()
        try:
            root = ET.fromstring(given if isinstance(given, str) else read_text(given, _MAX_XML))
        except (*_ABSENT, UnicodeDecodeError, ET.ParseError):
            continue
        folders |= {given.parent} if isinstance(given, Path) else set()
        folders |= {
            folder / each.get(name, "") for folder in folders for each in root.iter("compiler") for name in _FOLDERS
        }
        named = [(each.tag, x) for each in root.iter() for key, x in each.items() if key.startswith("file") and x]
        for tag, name in named:
            for path in {folder / part for folder in folders for part in (name, os.path.basename(name))} - seen:
                seen.add(path)
                if tag in ("include", "model"):  # MJCF again
                    texts.append(path)
                    continue
                with suppress(*_ABSENT):
                    check_plain(path, _MAX_ASSET)


def _read_spec(asset: str) -> mujoco.MjSpec:
    model = asset if asset.lstrip().startswith("<") else ASSETS / asset
    check_model_files(model)
    return mujoco.MjSpec.from_string(model) if isinstance(model, str) else mujoco.MjSpec.from_file(str(model))


def _refuse_memory(asset: str, model: mujoco.MjModel) -> None:
    """Refuse, by a ValueError, an element whose state is not in qpos and qvel."""
    named = "the MJCF text" if asset.lstrip().startswith("<") else asset
    text = f"{named}: a step must depend on qpos, qvel and ctrl alone"
    if (clocks := model.sensor_type == int(_SENSOR.mjSENS_CLOCK)).any():
        which = model.sensor(int(clocks.argmax())).name
        raise ValueError(f"{text}, but sensor {which!r} reads a clock; world.time is it")
    if model.na:
        which = ", ".join(repr(model.actuator(i).name or i) for i in np.flatnonzero(model.actuator_actnum > 0))
        what = f"actuator {which} has an activation"
        raise ValueError(f"{text}, but {what}; use motor, position or velocity, without dyntype or timeconst")
    if model.npluginstate or model.nhistory:
        what = "a plugin with a state" if model.npluginstate else "a delay of an actuator or sensor"
        delays = "delay_action and delay_observation (docs/randomization.md) are delays of ejax's own"
        raise ValueError(f"{text}, but the model has {what}; take it out; {delays}")
