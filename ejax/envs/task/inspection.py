"""Facts about a MuJoCo model in their units, and warnings of common mistakes; ``ejax check`` prints them."""

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

_JOINT = ("joint", "kind", "range", "damping", "armature", "friction", "force")
_ACTUATOR = ("actuator", "kind", "moves", "control is", "range", "gains", "force")
_MESH = int(mujoco.mjtGeom.mjGEOM_MESH)
_WIDE, _NARROW = 6.0 * np.pi, 2.0 * np.pi**2 / 180.0
"""rad: a range of more than three turns reads like degrees taken as radians, one below this like the reverse."""
_DEEP = 2e-3  # m: how far geoms may overlap where an episode starts; resting on the floor takes less
_NEAR = 1e-3  # rad or m: keyframes are rounded
_HOLLOW = 1.5  # times a mesh's volume: from there on its hull is another shape
_MANY_VERTICES = 200  # of a hull: above, each contact of MJX's takes milliseconds on a CPU


class Inspection(NamedTuple):
    facts: dict[str, str]
    tables: list[tuple[tuple[str, ...], list[tuple[str, ...]]]]
    """Columns and rows: of the joints, and of the actuators."""
    warnings: list[str]
    errors: list[str]  # Reasons why ejax does not simulate it


def inspect_model(asset: str, keyframe: str | int = "") -> Inspection:
    """Read a model, ``asset`` as in ``Physics``, at the keyframe that episodes start from, as in ``MuJoCoTask``.

    Raises ValueError: MuJoCo does not compile it.
    """
    spec = read_spec(asset)
    model, errors = spec.compile(), []
    tables = [(_JOINT, list(_joints(model))), (_ACTUATOR, list(_actuators(model)))]
    warnings = [*_ranges(model), *_drives(model), *_masses(spec, model), *_hulls(model), *_keys(model)]
    try:
        warnings += _start(asset, keyframe)
    except ValueError as error:
        errors.append(str(error))
    if not model.nu:
        warnings.append("the model has no actuators, and a task needs some; add an <actuator> section to the MJCF")
    warnings = list(map(shorten, warnings))
    return Inspection(_facts(model), [table for table in tables if table[1]], warnings, errors)


def _facts(model: mujoco.MjModel) -> dict[str, str]:
    used, met = (set(model.geom_dataid[(model.geom_type == _MESH) & each]) for each in (True, _meets(model)))
    colliding = f", of which {len(met)} collide, by their convex hulls" if met else ", none of which collides"
    return {
        "size": f"{model.nbody - 1} bodies, {model.njnt} joints, nq {model.nq}, nv {model.nv}, {model.nu} actuators",
        "mass": f"{model.body_mass[model.body_weldid > 0].sum():.4g} kg that moves",
        "timestep": f"{model.opt.timestep:g} s",
        "meshes": f"{len(used)}{colliding}" if used else "none",
        "keyframes": ", ".join(label(model, "key", i) for i in range(model.nkey)) or "none",
    }


def _joints(model: mujoco.MjModel) -> Iterator[tuple[str, ...]]:
    for i, name in enumerate(joint_names(model)):
        dof, unit = model.jnt_dofadr[i], LENGTHS.get(int(model.jnt_type[i]), "")
        yield (
            name,
            _short(mujoco.mjtJoint, model.jnt_type[i]),
            _span(model.jnt_range[i], unit) if model.jnt_limited[i] else "free",
            *(f"{each[dof]:.4g}" for each in (model.dof_damping, model.dof_armature, model.dof_frictionloss)),
            _span(model.jnt_actfrcrange[i], {"rad": "N m"}.get(unit, "N")) if model.jnt_actfrclimited[i] else "",
        )


