"""A UR10 pushes a cube to a goal on the floor. Source: the first version of EmbodiChain's PushCubeRL."""

from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from numpy.typing import NDArray

from ejax.envs.description import WHOLE, EnvDescription, Feature, features
from ejax.envs.mujoco.appearance import Appearance
from ejax.envs.mujoco.engine import Engine, Physics, PhysicsState, check_physics, load_model, render
from ejax.envs.mujoco.kinematics import site_pose
from ejax.numerics.finite import all_finite
from ejax.types import Array, CameraView, Key, Timestep

Position: TypeAlias = tuple[float, float, float]
Range: TypeAlias = tuple[Position, Position]

_ASSET = "push_cube.xml"
_ARM_HOME = (0.0, -1.57, 1.57, -1.57, -1.57, 0.0)
_FIXED: Range = ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
_PUSH_OFFSET = 0.015
_PUSH_HEIGHT = 0.015
_CUBE_FELL = -0.1


_JOINTS = ("shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3")
_OBSERVATION = (
    *(Feature(f"{joint} angle", "rad") for joint in _JOINTS),
    *features(("tool centre point", "xyz", "m"), ("cube", "xyz", "m"), ("goal", "xyz", "m")),
)
_ACTION = tuple(Feature(f"{joint} angle change / action_scale", "rad") for joint in _JOINTS)


@struct.dataclass(kw_only=True)
class PushCubeState:
    """One episode."""

    physics: PhysicsState
    """qpos [13]: 6 joints, cube position, cube quaternion; qvel [12]."""
    goal: Array
    """[3], m"""
    episode_step: Array
    """Control steps done, int32."""


