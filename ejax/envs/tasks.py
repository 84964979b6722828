"""What EmbodiChain's task classes add to their gym config: success, failure, a base reward, an episode's early end."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import jax.numpy as jnp

from ejax.envs.world import World
from ejax.types import Array

_CUBE_FELL = -0.1
_SUCCESS_ANGLE = 0.02
_SUCCESS_VELOCITY = 0.05


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Of one step."""

    success: Array
    """bool; ends the episode, with no value after it, as does ``fail``."""
    fail: Array
    truncated: Array
    """bool, besides the time limit."""
    reward: Array
    """What the reward functors are added to."""
    metrics: dict[str, Array] = field(default_factory=dict)


JudgeFn: TypeAlias = Callable[[World], Judgement]


@dataclass(frozen=True)
class Task:
    """A judge, and the names in ``env.extensions`` that it reads."""

    judge: JudgeFn
    extensions: tuple[str, ...] = ()


def generic(world: World) -> Judgement:
    """A gym config without a task class: it ends by its time limit only."""
    never = jnp.zeros((), bool)
    return Judgement(success=never, fail=never, truncated=never, reward=jnp.zeros(()))


def push_cube(world: World) -> Judgement:
    """Success: the cube is nearer to ``goal_pose`` than ``success_threshold``, horizontally. Cut: it fell to −0.1 m."""
    cube = world.object_pose("cube")[:3, 3]
    distance = jnp.linalg.norm((cube - world.pose("goal_pose")[:3, 3])[:2])
    never = jnp.zeros((), bool)
    return Judgement(
        success=distance < world.extensions.get("success_threshold", 0.1),
        fail=never,
        truncated=cube[2] < _CUBE_FELL,
        reward=jnp.zeros(()),
        metrics={"distance_to_goal": distance},
    )


def cart_pole(world: World) -> Judgement:
    """r = 1 − |θ|/π. Success, in the last step only: |θ| < 0.02 rad and |θ̇| < 0.05 rad/s. Failure: |θ| > π/2.

    Differs from EmbodiChain, where a fall is a truncation and nothing else, after which its GAE sees no value. Here a
    value follows a truncation; beyond a fall no data teach it, and it runs away. So a fall is reported as both.
    """
    angle, velocity = jnp.abs(world.part_qpos("hand")[0]), jnp.abs(world.part_qvel("hand")[0])
    fell = angle > jnp.pi / 2.0
    last = world.state.episode_step >= world.max_episode_steps
    return Judgement(
        success=last & (angle < _SUCCESS_ANGLE) & (velocity < _SUCCESS_VELOCITY),
        fail=fell,
        truncated=fell,
        reward=1.0 - angle / jnp.pi,
        metrics={"distance_to_goal": angle},
    )


TASKS: dict[str, Task] = {
    "PushCubeRL": Task(push_cube, ("success_threshold",)),
    "CartPoleRL": Task(cart_pole),
}
"""By the ``id`` of a gym config; any other id is ``generic``."""


def register_task(name: str, judge: JudgeFn, extensions: tuple[str, ...] = ()) -> None:
    """Put a task of your own beside EmbodiChain's.

    Raises:
        ValueError: the name is taken.
    """
    if name in TASKS:
        raise ValueError(f"task '{name}' is registered already")
    TASKS[name] = Task(judge, extensions)