def _actuators(model: mujoco.MjModel) -> Iterator[tuple[str, ...]]:
    for i in range(model.nu):
        kind, (what, unit, scale) = actuator_kind(model, i), unit_of_actuator(model, i)
        gain, bias, gear = model.actuator_gainprm[i], model.actuator_biasprm[i], model.actuator_gear[i, 0]
        numbers = {"position": f"kp {gain[0]:.4g}, kv {-bias[2]:.4g}", "velocity": f"kv {gain[0]:.4g}"}
        other = f"gain {gain[0]:.4g}, bias {bias[0]:.4g} {bias[1]:.4g} {bias[2]:.4g}".removesuffix(", bias 0 0 0")
        yield (
            actuator_name(model, i),
            kind,
            _moved(model, i),
            what,
            _span(scale * model.actuator_ctrlrange[i], unit) if model.actuator_ctrllimited[i] else "none",
            numbers.get(kind, other) + (f", gear {gear:.4g}" if gear != 1.0 else ""),
            _span(model.actuator_forcerange[i], "") if model.actuator_forcelimited[i] else "",
        )


def _ranges(model: mujoco.MjModel) -> Iterator[str]:
    turns = [i for i in range(model.njnt) if LENGTHS.get(int(model.jnt_type[i])) == "rad" and model.jnt_limited[i]]
    size, names = np.ptp(model.jnt_range, axis=1), joint_names(model)
    if wide := [f"{names[i]} ({_span(model.jnt_range[i], 'rad')})" for i in turns if size[i] > _WIDE]:
        yield f"ranges of more than three turns: {', '.join(wide)}; degrees need <compiler angle='degree'/>"
    if narrow := [f"{names[i]} ({_span(model.jnt_range[i], 'rad')})" for i in turns if size[i] < _NARROW]:
        yield f"ranges of a few degrees: {', '.join(narrow)}; radians need <compiler angle='radian'/>"


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
        servo = kind == "position" and model.actuator_gear[i, 0] == 1.0
        if servo and model.actuator_ctrllimited[i] and model.jnt_limited[joint]:
            (low, high), (least, most) = model.actuator_ctrlrange[i], model.jnt_range[joint]
            slack = 0.5 * (most - least)
            if low < least - slack or high > most + slack:
                text = "a ctrlrange far beyond the joint's range: MuJoCo takes it as radians in any file"
                found.setdefault(text, []).append(f"{name} ({low:g} to {high:g})")
        if kind == "position" and not model.actuator_forcelimited[i] and not model.jnt_actfrclimited[joint]:
            found.setdefault("a position drive without a force limit: set its forcerange", []).append(name)
        if servo and not model.actuator_biasprm[i, 2] and not model.dof_damping[model.jnt_dofadr[joint]]:
            found.setdefault("an undamped position drive, which oscillates: set its kv or dampratio", []).append(name)
    yield from (f"{', '.join(names)}: {text}" for text, names in found.items())


def _masses(spec: mujoco.MjSpec, model: mujoco.MjModel) -> Iterator[str]:
    moving = [i for i in range(1, model.nbody) if model.body_weldid[i]]
    light = [label(model, "body", i) for i in moving if model.body_dofnum[i] and not model.body_mass[i] > 1e-6]
    if light:
        yield f"{', '.join(light)}: moves and has no mass; add an <inertial>"
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
        yield f"{', '.join(twice)}: visual geoms have mass too; add an <inertial>, or set mass='0' on them"


