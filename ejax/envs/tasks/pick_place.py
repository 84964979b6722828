"""A UR10 with a two-finger gripper picks up a cube and sets it down in a goal zone. A task of ejax's own."""

from dataclasses import asdict, dataclass, replace

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from numpy.typing import NDArray

from ejax.envs.description import WHOLE, EnvDescription
from ejax.envs.mujoco.appearance import Appearance
from ejax.envs.mujoco.engine import Engine, Physics, PhysicsState, check_physics, render
from ejax.envs.tasks.grasp_scene import GOAL_MARKER, HOME, make_model
from ejax.envs.tasks.grasp_task import (
    ACTION,
    CUBE_FELL,
    LIFT,
    ROBOT,
    as_pair,
    check_reachable,
    check_turn,
    describe_numbers,
    draw_place,
    draw_turn,
    height_of,
    horizontal_distance,
    is_set_down,
    potentials,
    tool_control,
    tool_position,
)
from ejax.numerics.finite import all_finite
from ejax.types import Array, CameraView, Key, Timestep

OBSERVATION = (
    *ROBOT,
    *(f"{point} {axis}" for point in ("cube", "goal", "cube - tool", "goal - cube") for axis in "xyz"),
    "was lifted",
)
"""The name of each number of the observation; rad, m, and 0 or 1."""

_CUBE = slice(8, 11)
_CUBE_VELOCITY = slice(8, 11)


@struct.dataclass(kw_only=True)
class PickPlaceState:
    """One episode."""

    physics: PhysicsState
    """qpos [15]: 6 joints, 2 fingers, cube position, cube quaternion; qvel [14]."""
    goal: Array
    """[3], m: where the cube's centre should end up."""
    was_lifted: Array
    """bool: the cube has been 0.05 m above the floor in this episode."""
    episode_step: Array
    """Control steps done, int32."""


