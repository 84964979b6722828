"""MuJoCo Warp: a control step of a whole batch in one call of NVIDIA's kernels, on a GPU; on a CPU to test it.

Warp keeps the contacts of all rows in one buffer, and leaves out what finds no room. Here a row has as many places as
its geoms can make contacts, up to ``_MAX_CONTACTS``. Where these do not suffice, rows that may have lost something are
NaN: one row for its constraints, all rows for shared contacts. A row that is not finite takes no places, and is NaN.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from jax.custom_batching import custom_vmap

from ejax.envs.mujoco.engine import PhysicsState
from ejax.envs.mujoco.models import beyond_engine, derived_fields, load_accelerated_model, parameter
from ejax.types import Array

_Step: TypeAlias = Callable[..., tuple[Array, Array, Array]]
"""``(qpos [nq], qvel [nv], ctrl, parameters) -> (qpos, qvel, sensordata [num_substeps, nsensordata])``. ctrl: [nu], or
with the places of mocap bodies [nu + 3·nmocap], or also their quaternions [nu + 7·nmocap]."""

_MAX_CONTACTS = 128  # per row; about 1 kB each for a robot arm. ejax's tasks need 4 to 30 at once.
_GEOM = mujoco.mjtGeom
_CONTACTS = {
    (_GEOM.mjGEOM_PLANE, _GEOM.mjGEOM_ELLIPSOID): 1,
    (_GEOM.mjGEOM_PLANE, _GEOM.mjGEOM_CAPSULE): 2,
    (_GEOM.mjGEOM_PLANE, _GEOM.mjGEOM_CYLINDER): 4,
    (_GEOM.mjGEOM_CAPSULE, _GEOM.mjGEOM_CAPSULE): 2,
    (_GEOM.mjGEOM_CAPSULE, _GEOM.mjGEOM_BOX): 2,
}
"""The most contacts of two geoms in Warp's collision functions; a sphere makes one, other solids eight."""
_HARMLESS = ("CONTACT_MATCH", "ITERATIONS", "LS_ITERATIONS", "TACTILE")
"""Flags of ``Data.overflow`` that lose no force: sensors, and a solver at its limit, where the C engine stops too."""
_MAX_NUMBER = mujoco.mjMAXVAL  # a state beyond it is broken: the C engine's bound


def step(asset: str, num_substeps: int, state: PhysicsState, ctrl: Array) -> tuple[PhysicsState, Array]:
    """Step one simulation, as ``Physics.step_sensing``. Computes in float32, returns the state's dtype."""
    made = _step_of(asset, num_substeps, tuple(sorted(state.parameters)))
    qpos, qvel, readings = made(state.qpos, state.qvel, ctrl, state.parameters)
    return replace(state, qpos=qpos, qvel=qvel), readings


@functools.cache
def _step_of(asset: str, num_substeps: int, names: tuple[str, ...]) -> _Step:
    return make_step(load_accelerated_model(asset, names), num_substeps)


def make_step(
    model: mujoco.MjModel, num_substeps: int, *, max_contacts: int | None = None, max_constraints: int | None = None
) -> _Step:
    """Make a pure step of one simulation; under ``vmap`` the batch is one call. It cannot be differentiated.

    ``max_contacts`` and ``max_constraints`` of one row are by default from the model.
    Raises ModuleNotFoundError: MuJoCo Warp is not installed.
    """
    simulate = partial(_simulate, _Simulation(model, num_substeps, max_contacts, max_constraints))
    marked = model.body_mocapid >= 0
    control = np.concatenate([np.zeros(model.nu), model.body_pos[marked].ravel(), model.body_quat[marked].ravel()])
    start = [x.astype(np.float32)[None] for x in (model.qpos0, np.zeros(model.nv), control)]

    @custom_vmap
    def step_rows(qpos: Array, qvel: Array, ctrl: Array, parameters: dict[str, Array]) -> tuple[Array, Array, Array]:
        """Step [N, nq], [N, nv], [N, nu], [N, *shape] to (qpos, qvel, readings)."""
        sound = _sound(qpos, qvel, ctrl, *(x.reshape(len(x), -1) for x in parameters.values()))
        rows = (qpos, qvel, ctrl)
        finite = [jnp.where(sound, x.astype(jnp.float32), y[:, : x.shape[1]]) for x, y in zip(rows, start, strict=True)]
        usable = {
            name: jnp.where(sound.reshape(-1, *[1] * (x.ndim - 1)), x, parameter(model, name)).astype(jnp.float32)
            for name, x in parameters.items()
        }
        new_qpos, new_qvel, readings, overflow = simulate(finite[0], finite[1], finite[2], usable)
        sound &= _sound(new_qpos, new_qvel) & (overflow == 0)[:, None]
        new_qpos, new_qvel = (jnp.where(sound, x, jnp.nan).astype(qpos.dtype) for x in (new_qpos, new_qvel))
        return new_qpos, new_qvel, jnp.where(sound[..., None], readings, jnp.nan).astype(qpos.dtype)

    @step_rows.def_vmap
    def _(size: int, has_axis: Sequence[Any], *rows: Any) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
        """Fold a batch of batches into one: all contacts are in one buffer."""
        # what is the same in all rows, such as a constant control, has no axis
        full = jax.tree.map(lambda x, has: x if has else jnp.broadcast_to(x, (size, *x.shape)), rows, tuple(has_axis))
        results = step_rows(*jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), full))
        return tuple(x.reshape(*full[0].shape[:-1], *x.shape[1:]) for x in results), (True,) * len(results)

    @jax.custom_jvp
    def step_row(qpos: Array, qvel: Array, ctrl: Array, parameters: dict[str, Array]) -> tuple[Array, Array, Array]:
        qpos, qvel, readings = step_rows(*jax.tree.map(lambda x: x[None], (qpos, qvel, ctrl, parameters)))
        return qpos[0], qvel[0], readings[0]

    @step_row.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        del primals, tangents
        raise ValueError('physics "warp" has no derivatives')

    return step_row


