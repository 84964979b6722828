"""The one table of terms by name: EmbodiChain's, legged robots', registered ones, and ``package.module:function``."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ejax.envs.randomization.events import Curriculum
from ejax.envs.randomization.names import CURRICULUM, REFUSED
from ejax.envs.randomization.physics import PHYSICS
from ejax.envs.task.terms import TermKind
from ejax.envs.task.world import World
from ejax.envs.terms import (
    actions,
    commands,
    events,
    legged,
    observations,
    rewards,
    terminations,
    tool_actions,
    tracking,
)
from ejax.envs.terms.curricula import Stages
from ejax.envs.terms.vocabulary import REFUSED_FUNCTORS
from ejax.schema.messages import did_you_mean
from ejax.schema.trust import import_trusted
from ejax.types import Array

_F = TypeVar("_F", bound=Callable[..., Any])


def _by_name(functions: Iterable[Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    return {each.__name__: each for each in functions}


_OF_EJAX: tuple[Callable[..., Any], ...] = (*rewards.REWARDS, *legged.LEGGED_REWARDS, *tracking.TRACKING_REWARDS)
TERMS: dict[TermKind, dict[str, Callable[..., Any]]] = {
    "observations": {
        **_by_name((*observations.OF_WORLD, *observations.OF_CAMERAS)),
        "get_object_pose": observations.get_rigid_object_pose,  # its newer name
        **legged.OBSERVATIONS,
        **_by_name(tracking.TRACKING_OBSERVATIONS),
    },
    "rewards": _by_name(_OF_EJAX),
    "events": _by_name((*events.EVENTS, *(events.PhysicsEvent(*each) for each in PHYSICS.items()))),
    "actions": {
        "DeltaQposTerm": actions.delta_qpos,
        "QposTerm": actions.qpos,
        "QposDenormalizedTerm": actions.qpos_denormalized,
        "QposNormalizedTerm": actions.qpos_normalized,
        "EefPoseTerm": tool_actions.eef_pose,
        "QvelTerm": actions.qvel,
        "QfTerm": actions.qf,
        "RelativeJointPositionAction": actions.relative_joint_position,
        "JointPositionAction": actions.joint_position,
        "JointPositionToLimitsAction": actions.joint_position_to_limits,
        "DefaultJointPositionAction": actions.default_joint_position,
        "JointVelocityAction": actions.joint_velocity,
        "JointEffortAction": actions.joint_effort,
        "EefPoseAction": tool_actions.eef_pose_action,
        "RelativeEefPoseAction": tool_actions.relative_eef_pose,
        "ParallelGripperAction": tool_actions.parallel_gripper,
        "DefaultJointPositionTerm": actions.unbounded_default_joint_position,
    },
    "terminations": {**terminations.TASKS, **_by_name((*legged.TERMINATIONS, *tracking.TRACKING_TERMINATIONS))},
    "commands": {"velocity": commands.CommandRanges},
    "curricula": {CURRICULUM: Curriculum, "stages": Stages},
}
"""See ``ejax.envs.task.terms`` on what each kind takes and gives."""


def register_functor(kind: TermKind, name: str, *, override: bool = False) -> Callable[[_F], _F]:
    """Add a function: ``@register_functor("rewards", "lift_height")``. Raises ValueError: the name is taken."""

    def register(function: _F) -> _F:
        if name in TERMS[kind] and not override:
            raise ValueError(f"{kind} functor '{name}' is registered already; pass override=True to replace it")
        TERMS[kind][name] = function
        return function

    return register


def find_functor(kind: TermKind, name: str) -> Callable[..., Any]:
    """Return the function of a name.

    Raises:
        ValueError: no such functor; the message has the nearest names.
        UntrustedCodeError: ``package.module:function`` that only a file names (``ejax.schema.trust``).
        ImportError: ``package.module:function`` does not exist.
    """
    if name in TERMS[kind]:
        return TERMS[kind][name]
    module_name, colon, attribute = name.partition(":")
    if colon:
        module = import_trusted(name)
        if attribute not in vars(module):
            raise ImportError(f"module '{module_name}' has no '{attribute}'{did_you_mean(attribute, vars(module))}")
        return vars(module)[attribute]
    if reason := (REFUSED_FUNCTORS.get(kind, {}) | (REFUSED if kind == "events" else {})).get(name):
        raise ValueError(f"no {kind} functor '{name}': {reason}")
    elsewhere = next((other for other in TERMS if name in TERMS[other]), None)
    hint = f"; it belongs under env.{elsewhere}" if elsewhere else did_you_mean(name, TERMS[kind])
    raise ValueError(f"no {kind} functor '{name}'; there is {', '.join(TERMS[kind])}, or package.module:function{hint}")


def find_reward(name: str) -> Callable[..., Any]:
    """Return a reward as f(world, **params); functions that are not ejax's have EmbodiChain's signature."""
    function = find_functor("rewards", name)
    return function if function in _OF_EJAX else as_term(function)


@functools.cache  # equal configs have equal terms
def as_term(func: Callable[..., Array]) -> Callable[..., Array]:
    """Adapt EmbodiChain's f(world, obs, action, info, **params) to f(world, **params). ``action``: the policy's own."""
    signature = inspect.signature(func)
    # readers of a config check parameters by the signature: the three that are given are not parameters
    world, *rest = signature.parameters.values()

    @functools.wraps(func)
    def term(world: World, **params: Any) -> Array:
        return func(world, world.obs, world.action, world.info, **params)

    term.__signature__ = signature.replace(parameters=[world, *rest[3:]])  # type: ignore[attr-defined]  # inspect's own
    return term
