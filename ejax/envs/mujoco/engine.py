"""One MuJoCo model, three engines behind one pure function: the C engine on a CPU, MJX or Warp on an accelerator.

    state' = step(state, ctrl): ``num_substeps`` physics steps with ``ctrl`` held
    state', readings = step_sensing(state, ctrl): the same, and the model's sensors in each of them

``mujoco`` runs the C engine's threaded batch stepping behind ``host_call``, so one jitted loop serves both.
The callback is pure: its result depends on (qpos, qvel, parameters, ctrl, mocap_pos) and on nothing else. To that end
the solver's warm start is off whatever a model says, and models with activations are refused; time is not carried. The
bits of a row depend neither on threads nor on its place in the batch nor on the size of the batch.

A simulation that breaks is NaN from then on, in all engines. By itself the C engine would reset it to the model's
start, at rest, and treat a non-finite control as 0: a pole that flew off would stand upright again.

Which engine ``auto`` means is settled once, where a run is built or a ``Physics`` is made: ``ejax.envs.mujoco.choice``.
"""

import atexit
import copy
import functools
import importlib
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from flax import struct
from mujoco.rollout import Rollout
from numpy.typing import NDArray

from ejax.envs.mujoco.choice import Engine, choose_engine
from ejax.envs.mujoco.model_files import check_model_files
from ejax.envs.mujoco.parameters import ModelRows, check_parameters, displace, with_parameters
from ejax.runtime.host_call import host_call
from ejax.runtime.stopwatch import ENGINE
from ejax.types import Array, CameraView

_ASSETS = Path(__file__).parents[1] / "assets"
_CTRL, _MOCAP_POS = int(mujoco.mjtState.mjSTATE_CTRL), int(mujoco.mjtState.mjSTATE_MOCAP_POS)
_STATE = mujoco.mjtState.mjSTATE_FULLPHYSICS
"""The state that the C engine's rollout reads and writes per row. Without activations: time, qpos, qvel."""
_RANGEFINDER = mujoco.mjtSensor.mjSENS_RANGEFINDER
_SEEING = (
    *(_RANGEFINDER, mujoco.mjtSensor.mjSENS_GEOMDIST),
    *(mujoco.mjtSensor.mjSENS_GEOMNORMAL, mujoco.mjtSensor.mjSENS_GEOMFROMTO),
)
"""Sensors that read geoms which collide with nothing, too."""
_DISTANCE = 1
"""A rangefinder's ``data`` of nothing else."""
_START = 1.0
"""s: the time that a row's steps begin at. The engine sets a row that breaks back to 0."""


@struct.dataclass(kw_only=True)
class PhysicsState:
    """Everything a physics step reads apart from the control."""

    qpos: Array
    """[nq], m, rad, unit quaternions (w x y z)"""
    qvel: Array
    """[nv], m/s, rad/s"""
    parameters: dict[str, Array] = struct.field(default_factory=dict)
    """Fields of the model that are not the MJCF's, whole and by name: ``ejax.envs.mujoco.parameters``."""