def max_num_contacts(model: mujoco.MjModel, pairs: Any) -> int:
    """Count the contacts that these pairs of geoms can make at once, within 1 and 128."""
    types = np.sort(model.geom_type[np.asarray(pairs, int)].reshape(-1, 2), axis=1)
    return min(_MAX_CONTACTS, max(1, sum(_max_between(*pair) for pair in types)))


def max_num_constraints(model: mujoco.MjModel, num_contacts: int) -> int:
    """Count the solver's rows for that many contacts, all joint limits, friction losses and equalities."""
    dims = max([1, *model.geom_condim, *model.pair_dim])
    pyramidal = model.opt.cone == mujoco.mjtCone.mjCONE_PYRAMIDAL
    per_contact = 2 * (dims - 1) if pyramidal and dims > 1 else dims
    limits = model.jnt_limited.sum() + model.tendon_limited.sum()
    losses = (model.dof_frictionloss > 0).sum() + (model.tendon_frictionloss > 0).sum()
    return int(num_contacts * per_contact + limits + losses + 6 * model.neq)


def import_warp(name: str = "mujoco_warp") -> tuple[Any, Any]:
    """Import Warp and, by its name, MuJoCo Warp, with listings kept off the console.

    Raises ModuleNotFoundError: either is not installed.
    """
    try:
        import warp

        mujoco_warp = importlib.import_module(name)
    except ImportError as error:
        text = "physics 'warp' needs MuJoCo Warp: pip install -e '.[warp]' in ejax's folder"
        raise ModuleNotFoundError(text) from error
    warp.config.log_level = max(warp.config.log_level, warp.LOG_WARNING)
    return warp, mujoco_warp


def lost_flags(mujoco_warp: Any) -> int:
    """Collect the flags in ``Data.overflow`` of a row that may have lost a force."""
    return sum(flag for flag in mujoco_warp.OverflowType if flag.name not in _HARMLESS)


class _Simulation:  # hashed by identity: programs of one simulation share its buffers
    """A model on Warp, and the room that a row of it gets."""

    def __init__(
        self, model: mujoco.MjModel, num_substeps: int, max_contacts: int | None, max_constraints: int | None
    ) -> None:
        warp, mujoco_warp = import_warp()
        self.model, self.num_substeps, self.lost = model, num_substeps, lost_flags(mujoco_warp)
        try:
            with warp.ScopedDevice("cpu"):
                pairs = mujoco_warp.put_model(model).nxn_geom_pair_filtered.numpy()
        except NotImplementedError as error:
            raise beyond_engine("warp", error) from error
        self.contacts = max_contacts or max_num_contacts(model, pairs)
        self.constraints = max_constraints or max_num_constraints(model, self.contacts)


def _simulate(
    simulation: _Simulation, qpos: Array, qvel: Array, ctrl: Array, parameters: dict[str, Array]
) -> tuple[Array, Array, Array, Array]:
    """Step rows that are finite: (qpos, qvel, readings [N, ...], flags of what was lost [N])."""
    model, num_rows = simulation.model, len(qpos)
    derived = jax.vmap(partial(derived_fields, model), axis_size=num_rows)(parameters)
    derived.pop("dof_M0", None)  # MJX's alone
    start, end = model.nu, model.nu + 3 * model.nmocap  # both parts may be missing
    placed = {"mocap_pos": ctrl[:, start:end], "mocap_quat": ctrl[:, end:]}
    inputs = {"qpos": qpos, "qvel": qvel, "ctrl": ctrl[:, :start], **placed, **parameters, **derived}
    given = {name: x.reshape(num_rows, -1).astype(jnp.float32) for name, x in inputs.items() if x.size}
    outputs = {"new_qpos": qpos.shape, "new_qvel": qvel.shape, "new_overflow": (num_rows,)}
    outputs["readings"] = (simulation.num_substeps, num_rows, model.nsensordata)
    call = _control_step_call(simulation, tuple(given))
    new_qpos, new_qvel, readings, overflow = call(*given.values(), output_dims=outputs)
    return new_qpos, new_qvel, readings.swapaxes(0, 1), overflow & simulation.lost


