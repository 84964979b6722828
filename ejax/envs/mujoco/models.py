"""MuJoCo models from MJCF: for the physics, for pictures, and with numbers that may differ from row to row: masses,
friction, gains, sizes, gravity.

A step is a pure function of qpos and qvel: the solver's warm start is off, and models with activations are refused.

A row's parameters are ``{field: array}``: whole fields of ``MjModel``, and ``gravity``. Others, and entries that equal
the MJCF's in the row's dtype, are the MJCF's: an unchanged mass keeps its bits. The C engine derives what follows from
masses (``mj_setConst``) when a row's parameters change (``ModelRows``), MJX and Warp in each step
(``with_parameters``).
"""

import copy
import functools
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import jax.numpy as jnp
import mujoco
import numpy as np
from numpy.typing import NDArray

from ejax.schema.messages import did_you_mean
from ejax.schema.plain_files import check_plain, read_text
from ejax.types import Array

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
FIELDS = (
    *("body_mass", "body_inertia", "body_ipos", "gravity"),
    *("dof_damping", "dof_armature", "dof_frictionloss", "actuator_gainprm", "actuator_biasprm"),
    *("geom_friction", "pair_friction", "geom_size", "geom_pos", "geom_rbound", "geom_aabb"),
)
"""Fields that may differ. ``body_pos`` may not: tasks compute the place of a tool from the MJCF's."""
_INERTIAL = ("body_mass", "body_inertia", "body_ipos", "dof_armature")  # fields that what MuJoCo derives depends on
_POSITIVE = ("body_mass", "body_inertia")
_DISPLACED = 0.01  # m


@functools.cache
def load_model(asset: str, *, visual: bool = False, displaced: bool = False) -> mujoco.MjModel:
    """Load the simulated model, the MJCF without its visual geoms; ``asset`` as in ``Physics``. Not to be changed.

    ``visual``: with everything that can be seen. ``displaced``: for other centres of mass, see ``displace``.
    """
    spec = read_spec(asset)
    # either would make a step depend on the steps before it
    spec.option.disableflags |= _WARM_START
    spec.option.enableflags &= ~_SLEEP
    spec.compiler.discardvisual = not visual and all(each.type not in _SEEING for each in spec.sensors)
    model = spec.compile()
    _refuse_memory(asset, model)
    return displace(spec, model) if displaced else model


def load_parametric_model(asset: str, names: tuple[str, ...]) -> mujoco.MjModel:
    """Load the simulated model, ready for the parameters of these names to be changed."""
    return load_model(asset, displaced=True) if "body_ipos" in names else load_model(asset)


def load_accelerated_model(asset: str, names: tuple[str, ...]) -> mujoco.MjModel:
    """Load the parametric model for MJX and Warp, which ask only once which joints have dry friction."""
    model = load_parametric_model(asset, names)
    odd = (model.sensor_objtype != int(mujoco.mjtObj.mjOBJ_SITE)) | (model.sensor_intprm[:, 0] != _DISTANCE)
    wide = (model.sensor_type == int(_SENSOR.mjSENS_RANGEFINDER)) & (odd | (model.sensor_dim != 1))
    if wide.any():
        which = ", ".join(repr(model.sensor(i).name or int(i)) for i in np.flatnonzero(wide))
        text = "reads more than one distance; use a site without data, or physics: mujoco"
        raise ValueError(f"rangefinder {which} {text}")
    if "dof_frictionloss" not in names:
        return model
    model = copy.copy(model)
    model.dof_frictionloss[:] = 1.0  # so that they make a row of the solver for each joint's friction, 0 or not
    return model


def beyond_engine(engine: str, error: NotImplementedError) -> ValueError:
    """Return the refusal of a model that has more than MJX or Warp simulates."""
    what = re.sub(r"mjtGeom\.mjGEOM_(\w+)", lambda match: match[1].lower(), str(error)).rstrip(".")
    return ValueError(f"physics '{engine}' does not simulate all of the model: {what}; use mujoco")


def mocap_bodies(model: Any) -> NDArray[np.int_]:
    """Return the mocap bodies, in the order of ``mocap_pos``."""
    return np.flatnonzero(np.asarray(model.body_mocapid) >= 0)


def settings_changed(asset: str) -> tuple[str, ...]:
    """Name settings of the MJCF that the model is simulated without."""
    option, texts = read_spec(asset).option, []
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
        inside = [each.get(name, "") for each in root.iter("compiler") for name in _FOLDERS]
        folders |= {folder / name for folder in folders for name in inside}
        named = [(each.tag, x) for each in root.iter() for key, x in each.items() if key.startswith("file") and x]
        for tag, name in named:
            for path in {folder / part for folder in folders for part in (name, os.path.basename(name))} - seen:
                seen.add(path)
                if tag in ("include", "model"):  # MJCF again
                    texts.append(path)
                    continue
                with suppress(*_ABSENT):
                    check_plain(path, _MAX_ASSET)