@dataclass(frozen=True)
class Physics:
    """A model and how to step it. Hashable; models are compiled at first use and kept for the process.

    Args:
        asset: an MJCF file, looked up in ``ejax/envs/assets`` unless it is an absolute path; or MJCF itself, as text.
        engine: ``mujoco`` (C, on the host), ``mjx`` (XLA), ``warp`` (CUDA kernels), or ``auto``, which is replaced by
            what it means where JAX computes now.
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
        """``num_substeps`` physics steps of one simulation; ``vmap`` it for many.

        The C engine computes in float64 and Warp in float32, both return the dtype of ``state``; MJX computes in it.

        Args:
            ctrl: [nu].

        Raises:
            ModuleNotFoundError: the engine is not installed.
            ValueError: ``state.parameters`` that no row may have.
        """
        return self.step_sensing(state, ctrl)[0]

    def step_sensing(
        self, state: PhysicsState, ctrl: Array, mocap_pos: Mapping[str, Array] | None = None
    ) -> tuple[PhysicsState, Array]:
        """``step``, and the model's sensors: ``sensordata`` [num_substeps, nsensordata].

        A physics step reads its sensors before it moves anything: the first row belongs to ``state``, the last to the
        state before the last physics step.

        Args:
            mocap_pos: mocap body -> its place [3], m, in these steps; the others are where the model puts them.
        """
        check_parameters(self.model, state.parameters)
        names = tuple(sorted(state.parameters))
        if mocap_pos:  # one array: see below
            bodies = [self.model.body(i) for i in _mocap_bodies(self.model)]
            places = [jnp.asarray(mocap_pos.get(body.name, body.pos), ctrl.dtype) for body in bodies]
            ctrl = jnp.concatenate([ctrl, *places])
        if self.engine == "mjx":
            return _step_mjx(self.asset, self.num_substeps, state, ctrl)
        if self.engine == "warp":
            qpos, qvel, readings = _warp_step(self.asset, self.num_substeps, names)(
                state.qpos, state.qvel, ctrl, state.parameters
            )
            return replace(state, qpos=qpos, qvel=qvel), readings
        host = _host_stepper(self.asset, self.num_substeps, names)
        sensed = jax.ShapeDtypeStruct((self.num_substeps, self.model.nsensordata), state.qpos.dtype)
        shape = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state.qpos, state.qvel))
        # one array: each argument and each result of a callback costs the host more than a row's physics
        given = [state.qpos, state.qvel, ctrl]
        if names:
            given.append(jnp.concatenate([state.parameters[name].ravel() for name in names]))
        if sensed.size:
            shape = (*shape, sensed)
        name = repr((self.asset, self.num_substeps, names))
        qpos, qvel, *sensed_now = host_call(host, shape, *given, name=name)
        return replace(state, qpos=qpos, qvel=qvel), sensed_now[0] if sensed_now else jnp.zeros(
            sensed.shape, sensed.dtype
        )


def check_physics(engine: Engine, num_substeps: int) -> None:
    """Reject wrong values where an environment is made, not in a later trace. Starts no JAX, unlike ``Physics``.

    Raises:
        ValueError: no such engine, or no physics step.
    """
    if engine not in get_args(Engine):
        raise ValueError(f"physics must be 'auto', 'mujoco', 'mjx' or 'warp', got {engine!r}")
    if num_substeps < 1:
        raise ValueError(f"the number of physics steps per control step must be >= 1, got {num_substeps}")


def load_model(asset: str) -> mujoco.MjModel:
    """The simulated model: the MJCF without its visual geoms. ``asset`` as in ``Physics``."""
    return _load_model(asset, visual=False)


def load_parametric_model(asset: str, names: tuple[str, ...]) -> mujoco.MjModel:
    """The simulated model, ready for the parameters of these names to be changed."""
    return _load_model(asset, visual=False, displaced=True) if "body_ipos" in names else load_model(asset)


def load_accelerated_model(asset: str, names: tuple[str, ...]) -> mujoco.MjModel:
    """``load_parametric_model`` for MJX and Warp, which ask the model once which joints have dry friction at all."""
    model = load_parametric_model(asset, names)
    odd = (model.sensor_objtype != int(mujoco.mjtObj.mjOBJ_SITE)) | (model.sensor_intprm[:, 0] != _DISTANCE)
    wide = (model.sensor_type == int(_RANGEFINDER)) & (odd | (model.sensor_dim != 1))
    if wide.any():
        which = ", ".join(repr(model.sensor(i).name or int(i)) for i in np.flatnonzero(wide))
        raise ValueError(
            f"rangefinder {which} reads more than one distance, which only physics 'mujoco' has; give it a site and "
            "no data, or physics: mujoco"
        )
    if "dof_frictionloss" not in names:
        return model
    model = copy.copy(model)
    model.dof_frictionloss[:] = 1.0
    return model


def load_drawn_model(asset: str) -> mujoco.MjModel:
    """The model with everything that can be seen; not to be changed."""
    return _load_model(asset, visual=True)


def render(
    asset: str,
    qpos: Array | NDArray[Any],
    *,
    width: int = 640,
    height: int = 480,
    mocap_pos: Mapping[str, Array | NDArray[Any]] | None = None,
    rgba: Mapping[str, Array | NDArray[Any]] | None = None,
    camera: CameraView | None = None,
) -> NDArray[np.uint8]:
    """Draw one configuration, on a display or without one (EGL; the environment variable MUJOCO_GL can name another).

    Args:
        qpos: [nq].
        mocap_pos: body name -> position [3] in m, for bodies that only mark something.
        rgba: geom name -> colour [4] in 0 … 1, of this picture alone.
        camera: None: the model's camera ``main``, or where it has none, ``default_view``.

    Returns:
        [height, width, 3] RGB.
    """
    camera = camera or default_view(asset)
    effects = camera is None or camera.effects
    model, data, renderer = _canvases.get(asset, width, height, effects)
    data.qpos[:] = np.asarray(qpos)
    for name, position in (mocap_pos or {}).items():
        data.mocap_pos[model.body(name).mocapid[0]] = np.asarray(position)
    model.geom_rgba[:] = _load_model(asset, visual=True).geom_rgba
    for name, colour in (rgba or {}).items():
        model.geom(name).rgba[:] = np.asarray(colour)
    mujoco.mj_kinematics(model, data)
    mujoco.mj_comPos(model, data)  # of cameras that go with a body
    mujoco.mj_camlight(model, data)
    if camera is None:
        renderer.update_scene(data, camera="main")
    else:
        model.vis.global_.fovy = camera.fovy  # of a free camera; ``main`` has its own
        renderer.update_scene(data, camera=_free_camera(camera))
        for eye in renderer.scene.camera:
            _aim(eye, camera, width / height)
    for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
        renderer.scene.flags[flag] = effects
    return cast(NDArray[np.uint8], renderer.render())


def default_view(asset: str) -> CameraView | None:
    """A view of the whole model, as MuJoCo's viewer starts with. None: the model has a camera ``main``."""
    model = load_drawn_model(asset)
    if mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, "main") >= 0:
        return None
    camera = mujoco.MjvCamera()
    mujoco.mjv_defaultFreeCamera(model, camera)
    azimuth, elevation = math.radians(camera.azimuth), math.radians(camera.elevation)
    forward = (
        math.cos(elevation) * math.cos(azimuth),
        math.cos(elevation) * math.sin(azimuth),
        math.sin(elevation),
    )
    x, y, z = (float(at - camera.distance * along) for at, along in zip(camera.lookat, forward, strict=True))
    target_x, target_y, target_z = map(float, camera.lookat)
    return CameraView((x, y, z), (target_x, target_y, target_z), float(model.vis.global_.fovy))