def _hulls(model: mujoco.MjModel) -> Iterator[str]:
    hollow, large, meshes = [], [], model.geom_dataid[(model.geom_type == _MESH) & _meets(model)]
    for mesh in map(int, np.unique(meshes)):
        name, start = label(model, "mesh", mesh), int(model.mesh_graphadr[mesh])
        if start < 0:
            continue
        num_corners, num_faces = map(int, model.mesh_graph[start : start + 2])
        end = start + 2 + 3 * num_corners + 6 * num_faces  # its last part: the faces' corners, among the mesh's
        hull = model.mesh_graph[end - 3 * num_faces : end].reshape(-1, 3)
        corner = model.mesh_vert[model.mesh_vertadr[mesh] :][: model.mesh_vertnum[mesh]]
        face = model.mesh_face[model.mesh_faceadr[mesh] :][: model.mesh_facenum[mesh]]
        middle = corner.mean(axis=0)
        own, whole = _volumes(corner[face] - middle).sum(), np.abs(_volumes(corner[hull] - middle)).sum()
        if 0.0 < own * _HOLLOW < whole:
            hollow.append(f"{name} ({whole / own:.1f} times)")
        if num_corners > _MANY_VERTICES:
            large.append(f"{name} ({num_corners})")
    if hollow:
        yield f"meshes collide by hulls of a far greater volume: {', '.join(hollow)}; split them, or use boxes"
    if large:
        yield f"hulls with many vertices, slow on MJX: {', '.join(large)}; set a maxhullvert on the mesh, such as 64"


def _keys(model: mujoco.MjModel) -> Iterator[str]:
    single = np.isin(model.jnt_type, list(LENGTHS)) & (model.jnt_limited != 0)
    drives, limited = [actuator_name(model, i) for i in range(model.nu)], model.actuator_ctrllimited != 0
    for what, values, (low, high), counts, names in (
        ("a joint's range", model.key_qpos[:, model.jnt_qposadr], model.jnt_range.T, single, joint_names(model)),
        ("a ctrlrange", model.key_ctrl, model.actuator_ctrlrange.T, limited, drives),
    ):
        beyond = counts & ((values < low - _NEAR) | (values > high + _NEAR))
        which = [", ".join(names[i] for i in np.flatnonzero(row)) for row in beyond]
        if found := [f"{label(model, 'key', key)} ({each})" for key, each in enumerate(which) if each]:
            yield f"keyframes beyond {what}: {', '.join(found)}"


def _start(asset: str, keyframe: str | int) -> Iterator[str]:
    model, data = load_model(asset), copy.copy(home_of(asset, keyframe)[0])  # the other is kept for others
    mujoco.mj_forward(model, data)
    deep: dict[str, float] = {}
    for contact in data.contact:
        bodies = sorted(label(model, "body", int(model.geom_bodyid[geom])) for geom in contact.geom)
        deep[" and ".join(bodies)] = max(deep.get(" and ".join(bodies), 0.0), -float(contact.dist))
    if found := [f"{bodies} ({1e3 * depth:.1f} mm)" for bodies, depth in deep.items() if depth > _DEEP]:
        yield f"overlap at the start: {', '.join(found)}; an <exclude>, or another keyframe, keeps them apart"


def _meets(model: mujoco.MjModel) -> NDArray[np.bool_]:
    """[ngeom]: it can collide, by its masks or by a <pair>."""
    masked = (model.geom_contype != 0) | (model.geom_conaffinity != 0)
    return masked | np.isin(np.arange(model.ngeom), [*model.pair_geom1, *model.pair_geom2])


def _moved(model: mujoco.MjModel, i: int) -> str:
    kind = _short(mujoco.mjtTrn, model.actuator_trntype[i])
    part = {"jointinparent": "joint", "slidercrank": "site"}.get(kind, kind)
    name = getattr(model, part)(int(model.actuator_trnid[i, 0])).name
    return name if part == "joint" else f"{kind} {name}"


def _volumes(triangles: NDArray[np.float32]) -> NDArray[np.float64]:
    """[F], m³: of the tetrahedra over ``triangles`` [F, 3, 3] with the origin, negative where it is before the face."""
    one, two, three = triangles.astype(np.float64).swapaxes(0, 1)
    return np.einsum("fi,fi->f", one, np.cross(two, three)) / 6.0


def _span(ends: NDArray[np.float64], unit: str) -> str:
    return f"{ends[0]:.4g} to {ends[1]:.4g} {unit.removesuffix('1')}".rstrip()


def _short(kinds: Any, number: int) -> str:
    return kinds(int(number)).name.partition("_")[2].lower()
