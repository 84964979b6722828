"""A cart balances a pole; both joints are driven. Source: EmbodiChain's CartPoleRL."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.core import FrozenDict

from ejax.envs.description import Feature
from ejax.envs.mujoco.engine import Engine, PhysicsState, load_model
from ejax.envs.task.world import World
from ejax.envs.tasks.physics_task import PhysicsTask
from ejax.types import Array, Key

_HOME = (-0.2, 0.07)
_SUCCESS_ANGLE = 0.02
_SUCCESS_VELOCITY = 0.05


@struct.dataclass(kw_only=True)
class CartPoleState:
    """One episode."""

    physics: PhysicsState  # qpos [2]: cart (m), pole (rad, 0 is upright); qvel [2]
    target: Array  # [2]: the positions that the drives hold the joints at
    episode_step: Array  # Control steps done, int32


@dataclass(frozen=True)
class CartPoleRL(PhysicsTask):
    """Task of a cart that balances a pole by position drives.

        r = 1 − |θ|/π − velocity_penalty_weight·|θ̇|

    Observation [6]: forces of the drives (2: N, N·m), joint positions scaled to 0..1 by their ranges (2), joint
    velocities (2: m/s, rad/s). Action [2]: action_scale·a (m, rad) is added to the current joint positions, and the
    drives pull to that target for one control step of 0.04 s. Actions are not clipped. Truncated: |θ| > π/2, or the
    time limit. Success, judged in the last step only, and then terminated: |θ| < 0.02 rad and |θ̇| < 0.05 rad/s.

    Differs from EmbodiChain: the start, always at (−0.2 m, 0.07 rad) there, is within ± ``reset_range`` of it, uniform.
    A cart that leaves the ``rail`` (m to each side of 0) has failed. EmbodiChain's has no end, and its reward knows no
    cart: a policy may lean for ever while it drives away, 130 m in one episode.
    """

    asset = "cart_pole.xml"
    obs_features = (
        Feature("cart drive force", "N"),
        Feature("pole drive torque", "N m"),
        Feature("cart position / range", "1"),
        Feature("pole position / range", "1"),
        Feature("cart velocity", "m/s"),
        Feature("pole velocity", "rad/s"),
    )
    action_features = (
        Feature("cart position change / action_scale", "m"),
        Feature("pole angle change / action_scale", "rad"),
    )
    positive = ("max_episode_steps", "action_scale")
    not_negative = ("reset_range",)

    max_episode_steps: int = 500
    action_scale: float = 0.1
    velocity_penalty_weight: float = 0.005
    reset_range: float = 0.0
    rail: float | None = None
    physics: Engine = "auto"
    sim_steps_per_control: int = 4
    rewards: Mapping[str, Any] = FrozenDict()
    functor_events: Mapping[str, Any] = FrozenDict()

    @property
    def action_space(self) -> gymnasium.spaces.Box:
        """The joints' ranges, as for a robot of EmbodiChain."""
        low, high = load_model(self.asset).jnt_range.T.astype(np.float32)
        return gymnasium.spaces.Box(low, high, (2,), np.float32)

    def start(self, key: Key) -> CartPoleState:
        offset = jax.random.uniform(key, (2,), minval=-self.reset_range, maxval=self.reset_range)
        qpos = jnp.asarray(_HOME) + offset
        return CartPoleState(
            physics=PhysicsState(qpos=qpos, qvel=jnp.zeros(2)), target=qpos, episode_step=jnp.zeros((), jnp.int32)
        )

    def control(self, world: World, action: Array) -> Array:
        return world.qpos + self.action_scale * action

    def update(self, key: Key, world: World, before: World) -> World:
        return replace(world, state=replace(world.state, target=self.control(before, world.executed)))

    def succeeds(self, world: World) -> Array:
        angle, velocity = _pole(world)
        # EmbodiChain judges the last step only: a pole that swings through upright has not succeeded
        out_of_time = world.state.episode_step >= self.max_episode_steps
        return out_of_time & (angle < _SUCCESS_ANGLE) & (velocity < _SUCCESS_VELOCITY)

    def fails(self, world: World) -> Array:
        return super().fails(world) if self.rail is None else jnp.abs(world.qpos[0]) > self.rail

    def truncates(self, world: World) -> Array:
        return _pole(world)[0] > jnp.pi / 2.0

    def reward_terms(self, world: World, before: World) -> dict[str, Array]:
        angle, velocity = _pole(world)
        return {"upright": 1.0 - angle / jnp.pi, "velocity_penalty": -velocity}

    @property
    def own_weights(self) -> dict[str, float]:
        return {"upright": 1.0, "velocity_penalty": self.velocity_penalty_weight}

    def metrics(self, world: World) -> dict[str, Array]:
        return {"distance_to_goal": _pole(world)[0]}

    def observe(self, world: World) -> Array:
        model, state, qpos, qvel = world.model, world.state, world.qpos, world.qvel
        # of the row where events changed them: the observed force is what the drive really pulls with
        gain, bias = (
            state.physics.parameters.get(name, getattr(model, name))
            for name in ("actuator_gainprm", "actuator_biasprm")
        )
        kp, kv = gain[:, 0], -bias[:, 2]
        force = jnp.asarray(kp, qpos.dtype) * (state.target - qpos) - jnp.asarray(kv, qpos.dtype) * qvel
        low, high = jnp.asarray(model.jnt_range.T, qpos.dtype)
        force_low, force_high = jnp.asarray(model.actuator_forcerange.T, qpos.dtype)
        return jnp.concatenate([jnp.clip(force, force_low, force_high), (qpos - low) / (high - low), qvel])


def _pole(world: World) -> tuple[Array, Array]:
    """|θ|, rad, and |θ̇|, rad/s."""
    return jnp.abs(world.qpos[1]), jnp.abs(world.qvel[1])
