"""Tasks on MuJoCo models: states have ``physics``; the tasks can be drawn, and their physics randomized."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ejax.envs.description import EnvDescription
from ejax.envs.mujoco.drawing import Appearance
from ejax.envs.mujoco.engine import Engine, Physics, PhysicsState, check_physics, load_model, render
from ejax.envs.task.world import SceneState, TaskState, World
from ejax.envs.tasks.task import Task
from ejax.types import Array, CameraView, Key

Position: TypeAlias = tuple[float, float, float]
"""m"""
PositionRange: TypeAlias = tuple[Position, Position]
"""(low, high), m"""


class PhysicsTask(Task):
    """A task on a MuJoCo model; its physics runs ``sim_steps_per_control`` steps of 0.01 s by default."""

    physics: Engine
    sim_steps_per_control: Any
    marked: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Mocap bodies, which are drawn and no part of the physics, and the field of the state that has a body's place."""
    functor_events: Mapping[str, Any]
    has_model = True
    positions: ClassVar[tuple[str, ...]] = ()
    """Fields that are coordinates, m, as many as their defaults: a file's lists become (hashable) tuples."""

    @property
    def asset(self) -> str:
        """Return the model, as in ``ejax.envs.mujoco.engine.Physics``."""
        raise NotImplementedError

    def check_fields(self) -> None:
        super().check_fields()
        check_physics(self.physics, self.num_substeps)
        # tuples have a hash, which a static argument needs; a file gives lists
        for name in self.positions:
            value, like = getattr(self, name), getattr(type(self), name)
            object.__setattr__(self, name, _as_position(name, value, like))

    def control(self, world: World, action: Array) -> Array:
        """Compute the actuators' control [nu] for one control step."""
        raise NotImplementedError

    def advance(self, world: World, action: Array) -> Any:
        physics = self.simulation.step(world.physics, self.control(world, action))
        return replace(world.state, physics=physics)

    def world(self, state: Any) -> World:
        return World(asset=self.asset, control_period=self.control_period, state=state, markers_of=self.markers)

    def resting(self, *qpos: ArrayLike) -> PhysicsState:
        """All bodies at rest, at these parts of qpos, one after the other."""
        speeds = jnp.zeros(load_model(self.asset).nv)
        return PhysicsState(qpos=jnp.concatenate([jnp.asarray(part) for part in qpos]), qvel=speeds)

    def markers(self, state: Any) -> dict[str, Array]:
        """Mocap body -> its place [3], m. Default: as the state, or ``marked``, has it."""
        if isinstance(state, TaskState | SceneState):
            return state.markers
        return {body: getattr(state, field) for body, field in self.marked}

    def colours(self, state: Any) -> dict[str, Array]:
        """Geom -> colour [4] in 0 … 1, of the episode. Default: the model's."""
        del state
        return {}

    @property
    def num_substeps(self) -> int:
        return int(self.sim_steps_per_control)

    @property
    def control_period(self) -> float:
        """Duration of one step, s."""
        return 0.01 * self.num_substeps

    @property
    def simulation(self) -> Physics:
        return Physics(self.asset, self.physics, self.num_substeps)

    @property
    def description(self) -> EnvDescription:
        return replace(super().description, control_period=self.control_period)

    def render(
        self, state: Any, width: int = 640, height: int = 480, camera: CameraView | None = None
    ) -> NDArray[np.uint8]:
        """Draw one environment: [height, width, 3] RGB. See ``ejax.envs.mujoco.engine.render``."""
        # by ``appearance``, so that a video shows what a policy that sees is shown
        return render(self.appearance(state), width=width, height=height, camera=camera)

    def appearance(self, state: Any) -> Appearance:
        return Appearance(
            asset=self.asset, qpos=state.physics.qpos, mocap_pos=self.markers(state), rgba=self.colours(state)
        )


def draw_position(key: Key, centre: Position, offset: PositionRange) -> Array:
    """[3], m: ``centre`` with an offset between these two, uniform."""
    low, high = jnp.asarray(offset[0]), jnp.asarray(offset[1])
    return jnp.asarray(centre) + jax.random.uniform(key, (3,), minval=low, maxval=high)


def _as_position(where: str, value: Any, like: tuple[Any, ...]) -> tuple[Any, ...]:
    """Make (hashable) tuples of coordinates or bounds. Raises ValueError: more or fewer numbers than in ``like``."""
    if not isinstance(value, list | tuple | np.ndarray) or len(value) != len(like):
        of_two = "two positions, low and high (m)" if isinstance(like[0], tuple) else "two numbers (x and y, m)"
        takes = of_two if len(like) == 2 else "positions of three numbers (m)"
        raise ValueError(f"{where} takes {takes}, got {value!r}")
    pairs = zip(value, like, strict=True)
    return tuple(_as_position(where, x, y) if isinstance(y, tuple) else float(x) for x, y in pairs)
