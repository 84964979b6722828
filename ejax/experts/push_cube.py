"""Experts for PushCube and PushCubeRL: ``make_push_task`` and ``make_task``."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from ejax.envs.manager.embodied import EmbodiedEnv
from ejax.envs.mujoco.engine import load_model
from ejax.envs.mujoco.kinematics import site_pose
from ejax.envs.task.scene import SceneWorld
from ejax.envs.task.world import SceneState
from ejax.envs.tasks.push import PushCube
from ejax.envs.tasks.push_cube import PushCubeRL
from ejax.envs.terms.actions import ActionTerm
from ejax.experts.task import EnvRows, Expert, Law, ScriptedTask, limit_length, phrase, read_plan
from ejax.numerics.platforms import solve_positive
from ejax.schema.problems import ConfigError, Problem
from ejax.types import Array, CameraView, PyTree

_TRIED = 0.01  # rad that every joint is moved by where it is tried whether the terms can
_MISSED = 1e-3  # rad


@dataclass(frozen=True)
class SceneArm:
    """The arm with the tool. Raises ConfigError: there is none, or its action terms do not reach joint positions."""

    env: EmbodiedEnv
    uid: str
    """Object that the arm handles."""
    goal: str
    """Key of the virtual target that it goes to."""

    def __post_init__(self) -> None:
        scene = self.env.spec.scene
        if scene.tool_part is None or self.joints != tuple(range(len(self.joints))):
            raise ConfigError(
                [Problem("robot", "the expert needs an arm with a tool whose joints are the robot's first")]
            )
        if not all(term.command == "qpos" and term.width in (1, len(term.joints)) for term in self.env.spec.actions):
            raise _unfit("are not all of joint positions")
        state = jax.jit(self.env.reset)(jax.random.key(0))[0]
        step = jnp.full(len(self.joints), _TRIED)
        aimed = jax.jit(lambda state: self.env.aim(self.env.world(state), self._action(state, step)).state)(state)
        joints = jnp.array(self.joints)
        if not np.allclose(aimed.target[joints], state.physics.qpos[joints] + step, atol=_MISSED):
            raise _unfit("do not take all joints of the arm to positions")

    @property
    def joints(self) -> tuple[int, ...]:
        scene = self.env.spec.scene
        return scene.part(str(scene.tool_part)) if scene.tool_part else ()

    @partial(jax.jit, static_argnums=0)
    @partial(jax.vmap, in_axes=(None, 0))
    def see(self, state: SceneState) -> Array:
        """[N, J + 9]: the arm's joint angles, rad; tool, object and goal, m."""
        world = self.env.world(state)
        places = [pose[:3, 3] for pose in (world.eef_pose(), world.object_pose(self.uid), world.pose(self.goal))]
        return jnp.concatenate([state.physics.qpos[jnp.array(self.joints)], *places])

    @partial(jax.jit, static_argnums=0)
    @partial(jax.vmap, in_axes=(None, 0, 0))
    def command(self, state: SceneState, step: Array) -> Array:
        """Compute actions [N, A] that set the arm's targets ``step`` [N, J], rad, beyond its angles; others stay."""
        return self._action(state, step)

    def _action(self, state: SceneState, step: Array) -> Array:
        space, joints = self.env.action_space, jnp.array(self.joints)
        wanted = state.target.at[joints].set(state.physics.qpos[joints] + step)
        parts = [_invert(term, self.env.world(state), wanted) for term in self.env.spec.actions]
        return jnp.clip(jnp.concatenate(parts), space.low, space.high)


def _unfit(what: str) -> ConfigError:
    text = f"its terms {what}, as the expert needs; use DeltaQposTerm, or another term of joint positions"
    return ConfigError([Problem("env.actions", text)])


def _invert(term: ActionTerm, world: SceneWorld, wanted: Array) -> Array:
    """Find the numbers [width] by which a term sets the targets ``wanted`` [J] of its joints: those of joint positions
    are affine, joint by joint, or by one number for all of a gripper's."""
    joints, unit = jnp.array(term.joints), jnp.minimum(1.0, jnp.array(term.high))
    at_rest = term.apply(world, jnp.zeros(term.width)).target[joints]
    slope = (term.apply(world, unit).target[joints] - at_rest) / unit
    way = wanted[joints] - at_rest
    if term.width == 1 and len(term.joints) > 1:
        return (slope @ way / (slope @ slope))[None]
    return way / slope


_PLAN = read_plan(__file__)
CAMERA, ENV, _SCENE = CameraView(**_PLAN["camera"]), _PLAN["env"], _PLAN["scene"]
_CARE = np.array(list(_PLAN["segments"].values()))[:, None] * np.ones(6)

_FASTER = dict(_PLAN["ranges"])
for _name in ("speed", "push_speed"):
    _low, _high, _count = _FASTER[_name]
    _FASTER[_name] = (_SCENE["faster"] * _low, _SCENE["faster"] * _high, _count)

_THERE = 0.03  # distance of the tool from a waypoint, m, at which the next segment begins
_OFF_LINE = 0.04  # distance from the line between cube and goal, m, at which the tool only returns to it
_BACK_ON_LINE = 0.015  # m per step
_PUSH_HEIGHT = 0.04  # m
_DAMPING = 0.01