@dataclass(frozen=True)
class PickPlaceRL:
    """
        r = Φ(s') − Φ(s) − w_action·‖Δ‖ + w_success·[success]
        Φ = w_reaching·(1 − tanh 5‖tool − cube‖) + w_lifting·ℓ + w_placing·[lifted]·(1 − tanh 5‖cube − goal‖)

    with ℓ the cube's height as a part of 0.05 m, and 1 once it was lifted; lengths in m. A difference of potentials
    leaves the best policy as it is (Ng, Harada and Russell 1999): nothing is gained by dawdling.

    Observation [24]: see ``OBSERVATION``. Action [4] in ±1: the tool's target is where it is now plus
    action_scale·a[:3] m, pointing down, and the fingers' is 0.02·(1 + a[3]) m: −1 is open, 1 closed. Damped least
    squares turn the tool's target into joint angles, which the drives hold for one control step of 0.04 s.
    Terminated: success, which is a cube that was lifted, now stands within success_threshold of the goal, is at rest,
    and is released. Truncated: after episode_length steps, or when the cube fell below −0.1 m.

    Actions move the tool and not the joints, so that a cloned policy need not learn the arm's kinematics: a scripted
    expert and a Gaussian policy act in the same three directions in m, and one grip.

    Args:
        episode_length: time limit, control steps.
        physics: the engine, see ``ejax.envs.mujoco.choice``.
        success_threshold: m, horizontally.
        cube_position, goal_position: m, (x, y) in the frame of the robot's base.
        cube_position_range, goal_position_range: ± m, added to them at reset, uniform.
        cube_turn: ± rad about the vertical at reset, uniform.
    """

    episode_length: int = 100
    action_scale: float = 0.04
    success_threshold: float = 0.03
    reaching_weight: float = 1.0
    lifting_weight: float = 1.0
    placing_weight: float = 3.0
    action_penalty_weight: float = 0.05
    success_weight: float = 10.0
    physics: Engine = "auto"
    sim_steps_per_control: int = 4
    cube_position: tuple[float, float] = (-0.65, 0.05)
    goal_position: tuple[float, float] = (-0.65, -0.3)
    cube_position_range: tuple[float, float] = (0.1, 0.08)
    goal_position_range: tuple[float, float] = (0.15, 0.12)
    cube_turn: float = 0.2

    def __post_init__(self) -> None:
        for name in ("episode_length", "action_scale", "success_threshold"):
            if not getattr(self, name) > 0:
                raise ValueError(f"PickPlaceRL: {name} must be > 0, got {getattr(self, name)}")
        for name in ("cube_position", "goal_position", "cube_position_range", "goal_position_range"):
            object.__setattr__(self, name, as_pair("PickPlaceRL", name, getattr(self, name)))
        check_turn("PickPlaceRL", self.cube_turn)
        for name in ("cube", "goal"):
            check_reachable(
                "PickPlaceRL", name, getattr(self, f"{name}_position"), getattr(self, f"{name}_position_range")
            )
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
            observation={WHOLE: describe_numbers(OBSERVATION)},
            action=ACTION,
            clips_actions=True,
            control_period=self.control_period,
            parameters=asdict(self),
        )

    @property
    def observation_space(self) -> gymnasium.spaces.Box:
        return gymnasium.spaces.Box(-np.inf, np.inf, (len(OBSERVATION),), np.float32)

    @property
    def action_space(self) -> gymnasium.spaces.Box:
        return gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)

    def reset(self, key: Key) -> tuple[PickPlaceState, Array]:
        key_cube, key_turn, key_goal = jax.random.split(key, 3)
        cube = draw_place(key_cube, self.cube_position, self.cube_position_range)
        quaternion = draw_turn(key_turn, self.cube_turn)
        state = PickPlaceState(
            physics=PhysicsState(qpos=jnp.concatenate([jnp.asarray(HOME), cube, quaternion]), qvel=jnp.zeros(14)),
            goal=draw_place(key_goal, self.goal_position, self.goal_position_range),
            was_lifted=jnp.zeros((), bool),
            episode_step=jnp.zeros((), jnp.int32),
        )
        return state, self._observe(state)

    def step(self, state: PickPlaceState, action: Array, key: Key) -> tuple[PickPlaceState, Timestep]:
        del key  # physics is deterministic
        if action.shape != (4,):
            raise ValueError(f"PickPlaceRL.step takes an action of shape (4,), got {action.shape}")
        action = jnp.clip(action, -1.0, 1.0)
        potential_before = self._potential(state)
        physics = self._physics.step(state.physics, self._control(state.physics.qpos, action))
        state = replace(
            state,
            physics=physics,
            was_lifted=state.was_lifted | (height_of(physics.qpos[_CUBE]) > LIFT),
            episode_step=state.episode_step + 1,
        )
        finite = all_finite(state)
        success = self._success(state) & finite
        fell = state.physics.qpos[_CUBE][2] < CUBE_FELL
        rewards = {name: after - potential_before[name] for name, after in self._potential(state).items()} | {
            "action_penalty": -self.action_penalty_weight * jnp.linalg.norm(self.action_scale * action[:3]),
            "success": self.success_weight * success,
        }
        return state, Timestep(
            obs=self._observe(state),
            reward=sum(rewards.values(), jnp.zeros(())),
            terminated=success,
            truncated=(state.episode_step >= self.episode_length) | fell | ~finite,
            info={"success": success, "metrics": {"distance_to_goal": _distance_to_goal(state)}, "rewards": rewards},
        )

    def render(
        self, state: PickPlaceState, width: int = 640, height: int = 480, camera: CameraView | None = None
    ) -> NDArray[np.uint8]:
        """Draw one environment: [height, width, 3] RGB. See ``ejax.envs.mujoco.engine.render``."""
        return render(
            make_model(),
            state.physics.qpos,
            width=width,
            height=height,
            mocap_pos={GOAL_MARKER: state.goal},
            camera=camera,
        )

    def appearance(self, state: PickPlaceState) -> Appearance:
        """For ``ejax.envs.mujoco.raycast``."""
        return Appearance(asset=make_model(), qpos=state.physics.qpos, mocap_pos={GOAL_MARKER: state.goal})

    @property
    def _physics(self) -> Physics:
        return Physics(make_model(), self.physics, self.sim_steps_per_control)

    def _control(self, qpos: Array, action: Array) -> Array:
        """[8]: the signal of the drives, see ``tool_control``."""
        return tool_control(make_model(), qpos, action, self.action_scale)

    def _observe(self, state: PickPlaceState) -> Array:
        qpos = state.physics.qpos
        tool, cube, goal = tool_position(make_model(), qpos), qpos[_CUBE], state.goal
        lifted = state.was_lifted.astype(qpos.dtype)[None]
        return jnp.concatenate([qpos[:8], tool, cube, goal, cube - tool, goal - cube, lifted])

    def _potential(self, state: PickPlaceState) -> dict[str, Array]:
        """Φ's terms, weighted."""
        qpos, weights = state.physics.qpos, (self.reaching_weight, self.lifting_weight, self.placing_weight)
        return potentials(tool_position(make_model(), qpos), qpos[_CUBE], state.goal, state.was_lifted, weights)

    def _success(self, state: PickPlaceState) -> Array:
        qpos = state.physics.qpos
        there = _distance_to_goal(state) < self.success_threshold
        set_down = is_set_down(qpos[_CUBE], state.physics.qvel[_CUBE_VELOCITY], qpos[6:8])
        return state.was_lifted & there & set_down


def _distance_to_goal(state: PickPlaceState) -> Array:
    """Horizontal, m."""
    return horizontal_distance(state.physics.qpos[_CUBE], state.goal)
