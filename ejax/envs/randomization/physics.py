"""Events that change a row's physics, its parameters or, in a push, its velocities: each makes, for a model, the
``Change`` that an event's parameters ask for.

Names and parameters are EmbodiChain's where it has them. Values are made from the MJCF's, never from what an earlier
event left. Differs from EmbodiChain: ``operation`` (abs, add, scale) and ``distribution`` fix how a range is drawn and
used; a scaled object keeps its density; a mass that is not positive, and the like, is refused.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from numpy.typing import NDArray

from ejax.envs.mujoco.engine import PhysicsState
from ejax.envs.mujoco.models import parameter
from ejax.envs.mujoco.rotations import matrix_from_quaternion
from ejax.envs.randomization.draws import Draw, read_draw
from ejax.envs.randomization.names import PHYSICS_EVENTS
from ejax.envs.task.entities import (
    Entity,
    bodies_of,
    drives_of_joints,
    joint_dofs,
    label,
    look_up,
    matching_names,
    object_body,
    refuse_constrained,
    robot_links,
)
from ejax.schema.problems import KeyReport
from ejax.types import Array, Key

Names: TypeAlias = str | Sequence[str] | None
NewEntries: TypeAlias = Callable[[Key, Array | None], dict[str, Array]]
"""Parameter -> its new entries, from the key and the level of a curriculum."""


@dataclass(frozen=True)
class Change:
    """One event's effect on a row's physics: ``apply(physics, key, level)``; ``level`` None: no curriculum."""

    apply: Callable[[PhysicsState, Key, Array | None], PhysicsState]
    writes: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    """Parameter -> its entries that are written. None of a push, which changes velocities."""


def write_parameters(model: mujoco.MjModel, values: NewEntries, **rows: Any) -> Change:
    """Change parameters. ``rows``: parameter -> the index of its entries that ``values`` gives."""
    # what is written is known without a draw: overlaps are refused, and startup's entries kept, by these
    masks = {name: np.zeros(parameter(model, name).shape, bool) for name in rows}
    for name, row in rows.items():
        masks[name][row] = True

    def apply(physics: PhysicsState, key: Key, level: Array | None) -> PhysicsState:
        drawn = values(key, level)
        written = {name: physics.parameters[name].at[rows[name]].set(drawn[name]) for name in rows}
        return replace(physics, parameters={**physics.parameters, **written})

    return Change(apply, masks)


def refuse_overlaps(changes: Iterable[tuple[str, Change]], report: KeyReport) -> None:
    """Refuse two events that write the same: each starts from the MJCF's value, so the later would undo the other."""
    for (key, one), (other_key, other) in itertools.combinations(changes, 2):
        for name in sorted(one.writes.keys() & other.writes.keys()):
            if (one.writes[name] & other.writes[name]).any():
                report.refuse(other_key, f"writes the same {name} as {key}; keep one of them")


def base(model: mujoco.MjModel, changes: Sequence[Change]) -> dict[str, NDArray[np.float32]]:
    """Collect the MJCF's value of every parameter that one of the changes writes."""
    names = sorted({name for change in changes for name in change.writes})
    return {name: parameter(model, name).astype(np.float32) for name in names}  # float32, as a state's arrays are


def keep_written(change: Change, ended: PhysicsState, started: PhysicsState) -> PhysicsState:
    """Return a new episode's state with what the change wrote in an earlier one."""
    kept = {
        name: jnp.where(mask, ended.parameters[name], started.parameters[name]) for name, mask in change.writes.items()
    }
    return replace(started, parameters={**started.parameters, **kept})


def randomize(model: mujoco.MjModel, draw: Draw, shape: tuple[int, ...] = (), **rows: Any) -> Change:
    """Change fields of a model by numbers of one draw, of this shape. ``rows``: field -> the index of its entries."""
    nominal = {name: parameter(model, name)[row].copy() for name, row in rows.items()}  # the model is shared

    def values(key: Key, level: Array | None) -> dict[str, Array]:
        x = draw.sample(key, shape)  # once: a friction of geoms and pairs is the same number
        return {name: draw.value(each, x, level) for name, each in nominal.items()}

    return write_parameters(model, values, **rows)