def read_spec(asset: str) -> mujoco.MjSpec:
    """Read the MJCF, uncompiled; ``asset`` as in ``Physics``. Raises ValueError: MuJoCo cannot read it."""
    model = asset if asset.lstrip().startswith("<") else ASSETS / asset
    check_model_files(model)
    return mujoco.MjSpec.from_string(model) if isinstance(model, str) else mujoco.MjSpec.from_file(str(model))


def _refuse_memory(asset: str, model: mujoco.MjModel) -> None:
    """Refuse, by a ValueError, an element whose state is not in qpos and qvel."""
    named = "the MJCF text" if asset.lstrip().startswith("<") else asset
    text = f"{named}: a step must depend on qpos, qvel and ctrl alone"
    if (clocks := model.sensor_type == int(_SENSOR.mjSENS_CLOCK)).any():
        which = model.sensor(int(clocks.argmax())).name
        raise ValueError(f"{text}, but sensor {which!r} reads a clock; use world.time")
    if model.na:
        which = ", ".join(repr(model.actuator(i).name or i) for i in np.flatnonzero(model.actuator_actnum > 0))
        what = f"actuator {which} has an activation"
        raise ValueError(f"{text}, but {what}; use motor, position or velocity, without dyntype or timeconst")
    if model.npluginstate or model.nhistory:
        what = "a plugin with a state" if model.npluginstate else "a delay of an actuator or sensor"
        delays = "delay_action and delay_observation (docs/randomization.md) are delays of ejax's own"
        raise ValueError(f"{text}, but the model has {what}; take it out; {delays}")


def parameter(model: mujoco.MjModel, name: str) -> NDArray[np.float64]:
    """Return a field as the model has it, not to be changed."""
    return model.opt.gravity if name == "gravity" else getattr(model, name)


def check_parameters(model: mujoco.MjModel, parameters: Mapping[str, Any]) -> None:
    """Raise ValueError for a field that there is not, or another shape than the model's."""
    for name, value in parameters.items():
        if name not in FIELDS:
            there = f"{', '.join(FIELDS)}{did_you_mean(name, FIELDS)}"
            raise ValueError(f"no parameter '{name}'; rows may differ in {there}")
        if value.shape != parameter(model, name).shape:
            raise ValueError(f"parameter {name} has the shape {parameter(model, name).shape}, got {value.shape}")


def displace(spec: mujoco.MjSpec, model: mujoco.MjModel) -> mujoco.MjModel:
    """Return the model, compiled with all centres of mass displaced, then put back.

    MuJoCo compiles short cuts for a body whose centre of mass is at its origin (``body_simple``, ``body_sameframe``,
    the mass matrix's sparsity), which no later change undoes.
    """
    for body in spec.bodies:
        if model.body_mass[body.id] > 0.0:
            body.explicitinertial = True
            body.mass, body.inertia = model.body_mass[body.id], model.body_inertia[body.id]
            body.ipos, body.iquat = model.body_ipos[body.id] + _DISPLACED, model.body_iquat[body.id]
    displaced = spec.compile()
    for name in _POSITIVE:
        getattr(displaced, name)[:] = getattr(model, name)
    displaced.body_ipos[:], displaced.body_iquat[:] = model.body_ipos, model.body_iquat
    mujoco.mj_setConst(displaced, mujoco.MjData(displaced))
    return displaced


class ModelRows:
    """A model of the C engine for each row, rewritten when the row's parameters change. For one thread at a time."""

    def __init__(self, model: mujoco.MjModel, names: Sequence[str]) -> None:
        self._model, self._names = model, names
        self._data = mujoco.MjData(model)
        values = [parameter(model, name).ravel() for name in names] or [np.zeros(0)]
        positive = [(value > 0.0) & (name in _POSITIVE) for name, value in zip(names, values, strict=False)]
        self._base = np.concatenate(values)
        self._must_be_positive = np.concatenate(positive or [np.zeros(0, bool)])
        self._own: list[mujoco.MjModel] = []
        self._rows, self._sound = np.zeros((0, 0)), np.zeros(0, bool)

    def of(self, rows: NDArray[Any]) -> tuple[list[mujoco.MjModel], NDArray[np.bool_]]:
        """Return a model for each of ``rows`` [N, K], and which of them can be simulated; others get the MJCF's."""
        num_rows = len(rows)
        if not self._names:
            return [self._model] * num_rows, np.ones(num_rows, bool)
        if (rows.shape, rows.dtype) != (self._rows.shape, self._rows.dtype):
            self._rows, self._sound = np.full_like(rows, np.nan), np.zeros(num_rows, bool)  # all are new
            # a copy takes 700 µs and is made once; writing it and deriving the rest takes 20
            self._own += [copy.copy(self._model) for _ in range(num_rows - len(self._own))]
        changed = np.flatnonzero((rows != self._rows).any(axis=1))
        if len(changed):
            self._rows = rows.copy()
            # what equals the MJCF's number in float32 is meant to be that number, in float64
            exact = np.where(rows[changed] == self._base.astype(rows.dtype), self._base, rows[changed])
            positive = (exact[:, self._must_be_positive] > 0.0).all(axis=1)
            self._sound[changed] = np.isfinite(exact).all(axis=1) & positive
            for i, row in zip(changed, exact, strict=True):
                if self._sound[i]:
                    self._write(self._own[i], row)
        models = [own if sound else self._model for own, sound in zip(self._own, self._sound, strict=False)]
        return models, self._sound

    def _write(self, model: mujoco.MjModel, row: NDArray[np.float64]) -> None:
        start = 0
        for name in self._names:
            field = parameter(model, name)
            field[:] = row[start : start + field.size].reshape(field.shape)
            start += field.size
        if any(name in _INERTIAL for name in self._names):
            mujoco.mj_setConst(model, self._data)