@dataclass(frozen=True)
class PushCubeRL:
    """
        r = w_reaching·(1 − tanh 5‖ee − push‖) + w·tanh 10(d_prev − d) − w_action·‖Δq‖ + w_success·[d < threshold]

    with ee the tool centre point, d the horizontal distance from cube to goal, w = place_weight where the cube came
    nearer and place_penalty_weight where it went away, û the direction from cube to goal, and
    push = cube − 0.015·û + (0, 0, 0.015), all in m.

    Observation [15]: joint angles (6, rad), ee (3), cube (3), goal (3). Action [6]: Δq = clip(action_scale·a,
    ±joint_limits) rad is added to the current joint angles, and the drives hold that target for one control step of
    0.04 s.
    Terminated: d < success_threshold. Truncated: after episode_length steps, or when the cube fell below −0.1 m.

    Differs from the source: d_prev is the distance before this very step, so it cannot leak across episodes. The cube
    weighs 2 kg with friction 0.6, not 10 kg with friction 2 to 3: that one tips over when pushed, see push_cube.xml.

    Args:
        episode_length: time limit, control steps.
        joint_limits: rad, the largest Δq of a step; also the bounds of the action space.
        obs_mode: "state" is the only one.
        physics: the engine, see ``ejax.envs.mujoco.choice``.
        cube_position, goal_position: m, in the frame of the robot's base.
        cube_position_range, goal_position_range: (low, high) of the offset added to them at reset, uniform.
    """

    episode_length: int = 100
    action_scale: float = 0.1
    success_threshold: float = 0.1
    obs_mode: str = "state"
    reaching_weight: float = 0.1
    place_weight: float = 2.0
    place_penalty_weight: float = 0.5
    action_penalty_weight: float = 0.01
    success_weight: float = 10.0
    physics: Engine = "auto"
    sim_steps_per_control: int = 4
    cube_position: Position = (-0.6, -0.4, 0.05)
    goal_position: Position = (-0.9, -0.6, 0.05)
    cube_position_range: Range = _FIXED
    goal_position_range: Range = _FIXED
    joint_limits: float = 0.5

    def __post_init__(self) -> None:
        if self.obs_mode != "state":
            raise ValueError(f"PushCubeRL: obs_mode must be 'state', got {self.obs_mode!r}")
        for name in ("episode_length", "success_threshold", "action_scale", "joint_limits"):
            if not getattr(self, name) > 0:
                raise ValueError(f"PushCubeRL: {name} must be > 0, got {getattr(self, name)}")
        for name in ("cube_position", "goal_position"):
            object.__setattr__(self, name, _as_position(name, getattr(self, name)))
        for name in ("cube_position_range", "goal_position_range"):
            low, high = getattr(self, name)
            object.__setattr__(self, name, (_as_position(name, low), _as_position(name, high)))
        check_physics(self.physics, self.sim_steps_per_control)

    @property
    def max_episode_steps(self) -> int:
        return self.episode_length

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
        return gymnasium.spaces.Box(-np.inf, np.inf, (15,), np.float32)

    @property
    def action_space(self) -> gymnasium.spaces.Box:
        return gymnasium.spaces.Box(-self.joint_limits, self.joint_limits, (6,), np.float32)

    def reset(self, key: Key) -> tuple[PushCubeState, Array]:
        key_cube, key_goal = jax.random.split(key)
        cube = jnp.asarray(self.cube_position) + _uniform(key_cube, self.cube_position_range)
        goal = jnp.asarray(self.goal_position) + _uniform(key_goal, self.goal_position_range)
        upright = jnp.array([1.0, 0.0, 0.0, 0.0])
        state = PushCubeState(
            physics=PhysicsState(qpos=jnp.concatenate([jnp.asarray(_ARM_HOME), cube, upright]), qvel=jnp.zeros(12)),
            goal=goal,
            episode_step=jnp.zeros((), jnp.int32),
        )
        return state, self._observe(state)

    def step(self, state: PushCubeState, action: Array, key: Key) -> tuple[PushCubeState, Timestep]:
        del key  # physics is deterministic
        if action.shape != (6,):
            raise ValueError(f"PushCubeRL.step takes an action of shape (6,), got {action.shape}")
        delta = jnp.clip(self.action_scale * action, -self.joint_limits, self.joint_limits)
        physics = Physics(_ASSET, self.physics, self.sim_steps_per_control)
        distance_before = _distance_to_goal(state)
        state = replace(
            state,
            physics=physics.step(state.physics, state.physics.qpos[:6] + delta),
            episode_step=state.episode_step + 1,
        )

        obs = self._observe(state)
        distance = _distance_to_goal(state)
        finite = all_finite(state)
        success = (distance < self.success_threshold) & finite
        rewards = self._rewards(obs, distance_before - distance, delta, success)
        return state, Timestep(
            obs=obs,
            reward=sum(rewards.values(), jnp.zeros(())),
            terminated=success,
            truncated=(state.episode_step >= self.episode_length) | (_cube(state)[2] < _CUBE_FELL) | ~finite,
            info={"success": success, "metrics": {"distance_to_goal": distance}, "rewards": rewards},
        )

    def render(
        self, state: PushCubeState, width: int = 640, height: int = 480, camera: CameraView | None = None
    ) -> NDArray[np.uint8]:
        """Draw one environment: [height, width, 3] RGB. See ``ejax.envs.mujoco.engine.render``."""
        return render(
            _ASSET, state.physics.qpos, width=width, height=height, mocap_pos={"goal": state.goal}, camera=camera
        )

    def appearance(self, state: PushCubeState) -> Appearance:
        """For ``ejax.envs.mujoco.raycast``."""
        return Appearance(asset=_ASSET, qpos=state.physics.qpos, mocap_pos={"goal": state.goal})

    def _observe(self, state: PushCubeState) -> Array:
        qpos = state.physics.qpos
        tool = site_pose(load_model(_ASSET), "tcp", qpos)[:3, 3]
        return jnp.concatenate([qpos[:6], tool, _cube(state), state.goal])

    def _rewards(self, obs: Array, progress: Array, delta: Array, success: Array) -> dict[str, Array]:
        """EmbodiChain's terms of the reward, weighted. ``progress``: how much nearer the cube came to the goal, m."""
        tool, cube, goal = obs[6:9], obs[9:12], obs[12:15]
        to_goal = goal - cube
        direction = to_goal / (jnp.linalg.norm(to_goal) + 1e-6)
        push = cube - _PUSH_OFFSET * direction + jnp.array([0.0, 0.0, _PUSH_HEIGHT])
        place_weight = jnp.where(progress >= 0.0, self.place_weight, self.place_penalty_weight)
        return {
            "reaching_reward": self.reaching_weight * (1.0 - jnp.tanh(5.0 * jnp.linalg.norm(tool - push))),
            "place_reward": place_weight * jnp.tanh(10.0 * progress),
            "action_penalty": -self.action_penalty_weight * jnp.linalg.norm(delta),
            "success_bonus": self.success_weight * success,
        }


def _cube(state: PushCubeState) -> Array:
    """[3], m: the cube's centre."""
    return state.physics.qpos[6:9]


def _distance_to_goal(state: PushCubeState) -> Array:
    """Horizontal, m."""
    return jnp.linalg.norm((_cube(state) - state.goal)[:2])


def _uniform(key: Key, bounds: Range) -> Array:
    return jax.random.uniform(key, (3,), minval=jnp.asarray(bounds[0]), maxval=jnp.asarray(bounds[1]))


def _as_position(name: str, value: Any) -> Position:
    """The list of a config file as a (hashable) tuple."""
    if len(value) != 3:
        raise ValueError(f"PushCubeRL: {name} takes positions of three numbers (m), got {value!r}")
    x, y, z = value
    return float(x), float(y), float(z)
