"""What a MuJoCo model is, in its units, and what commonly goes wrong with one; ``ejax check`` prints it."""

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import mujoco
import numpy as np
from numpy.typing import NDArray

from ejax.envs.mujoco.models import load_model, read_spec
from ejax.envs.task.entities import home_of, joint_names, label
from ejax.envs.task.mjcf import LENGTHS, actuator_kind, actuator_name, unit_of_actuator
from ejax.schema.messages import shorten

_MESH = int(mujoco.mjtGeom.mjGEOM_MESH)
_WIDE, _NARROW = 6.0 * np.pi, 2.0 * np.pi**2 / 180.0
"""rad: a range of more than three turns reads like degrees taken as radians, one below this like the reverse."""
_DEEP = 1e-3  # m: how far geoms may overlap where an episode starts; resting on the floor takes less
_NEAR = 1e-3  # rad or m: keyframes are rounded
_HOLLOW = 1.5  # times a mesh's volume: from there on its hull is another shape
_MANY_VERTICES = 200  # of a hull: above, each contact of MJX's takes milliseconds on a CPU


class Inspection(NamedTuple):
    facts: dict[str, str]
    tables: dict[str, list[dict[str, str]]]
    """Title -> rows, each value by its column."""
    warnings: list[str]
    errors: list[str]
    """Reasons why ejax does not simulate it."""


def inspect_model(asset: str, keyframe: str | int = "") -> Inspection:
    """Read a model, ``asset`` as in ``Physics``, at the keyframe that episodes start from, as in ``MuJoCoTask``.

    Raises ValueError: MuJoCo does not compile it.
    """
    spec = read_spec(asset)
    model, errors = spec.compile(), []
    tables = {"joints": _joints(model), "actuators": _actuators(model)}
    warnings = [*_ranges(model), *_drives(model), *_masses(spec, model), *_hulls(model), *_keys(model)]
    try:
        warnings += _start(asset, keyframe)
    except ValueError as error:
        errors.append(str(error))
    if not model.nu:
        warnings.append("there are no actuators: a task needs some; give the MJCF an <actuator> section")
    return Inspection(_facts(model), {name: rows for name, rows in tables.items() if rows}, warnings, errors)


def _facts(model: mujoco.MjModel) -> dict[str, str]:
    shown, met = (set(model.geom_dataid[(model.geom_type == _MESH) & each]) for each in (~_meets(model), _meets(model)))
    flat = ", none of which collides" if not met else f", of which {len(met)} collide, by their convex hulls"
    keys = ", ".join(label(model, "key", i) for i in range(model.nkey))
    return {
        "size": f"{model.nbody - 1} bodies, {model.njnt} joints, nq {model.nq}, nv {model.nv}, {model.nu} actuators",
        "mass": f"{model.body_mass[model.body_weldid > 0].sum():.4g} kg that moves",
        "timestep": f"{model.opt.timestep:g} s",
        "meshes": f"{len(shown | met)}{flat}" if shown | met else "none",
        "keyframes": keys or "none",
    }


def _joints(model: mujoco.MjModel) -> list[dict[str, str]]:
    rows, names = [], joint_names(model)
    for i in range(model.njnt):
        kind, dof = mujoco.mjtJoint(int(model.jnt_type[i])).name.removeprefix("mjJNT_").lower(), model.jnt_dofadr[i]
        unit = LENGTHS.get(int(model.jnt_type[i]), "")
        force = model.jnt_actfrcrange[i] if model.jnt_actfrclimited[i] else None
        rows.append(
            {
                "joint": names[i],
                "kind": kind,
                "range": _span(model.jnt_range[i], unit) if model.jnt_limited[i] else "free",
                "damping": f"{model.dof_damping[dof]:.4g}",
                "armature": f"{model.dof_armature[dof]:.4g}",
                "friction": f"{model.dof_frictionloss[dof]:.4g}",
                "force": "" if force is None else _span(force, _effort(unit)),
            }
        )
    return rows


