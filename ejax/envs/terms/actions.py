"""Action functors: f(scene, active, **params) -> ActionTerm. Those of a tool or a gripper are in ``tool_actions.py``.

``active``: the indices of the observed joints. A target holds for one control step; joints that no term drives keep
theirs. EmbodiChain 0.2's terms (``…Term``) drive all active joints, 0.3's (``…Action``) a selection.

Differs from EmbodiChain: the numbers of an action always count active joints. QposDenormalizedTerm and
QposNormalizedTerm index them by joint ids there, and DeltaQposTerm fails where ``control_parts`` names only some.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np

from ejax.envs.task.scene import Scene, SceneWorld
from ejax.envs.task.world import SceneState
from ejax.schema.values import is_number
from ejax.types import Array

Scale: TypeAlias = float | Sequence[float]
Joints: TypeAlias = tuple[int, ...]
DriveTarget: TypeAlias = Literal["qpos", "qvel", "qf"]
Law: TypeAlias = Callable[[Array, Array], Array]  # A joint's position and scale·a -> its new target


@dataclass(frozen=True)
class ActionTerm:
    """One term's part of an action."""

    low: tuple[float, ...]  # Bounds of the action space; nothing is clipped to them
    high: tuple[float, ...]  # likewise
    apply: Callable[[SceneWorld, Array], SceneState]
    """Sets new targets, from the world before the step and the term's numbers [width]."""
    command: DriveTarget | None = None
    joints: Joints = ()  # The targets that it sets: two terms of one config may not set the same. None: not known.

    @property
    def width(self) -> int:
        return len(self.low)


def joint_action(act: Callable[..., ActionTerm]) -> Callable[..., ActionTerm]:
    """Let a functor act on ``part_name`` or ``joint_names``, in the robot's order unless ``preserve_order``."""

    @functools.wraps(act)
    def functor(
        scene: Scene,
        active: Joints,
        part_name: str | None = None,
        joint_names: Sequence[str] | None = None,
        preserve_order: bool = False,
        **params: Any,
    ) -> ActionTerm:
        # either would do alone; both could contradict each other
        if (part_name is None) == (joint_names is None):
            raise ValueError("set either part_name or joint_names")
        if part_name is not None:
            return act(scene, scene.part(part_name), **params)
        names = joint_names or ()
        if unknown := [name for name in names if name not in scene.joints]:
            raise ValueError(f"no joints {', '.join(unknown)}; there is {', '.join(scene.joints)}")
        joints = tuple(scene.joints.index(name) for name in names)
        if not joints or len(set(joints)) != len(joints):
            raise ValueError(f"joint_names must name at least one joint, each once, got {names}")
        return act(scene, joints if preserve_order else tuple(sorted(joints)), **params)

    # a gym config's parameters are checked by the signature, as those of any other functor
    *selection, _ = inspect.signature(functor, follow_wrapped=False).parameters.values()
    _, _, *own = inspect.signature(act).parameters.values()
    vars(functor)["__signature__"] = inspect.Signature([*selection, *own])
    return functor


def delta_qpos(scene: Scene, active: Joints, scale: Scale = 1.0) -> ActionTerm:
    """q* = q + scale·a"""
    return _position_term(scene, active, scale, lambda q, x: q + x)


def qpos(scene: Scene, active: Joints, scale: Scale = 1.0) -> ActionTerm:
    """q* = scale·a"""
    return _position_term(scene, active, scale, lambda q, x: x)


def qpos_denormalized(
    scene: Scene,
    active: Joints,
    scale: Scale = 1.0,
    joint_ids: Sequence[int] | None = None,
    range: Sequence[float] = (-1.0, 1.0),
) -> ActionTerm:
    """q* = lo + (scale·a − r₀)/(r₁ − r₀)·(hi − lo) in the columns ``joint_ids`` (default: all), else scale·a."""
    law = _law_of_columns(active, joint_ids, range, scene.limits[list(active)].T)
    return _position_term(scene, active, scale, law, bounds=(range[0], range[1]))


def qpos_normalized(
    scene: Scene,
    active: Joints,
    scale: Scale = 1.0,
    joint_ids: Sequence[int] | None = None,
    range: Sequence[float] = (0.0, 1.0),
) -> ActionTerm:
    """q* = (scale·a − lo)/(hi − lo)·(r₁ − r₀) + r₀ in the columns ``joint_ids`` (default: all), else scale·a."""
    law = _law_of_columns(active, joint_ids, scene.limits[list(active)].T, range)
    return _position_term(scene, active, scale, law)


def qvel(scene: Scene, active: Joints, scale: Scale = 1.0) -> ActionTerm:
    """q̇* = scale·a; the position target is the joint's position, so that the drive only follows the velocity."""
    return _drive_term(active, scale, "qvel", "velocity_target", (np.inf,) * len(active))


def qf(scene: Scene, active: Joints, scale: Scale = 1.0) -> ActionTerm:
    """τ = scale·a, in addition to the drive's damping; the position target is the joint's position."""
    return _drive_term(active, scale, "qf", "effort", tuple(scene.drives.max_effort[i] for i in active))


