"""A cart balances a pole; both joints are driven. Source: EmbodiChain's CartPoleRL."""

from dataclasses import asdict, dataclass, replace

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from numpy.typing import NDArray

from ejax.envs.description import WHOLE, EnvDescription, Feature
from ejax.envs.mujoco.appearance import Appearance
from ejax.envs.mujoco.engine import Engine, Physics, PhysicsState, check_physics, load_model, render
from ejax.numerics.finite import all_finite
from ejax.types import Array, CameraView, Key, Timestep

_ASSET = "cart_pole.xml"
_HOME = (-0.2, 0.07)
_SUCCESS_ANGLE = 0.02
_SUCCESS_VELOCITY = 0.05


_OBSERVATION = (
    Feature("cart drive force", "N"),
    Feature("pole drive torque", "N m"),
    Feature("cart position / range", "1"),
    Feature("pole position / range", "1"),
    Feature("cart velocity", "m/s"),
    Feature("pole velocity", "rad/s"),
)
_ACTION = (
    Feature("cart position change / action_scale", "m"),
    Feature("pole angle change / action_scale", "rad"),
)


@struct.dataclass(kw_only=True)
class CartPoleState:
    """One episode."""

    physics: PhysicsState
    """qpos [2]: cart (m), pole (rad, 0 is upright); qvel [2]."""
    target: Array
    """[2]: the positions that the drives hold the joints at."""
    episode_step: Array
    """Control steps done, int32."""


@dataclass(frozen=True)
class CartPoleRL:
    """
        r = 1 − |θ|/π − velocity_penalty_weight·|θ̇|

    Observation [6]: forces of the drives (2: N, N·m), joint positions scaled to 0..1 by their ranges (2), joint
    velocities (2: m/s, rad/s). Action [2]: action_scale·a (m, rad) is added to the current joint positions, and the
    drives pull to that target for one control step of 0.04 s. Actions are not clipped.
    Truncated: |θ| > π/2, or the time limit. Success, judged in the last step only, and then terminated:
    |θ| < 0.02 rad and |θ̇| < 0.05 rad/s.

    ``info["rewards"]`` are weighted and sum up to the reward; EmbodiChain has the bare velocity term there.

    Args:
        reset_range: the start is (−0.2 m, 0.07 rad) ± this, uniform. EmbodiChain always starts at the same place.
        physics: the engine, see ``ejax.envs.mujoco.choice``.
    """

    max_episode_steps: int = 500
    action_scale: float = 0.1
    velocity_penalty_weight: float = 0.005
    reset_range: float = 0.0
    physics: Engine = "auto"
    sim_steps_per_control: int = 4

    def __post_init__(self) -> None:
        for name in ("max_episode_steps", "action_scale"):
            if not getattr(self, name) > 0:
                raise ValueError(f"CartPoleRL: {name} must be > 0, got {getattr(self, name)}")
        if not self.reset_range >= 0.0:
            raise ValueError(f"CartPoleRL: reset_range must be >= 0, got {self.reset_range}")
        check_physics(self.physics, self.sim_steps_per_control)

    @property
    def control_period(self) -> float:
        """Duration of one step, s."""
        return 0.01 * self.sim_steps_per_control

    @property
    def description(self) -> EnvDescription:
        return EnvDescription(
            observation={WHOLE: _OBSERVATION},
            action=_ACTION,
            control_period=self.control_period,
            parameters=asdict(self),
        )

    @property
    def observation_space(self) -> gymnasium.spaces.Box:
        return gymnasium.spaces.Box(-np.inf, np.inf, (6,), np.float32)

    @property
    def action_space(self) -> gymnasium.spaces.Box:
        """The joints' ranges, as for a robot of EmbodiChain."""
        low, high = load_model(_ASSET).jnt_range.T.astype(np.float32)
        return gymnasium.spaces.Box(low, high, (2,), np.float32)

    def reset(self, key: Key) -> tuple[CartPoleState, Array]:
        offset = jax.random.uniform(key, (2,), minval=-self.reset_range, maxval=self.reset_range)
        qpos = jnp.asarray(_HOME) + offset
        state = CartPoleState(
            physics=PhysicsState(qpos=qpos, qvel=jnp.zeros(2)), target=qpos, episode_step=jnp.zeros((), jnp.int32)
        )
        return state, _observe(state)

    def step(self, state: CartPoleState, action: Array, key: Key) -> tuple[CartPoleState, Timestep]:
        del key  # physics is deterministic
        if action.shape != (2,):
            raise ValueError(f"CartPoleRL.step takes an action of shape (2,), got {action.shape}")
        physics = Physics(_ASSET, self.physics, self.sim_steps_per_control)
        target = state.physics.qpos + self.action_scale * action
        state = replace(
            state,
            physics=physics.step(state.physics, target),
            target=target,
            episode_step=state.episode_step + 1,
        )

        angle, velocity = jnp.abs(state.physics.qpos[1]), jnp.abs(state.physics.qvel[1])
        rewards = {
            "upright": 1.0 - angle / jnp.pi,
            "velocity_penalty": -self.velocity_penalty_weight * velocity,
        }
        out_of_time = state.episode_step >= self.max_episode_steps
        finite = all_finite(state)
        success = out_of_time & (angle < _SUCCESS_ANGLE) & (velocity < _SUCCESS_VELOCITY) & finite
        return state, Timestep(
            obs=_observe(state),
            reward=rewards["upright"] + rewards["velocity_penalty"],
            terminated=success,
            truncated=out_of_time | (angle > jnp.pi / 2.0) | ~finite,
            info={"success": success, "metrics": {"distance_to_goal": angle}, "rewards": rewards},
        )

    def render(
        self, state: CartPoleState, width: int = 640, height: int = 480, camera: CameraView | None = None
    ) -> NDArray[np.uint8]:
        """Draw one environment: [height, width, 3] RGB. See ``ejax.envs.mujoco.engine.render``."""
        return render(_ASSET, state.physics.qpos, width=width, height=height, camera=camera)

    def appearance(self, state: CartPoleState) -> Appearance:
        """For ``ejax.envs.mujoco.raycast``."""
        return Appearance(asset=_ASSET, qpos=state.physics.qpos)


def _observe(state: CartPoleState) -> Array:
    """[6]: the drives' forces, qpos scaled to 0..1, qvel."""
    model = load_model(_ASSET)
    qpos, qvel = state.physics.qpos, state.physics.qvel
    gain, bias = (
        state.physics.parameters.get(name, getattr(model, name)) for name in ("actuator_gainprm", "actuator_biasprm")
    )
    kp, kv = gain[:, 0], -bias[:, 2]
    force = jnp.asarray(kp, qpos.dtype) * (state.target - qpos) - jnp.asarray(kv, qpos.dtype) * qvel
    low, high = jnp.asarray(model.jnt_range.T, qpos.dtype)
    force_low, force_high = jnp.asarray(model.actuator_forcerange.T, qpos.dtype)
    return jnp.concatenate([jnp.clip(force, force_low, force_high), (qpos - low) / (high - low), qvel])