def with_parameters(model: Any, host_model: mujoco.MjModel, parameters: Mapping[str, Array]) -> Any:
    """Return a model of MJX with a row's parameters. ``host_model``: what it was made of."""
    fields = {name: value for name, value in parameters.items() if name != "gravity"}
    changed = model.replace(**fields, **derived_fields(host_model, parameters))
    if "gravity" in parameters:
        changed = changed.replace(opt=changed.opt.replace(gravity=parameters["gravity"]))
    return changed


def derived_fields(model: mujoco.MjModel, parameters: Mapping[str, Array]) -> dict[str, Array]:
    """Derive from a row's masses the numbers of ``mj_setConst`` that steps read, at qpos0, with M the mass matrix:

        M = Σ Jᵀ diag(m m m I) J + armature, J of a body's centre of mass, about its principal axes
        dof_invweight0 = diag M⁻¹       body_invweight0 = mean diag of J M⁻¹ Jᵀ

    apart for translation and rotation, and as a mean over the axes of a free or ball joint. What qpos0 fixes, the
    C engine computes once. Empty where the row has the MJCF's masses.
    """
    if not any(name in _INERTIAL for name in parameters):
        return {}
    given = [parameters.get(name, parameter(model, name)) for name in _INERTIAL]
    mass, inertia, ipos, armature = (jnp.asarray(x, jnp.result_type(float)) for x in given)
    data = mujoco.MjData(model)
    data.qpos[:] = model.qpos0
    mujoco.mj_kinematics(model, data)
    mujoco.mj_comPos(model, data)
    origin, turning = np.zeros((2, model.nbody, 3, model.nv))
    for body in range(model.nbody):
        mujoco.mj_jacBody(model, data, origin[body], turning[body], body)
    precise = partial(jnp.einsum, precision="highest")  # on a GPU, too
    arm = precise("bij,bj->bi", data.xmat.reshape(-1, 3, 3), ipos)
    centre = origin + jnp.cross(turning, arm[:, :, None], axis=1)
    axes = np.einsum("bij,bin->bjn", data.ximat.reshape(-1, 3, 3), turning)
    jacobian = jnp.stack([centre, axes], axis=1)  # [nbody, 2, 3, nv], of translation and of rotation
    inertial = jnp.stack([jnp.tile(mass[:, None], 3), inertia], axis=1)
    matrix = precise("bkin,bki,bkim->nm", jacobian, inertial, jacobian) + jnp.diag(armature)
    inverse = jnp.linalg.inv(matrix)
    axis_mean = np.eye(model.nv)
    for kind, start in zip(model.jnt_type, model.jnt_dofadr, strict=True):
        free, ball = kind == mujoco.mjtJoint.mjJNT_FREE, kind == mujoco.mjtJoint.mjJNT_BALL
        for first in [start, start + 3] if free else [start] if ball else []:
            axis_mean[first : first + 3, first : first + 3] = 1.0 / 3.0
    is_below = np.eye(model.nbody, dtype=bool)
    for body in range(model.nbody - 1, 0, -1):  # children have greater numbers than their parents
        is_below[model.body_parentid[body]] |= is_below[body]
    weight = precise("bkin,nm,bkim->bk", jacobian, inverse, jacobian) / 3.0
    return {
        "dof_M0": jnp.diagonal(matrix),
        "dof_invweight0": precise("nm,m->n", axis_mean, jnp.diagonal(inverse)),
        "body_invweight0": jnp.where((model.body_weldid != 0)[:, None], weight, 0.0),
        "body_subtreemass": precise("bc,c->b", is_below.astype(float), mass),
    }
