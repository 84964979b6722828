"""One MuJoCo model, several engines behind one pure function: the C engine on a CPU, MJX or Warp on an accelerator.

    state' = step(state, ctrl): ``num_substeps`` physics steps with ``ctrl`` held
    state', readings = step_sensing(state, ctrl): the same, and the model's sensors in each of them

A simulation that breaks is NaN from then on, in all engines.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import mujoco
from flax import struct

from ejax.envs.mujoco.choice import Engine, check_physics, choose_engine
from ejax.envs.mujoco.drawing import render
from ejax.envs.mujoco.models import check_parameters, load_model, mocap_bodies
from ejax.types import Array

__all__ = ["Engine", "Physics", "PhysicsState", "check_physics", "load_model", "render"]


@struct.dataclass(kw_only=True)
class PhysicsState:
    """Everything a physics step reads apart from the control."""

    qpos: Array  # [nq], m, rad, unit quaternions (w x y z)
    qvel: Array  # [nv], m/s, rad/s
    parameters: dict[str, Array] = struct.field(default_factory=dict)
    """Whole fields that are not the MJCF's, by name: ``ejax.envs.mujoco.models``."""


@dataclass(frozen=True)
class Physics:
    """A model and how to step it. Hashable; models are compiled at first use and kept for the process.

    Args:
        asset: an MJCF file, looked up in ``ejax/envs/assets`` unless it is an absolute path; or MJCF itself, as text.
        engine: ``mujoco`` (C, on the host), ``mjx`` (XLA), ``warp`` (CUDA kernels), or ``auto`` (``choice``).
        num_substeps: physics steps per control step, ≥ 1.
    """

    asset: str
    engine: Engine = "auto"
    num_substeps: int = 4

    def __post_init__(self) -> None:
        check_physics(self.engine, self.num_substeps)
        object.__setattr__(self, "engine", choose_engine(self.engine).engine)

    @property
    def model(self) -> mujoco.MjModel:
        return load_model(self.asset)

    def step(self, state: PhysicsState, ctrl: Array) -> PhysicsState:
        """Take ``num_substeps`` physics steps of one simulation; ``vmap`` it for many. ``ctrl``: [nu].

        The C engine computes in float64 and Warp in float32, both return the dtype of ``state``; MJX computes in it.
        Raises ModuleNotFoundError: the engine is not installed; ValueError: ``state.parameters`` that no row may have.
        """
        return self.step_sensing(state, ctrl)[0]

    def step_sensing(
        self, state: PhysicsState, ctrl: Array, mocap_pos: Mapping[str, Array] | None = None
    ) -> tuple[PhysicsState, Array]:
        """Step, and return the model's sensors too: ``sensordata`` [num_substeps, nsensordata].

        Sensors are read before a physics step moves anything: the first row belongs to ``state``. ``mocap_pos``: body
        -> its place [3], m, or pose [7] with a quaternion, in these steps; the others are where the model puts them.
        """
        check_parameters(self.model, state.parameters)
        if mocap_pos:  # one array: see ``engines.mujoco.step``
            bodies = [self.model.body(i) for i in mocap_bodies(self.model)]
            places = [jnp.asarray(mocap_pos.get(body.name, body.pos), ctrl.dtype) for body in bodies]
            turns = [x[3:] if len(x) > 3 else body.quat for body, x in zip(bodies, places, strict=True)]
            turns *= any(len(place) > 3 for place in places)
            ctrl = jnp.concatenate([ctrl, *(place[:3] for place in places), *turns])
        engine = importlib.import_module(f"ejax.envs.mujoco.engines.{self.engine}")
        return engine.step(self.asset, self.num_substeps, state, ctrl)
