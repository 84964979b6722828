"""A planar two-link arm that reaches a target. Analytic, differentiable. Source: EmbodiChain's Newton planar reach."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from flax.core import FrozenDict

from ejax.envs.description import Feature, features
from ejax.envs.task.terms import Snapshot
from ejax.envs.tasks.task import Task, clip_with_gradient
from ejax.types import Array, Key


@struct.dataclass(kw_only=True)
class PlanarReachState:
    joint_position: Array  # [2], rad
    target_position: Array  # [2], m
    last_action: Array
    episode_step: Array


@dataclass(frozen=True)
class PlanarReachRL(Task):
    """Task of a two-link arm that reaches a target; differentiable.

        q ← clip(q + action_scale·a, ±π),  x = (l₁ sin q₁ + l₂ sin(q₁ + q₂), −l₁ cos q₁ − l₂ cos(q₁ + q₂))
        r = −‖x − target‖²

    The arm hangs down at q = 0. Observation [8]: q, x, target, previous action. Action [2] in ±1, clipped. Terminated,
    and a success: ‖x − target‖ < success_threshold. A new episode starts at q ~ U(±π/2), with the target where the arm
    is at some q ~ U(±π): it can always be reached.
    """

    obs_features = (
        *(Feature(f"joint {i} angle", "rad") for i in (1, 2)),
        *features(("end effector", "xy", "m"), ("target", "xy", "m")),
        *(Feature(f"joint {i} previous action", "1") for i in (1, 2)),
    )
    action_features = tuple(Feature(f"joint {i} angle change / action_scale", "rad") for i in (1, 2))
    positive = ("max_episode_steps", "action_scale")
    not_negative = ("success_threshold",)

    max_episode_steps: int = 32
    link_length: tuple[float, float] = (1.0, 0.8)
    """m"""
    action_scale: float = 0.2
    """rad per step at full action"""
    success_threshold: float = 0.05
    """m"""
    rewards: Mapping[str, Any] = FrozenDict()
    functor_events: Mapping[str, Any] = FrozenDict()

    def check_fields(self) -> None:
        super().check_fields()
        if not min(self.link_length) > 0.0:
            raise ValueError(f"link_length must be two lengths > 0, got {self.link_length}")

    def start(self, key: Key) -> PlanarReachState:
        key_start, key_target = jax.random.split(key)
        return PlanarReachState(
            joint_position=jax.random.uniform(key_start, (2,), minval=-0.5 * jnp.pi, maxval=0.5 * jnp.pi),
            # by a posture, not a point: every target is within reach
            target_position=self.end_effector(jax.random.uniform(key_target, (2,), minval=-jnp.pi, maxval=jnp.pi)),
            last_action=jnp.zeros(2),
            episode_step=jnp.zeros((), jnp.int32),
        )

    def clip_action(self, action: Array) -> Array:
        return clip_with_gradient(action)

    def advance(self, world: Snapshot, action: Array) -> PlanarReachState:
        state: PlanarReachState = world.state
        joint_position = jnp.clip(state.joint_position + self.action_scale * action, -jnp.pi, jnp.pi)
        return replace(state, joint_position=joint_position, last_action=action)

    def observe(self, world: Snapshot) -> Array:
        state = world.state
        tip = self.end_effector(state.joint_position)
        return jnp.concatenate([state.joint_position, tip, state.target_position, state.last_action])

    def state_of(self, obs: Array) -> PlanarReachState:
        """Reconstruct the state; the tip is where the angles put it."""
        return PlanarReachState(
            joint_position=obs[:2],
            target_position=obs[4:6],
            last_action=obs[6:8],
            episode_step=jnp.zeros((), jnp.int32),
        )

    def distance(self, state: PlanarReachState) -> Array:
        """Measure from the tip to the target, m, without a gradient."""
        # the root has no gradient at 0, and nothing learns from it
        return jnp.sqrt(jax.lax.stop_gradient(self._squared_distance(state)))

    def succeeds(self, world: Snapshot) -> Array:
        return self.distance(world.state) < self.success_threshold

    def base_reward(self, world: Snapshot) -> Array:
        return -self._squared_distance(world.state)

    def metrics(self, world: Snapshot) -> dict[str, Array]:
        return {"final_distance": self.distance(world.state)}

    def end_effector(self, joint_position: Array) -> Array:
        """Locate the tip, m. [2] -> [2]."""
        first, second = self.link_length
        q_1, q_12 = joint_position[0], joint_position[0] + joint_position[1]
        x = first * jnp.sin(q_1) + second * jnp.sin(q_12)
        y = -first * jnp.cos(q_1) - second * jnp.cos(q_12)
        return jnp.stack([x, y])

    def _squared_distance(self, state: PlanarReachState) -> Array:
        return jnp.sum(jnp.square(self.end_effector(state.joint_position) - state.target_position))