def randomize_mass(
    find_bodies: Callable[[mujoco.MjModel, Entity], Iterable[int]],
    model: mujoco.MjModel,
    entity_cfg: Entity,
    mass_range: Any,
    link_names: Names = None,
    relative: bool = False,
    recompute_inertia: bool = True,
    min_mass: float = 1e-6,
    operation: str | None = None,
    distribution: str = "uniform",
) -> Change:
    """Draw the mass, kg, at least ``min_mass``, of an object or of each of a robot's links. ``mass_range`` is of all
    links, or ``{name: range}``; ``link_names`` None: all that have a mass. Inertia follows in proportion unless
    ``recompute_inertia`` is False. ``relative``: the range is added to the MJCF's mass, as by ``operation``."""
    names = {label(model, "body", body): body for body in find_bodies(model, entity_cfg)}
    ranges: Mapping[str, Any] = mass_range
    if not isinstance(mass_range, Mapping):
        ranges = dict.fromkeys(matching_names("link", link_names, names), mass_range)
    bodies = np.array([look_up("link", name, names, "mass_range: ") for name in ranges])
    operation = operation or ("add" if relative else "abs")
    draws = [read_draw("mass_range", each, operation, distribution) for each in ranges.values()]
    if not min_mass > 0.0:
        raise ValueError(f"min_mass: got {min_mass}; must be > 0")
    nominal, inertia = model.body_mass[bodies], model.body_inertia[bodies]
    for draw, mass in zip(draws, nominal, strict=True):
        _check_positive("mass_range", draw, mass)

    def values(key: Key, level: Array | None) -> dict[str, Array]:
        drawn = zip(nominal, draws, jax.random.split(key, len(bodies)), strict=True)
        mass = jnp.stack([draw.value(each, draw.sample(own), level) for each, draw, own in drawn])
        mass = jnp.maximum(mass, min_mass)
        # a solid of the same shape: its density changes, and with it all moments
        ratio = mass / jnp.asarray(nominal, jnp.float32)
        return {"body_mass": mass, "body_inertia": jnp.asarray(inertia, jnp.float32) * ratio[:, None]}

    written = ("body_mass", "body_inertia") if recompute_inertia else ("body_mass",)
    return write_parameters(model, values, **dict.fromkeys(written, bodies))


randomize_rigid_object_mass = partial(randomize_mass, lambda model, entity: [object_body(model, entity)])
randomize_articulation_mass = partial(randomize_mass, robot_links)


def randomize_rigid_object_center_of_mass(
    model: mujoco.MjModel, entity_cfg: Entity, com_pos_offset_range: Any, distribution: str = "uniform"
) -> Change:
    """Shift an object's centre of mass, [3], m, in its own frame."""
    body = object_body(model, entity_cfg)
    draw = read_draw("com_pos_offset_range", com_pos_offset_range, "add", distribution, (3,))
    return randomize(model, draw, (3,), body_ipos=body)


def randomize_rigid_object_inertia(
    model: mujoco.MjModel,
    entity_cfg: Entity,
    inertia_range: Any,
    operation: str = "scale",
    distribution: str = "uniform",
) -> Change:
    """Draw an object's principal moments of inertia, [3], kg·m², independently. Raises ValueError: a moment may come
    out not positive, or greater than the sum of the two others."""
    body = object_body(model, entity_cfg)
    draw = read_draw("inertia_range", inertia_range, operation, distribution, (3,))
    low, high = draw.ends(model.body_inertia[body])
    # drawn independently, the worst case is one moment at its highest and the others at their lowest
    if (low <= 0.0).any() or any(high[i] > low[i - 1] + low[i - 2] for i in range(3)):
        text = "a body's moments are positive, and none is greater than the sum of the others"
        raise ValueError(f"inertia_range: allows moments from {low} to {high} kg·m²; {text}")
    return randomize(model, draw, (3,), body_inertia=body)