def _actuators(model: mujoco.MjModel) -> list[dict[str, str]]:
    rows = []
    for i in range(model.nu):
        kind, (what, unit, scale) = actuator_kind(model, i), unit_of_actuator(model, i)
        gain, bias = model.actuator_gainprm[i], model.actuator_biasprm[i]
        numbers = {"position": f"kp {gain[0]:.4g}, kv {-bias[2]:.4g}", "velocity": f"kv {gain[0]:.4g}"}
        other = f"gain {gain[0]:.4g}, bias {bias[0]:.4g} {bias[1]:.4g} {bias[2]:.4g}".removesuffix(", bias 0 0 0")
        gear = f", gear {model.actuator_gear[i, 0]:.4g}" if model.actuator_gear[i, 0] != 1.0 else ""
        rows.append(
            {
                "actuator": actuator_name(model, i),
                "kind": kind,
                "moves": _moved(model, i),
                "control is": what,
                "range": _span(scale * model.actuator_ctrlrange[i], unit) if model.actuator_ctrllimited[i] else "none",
                "gains": numbers.get(kind, other) + gear,
                "force": _span(model.actuator_forcerange[i], "") if model.actuator_forcelimited[i] else "",
            }
        )
    return rows


def _ranges(model: mujoco.MjModel) -> Iterator[str]:
    turns = [i for i in range(model.njnt) if LENGTHS.get(int(model.jnt_type[i])) == "rad" and model.jnt_limited[i]]
    size = model.jnt_range[:, 1] - model.jnt_range[:, 0]
    names = joint_names(model)
    if wide := [f"{names[i]} ({_span(model.jnt_range[i], 'rad')})" for i in turns if size[i] > _WIDE]:
        yield f"ranges of more than three turns: {_list(wide)}; degrees need <compiler angle='degree'/>, MJCF's default"
    if narrow := [f"{names[i]} ({_span(model.jnt_range[i], 'rad')})" for i in turns if size[i] < _NARROW]:
        yield f"ranges of a few degrees: {_list(narrow)}; radians need <compiler angle='radian'/>"


def _drives(model: mujoco.MjModel) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for i in range(model.nu):
        kind, on, name = actuator_kind(model, i), model.actuator_trntype[i], actuator_name(model, i)
        if not model.actuator_ctrllimited[i]:
            text = "no ctrlrange, which actions of ±1 are scaled to: write one, or inheritrange='1' for a position"
            found.setdefault(text, []).append(name)
        if on != mujoco.mjtTrn.mjTRN_JOINT:
            continue
        joint = int(model.actuator_trnid[i, 0])
        low, high = model.actuator_ctrlrange[i]
        servo = kind == "position" and model.actuator_gear[i, 0] == 1.0
        if servo and model.actuator_ctrllimited[i] and model.jnt_limited[joint]:
            least, most = model.jnt_range[joint]
            slack = 0.5 * (most - least)
            if low < least - slack or high > most + slack:
                text = "a ctrlrange far beyond the joint's range: MuJoCo takes it as radians in any file"
                found.setdefault(text, []).append(f"{name} ({low:g} to {high:g})")
        if kind == "position" and not model.actuator_forcelimited[i] and not model.jnt_actfrclimited[joint]:
            found.setdefault("a position drive without a limit of its force: give a forcerange", []).append(name)
        if servo and not model.actuator_biasprm[i, 2] and not model.dof_damping[model.jnt_dofadr[joint]]:
            found.setdefault("a position drive without damping, which swings: give a kv or dampratio", []).append(name)
    yield from (f"{_list(names)}: {text}" for text, names in found.items())


def _masses(spec: mujoco.MjSpec, model: mujoco.MjModel) -> Iterator[str]:
    moving = [i for i in range(1, model.nbody) if model.body_weldid[i]]
    light = [label(model, "body", i) for i in moving if model.body_dofnum[i] and not model.body_mass[i] > 1e-6]
    if light:
        yield f"{_list(light)}: moves and weighs nothing by itself; give it an <inertial>"
    twice: list[str] = []
    low, high = spec.compiler.inertiagrouprange
    for body in spec.bodies:
        weighs = [
            geom
            for geom in body.geoms
            if low <= geom.group <= high and (geom.density > 0.0 if np.isnan(geom.mass) else geom.mass > 0.0)
        ]
        shown = [geom for geom in weighs if not geom.contype and not geom.conaffinity]
        if shown and len(weighs) > len(shown) and not body.explicitinertial and model.body_weldid[body.id]:
            twice.append(body.name or f"body {body.id}")
    if twice:
        yield f"{_list(twice)}: geoms that only show weigh too; give an <inertial>, or mass='0' to them"


