"""Changes of an environment between two steps: commands, blows, and the viewer's mouse.

A patch is a function from state to state, leaves [1, ...].
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from numpy.typing import NDArray

from ejax.envs.mujoco.engine import PhysicsState
from ejax.envs.terms.commands import Command, hold
from ejax.types import PyTree

StatePatch: TypeAlias = Callable[[PyTree], PyTree]

_STEP = 0.1
"""m/s or rad/s of one press of a key."""
_UP, _DOWN, _LEFT, _RIGHT = 265, 264, 263, 262
# the viewer takes letters and the digits to 5 for itself
_AXES = {_UP: (0, 1), _DOWN: (0, -1), _LEFT: (2, 1), _RIGHT: (2, -1), ord("7"): (1, 1), ord("9"): (1, -1)}
"""Key, by GLFW's number -> the velocity's part and its sign, in the robot's frame: forward, left, turning left."""
_STOP = ord("8")


class HeldCommand:
    """A velocity command that holds until a key changes it; None: the drawn ones.

    ``velocity``: forward, left (m/s), turning left (rad/s).
    """

    def __init__(self, velocity: tuple[float, float, float] | None = None) -> None:
        self._velocity = velocity

    def press(self, key: int) -> None:
        """Take a key of the viewer, by GLFW's number."""
        if key == _STOP:
            self._velocity = (0.0, 0.0, 0.0)
        elif key in _AXES:
            velocity, (axis, sign) = list(self._velocity or (0.0, 0.0, 0.0)), _AXES[key]
            # 0.1 + 0.2 would be shown with 17 digits
            velocity[axis] = round(velocity[axis] + sign * _STEP, 6)
            self._velocity = (velocity[0], velocity[1], velocity[2])

    def __call__(self, state: PyTree) -> PyTree:
        velocity = self._velocity
        if velocity is None:
            return state
        return replace_parts(state, Command, lambda command: hold(command, jnp.asarray(velocity)))


def make_blows(model: mujoco.MjModel, size: float, every: int, seed: int) -> StatePatch:
    """Make a patch: every so many decisions the first free body gets ``size`` m/s more, in a random level direction.

    ValueError: nothing moves freely.
    """
    free = np.flatnonzero(model.jnt_type == mujoco.mjtJoint.mjJNT_FREE)
    if not len(free):
        raise ValueError(
            "--push: nothing in this model moves freely; push_joints_by_setting_velocity, of the run's "
            "trainer.events (--randomize), pushes joints"
        )
    start, random, waiting = int(model.jnt_dofadr[free[0]]), np.random.default_rng(seed), every

    def patch(state: PyTree) -> PyTree:
        nonlocal waiting
        # counted in decisions: a show at another speed gets the same blows
        waiting -= 1
        if waiting > 0:
            return state
        waiting, angle = every, random.uniform(-math.pi, math.pi)
        change = np.zeros(model.nv)
        # the first two of a free joint's six velocities are level: a blow upwards would only lift it
        change[start : start + 2] = size * math.cos(angle), size * math.sin(angle)
        return add_velocity(state, change)

    return patch


def add_velocity(state: PyTree, change: NDArray[np.float64]) -> PyTree:
    """Add ``change`` [nv] to the velocities of the simulation."""
    if not change.any():
        return state

    def moved(physics: PhysicsState) -> PhysicsState:
        return replace(physics, qvel=physics.qvel + change.astype(physics.qvel.dtype)[None])

    return replace_parts(state, PhysicsState, moved)


def parts_of(state: PyTree, kind: type) -> list[Any]:
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kind))
    return [each for each in leaves if isinstance(each, kind)]


def replace_parts(state: PyTree, kind: type, change: Callable[[Any], Any]) -> PyTree:
    return jax.tree.map(lambda x: change(x) if isinstance(x, kind) else x, state, is_leaf=lambda x: isinstance(x, kind))