def randomize_rigid_object_scale(
    model: mujoco.MjModel,
    entity_cfg: Entity,
    scale_factor_range: Any,
    same_scale_all_axes: bool = True,
    distribution: str = "uniform",
) -> Change:
    """Scale an object by s: mass times s³, inertia times s⁵. It starts where the task puts its centre. The range is
    (low, high), or ((low,), (high,)) as in EmbodiChain."""
    if not same_scale_all_axes:
        raise ValueError("same_scale_all_axes: got false, but solids keep their shape here; set it to true")
    body = object_body(model, entity_cfg)
    ends = np.asarray(scale_factor_range, np.float64)
    draw = read_draw("scale_factor_range", ends[:, 0] if ends.ndim == 2 else ends, "abs", distribution, above=0.0)
    _check_positive("scale_factor_range", draw, np.ones(()))
    geoms = np.flatnonzero(model.geom_bodyid == body)
    if (model.geom_contype[geoms] | model.geom_conaffinity[geoms]).any():
        text = "collides by contype, whose trees of boxes are fixed; list its contacts as pairs"
        raise ValueError(f"{entity_cfg['uid']} {text}")
    if model.geom_dataid[geoms].max() >= 0:
        raise ValueError(f"{entity_cfg['uid']} has a mesh; only primitives can be scaled")
    powers = dict.fromkeys(("geom_size", "geom_rbound", "geom_aabb", "geom_pos", "body_ipos"), 1)
    powers |= {"body_mass": 3, "body_inertia": 5}  # of the same density
    rows: dict[str, Any] = {name: body if name.startswith("body_") else geoms for name in powers}
    # a place at the origin stays there: a parameter that is not written costs nothing
    rows = {name: row for name, row in rows.items() if parameter(model, name)[row].any()}
    nominal = {name: jnp.asarray(parameter(model, name)[row], jnp.float32) for name, row in rows.items()}

    def values(key: Key, level: Array | None) -> dict[str, Array]:
        scale = draw.value(np.ones(()), draw.sample(key), level)
        return {name: nominal[name] * scale ** powers[name] for name in rows}

    return write_parameters(model, values, **rows)


def randomize_rigid_object_friction(
    model: mujoco.MjModel,
    entity_cfg: Entity,
    friction_range: Any,
    operation: str = "abs",
    distribution: str = "uniform",
) -> Change:
    """Draw the coefficient of sliding friction of an object, or of a robot's links, one for all its contacts."""
    bodies = bodies_of(model, entity_cfg)
    draw = read_draw("friction_range", friction_range, operation, distribution)
    geoms = np.flatnonzero(np.isin(model.geom_bodyid, bodies))
    pairs = np.flatnonzero(np.isin(model.pair_geom1, geoms) | np.isin(model.pair_geom2, geoms))
    if not len(pairs) and not (model.geom_contype[geoms] | model.geom_conaffinity[geoms]).any():
        raise ValueError(f"{entity_cfg['uid']} touches nothing in this model: it has no friction")
    # a pair has two sliding directions, and takes nothing from its geoms
    rows: dict[str, Any] = {"geom_friction": (geoms, 0), "pair_friction": (pairs[:, None], np.arange(2))}
    rows = rows if len(pairs) else {"geom_friction": rows["geom_friction"]}
    for name, row in rows.items():
        _check_positive("friction_range", draw, parameter(model, name)[row])
    return randomize(model, draw, **rows)


