"""The rules of EmbodiChain's task classes on top of the gym config: success, failure, base reward, early end."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import jax.numpy as jnp

from ejax.envs.manager.vocabulary import OTHER_TASKS, TASKS_ELSEWHERE
from ejax.envs.task.step import Outcome
from ejax.envs.task.world import World
from ejax.schema.registry import did_you_mean
from ejax.types import Array

_FELL = -0.1
_BELOW_TABLE = 1e-3
_SUCCESS_ANGLE = 0.02
_SUCCESS_VELOCITY = 0.05

OutcomeFn: TypeAlias = Callable[[World], Outcome]


@dataclass(frozen=True)
class Task:
    """A task: how it finds a step's outcome, and the names in ``env.extensions`` that it reads."""

    outcome: OutcomeFn
    extensions: tuple[str, ...] = ()
    first_outcome: OutcomeFn | None = None
    """That of configs in the form of 0.1.0 and 0.1.1, where it differed (see ``extensions``). None: ``outcome``."""


def scene_only(world: World) -> Outcome:
    """EmbodiChain's base class, without a task: an episode ends by its time limit only."""
    never = jnp.zeros((), bool)
    return Outcome(success=never, fail=never, truncated=never, reward=jnp.zeros(()))


def push(world: World, uid: str) -> Outcome:
    """Success: the body is horizontally within ``success_threshold`` of ``goal_pose``. Truncated: it fell to −0.1 m."""
    position = world.object_pose(uid)[:3, 3]
    distance = jnp.linalg.norm((position - world.pose("goal_pose")[:3, 3])[:2])
    return replace(
        scene_only(world),
        success=distance < world.extensions.get("success_threshold", 0.1),
        truncated=position[2] < _FELL,
        metrics={"distance_to_goal": distance},
    )


def push_t(world: World) -> Outcome:
    """As ``push``; with ``require_on_table`` success also needs the body not below ``table_height``, m."""
    outcome = push(world, "t")
    if not world.extensions.get("require_on_table", True):
        return outcome
    on_table = world.object_pose("t")[2, 3] >= world.extensions.get("table_height", 0.0) - _BELOW_TABLE
    return replace(outcome, success=outcome.success & on_table)


def cart_pole(world: World) -> Outcome:
    """r = 1 − |θ|/π. Success, in the last step only: |θ| < 0.02 rad and |θ̇| < 0.05 rad/s. Failure: |θ| > π/2.

    In EmbodiChain a fall is a truncation, after which its GAE sees no value. Here it is reported as both: after a mere
    truncation comes a value, which beyond a fall no data teach, and which runs away.
    """
    angle = jnp.abs(world.part_qpos("hand")[0])
    fell = angle > jnp.pi / 2.0
    last = world.state.episode_step >= world.max_episode_steps
    return Outcome(
        success=last & _at_rest(world),
        fail=fell,
        truncated=fell,
        reward=1.0 - angle / jnp.pi,
        metrics={"distance_to_goal": angle},
    )


def first_cart_pole(world: World) -> Outcome:
    """As ``cart_pole``, with success in any step: an episode ends as soon as the pole is at rest upright."""
    outcome = cart_pole(world)
    return replace(outcome, success=_at_rest(world))


def _at_rest(world: World) -> Array:
    angle, velocity = jnp.abs(world.part_qpos("hand")[0]), jnp.abs(world.part_qvel("hand")[0])
    return (angle < _SUCCESS_ANGLE) & (velocity < _SUCCESS_VELOCITY)


SCENE_ONLY = "EmbodiedEnv-v1"
OUTCOMES: dict[str, Task] = {
    "PushCubeRL": Task(partial(push, uid="cube"), ("success_threshold",)),
    "PushBallRL": Task(partial(push, uid="soccer_ball"), ("success_threshold",)),
    "PushTRL": Task(push_t, ("success_threshold", "table_height", "require_on_table")),
    "CartPoleRL": Task(cart_pole, first_outcome=first_cart_pole),
    SCENE_ONLY: Task(scene_only),
}
"""By the ``id`` of a gym config. EmbodiChain released neither PushBallRL nor PushTRL: they are in its history."""


def missing_task(name: str) -> str:
    """Explain why an ``id`` is not in ``OUTCOMES``, and the remedy."""
    remedy = (
        f"give {SCENE_ONLY} for the scene without a task, which never succeeds and ends by its time limit only, or "
        "register a function of its outcome with register_task (ejax.envs.manager.tasks)"
    )
    if own := TASKS_ELSEWHERE.get(name.partition("-")[0]):
        return f"'{name}' is no task of EmbodiedEnv, but of a class: {own}. trainer.gym_config finds it"
    if name.partition("-")[0] in OTHER_TASKS:
        return (
            f"'{name}' is a class of EmbodiChain's, which ejax does not have: when an episode succeeds, fails or ends, "
            f"and everything else that the class computes, such as its actions, is not known here. ejax has "
            f"{', '.join(OUTCOMES)}; {remedy}"
        )
    return f"no task '{name}'; there is {', '.join(OUTCOMES)}; else {remedy}{did_you_mean(name, OUTCOMES)}"


def register_task(name: str, outcome: OutcomeFn, extensions: tuple[str, ...] = ()) -> None:
    """Add a task of your own to EmbodiChain's. Raises ValueError: the name is taken."""
    if name in OUTCOMES:
        raise ValueError(f"task '{name}' is registered already")
    OUTCOMES[name] = Task(outcome, extensions)
