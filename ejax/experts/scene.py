"""The arm of an EmbodiChain gym config's scene for experts: read from the simulated state, independently of the
config's observations, and moved through the config's own action terms."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejax.envs.manager.embodied import EmbodiedEnv
from ejax.envs.task.states import SceneState
from ejax.envs.task.world import World
from ejax.envs.terms.actions import ActionTerm
from ejax.experts.task import Rows
from ejax.schema.problems import ConfigError, Problem
from ejax.types import Array

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

    def see(self, state: SceneState) -> Rows:
        """[N, J + 9]: the arm's joint angles, rad; tool, object and goal, m."""
        return np.asarray(self._seen(state))

    def command(self, state: SceneState, step: Rows) -> Rows:
        """Compute actions [N, A] that set the arm's targets ``step`` [N, J], rad, beyond its angles; the other joints
        keep their targets."""
        return np.asarray(self._commanded(state, step))

    @cached_property
    def _seen(self) -> Any:
        return jax.jit(jax.vmap(self._see))

    @cached_property
    def _commanded(self) -> Any:
        return jax.jit(jax.vmap(self._action))

    def _see(self, state: SceneState) -> Array:
        world = self.env.world(state)
        places = [pose[:3, 3] for pose in (world.eef_pose(), world.object_pose(self.uid), world.pose(self.goal))]
        return jnp.concatenate([state.physics.qpos[jnp.array(self.joints)], *places])

    def _action(self, state: SceneState, step: Array) -> Array:
        space, joints = self.env.action_space, jnp.array(self.joints)
        wanted = state.target.at[joints].set(state.physics.qpos[joints] + step)
        parts = [_invert(term, self.env.world(state), wanted) for term in self.env.spec.actions]
        return jnp.clip(jnp.concatenate(parts), space.low, space.high)


def _unfit(what: str) -> ConfigError:
    text = f"its terms {what}, as the expert needs; give DeltaQposTerm, or another term of joint positions"
    return ConfigError([Problem("env.actions", text)])


def _invert(term: ActionTerm, world: World, wanted: Array) -> Array:
    """Find the numbers [width] by which a term sets the targets ``wanted`` [J] of its joints: those of joint positions
    are affine, joint by joint, or by one number for all of a gripper's."""
    joints, unit = jnp.array(term.joints), jnp.minimum(1.0, jnp.array(term.high))
    at_rest = term.apply(world, jnp.zeros(term.width)).target[joints]
    slope = (term.apply(world, unit).target[joints] - at_rest) / unit
    way = wanted[joints] - at_rest
    if term.width == 1 and len(term.joints) > 1:
        return (slope @ way / (slope @ slope))[None]
    return way / slope