class PushCubeExpert(Expert):
    """Behind the cube, down, and forward, steering it by the place of contact."""

    make_env: ClassVar[Any] = PushCubeRL
    env_fields = ENV
    segments, care, ranges = tuple(_PLAN["segments"]), _CARE, _PLAN["ranges"]

    def act(self, obs: EnvRows, segment: EnvRows, variation: Mapping[str, EnvRows]) -> tuple[EnvRows, EnvRows]:
        way, segment = follow_push(obs[:, :15], segment, variation)
        return np.asarray(_joint_step(self.env.asset, obs[:, :6], way)) / self.env.action_scale, segment

    def instruct(self, rng: np.random.Generator, obs: EnvRows) -> list[str]:
        return phrase(rng, _PLAN["wordings"], obs[:, 12:14] - np.array(self.env.goal_position[:2]))


class PushExpert(PushCubeExpert):
    """The same plan, in ``PushCube``."""

    make_env = PushCube


class PushCubeInScene(Expert):
    """The same plan in the scene of an EmbodiChain gym config whose id is PushCubeRL, with any arm and any action terms
    of joint positions. It is faster: cube and goal are farther apart than in ``PushCubeRL``.

    Its own actions, and so the noise, are joint steps as fractions of the largest, ``scene.step``."""

    make_env = EmbodiedEnv
    segments, care = tuple(_PLAN["segments"]), _CARE[:, :1]
    ranges = _FASTER

    @property
    def space(self) -> gymnasium.spaces.Box:
        return gymnasium.spaces.Box(-1.0, 1.0, (len(self._arm.joints),), np.float32)

    @cached_property
    def _arm(self) -> SceneArm:
        return SceneArm(self.env, "cube", "goal_pose")

    def begin(self, rng: np.random.Generator, state: SceneState, obs: PyTree) -> tuple[list[str], Law]:
        seen = np.asarray(self._arm.see(state))
        # the config draws goals about the robot
        instructions, variation = phrase(rng, _PLAN["wordings"], seen[:, -3:-1]), self.vary(rng, len(seen))
        return instructions, lambda state, obs, segment: self.act(np.asarray(self._arm.see(state)), segment, variation)

    def act(self, obs: EnvRows, segment: EnvRows, variation: Mapping[str, EnvRows]) -> tuple[EnvRows, EnvRows]:
        """``obs``: ``SceneArm.see``."""
        way, segment = follow_push(obs, segment, variation)
        return np.asarray(_joint_step(self.env.asset, obs[:, :-9], way)) / _SCENE["step"], segment

    def command(self, state: SceneState, action: EnvRows) -> EnvRows:
        return np.asarray(self._arm.command(state, action * np.float32(_SCENE["step"])))


def follow_push(obs: EnvRows, segment: EnvRows, variation: Mapping[str, EnvRows]) -> tuple[EnvRows, EnvRows]:
    """Return the tool's ways [N, 3], m, and segments [N], see ``Expert.act``; ``obs`` [N, 9 or more] ends with tool,
    cube and goal, m."""
    tool, cube, goal = obs[:, -9:-6], obs[:, -6:-3], obs[:, -3:]
    forward = (goal - cube)[:, :2]
    forward = forward / np.maximum(np.linalg.norm(forward, axis=1), 1e-6)[:, None]
    left = np.stack([-forward[:, 1], forward[:, 0]], axis=1)
    behind = cube[:, :2] - variation["behind"][:, None] * forward + variation["aside"][:, None] * left
    above = np.column_stack([behind, variation["height"]])
    low = np.column_stack([behind, np.full(len(obs), _PUSH_HEIGHT)])
    off = np.sum((tool - cube)[:, :2] * left, axis=1)
    eager = variation["push_speed"] * np.clip(1.0 - np.abs(off) / _OFF_LINE, 0.0, 1.0)
    beside = eager[:, None] * forward - np.clip(off, -_BACK_ON_LINE, _BACK_ON_LINE)[:, None] * left
    push = np.column_stack([tool[:, :2] + beside, np.full(len(obs), _PUSH_HEIGHT)])
    there = [np.linalg.norm(place - tool, axis=1) < _THERE for place in (above, low)]
    done = np.stack([*there, np.zeros(len(obs), bool)])
    segment = segment + done[segment, np.arange(len(obs))]
    way = np.stack([above, low, push])[segment, np.arange(len(obs))] - tool
    return limit_length(way, variation["speed"]), segment


@partial(jax.jit, static_argnums=0)
@partial(jax.vmap, in_axes=(None, 0, 0))
def _joint_step(asset: str, angles: Array, way: Array) -> Array:
    """Compute changes of an arm's joint angles [J] that move the tool by ``way`` [3] m and turn it to point down. One
    iteration of ``ejax.envs.mujoco.kinematics``' damped least squares, free about the tool's axis."""
    model = load_model(asset)

    def tool(angles: Array) -> Array:
        pose = site_pose(model, "tcp", jnp.concatenate([angles, jnp.zeros(model.nq - len(angles))]))
        return jnp.concatenate([pose[:3, 3], pose[:3, 2]])

    axis, jacobian = tool(angles)[3:], jax.jacfwd(tool)(angles)
    error = jnp.concatenate([way, jnp.array([0.0, 0.0, -1.0]) - axis])
    return jacobian.T @ solve_positive(jacobian @ jacobian.T + _DAMPING**2 * jnp.eye(6), error)


make_task = partial(ScriptedTask, PushCubeExpert, camera=CAMERA)

make_push_task = partial(ScriptedTask, PushExpert, camera=CAMERA)

make_scene_task = partial(ScriptedTask, PushCubeInScene, camera=CAMERA)