@joint_action
def relative_joint_position(scene: Scene, joints: Joints, scale: Scale = 1.0, clip: float | None = None) -> ActionTerm:
    """q* = q + scale·clip(a, ±clip)"""
    return _position_term(scene, joints, scale, lambda q, x: q + x, within=np.inf if clip is None else clip)


@joint_action
def joint_position(scene: Scene, joints: Joints, scale: Scale = 1.0, offset: Scale = 0.0) -> ActionTerm:
    """q* = scale·a + offset"""
    check_scale(offset, len(joints), "offset")
    return _position_term(scene, joints, scale, lambda q, x: x + jnp.asarray(offset))


@joint_action
def joint_position_to_limits(scene: Scene, joints: Joints, scale: Scale = 1.0) -> ActionTerm:
    """q* = lo + (clip(scale·a, ±1) + 1)/2·(hi − lo)"""
    low, high = scene.limits[list(joints)].T
    return _position_term(scene, joints, scale, lambda q, x: between(low, high, x), bounds=(-1.0, 1.0))


def _about_home(
    scene: Scene, joints: Joints, scale: Scale = 1.0, offset: Scale | None = None, clip: float | None = 1.0
) -> ActionTerm:
    """q* = offset + scale·clip(a, ±clip), the offset by default the robot's init_qpos."""
    middle = tuple(scene.home[i] for i in joints) if offset is None else offset
    check_scale(middle, len(joints), "offset")
    within = np.inf if clip is None else clip
    return _position_term(scene, joints, scale, lambda q, x: jnp.asarray(middle) + x, within=within)


default_joint_position = joint_action(_about_home)
# clipped only where a config has ``clip``, as before it was an ``…Action``
unbounded_default_joint_position = joint_action(functools.partial(_about_home, clip=None))
joint_velocity = joint_action(qvel)
joint_effort = joint_action(qf)


def with_targets(state: SceneState, joints: Joints, wanted: Array) -> SceneState:
    """Return the state with new position targets of some joints."""
    return replace(state, target=state.target.at[jnp.array(joints)].set(wanted))


def between(low: Any, high: Any, x: Array) -> Array:
    """Map ±1, to which ``x`` is clipped, to ``low`` and ``high``."""
    return low + (jnp.clip(x, -1.0, 1.0) + 1.0) * 0.5 * (high - low)


def check_scale(scale: Scale, width: int, name: str = "scale") -> None:
    """Raise ValueError unless ``scale`` is a number, or one for each number of the action."""
    values = scale if isinstance(scale, list | tuple) else [scale]
    if not all(map(is_number, values)) or len(values) not in (1, width):
        raise ValueError(f"{name} must be a number, or a list of {width}, got {scale!r}")


def _position_term(
    scene: Scene,
    joints: Joints,
    scale: Scale,
    law: Law,
    *,
    bounds: tuple[float, float] | None = None,
    within: float | None = None,
) -> ActionTerm:
    """Set targets to ``law(q, scale·a)``, a clipped to ± ``within``; without ``bounds`` of a, the joints' ranges."""
    check_scale(scale, len(joints))
    bounds = bounds if within is None else (-within, within)

    def apply(world: SceneWorld, action: Array) -> SceneState:
        # a clip that does nothing would still be an operation, and other bits
        a = action if within is None else jnp.clip(action, -within, within)
        wanted = law(world.state.physics.qpos[jnp.array(joints)], jnp.asarray(scale) * a)
        return with_targets(world.state, joints, wanted)

    ranges = scene.limits[list(joints)] if bounds is None else np.broadcast_to(bounds, (len(joints), 2))
    return ActionTerm(tuple(ranges[:, 0].tolist()), tuple(ranges[:, 1].tolist()), apply, "qpos", joints)


def _drive_term(joints: Joints, scale: Scale, command: DriveTarget, field: str, high: tuple[float, ...]) -> ActionTerm:
    check_scale(scale, len(joints))

    def apply(world: SceneWorld, action: Array) -> SceneState:
        ids = jnp.array(joints)
        # the spring must not pull back to an old target
        state = with_targets(world.state, joints, world.state.physics.qpos[ids])
        return replace(state, **{field: getattr(state, field).at[ids].set(jnp.asarray(scale) * action)})

    return ActionTerm(tuple(-each for each in high), high, apply, command, joints)


def _law_of_columns(active: Joints, joint_ids: Sequence[int] | None, given: Any, wanted: Any) -> Law:
    """Map the ends ``given`` to ``wanted`` in the columns ``joint_ids``."""
    columns = range(len(active)) if joint_ids is None else joint_ids
    if outside := [i for i in columns if not 0 <= i < len(active)]:
        raise ValueError(f"joint_ids {outside} are not there: the action has {len(active)} numbers")
    chosen = np.isin(np.arange(len(active)), list(columns))
    (low, high), (first, last) = given, wanted
    return lambda q, x: jnp.where(chosen, (x - low) / (high - low) * (last - first) + first, x)
