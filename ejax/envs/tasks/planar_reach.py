"""A planar two-link arm that reaches a target. Analytic, differentiable. Source: EmbodiChain's Newton planar reach."""

from dataclasses import asdict, dataclass

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ejax.envs.description import WHOLE, EnvDescription, Feature, features
from ejax.numerics.finite import all_finite
from ejax.types import Array, Key, Timestep

_OBSERVATION = (
    *(Feature(f"joint {i} angle", "rad") for i in (1, 2)),
    *features(("end effector", "xy", "m"), ("target", "xy", "m")),
    *(Feature(f"joint {i} previous action", "1") for i in (1, 2)),
)
_ACTION = tuple(Feature(f"joint {i} angle change / action_scale", "rad") for i in (1, 2))


@struct.dataclass(kw_only=True)
class PlanarReachState:
    """One episode."""

    joint_position: Array
    """[2], rad"""
    target_position: Array
    """[2], m"""
    last_action: Array
    episode_step: Array


@dataclass(frozen=True)
class PlanarReachRL:
    """
        q ← clip(q + action_scale·a, ±π),  x = (l₁ sin q₁ + l₂ sin(q₁ + q₂), −l₁ cos q₁ − l₂ cos(q₁ + q₂))
        r = −‖x − target‖²

    The arm hangs down at q = 0. Observation [8]: q, x, target, previous action. Action [2] in ±1, clipped. Terminated,
    and a success: ‖x − target‖ < success_threshold. A new episode starts at q ~ U(±π/2), with the target where the arm
    is at some q ~ U(±π): it can always be reached.
    """

    max_episode_steps: int = 32
    link_length: tuple[float, float] = (1.0, 0.8)
    """m"""
    action_scale: float = 0.2
    """rad per step at full action."""
    success_threshold: float = 0.05
    """m"""

    def __post_init__(self) -> None:
        checks = {
            "max_episode_steps": (self.max_episode_steps > 0, "> 0"),
            "link_length": (min(self.link_length) > 0.0, "two lengths > 0"),
            "action_scale": (self.action_scale > 0.0, "> 0"),
            "success_threshold": (self.success_threshold >= 0.0, ">= 0"),
        }
        for name, (valid, allowed) in checks.items():
            if not valid:
                raise ValueError(f"PlanarReachRL: {name} must be {allowed}, got {getattr(self, name)}")

    @property
    def description(self) -> EnvDescription:
        return EnvDescription(
            observation={WHOLE: _OBSERVATION},
            action=_ACTION,
            control_period=None,
            parameters=asdict(self),
        )

    @property
    def observation_space(self) -> gymnasium.spaces.Box:
        return gymnasium.spaces.Box(-np.inf, np.inf, (8,), np.float32)

    @property
    def action_space(self) -> gymnasium.spaces.Box:
        return gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, key: Key) -> tuple[PlanarReachState, Array]:
        key_start, key_target = jax.random.split(key)
        state = PlanarReachState(
            joint_position=jax.random.uniform(key_start, (2,), minval=-0.5 * jnp.pi, maxval=0.5 * jnp.pi),
            target_position=self.end_effector(jax.random.uniform(key_target, (2,), minval=-jnp.pi, maxval=jnp.pi)),
            last_action=jnp.zeros(2),
            episode_step=jnp.zeros((), jnp.int32),
        )
        return state, self._observe(state)

    def step(self, state: PlanarReachState, action: Array, key: Key) -> tuple[PlanarReachState, Timestep]:
        del key  # the dynamics are deterministic
        if action.shape != (2,):
            raise ValueError(f"PlanarReachRL.step takes an action of shape (2,), got {action.shape}")
        # not jnp.clip, which halves the gradient on the bounds, where previously clipped actions lie
        action = jnp.where(jnp.abs(action) > 1.0, jnp.sign(action), action)
        state = PlanarReachState(
            joint_position=jnp.clip(state.joint_position + self.action_scale * action, -jnp.pi, jnp.pi),
            target_position=state.target_position,
            last_action=action,
            episode_step=state.episode_step + 1,
        )
        error = self.end_effector(state.joint_position) - state.target_position
        squared_distance = jnp.sum(jnp.square(error))
        distance = jnp.sqrt(jax.lax.stop_gradient(squared_distance))
        finite = all_finite(state)
        success = (distance < self.success_threshold) & finite
        timestep = Timestep(
            obs=self._observe(state),
            reward=-squared_distance,
            terminated=success,
            truncated=(state.episode_step >= self.max_episode_steps) | ~finite,
            info={"success": success, "metrics": {"final_distance": distance}, "rewards": {}},
        )
        return state, timestep

    def end_effector(self, joint_position: Array) -> Array:
        """Position of the tip, m. [2] -> [2]."""
        first, second = self.link_length
        q_1, q_12 = joint_position[0], joint_position[0] + joint_position[1]
        x = first * jnp.sin(q_1) + second * jnp.sin(q_12)
        y = -first * jnp.cos(q_1) - second * jnp.cos(q_12)
        return jnp.stack([x, y])

    def _observe(self, state: PlanarReachState) -> Array:
        end_effector = self.end_effector(state.joint_position)
        return jnp.concatenate([state.joint_position, end_effector, state.target_position, state.last_action])
