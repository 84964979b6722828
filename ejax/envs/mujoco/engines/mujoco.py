"""MuJoCo's C engine: threaded batch stepping on the host, behind ``host_call``.

The callback is pure. The bits of a row depend neither on threads nor on its place in the batch nor on the batch's size.

By itself the engine would reset a simulation that breaks to the model's start, and treat a non-finite control as 0: a
pole that flew off would stand upright again. Here such a row is NaN.
"""

import atexit
import functools
import os
import threading
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from mujoco.rollout import Rollout
from numpy.typing import NDArray

from ejax.envs.mujoco.engine import PhysicsState
from ejax.envs.mujoco.models import ModelRows, load_parametric_model
from ejax.runtime.host_call import host_call
from ejax.runtime.stopwatch import ENGINE
from ejax.types import Array

_CTRL, _MOCAP_POS = int(mujoco.mjtState.mjSTATE_CTRL), int(mujoco.mjtState.mjSTATE_MOCAP_POS)
_MOCAP_QUAT = int(mujoco.mjtState.mjSTATE_MOCAP_QUAT)
_STATE = mujoco.mjtState.mjSTATE_FULLPHYSICS
"""The state that the C engine's rollout reads and writes per row. Without activations: time, qpos, qvel."""
_START = 1.0  # s: the time that a row's steps begin at. The engine sets a row that breaks back to 0.


def step(asset: str, num_substeps: int, state: PhysicsState, ctrl: Array) -> tuple[PhysicsState, Array]:
    """Step one simulation, as ``Physics.step_sensing``. Computes in float64, returns the state's dtype."""
    names = tuple(sorted(state.parameters))
    host = _host_stepper(asset, num_substeps, names)
    num_readings = int(load_parametric_model(asset, names).nsensordata)
    sensed = jax.ShapeDtypeStruct((num_substeps, num_readings), state.qpos.dtype)
    shape = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state.qpos, state.qvel))
    # one array: each argument and each result of a callback costs the host more than a row's physics
    given = [state.qpos, state.qvel, ctrl]
    if names:
        given.append(jnp.concatenate([state.parameters[name].ravel() for name in names]))
    if sensed.size:
        shape = (*shape, sensed)
    name = repr((asset, num_substeps, names))
    qpos, qvel, *sensed_now = host_call(host, shape, *given, name=name)
    readings = sensed_now[0] if sensed_now else jnp.zeros(sensed.shape, sensed.dtype)
    return replace(state, qpos=qpos, qvel=qvel), readings


class _HostStepper:
    def __init__(self, model: mujoco.MjModel, num_substeps: int, names: tuple[str, ...] = ()) -> None:
        # the cores that this process may use, of which a container often has fewer than the machine
        num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if mujoco.__version__ == "4.0.0":  # its factor of a sparse Hessian is wrong, and with it the accelerations
            model.opt.jacobian = mujoco.mjtJacobian.mjJAC_DENSE
        self._model, self._num_substeps, self._num_threads = model, num_substeps, num_threads
        self._data = [mujoco.MjData(model) for _ in range(num_threads)]
        self._pool = Rollout(nthread=num_threads)
        atexit.register(self._pool.close)  # joins the threads
        self._lock = threading.Lock()
        self._models = ModelRows(model, names)
        self._allocate(1, model.nu)

    def __call__(
        self, qpos: Array, qvel: Array, ctrl: Array, parameters: Array | None = None
    ) -> tuple[NDArray[Any], ...]:
        """Step every row: ``(qpos, qvel)``, and ``readings`` of a model that has sensors.

        ``ctrl``: [..., nu], or with places of mocap bodies [..., nu + 3·nmocap], or also their quaternions [..., nu +
        7·nmocap]. ``parameters``: [..., K], by name.
        """
        nq, nv = self._model.nq, self._model.nv
        positions, velocities = np.asarray(qpos), np.asarray(qvel)
        num_rows = positions.size // nq
        # one pool and one set of buffers for all devices and threads of the process
        with self._lock, ENGINE.of("physics"):
            width = np.shape(ctrl)[-1]
            if (num_rows, width) != (len(self._state), self._ctrl.shape[-1]):
                self._allocate(num_rows, width)
            self._state[:, 1 : 1 + nq] = positions.reshape(-1, nq)
            self._state[:, 1 + nq :] = velocities.reshape(-1, nv)
            self._ctrl[:] = np.asarray(ctrl).reshape(num_rows, 1, width)
            rows = np.zeros((num_rows, 0)) if parameters is None else np.asarray(parameters).reshape(num_rows, -1)
            models, sound = self._models.of(rows)
            placed = self._model.nu + 3 * self._model.nmocap
            self._pool.rollout(
                models,
                self._data,
                self._state,
                self._ctrl,
                control_spec=_CTRL | _MOCAP_POS * (width > self._model.nu) | _MOCAP_QUAT * (width > placed),
                skip_checks=True,
                nstep=self._num_substeps,
                state=self._trajectory,
                sensordata=self._readings if self._readings.size else None,
                # four for each thread: rows take as long, but a core may be busy with something else
                chunk_size=max(1, -(-num_rows // (4 * self._num_threads))),
            )
            last = self._trajectory[:, -1]
            # a row that broke was reset, time and all; a non-finite control was taken for 0
            last[(last[:, 0] < _START) | ~np.isfinite(self._ctrl[:, 0]).all(axis=1) | ~sound] = np.nan
            self._readings[np.isnan(last[:, 1])] = np.nan
            after = (
                last[:, 1 : 1 + nq].astype(positions.dtype).reshape(positions.shape),
                last[:, 1 + nq :].astype(velocities.dtype).reshape(velocities.shape),
            )
            if not self._readings.size:
                return after
            readings = self._readings.astype(positions.dtype)
            return *after, readings.reshape(*positions.shape[:-1], *self._readings.shape[1:])

    def _allocate(self, num_rows: int, width: int) -> None:
        size = mujoco.mj_stateSize(self._model, _STATE)
        self._state = np.zeros((num_rows, size))
        self._state[:, 0] = _START
        self._ctrl = np.zeros((num_rows, self._num_substeps, width))
        self._trajectory = np.zeros((num_rows, self._num_substeps, size))
        self._readings = np.zeros((num_rows, self._num_substeps, self._model.nsensordata))


@functools.cache
def _host_stepper(asset: str, num_substeps: int, names: tuple[str, ...]) -> _HostStepper:
    return _HostStepper(load_parametric_model(asset, names), num_substeps, names)