def randomize_joint_parameters(
    model: mujoco.MjModel,
    entity_cfg: Entity,
    joint_names: Names = None,
    damping_range: Any = None,
    armature_range: Any = None,
    friction_range: Any = None,
    operation: str = "scale",
    distribution: str = "uniform",
) -> Change:
    """Draw damping (N·s/m, N·m·s/rad), armature (kg, kg·m²) and dry friction (N, N·m) of each joint: a robot's, or
    those that an object moves on. ``joint_names``: regular expressions. None: all."""
    dofs = joint_dofs(model, entity_cfg, joint_names)
    given = {"damping": damping_range, "armature": armature_range, "friction": friction_range}
    fields = {"damping": "dof_damping", "armature": "dof_armature", "friction": "dof_frictionloss"}
    draws = _read_ranges(given, operation, distribution)
    nominal = {name: parameter(model, fields[name])[dofs] for name in draws}
    for name, draw in draws.items():
        _check_positive(f"{name}_range", draw, nominal[name], or_zero=True)
        if operation == "scale" and not nominal[name].any():
            text = "it is 0 in the MJCF, and 0 times anything is 0; use operation abs or add"
            raise ValueError(f"{name}_range: {text}")

    def values(key: Key, level: Array | None) -> dict[str, Array]:
        keys = jax.random.split(key, len(draws))
        return {
            fields[name]: draw.value(nominal[name], draw.sample(each, (len(dofs),)), level)
            for each, (name, draw) in zip(keys, draws.items(), strict=True)
        }

    return write_parameters(model, values, **{fields[name]: dofs for name in draws})


def randomize_drive_gains(
    model: mujoco.MjModel,
    entity_cfg: Entity,
    joint_names: Names = None,
    stiffness_range: Any = None,
    damping_range: Any = None,
    operation: str = "scale",
    distribution: str = "uniform",
) -> Change:
    """Draw stiffness (N/m, N·m/rad) and damping of each of a robot's drives; a drive's damping is a joint's where the
    model has it there, as all robots of gym configs have."""
    dofs = joint_dofs(model, entity_cfg, joint_names)
    drives = np.array([i for i in drives_of_joints(model) if model.jnt_dofadr[model.actuator_trnid[i, 0]] in dofs], int)
    if not len(drives):
        raise ValueError(f"no drive moves the joints of {entity_cfg['uid']}")
    driven = model.jnt_dofadr[model.actuator_trnid[drives, 0]]
    in_drive = model.actuator_biasprm[drives, 2].any()
    nominal = {
        "stiffness": -model.actuator_biasprm[drives, 1],
        "damping": -model.actuator_biasprm[drives, 2] if in_drive else model.dof_damping[driven].copy(),
    }
    draws = _read_ranges({"stiffness": stiffness_range, "damping": damping_range}, operation, distribution)
    for name, draw in draws.items():
        if (nominal[name] <= 0.0).any():
            which = model.actuator(int(drives[np.argmax(nominal[name] <= 0.0)])).name
            text = "leave its joint out by joint_names"
            raise ValueError(f"{name}_range: drive '{which}' of {entity_cfg['uid']} has no {name} in the MJCF; {text}")
        _check_positive(f"{name}_range", draw, nominal[name], or_zero=name == "damping")
    # stiffness is a drive's gain and part of its bias, damping another part or the joint's own
    rows: dict[str, Any] = {
        **({"actuator_gainprm": (drives, 0)} if "stiffness" in draws else {}),
        **({"actuator_biasprm": (drives[:, None], np.arange(3))} if "stiffness" in draws or in_drive else {}),
        **({"dof_damping": driven} if "damping" in draws and not in_drive else {}),
    }
    gain, bias = model.actuator_gainprm[drives, 0].copy(), model.actuator_biasprm[drives, :3].copy()

    def values(key: Key, level: Array | None) -> dict[str, Array]:
        keys = dict(zip(("stiffness", "damping"), jax.random.split(key), strict=True))
        # ratios to the MJCF's: gain and bias of a drive scale alike, so that its target stays where it is
        ratio = {
            name: draw.value(nominal[name], draw.sample(keys[name], nominal[name].shape), level)
            / jnp.asarray(nominal[name], jnp.float32)
            for name, draw in draws.items()
        }
        one = jnp.ones(len(drives))
        stiff, damp = ratio.get("stiffness", one), ratio.get("damping", one)
        made = {
            "actuator_gainprm": jnp.asarray(gain, jnp.float32) * stiff,
            "actuator_biasprm": jnp.asarray(bias, jnp.float32) * jnp.stack([stiff, stiff, damp], axis=1),
            "dof_damping": jnp.asarray(nominal["damping"], jnp.float32) * damp,
        }
        return {name: made[name] for name in rows}

    return write_parameters(model, values, **rows)