def _hulls(model: mujoco.MjModel) -> Iterator[str]:
    hollow, large, meshes = [], [], model.geom_dataid[(model.geom_type == _MESH) & _meets(model)]
    for mesh in map(int, np.unique(meshes)):
        name, start = label(model, "mesh", mesh), int(model.mesh_graphadr[mesh])
        corner = _rows(model.mesh_vert, model.mesh_vertadr, model.mesh_vertnum, mesh)
        if start < 0:
            continue
        num_corners, num_faces = map(int, model.mesh_graph[start : start + 2])
        end = start + 2 + 3 * num_corners + 6 * num_faces  # its last part: the faces' corners, among the mesh's
        hull = model.mesh_graph[end - 3 * num_faces : end].reshape(-1, 3)
        face, middle = _rows(model.mesh_face, model.mesh_faceadr, model.mesh_facenum, mesh), corner.mean(axis=0)
        own, whole = _volumes(corner[face] - middle).sum(), np.abs(_volumes(corner[hull] - middle)).sum()
        if 0.0 < own * _HOLLOW < whole:
            hollow.append(f"{name} ({whole / own:.1f} times)")
        if num_corners > _MANY_VERTICES:
            large.append(f"{name} ({num_corners})")
    if hollow:
        yield f"meshes collide by convex hulls, of a far greater volume here: {_list(hollow)}; split them, or use boxes"
    if large:
        yield f"hulls with many vertices, slow on MJX: {_list(large)}; give the mesh a maxhullvert, such as 64"


def _keys(model: mujoco.MjModel) -> Iterator[str]:
    single = np.isin(model.jnt_type, list(LENGTHS)) & (model.jnt_limited != 0)
    names, drives = joint_names(model), [actuator_name(model, i) for i in range(model.nu)]
    for what, low, high, counts, labels in (
        ("a joint's range", *model.jnt_range.T, single, names),
        ("a ctrlrange", *model.actuator_ctrlrange.T, model.actuator_ctrllimited != 0, drives),
    ):
        found = []
        for key in range(model.nkey):
            value = model.key_qpos[key][model.jnt_qposadr] if labels is names else model.key_ctrl[key]
            beyond = counts & ((value < low - _NEAR) | (value > high + _NEAR))
            if beyond.any():
                found.append(f"{label(model, 'key', key)} ({', '.join(labels[i] for i in np.flatnonzero(beyond))})")
        if found:
            yield f"keyframes beyond {what}: {_list(found)}"


def _start(asset: str, keyframe: str | int) -> Iterator[str]:
    model, data = load_model(asset), copy.copy(home_of(asset, keyframe)[0])  # the other is kept for others
    mujoco.mj_forward(model, data)
    deep: dict[str, float] = {}
    for contact in data.contact:
        bodies = sorted(label(model, "body", int(model.geom_bodyid[geom])) for geom in contact.geom)
        deep[" and ".join(bodies)] = max(deep.get(" and ".join(bodies), 0.0), -float(contact.dist))
    if found := [f"{bodies} ({1e3 * depth:.1f} mm)" for bodies, depth in deep.items() if depth > _DEEP]:
        yield f"overlap at the start: {_list(found)}; an <exclude>, or another keyframe, keeps them apart"


def _meets(model: mujoco.MjModel) -> NDArray[np.bool_]:
    """[ngeom]: it can collide, by its masks or by a <pair>."""
    masked = (model.geom_contype != 0) | (model.geom_conaffinity != 0)
    return masked | np.isin(np.arange(model.ngeom), [*model.pair_geom1, *model.pair_geom2])


def _moved(model: mujoco.MjModel, i: int) -> str:
    kind = mujoco.mjtTrn(int(model.actuator_trntype[i])).name.removeprefix("mjTRN_").lower()
    part = {"jointinparent": "joint", "slidercrank": "site"}.get(kind, kind)
    name = getattr(model, part)(int(model.actuator_trnid[i, 0])).name
    return name if part == "joint" else f"{kind} {name}"


def _rows(array: NDArray[Any], start: NDArray[Any], count: NDArray[Any], i: int) -> NDArray[Any]:
    return array[int(start[i]) : int(start[i] + count[i])]


def _volumes(triangles: NDArray[np.float32]) -> NDArray[np.float64]:
    """[F], m³: of the tetrahedra over ``triangles`` [F, 3, 3] with the origin, negative where it is before the face."""
    one, two, three = triangles.astype(np.float64).swapaxes(0, 1)
    return np.einsum("fi,fi->f", one, np.cross(two, three)) / 6.0


def _span(ends: NDArray[np.float64], unit: str) -> str:
    return f"{ends[0]:.4g} to {ends[1]:.4g} {unit.removesuffix('1')}".rstrip()


def _effort(unit: str) -> str:
    return {"rad": "N m", "m": "N"}.get(unit, "")


def _list(names: list[str]) -> str:
    return shorten(", ".join(names))
