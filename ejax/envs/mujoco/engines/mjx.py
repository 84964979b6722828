"""MuJoCo XLA: the physics as XLA operations, on every device; it has derivatives."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import mujoco

from ejax.envs.mujoco.engine import PhysicsState
from ejax.envs.mujoco.models import beyond_engine, load_accelerated_model, mocap_bodies, with_parameters
from ejax.types import Array


def step(asset: str, num_substeps: int, state: PhysicsState, ctrl: Array) -> tuple[PhysicsState, Array]:
    """Step one simulation, as ``Physics.step_sensing``, in the state's dtype."""
    names = tuple(sorted(state.parameters))
    step_once, model, data = load_mjx(asset, names)
    with jax.numpy_rank_promotion("allow"):  # MJX counts on it
        model = with_parameters(model, load_accelerated_model(asset, names), state.parameters)
        data = data.replace(qpos=state.qpos, qvel=state.qvel, ctrl=ctrl[: model.nu])
        if len(ctrl) > model.nu:
            marked, end = mocap_bodies(model), model.nu + 3 * model.nmocap
            places = ctrl[model.nu : end].reshape(-1, 3)
            data = data.replace(mocap_pos=places)  # of the bodies themselves; of those on them, the model's:
            model = model.replace(body_pos=model.body_pos.at[marked].set(places))
            if len(ctrl) > end:
                data = data.replace(mocap_quat=(turns := ctrl[end:].reshape(-1, 4)))
                model = model.replace(body_quat=model.body_quat.at[marked].set(turns))

        def one_step(data: Any, _: None) -> tuple[Any, Array]:
            data = step_once(model, data)
            return data, data.sensordata

        data, readings = jax.lax.scan(one_step, data, length=num_substeps)
    return replace(state, qpos=data.qpos, qvel=data.qvel), readings


@functools.cache
def load_mjx(asset: str, names: tuple[str, ...]) -> tuple[Callable[..., Any], Any, Any]:
    """Return MJX's step function, the model and blank data on the device."""
    try:
        from mujoco import mjx
    except ImportError as error:
        raise ModuleNotFoundError("physics 'mjx' needs MuJoCo XLA: pip install -e '.[mjx]' in ejax's folder") from error
    host_model = load_accelerated_model(asset, names)
    with jax.ensure_compile_time_eval():  # kept beyond the trace that needs it first
        try:
            model = mjx.put_model(host_model, impl="jax")
        except NotImplementedError as error:
            raise beyond_engine("mjx", error) from error
        if not host_model.nmat:  # its rangefinders read the first material of a model without any, too
            model = model.replace(mat_rgba=jnp.ones((1, 4)))
        data = mjx.make_data(model)
        late = host_model.sensor_needstage == mujoco.mjtStage.mjSTAGE_ACC
        if late.any() and not getattr(data, "_impl", data).efc_J.size:
            text = "sensors of forces and accelerations in a model without constraints; use mujoco"
            raise ValueError(f"physics 'mjx' reads 0 from {text}")
        return mjx.step, model, data