def _free_camera(view: CameraView) -> mujoco.MjvCamera:
    camera = mujoco.MjvCamera()
    camera.type = mujoco.mjtCamera.mjCAMERA_FREE
    forward = np.subtract(view.target, view.eye)
    camera.lookat[:] = view.target
    camera.distance = float(np.linalg.norm(forward))
    camera.azimuth = math.degrees(math.atan2(forward[1], forward[0]))
    camera.elevation = math.degrees(math.atan2(forward[2], math.hypot(forward[0], forward[1])))
    return camera


def _aim(eye: mujoco.MjvGLCamera, view: CameraView, aspect: float) -> None:
    """Set what MuJoCo's free camera has no fields for: ``up``, ``fovx`` and ``center``."""
    forward = np.subtract(view.target, view.eye) / np.linalg.norm(np.subtract(view.target, view.eye))
    up = np.asarray(view.up) - np.dot(view.up, forward) * forward
    if np.linalg.norm(up) > 1e-6:  # else the free camera's own
        eye.up[:] = up / np.linalg.norm(up)
    half_height = eye.frustum_near * math.tan(math.radians(view.fovy) / 2.0)
    half_width = half_height * aspect
    if view.fovx is not None:
        half_width = eye.frustum_near * math.tan(math.radians(view.fovx) / 2.0)
    x, y = view.center
    eye.frustum_width, eye.frustum_center = half_width, half_width * (1.0 - 2.0 * x)
    eye.frustum_top, eye.frustum_bottom = 2.0 * half_height * y, -2.0 * half_height * (1.0 - y)


@functools.cache
def _load_model(asset: str, *, visual: bool, displaced: bool = False) -> mujoco.MjModel:
    spec = _read_spec(asset)
    for field, flag, _ in _unset_flags(spec):
        setattr(spec.option, field, flag)
    spec.compiler.discardvisual = not visual and all(each.type not in _SEEING for each in spec.sensors)
    model = spec.compile()
    _refuse_memory(asset, model)
    return displace(spec, model) if displaced else model


def settings_changed(asset: str) -> tuple[str, ...]:
    """What the model is simulated without, although its MJCF asks for it; in words."""
    return tuple(text for _, _, text in _unset_flags(_read_spec(asset)))