@functools.cache
def _control_step_call(simulation: _Simulation, names: tuple[str, ...]) -> Any:
    """Make XLA's call of a control step. It has few arrays, since the host handles each in Python, in each step."""
    warp, _ = import_warp()
    outputs = {"new_qpos": (float, 2), "new_qvel": (float, 2), "readings": (float, 3), "new_overflow": (int, 1)}
    types = {name: warp.array(dtype=float, ndim=2) for name in names}
    types |= {name: warp.array(dtype=dtype, ndim=ndim) for name, (dtype, ndim) in outputs.items()}

    def control_step(*given: Any) -> None:
        arrays, take, _ = _workspace(simulation, str(given[0].device), given[0].shape[0], names)
        for name, array in zip(names, given, strict=False):
            flat = warp.array(ptr=arrays[name].ptr, dtype=float, shape=array.shape, device=array.device)
            warp.copy(flat, array)
        take()
        for name, array in zip(outputs, given[len(names) :], strict=True):
            warp.copy(array, arrays[name])

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in types])
    control_step.__signature__, control_step.__annotations__ = signature, types  # type: ignore[attr-defined]
    mode = warp.JaxCallableGraphMode.NONE  # XLA's CUDA graphs cannot hold one with loops, as the solver's
    return warp.jax_callable(control_step, num_outputs=len(outputs), graph_mode=mode)


@functools.cache
def _workspace(
    simulation: _Simulation, device: str, num_rows: int, names: tuple[str, ...]
) -> tuple[dict[str, Any], Callable[[], None], Any]:
    """Allocate what Warp computes in, once in a process; on a GPU, record a control step in it as a CUDA graph.

    Returns the arrays that the step reads and writes, by name, the step, and what else is to be kept for it.
    """
    (warp, mujoco_warp), model, num_substeps = import_warp(), simulation.model, simulation.num_substeps
    warp_model = mujoco_warp.put_model(model)
    warp_model.opt.warn_overflow = 0  # a warning would be printed in each step; the flags are read instead
    warp_model.opt.tolerance.fill_(model.opt.tolerance)  # put_model raises it to 1e-6
    room = {"naconmax": num_rows * simulation.contacts, "njmax": simulation.constraints}
    data = mujoco_warp.make_data(model, nworld=num_rows, **room)
    arrays = {f"new_{name}": warp.empty_like(getattr(data, name)) for name in ("qpos", "qvel", "overflow")}
    arrays["readings"] = warp.empty((num_substeps, *data.sensordata.shape), dtype=float)
    for name in names:
        owner = data if hasattr(data, name) else warp_model.opt if name == "gravity" else warp_model
        if owner is not data:  # one for all rows so far
            shared = getattr(owner, name)
            setattr(owner, name, warp.empty((num_rows, *shared.shape[1:]), dtype=shared.dtype))
        arrays[name] = getattr(owner, name)

    def control_step() -> None:
        for substep in range(num_substeps):
            mujoco_warp.step(warp_model, data)
            warp.copy(arrays["readings"], data.sensordata, dest_offset=substep * data.sensordata.size)
        for name in ("qpos", "qvel", "overflow"):
            warp.copy(arrays[f"new_{name}"], getattr(data, name))
        mujoco_warp.reset_data(warp_model, data)  # the next step begins with blank data, as this one did
        for array in vars(data.efc).values():  # left by reset_data, and read past the last constraint
            array.zero_()

    if not warp.get_device(device).is_cuda:
        return arrays, control_step, None
    with warp.ScopedCapture() as capture:
        control_step()
    # the graph only knows the addresses of what these own
    return arrays, partial(warp.capture_launch, capture.graph), (warp_model, data)


def _max_between(first: int, second: int) -> int:
    if _GEOM.mjGEOM_HFIELD in (first, second) or _GEOM.mjGEOM_SDF in (first, second):
        return mujoco.mjMAXCONPAIR
    if _GEOM.mjGEOM_SPHERE in (first, second):
        return 1
    return _CONTACTS.get((_GEOM(first), _GEOM(second)), 8)


def _sound(*parts: Array) -> Array:
    return jnp.stack([(jnp.abs(x) <= _MAX_NUMBER).all(axis=-1, keepdims=True) for x in parts]).all(axis=0)
