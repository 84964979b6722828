"""Names of functors: EmbodiChain's, those registered here, and ``package.module:function``."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from ejax.envs.manager.functors import actions, events, observations, rewards, tool_actions
from ejax.envs.manager.vocabulary import REFUSED_FUNCTORS
from ejax.envs.randomization.names import REFUSED
from ejax.envs.randomization.physics import PHYSICS
from ejax.schema.registry import did_you_mean
from ejax.schema.trust import import_trusted

FunctorKind = Literal["observations", "rewards", "events", "actions"]
F = TypeVar("F", bound=Callable[..., Any])

FUNCTORS: dict[FunctorKind, dict[str, Callable[..., Any]]] = {
    "observations": {
        **{each.__name__: each for each in (*observations.OF_WORLD, *observations.OF_CAMERAS)},
        "get_object_pose": observations.get_rigid_object_pose,  # its newer name
    },
    "rewards": {each.__name__: each for each in rewards.REWARDS},
    "events": {
        **{each.__name__: each for each in events.EVENTS},
        **{name: events.PhysicsEvent(change) for name, change in PHYSICS.items()},
    },
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
}


def register_functor(kind: FunctorKind, name: str, *, override: bool = False) -> Callable[[F], F]:
    """Add a function: ``@register_functor("rewards", "lift_height")``. Raises ValueError: the name is taken."""

    def register(function: F) -> F:
        if name in FUNCTORS[kind] and not override:
            raise ValueError(f"{kind} functor '{name}' is registered already; pass override=True to replace it")
        FUNCTORS[kind][name] = function
        return function

    return register


def find_functor(kind: FunctorKind, name: str) -> Callable[..., Any]:
    """Return the function of a name.

    Raises:
        ValueError: no such functor; the message has the nearest names.
        UntrustedCodeError: ``package.module:function`` that only a file names (``ejax.schema.trust``).
        ImportError: ``package.module:function`` does not exist.
    """
    if name in FUNCTORS[kind]:
        return FUNCTORS[kind][name]
    module_name, colon, attribute = name.partition(":")
    if colon:
        module = import_trusted(name)
        if attribute not in vars(module):
            raise ImportError(f"module '{module_name}' has no '{attribute}'{did_you_mean(attribute, vars(module))}")
        return vars(module)[attribute]
    if reason := (REFUSED_FUNCTORS.get(kind, {}) | (REFUSED if kind == "events" else {})).get(name):
        raise ValueError(f"no {kind} functor '{name}': {reason}")
    elsewhere = next((other for other in FUNCTORS if name in FUNCTORS[other]), None)
    hint = f"; it belongs under env.{elsewhere}" if elsewhere else did_you_mean(name, FUNCTORS[kind])
    raise ValueError(
        f"no {kind} functor '{name}'; there is {', '.join(FUNCTORS[kind])}, or package.module:function{hint}"
    )