def _read_spec(asset: str) -> mujoco.MjSpec:
    model = asset if asset.lstrip().startswith("<") else _ASSETS / asset
    check_model_files(model)
    return mujoco.MjSpec.from_string(model) if isinstance(model, str) else mujoco.MjSpec.from_file(str(model))


def _unset_flags(spec: mujoco.MjSpec) -> Iterator[tuple[str, int, str]]:
    """Options by which a step would depend on what came before: (field, its value without, what to tell)."""
    disabled, enabled = spec.option.disableflags, spec.option.enableflags
    warm, sleep = int(mujoco.mjtDisableBit.mjDSBL_WARMSTART), int(mujoco.mjtEnableBit.mjENBL_SLEEP)
    if not disabled & warm:
        text = "the solver's warm start is off, as if <option><flag warmstart='disable'/></option> were in the MJCF"
        yield "disableflags", disabled | warm, f"{text}: a step depends on the state alone"
    if enabled & sleep:
        yield (
            "enableflags",
            enabled & ~sleep,
            "sleeping bodies (<flag sleep>) are off: a step depends on the state alone",
        )


def _refuse_memory(asset: str, model: mujoco.MjModel) -> None:
    """Raises ValueError: an element whose state is not in qpos and qvel."""
    named = "the MJCF text" if asset.lstrip().startswith("<") else asset
    if model.na:
        which = ", ".join(repr(model.actuator(i).name or i) for i in np.flatnonzero(model.actuator_actnum > 0))
        raise ValueError(
            f"{named}: a step must depend on qpos, qvel and ctrl alone, but actuator {which} has an activation of its "
            "own; use motor, position or velocity, without dyntype or timeconst"
        )
    if model.npluginstate or model.nhistory:
        what = "a plugin with a state" if model.npluginstate else "a delay of an actuator or sensor"
        text = "take it out; delay_action and delay_observation (docs/randomization.md) are delays of ejax's own"
        raise ValueError(f"{named}: a step must depend on qpos, qvel and ctrl alone, but the model has {what}; {text}")


class _Canvases(threading.local):
    """The last four canvases that a thread drew on, made, used and freed by that thread alone.

    A thread that frees the OpenGL context of another one that is still running cannot make it current, and
    deletes the objects of the same numbers in its own context instead: its later pictures are wrong.
    """

    def __init__(self) -> None:
        self.get = functools.lru_cache(maxsize=4)(_make_canvas)


def _make_canvas(
    asset: str, width: int, height: int, effects: bool
) -> tuple[mujoco.MjModel, mujoco.MjData, mujoco.Renderer]:
    """The model, data and renderer for pictures of one scene and size."""
    choose_opengl()
    model = copy.copy(_load_model(asset, visual=True))
    if not effects:
        model.vis.quality.offsamples = 0
    return model, mujoco.MjData(model), mujoco.Renderer(model, height=height, width=width)


_canvases = _Canvases()


@functools.cache
def choose_opengl() -> None:
    """EGL where there is no display. MuJoCo chooses when it is imported, and then takes a display for granted."""
    if sys.platform != "linux" or "MUJOCO_GL" in os.environ or os.environ.get("DISPLAY"):
        return
    os.environ["MUJOCO_GL"] = "egl"
    chooser = mujoco.Renderer.__init__.__globals__["gl_context"]  # the module, wherever a release keeps it
    importlib.reload(chooser)


