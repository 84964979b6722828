"""A point mass that reaches a goal past two soft obstacles. Differentiable. Source: EmbodiChain's PointMassRL."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from flax.core import FrozenDict

from ejax.envs.description import EnvDescription, Feature, features
from ejax.envs.task.terms import Snapshot
from ejax.envs.tasks.task import Task, clip_with_gradient
from ejax.numerics.platforms import by_platform
from ejax.types import Array, Key

_MAX_DRAWS = 50
_NEVER = 1e-12  # The probability of a failure that need not be provided for


@struct.dataclass(kw_only=True)
class PointMassState:
    """One episode. Lengths in m, velocities in m/s."""

    position: Array
    velocity: Array
    goal_position: Array
    obstacle_position: Array  # [2, 2]
    obstacle_radius: Array  # [2]
    last_action: Array
    episode_step: Array
    path_length: Array
    collision_count: Array


@dataclass(frozen=True)
class PointMassRL(Task):
    """Task of a point mass that reaches a goal past soft obstacles; differentiable.

        v ← v·(1 − damping·dt) + a·force/mass·dt,  p ← clip(p + v·dt)
        r = −d + ½·exp(−d²/(2·0.05²)) − 2Σpen² − 0.01‖v‖² − 0.001‖a − a_prev‖² + success_bonus·[d < threshold]

    with d the distance to the goal and pen the depth inside an obstacle. Observation [14]: position, velocity, goal,
    previous action, obstacle positions, obstacle radii. Action [2] in ±1, clipped.
    """

    obs_features = (
        *features(("position", "xy", "m"), ("velocity", "xy", "m/s"), ("goal", "xy", "m")),
        *features(("previous action", "xy", "1"), ("obstacle 0", "xy", "m"), ("obstacle 1", "xy", "m")),
        *(Feature(f"obstacle {i} radius", "m") for i in range(2)),
    )
    action_features = tuple(Feature(f"force {axis} / force_scale", "N") for axis in "xy")
    positive = ("max_episode_steps", "mass", "dt")
    not_negative = ("success_bonus",)

    max_episode_steps: int = 100
    workspace_half: float = 1.0
    mass: float = 1.0
    force_scale: float = 5.0
    linear_damping: float = 5.0
    dt: float = 1.0 / 60.0
    success_threshold: float = 0.03
    success_bonus: float = 0.0
    obstacle_radius_range: tuple[float, float] = (0.08, 0.15)
    obstacle_min_goal_distance: float = 0.25
    rewards: Mapping[str, Any] = FrozenDict()
    functor_events: Mapping[str, Any] = FrozenDict()

    def check_fields(self) -> None:
        super().check_fields()
        low, high = self.obstacle_radius_range
        if not 0.0 < low <= high:
            text = f"must be (low, high) with 0 < low <= high, got {self.obstacle_radius_range}"
            raise ValueError(f"obstacle_radius_range {text}")

    @property
    def description(self) -> EnvDescription:
        return replace(super().description, control_period=self.dt)

    def start(self, key: Key) -> PointMassState:
        key_goal, key_start, key_obstacles, key_radii = jax.random.split(key, 4)
        half = self.workspace_half
        goal = _uniform(key_goal, (2,), 0.7 * half)
        low, high = self.obstacle_radius_range
        return PointMassState(
            position=_uniform(key_start, (2,), 0.6 * half),
            velocity=jnp.zeros(2),
            goal_position=goal,
            obstacle_position=self._draw_obstacles(key_obstacles, goal),
            obstacle_radius=jax.random.uniform(key_radii, (2,), minval=low, maxval=high),
            last_action=jnp.zeros(2),
            episode_step=jnp.zeros((), jnp.int32),
            path_length=jnp.zeros(()),
            collision_count=jnp.zeros((), jnp.int32),
        )

    def clip_action(self, action: Array) -> Array:
        return clip_with_gradient(action)

    def advance(self, world: Snapshot, action: Array) -> PointMassState:
        state: PointMassState = world.state
        velocity = state.velocity * (1.0 - self.linear_damping * self.dt)
        velocity = velocity + action * (self.force_scale / self.mass * self.dt)
        position = jnp.clip(state.position + velocity * self.dt, -self.workspace_half, self.workspace_half)
        # logged only: its gradient at rest would be NaN
        moved = jnp.linalg.norm(jax.lax.stop_gradient(position - state.position))
        state = replace(
            state,
            position=position,
            velocity=velocity,
            last_action=jax.lax.stop_gradient(action),
            path_length=state.path_length + moved,
        )
        return replace(state, collision_count=state.collision_count + (_penetration(state) > 0.0).any())

    def distance(self, state: PointMassState) -> Array:
        """m, from the mass to the goal."""
        return _safe_norm(state.position - state.goal_position)

    def succeeds(self, world: Snapshot) -> Array:
        return self.distance(world.state) < self.success_threshold

    def base_reward(self, world: Snapshot) -> Array:
        state, distance = world.state, self.distance(world.state)
        return (
            -distance
            + 0.5 * jnp.exp(-jnp.square(distance) / (2.0 * 0.05**2))
            - 2.0 * jnp.sum(jnp.square(_penetration(state)))
            - 0.01 * jnp.sum(jnp.square(state.velocity))
            - 0.001 * jnp.sum(jnp.square(world.executed - world.before.state.last_action))
            + self.success_bonus * self.succeeds(world)
        )

    def metrics(self, world: Snapshot) -> dict[str, Array]:
        state = world.state
        metrics = {
            "final_position": state.position,
            "final_distance": self.distance(state),
            "path_length": state.path_length,
            "collision_count": state.collision_count,
        }
        return jax.lax.stop_gradient(metrics)

    def observe(self, world: Snapshot) -> Array:
        state = world.state
        moving = (state.position, state.velocity, state.goal_position, state.last_action)
        return jnp.concatenate([*moving, state.obstacle_position.reshape(4), state.obstacle_radius])

    def state_of(self, obs: Array) -> PointMassState:
        zero = jnp.zeros((), jnp.int32)
        return PointMassState(
            position=obs[:2],
            velocity=obs[2:4],
            goal_position=obs[4:6],
            last_action=jax.lax.stop_gradient(obs[6:8]),  # as ``advance`` does
            obstacle_position=obs[8:12].reshape(2, 2),
            obstacle_radius=obs[12:14],
            episode_step=zero,
            path_length=jnp.zeros(()),
            collision_count=zero,
        )

    def _draw_obstacles(self, key: Key, goal: Array) -> Array:
        """Uniform outside a disc around the goal; after 50 failed draws the point mirrored at the origin, −½·goal."""

        def too_close(obstacle: Array) -> Array:
            return jnp.linalg.norm(obstacle - goal[None], axis=-1) <= self.obstacle_min_goal_distance

        def draw(i: Array | int, obstacle: Array) -> Array:
            fresh = _uniform(jax.random.fold_in(key, i), (2, 2), 0.8 * self.workspace_half)
            return jnp.where(too_close(obstacle)[:, None], fresh, obstacle)

        def while_too_close(start: Array) -> Array:
            def unfinished(carry: tuple[Array, Array]) -> Array:
                return too_close(carry[0]).any() & (carry[1] < self._num_draws)

            def one_more(carry: tuple[Array, Array]) -> tuple[Array, Array]:
                return draw(carry[1], carry[0]), carry[1] + 1

            return jax.lax.while_loop(unfinished, one_more, (start, jnp.zeros((), jnp.int32)))[0]

        # a GPU would ask the host after each draw whether to continue; obstacles that are far enough away stay
        start = jnp.broadcast_to(goal, (2, 2))
        all_draws = partial(jax.lax.fori_loop, 0, self._num_draws, draw)
        obstacle = by_platform(cpu=while_too_close, gpu=all_draws)(start)
        return jnp.where(too_close(obstacle)[:, None], -0.5 * goal[None], obstacle)

    @property
    def _num_draws(self) -> int:
        fails = math.pi * self.obstacle_min_goal_distance**2 / (1.6 * self.workspace_half) ** 2
        if not 0.0 < fails < 1.0:
            return _MAX_DRAWS
        return min(_MAX_DRAWS, math.ceil(math.log(_NEVER) / math.log(fails)))


def _penetration(state: PointMassState) -> Array:
    """[2], m: how deep the mass is in each obstacle."""
    to_obstacle = _safe_norm(state.position[None] - state.obstacle_position)
    return jnp.maximum(state.obstacle_radius - to_obstacle, 0.0)


def _uniform(key: Key, shape: tuple[int, ...], half_width: float) -> Array:
    return jax.random.uniform(key, shape, minval=-half_width, maxval=half_width)


def _safe_norm(x: Array) -> Array:
    """‖x‖ over the last axis, of two, with gradient 0 at x = 0, where the plain norm's is NaN."""
    squared = jnp.square(x[..., 0]) + jnp.square(x[..., 1])  # on a GPU a sum over an axis is a kernel, and this is none
    zero = squared == 0.0  # not the opposite of "> 0", which is false for NaN: a NaN would then be near everything
    return jnp.where(zero, 0.0, jnp.sqrt(jnp.where(zero, 1.0, squared)))