def randomize_gravity(
    model: mujoco.MjModel, gravity_range: Any, operation: str = "add", distribution: str = "uniform"
) -> Change:
    """Draw gravity, [3], m/s²."""
    draw = read_draw("gravity_range", gravity_range, operation, distribution, (3,))
    return randomize(model, draw, (3,), gravity=slice(None))


def push_rigid_object_by_setting_velocity(
    model: mujoco.MjModel, entity_cfg: Entity, velocity_range: Mapping[str, Any]
) -> Change:
    """Push an object: a velocity is added to its own. ``velocity_range``: (low, high) of any of x, y, z (m/s), roll,
    pitch, yaw (rad/s), in the world's frame."""
    axes = ("x", "y", "z", "roll", "pitch", "yaw")
    if not isinstance(velocity_range, Mapping) or not velocity_range or set(velocity_range) - set(axes):
        raise ValueError(f"velocity_range: got {velocity_range!r}; must have (low, high) of any of {', '.join(axes)}")
    body = object_body(model, entity_cfg)
    # a free joint's numbers: position and quaternion; velocity in the world's frame, turning in the body's
    start, turn = int(model.body_dofadr[body]), int(model.jnt_qposadr[model.body_jntadr[body]]) + 3
    ends = np.array([velocity_range.get(axis, (0.0, 0.0)) for axis in axes], np.float64).T
    draw = read_draw("velocity_range", ends, "abs", "uniform", (6,))
    refuse_constrained(model, slice(start, start + 6), "push another object")

    def apply(physics: PhysicsState, key: Key, level: Array | None) -> PhysicsState:
        velocity = draw.value(np.zeros(6), draw.sample(key, (6,)), level).astype(physics.qvel.dtype)
        about = matrix_from_quaternion(physics.qpos[turn : turn + 4]).T @ velocity[3:]
        return replace(physics, qvel=physics.qvel.at[start : start + 6].add(jnp.concatenate([velocity[:3], about])))

    return Change(apply)


def push_joints_by_setting_velocity(
    model: mujoco.MjModel, entity_cfg: Entity, velocity_range: Any, joint_names: Names = None
) -> Change:
    """Push a robot: velocities (m/s, rad/s) are added to its joints', independently."""
    dofs = joint_dofs(model, entity_cfg, joint_names)
    draw = read_draw("velocity_range", velocity_range)
    refuse_constrained(model, dofs, "name others in joint_names")

    def apply(physics: PhysicsState, key: Key, level: Array | None) -> PhysicsState:
        velocity = draw.value(np.zeros(len(dofs)), draw.sample(key, (len(dofs),)), level)
        return replace(physics, qvel=physics.qvel.at[dofs].add(velocity.astype(physics.qvel.dtype)))

    return Change(apply)


PHYSICS: dict[str, Callable[..., Change]] = {name: globals()[name] for name in PHYSICS_EVENTS}


def _read_ranges(given: Mapping[str, Any], operation: str, distribution: str) -> dict[str, Draw]:
    if not (chosen := {name: each for name, each in given.items() if each is not None}):
        raise ValueError(f"gives no range; there is {', '.join(f'{name}_range' for name in given)}")
    return {name: read_draw(f"{name}_range", each, operation, distribution) for name, each in chosen.items()}


def _check_positive(name: str, draw: Draw, nominal: NDArray[np.float64], *, or_zero: bool = False) -> None:
    low, _ = draw.ends(nominal)  # of a mass MuJoCo needs more than 0; a friction or damping of 0 is none
    if (low < 0.0 if or_zero else low <= 0.0).any():
        raise ValueError(f"{name}: allows {low.min():g}; must stay {'>= 0' if or_zero else '> 0'}")
