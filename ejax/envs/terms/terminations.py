"""Ends of a step by EmbodiChain's task classes: success, failure, early end, and their base reward. By the ``id`` of a
gym config: f(world, **params) -> Outcome, whose parameters are the entries of ``env.extensions`` that it reads."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax.numpy as jnp

from ejax.envs.task.scene import SceneWorld
from ejax.envs.task.terms import Outcome
from ejax.envs.task.world import World
from ejax.types import Array

SCENE_ONLY = "EmbodiedEnv-v1"
FIRST_FORM = "{} of 0.1.1"
"""The name of a task's ends in configs in the form of 0.1.0 and 0.1.1, where they differed (see ``extensions``)."""
_FELL = -0.1
_BELOW_TABLE = 1e-3
_SUCCESS_ANGLE = 0.02
_SUCCESS_VELOCITY = 0.05


def scene_only(world: World) -> Outcome:
    """EmbodiChain's base class, without a task: an episode ends by its time limit only."""
    never = jnp.zeros((), bool)
    return Outcome(success=never, fail=never, truncated=never, reward=jnp.zeros(()))


def push(world: World, uid: str, success_threshold: float = 0.1) -> Outcome:
    """Success: the body is horizontally within ``success_threshold`` of ``goal_pose``. Truncated: it fell to −0.1 m."""
    position = world.object_pose(uid)[:3, 3]
    distance = jnp.linalg.norm((position - world.pose("goal_pose")[:3, 3])[:2])
    return replace(
        scene_only(world),
        success=distance < success_threshold,
        truncated=position[2] < _FELL,
        metrics={"distance_to_goal": distance},
    )


def push_t(
    world: World, success_threshold: float = 0.1, table_height: float = 0.0, require_on_table: bool = True
) -> Outcome:
    """As ``push``; with ``require_on_table`` success also needs the body not below ``table_height``, m."""
    outcome = push(world, "t", success_threshold)
    if outcome.success is None or not require_on_table:
        return outcome
    on_table = world.object_pose("t")[2, 3] >= table_height - _BELOW_TABLE
    return replace(outcome, success=outcome.success & on_table)


def cart_pole(world: SceneWorld) -> Outcome:
    """r = 1 − |θ|/π. Success, in the last step only: |θ| < 0.02 rad and |θ̇| < 0.05 rad/s. Failure: |θ| > π/2.

    In EmbodiChain a fall is a truncation, after which its GAE sees no value. Here it is reported as both: after a mere
    truncation comes a value, which beyond a fall no data teach, and which runs away.
    """
    angle = jnp.abs(world.part_qpos("hand")[0])
    fell = angle > jnp.pi / 2.0
    # EmbodiChain judges whole episodes: the pole has to be up at the end
    last = world.state.episode_step >= world.max_episode_steps
    return Outcome(
        success=last & _at_rest(world),
        fail=fell,
        truncated=fell,
        reward=1.0 - angle / jnp.pi,
        metrics={"distance_to_goal": angle},
    )


def first_cart_pole(world: SceneWorld) -> Outcome:
    """As ``cart_pole``, with success in any step: an episode ends as soon as the pole is at rest upright."""
    outcome = cart_pole(world)
    return replace(outcome, success=_at_rest(world))


def _at_rest(world: SceneWorld) -> Array:
    angle, velocity = jnp.abs(world.part_qpos("hand")[0]), jnp.abs(world.part_qvel("hand")[0])
    return (angle < _SUCCESS_ANGLE) & (velocity < _SUCCESS_VELOCITY)


TASKS: dict[str, Callable[..., Outcome]] = {
    "PushCubeRL": partial(push, uid="cube"),
    "PushBallRL": partial(push, uid="soccer_ball"),
    "PushTRL": push_t,
    "CartPoleRL": cart_pole,
    FIRST_FORM.format("CartPoleRL"): first_cart_pole,
    SCENE_ONLY: scene_only,
}
"""EmbodiChain released neither PushBallRL nor PushTRL: they are in its history."""