class _HostStepper:
    """The C engine for batches of rows: one thread per core, and buffers that are kept between calls."""

    def __init__(self, model: mujoco.MjModel, num_substeps: int, names: tuple[str, ...] = ()) -> None:
        num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._model = model
        self._num_substeps = num_substeps
        self._num_threads = num_threads
        self._data = [mujoco.MjData(model) for _ in range(num_threads)]
        self._pool = Rollout(nthread=num_threads)
        self._lock = threading.Lock()
        self._models = ModelRows(model, names)
        self._allocate(1, model.nu)

    def __call__(
        self, qpos: Array, qvel: Array, ctrl: Array, parameters: Array | None = None
    ) -> tuple[NDArray[Any], ...]:
        """Step every row.

        Args:
            qpos, qvel, ctrl: [..., nq], [..., nv], [..., nu], or with the places of mocap bodies [..., nu + 3·nmocap].
            parameters: [..., K], one after the other in the order of their names.

        Returns:
            ``(qpos, qvel)``, and ``readings`` of a model that has sensors.
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
            self._pool.rollout(
                models,
                self._data,
                self._state,
                self._ctrl,
                control_spec=_CTRL if width == self._model.nu else _CTRL | _MOCAP_POS,
                skip_checks=True,
                nstep=self._num_substeps,
                state=self._trajectory,
                sensordata=self._readings if self._readings.size else None,
                chunk_size=max(1, -(-num_rows // self._num_threads)),
            )
            last = self._trajectory[:, -1]
            last[self._broken() | ~sound] = np.nan
            self._readings[np.isnan(last[:, 1])] = np.nan
            after = (
                last[:, 1 : 1 + nq].astype(positions.dtype).reshape(positions.shape),
                last[:, 1 + nq :].astype(velocities.dtype).reshape(velocities.shape),
            )
            if not self._readings.size:
                return after
            readings = self._readings.astype(positions.dtype)
            return *after, readings.reshape(*positions.shape[:-1], *self._readings.shape[1:])

    def close(self) -> None:
        """Join the threads."""
        self._pool.close()

    def _broken(self) -> NDArray[np.bool_]:
        """[N]: rows that were reset, and those with a non-finite control, which the engine takes for 0."""
        return (self._trajectory[:, -1, 0] < _START) | ~np.isfinite(self._ctrl[:, 0]).all(axis=1)

    def _allocate(self, num_rows: int, width: int) -> None:
        size = mujoco.mj_stateSize(self._model, _STATE)
        self._state = np.zeros((num_rows, size))
        self._state[:, 0] = _START
        self._ctrl = np.zeros((num_rows, self._num_substeps, width))
        self._trajectory = np.zeros((num_rows, self._num_substeps, size))
        self._readings = np.zeros((num_rows, self._num_substeps, self._model.nsensordata))


@functools.cache
def _host_stepper(asset: str, num_substeps: int, names: tuple[str, ...]) -> _HostStepper:
    stepper = _HostStepper(load_parametric_model(asset, names), num_substeps, names)
    atexit.register(stepper.close)
    return stepper


def _step_mjx(asset: str, num_substeps: int, state: PhysicsState, ctrl: Array) -> tuple[PhysicsState, Array]:
    step, model, data = _mjx(asset, tuple(sorted(state.parameters)))
    with jax.numpy_rank_promotion("allow"):  # MJX counts on it
        model = with_parameters(model, state.parameters, (model, data))
        data = data.replace(qpos=state.qpos, qvel=state.qvel, ctrl=ctrl[: model.nu])
        if len(ctrl) > model.nu:
            places = ctrl[model.nu :].reshape(-1, 3)
            data = data.replace(mocap_pos=places)  # of the bodies themselves; of those on them, the model's:
            model = model.replace(body_pos=model.body_pos.at[_mocap_bodies(model)].set(places))
        data, readings = jax.lax.scan(lambda data, _: _with_readings(step(model, data)), data, length=num_substeps)
    return replace(state, qpos=data.qpos, qvel=data.qvel), readings


def _mocap_bodies(model: Any) -> NDArray[np.int_]:
    """In the order of ``mocap_pos``."""
    return np.flatnonzero(np.asarray(model.body_mocapid) >= 0)


def _with_readings(data: Any) -> tuple[Any, Array]:
    return data, data.sensordata


@functools.cache
def _mjx(asset: str, names: tuple[str, ...]) -> tuple[Callable[..., Any], Any, Any]:
    """MJX's step function, the model and blank data on the device."""
    try:
        from mujoco import mjx
    except ImportError as error:
        raise ModuleNotFoundError("physics 'mjx' needs MuJoCo XLA: pip install -e '.[mjx]' in ejax's folder") from error
    host_model = load_accelerated_model(asset, names)
    with jax.ensure_compile_time_eval():  # kept beyond the trace that asks first
        try:
            model = mjx.put_model(host_model, impl="jax")
        except NotImplementedError as error:
            raise ValueError(f"physics 'mjx' does not simulate all of the model: {error}; give mujoco") from error
        if not host_model.nmat:  # its rangefinders look at the first material even where there is none
            model = model.replace(mat_rgba=jnp.ones((1, 4)))
        return mjx.step, model, mjx.make_data(model)


@functools.cache
def _warp_step(asset: str, num_substeps: int, names: tuple[str, ...]) -> Callable[..., tuple[Array, Array, Array]]:
    from ejax.envs.mujoco.warp import make_step  # imports Warp, which is an extra

    return make_step(load_accelerated_model(asset, names), num_substeps)
