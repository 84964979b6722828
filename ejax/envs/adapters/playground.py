"""MuJoCo Playground environments: ``playground:CartpoleBalance``. They have Brax's interface."""

import dataclasses
import functools
import math
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from flax.traverse_util import flatten_dict
from numpy.typing import NDArray

from ejax.envs.adapters.brax import BraxEnv, adapt
from ejax.envs.adapters.library import check_name, check_options, import_library
from ejax.envs.mujoco.engines.warp import import_warp, lost_flags
from ejax.runtime.host_call import host_call
from ejax.runtime.stopwatch import ENGINE

_LONG_RESETS = ("CheetahRun",)  # 200 physics steps


def make(name: str, *, max_episode_steps: int | None = None, impl: str = "jax", **overrides: Any) -> BraxEnv:
    """Make a MuJoCo Playground environment.

    Args:
        max_episode_steps: time limit. None: the environment's ``episode_length``, in steps of its ``action_repeat``.
        impl: ``jax`` (MJX), on every device; ``c``, MuJoCo's C engine on the host, for tasks of the DeepMind Control
            Suite; or ``warp``, on CUDA and, for tests, on a CPU. Warp's contacts lie in one buffer for all rows, of the
            config's ``naconmax``; rows that may have lost some there, or of their ``njmax`` constraints, are NaN.
        overrides: entries of the environment's config, nested or dotted: ``{"ctrl_dt": 0.02}``.

    Raises:
        ModuleNotFoundError: Playground is not installed.
        FileNotFoundError: the environment needs robot models that are not on this machine.
        ValueError: an unknown name, an entry that the config does not have or in another type, another ``impl``.
    """
    if impl not in ("jax", "c", "warp"):
        raise ValueError(f"impl must be 'jax', 'c' or 'warp', got {impl!r}")
    if impl == "warp":
        import_warp()
    library = import_library("mujoco_playground", "playground")
    registry = library.registry
    check_name("playground", name, registry.ALL_ENVS)
    if name not in library.dm_control_suite.ALL_ENVS:
        _check_models(name)
        if impl == "c":
            text = "impl 'c' is for tasks of the DeepMind Control Suite, which read no contacts of MJX"
            raise ValueError(f"{text}; playground:{name} may: give 'jax', or 'warp'")
    config = registry.get_default_config(name)
    given = {"impl": "jax" if impl == "c" else impl} if "impl" in config else {}
    options = flatten_dict(overrides, sep=".") | given
    check_options(f"playground:{name}", "config entry", options, flatten_dict(config.to_dict(), sep="."))
    config.update_from_flattened_dict(options)
    with jax.ensure_compile_time_eval():  # constants, even if called while a program is traced
        env = registry.load(name, config=config)
    if impl != "jax":
        options["impl"] = impl  # environments of equal name and options share programs
        env = _WarpEnv(env) if impl == "warp" else HostPhysicsEnv(env, repr((name, sorted(options.items()))))
    repeat = config.get("action_repeat", 1)
    limit = math.ceil(config.episode_length / repeat) if max_episode_steps is None else max_episode_steps
    sizes = {"max_episode_steps": limit, "action_repeat": repeat, "long_reset": name in _LONG_RESETS}
    return adapt(f"playground:{name}", env, **sizes, options=options)


@dataclass(frozen=True)
class _WarpEnv:
    """An environment on Warp whose states are rows, without the whole batch's contacts, which each step finds again."""

    env: Any

    @property
    def action_size(self) -> int:
        return int(self.env.action_size)

    def reset(self, key: Any) -> Any:
        return self._rows(self.env.reset(key))

    def step(self, state: Any, action: Any) -> Any:
        # what rows share is left out of their states, and made blank again for the step, which fills it first
        blank = jax.eval_shape(self.env.reset, jax.random.PRNGKey(0)).data
        leaves, structure = jax.tree_util.tree_flatten_with_path(blank)
        rows = iter(state.data)
        full = [jnp.zeros(x.shape, x.dtype) if _is_shared(path) else next(rows) for path, x in leaves]
        data = jax.tree.unflatten(structure, full)
        after = self.env.step(state.replace(data=data), action)
        lost = (after.data._impl.overflow & lost_flags()) != 0

        def broken(x: Any) -> Any:
            return jnp.where(lost, jnp.nan, x) if jnp.issubdtype(x.dtype, jnp.floating) else x

        after = self._rows(after)
        obs, data = jax.tree.map(broken, (after.obs, after.data))
        return after.replace(obs=obs, data=data, reward=broken(after.reward))

    def _rows(self, state: Any) -> Any:
        leaves = jax.tree_util.tree_flatten_with_path(state.data)[0]
        return state.replace(data=tuple(x for path, x in leaves if not _is_shared(path)))


def _is_shared(path: Any) -> bool:
    from mujoco.mjx.warp.types import _BATCH_DIM

    names = [part.name for part in path if part.name != "_impl"]
    return not _BATCH_DIM["Data"].get("__".join(names), True)


def _check_models(name: str) -> None:
    place = import_library("mujoco_playground._src.mjx_env", "playground").MENAGERIE_PATH
    if not place.exists():
        command = "from mujoco_playground._src import mjx_env; mjx_env.ensure_menagerie_exists()"
        text = f"playground:{name} needs the robot models of mujoco_menagerie in {place}, which ejax does not download"
        raise FileNotFoundError(f"{text}: once, with a network, python -c '{command}'; DM Control Suite's need none")


_GIVEN = ("qpos", "qvel", "act", "qacc_warmstart", "mocap_pos", "mocap_quat", "ctrl")
_KEPT = (*_GIVEN[4:], "qfrc_applied", "xfrc_applied", "eq_active", "userdata", "plugin_state", "history", "time")
"""Fields that a physics step leaves as they are."""
_START = 1.0  # s: the time that a row's steps begin at. The engine sets a row that breaks back to 0.
_tracing = threading.RLock()
_steppers: dict[str, "_Stepper"] = {}


@dataclasses.dataclass(frozen=True)
class HostPhysicsEnv:
    """A Playground environment, stepped by the C engine. Its states are without MJX's own part, contacts among it,
    which an environment that reads it finds to be NaN.

    Args:
        name: the same in each process, and of no other environment or config.
    """

    env: Any
    name: str

    @property
    def action_size(self) -> int:
        return int(self.env.action_size)

    def reset(self, key: Any) -> Any:
        with self._host_steps():
            return self._public(self.env.reset(key))

    def step(self, state: Any, action: Any) -> Any:
        with self._host_steps():
            blank = jax.eval_shape(self.env.reset, jax.random.PRNGKey(0)).data

        def unknown(x: Any) -> Any:
            return jnp.full(x.shape, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 0, x.dtype)

        inner = jax.tree.map(unknown, blank._impl)
        with self._host_steps():
            return self._public(self.env.step(state.replace(data=state.data.replace(_impl=inner)), action))

    def _public(self, state: Any) -> Any:
        return state.replace(data=state.data.replace(_impl=None))

    @contextmanager
    def _host_steps(self) -> Iterator[None]:
        """Put host steps in the place of MJX's while the environment is traced."""
        library, mjx = (import_library(name, "playground") for name in ("mujoco_playground._src.mjx_env", "mujoco.mjx"))
        step = functools.partial(_step, self.name, self.env.mj_model)

        def forward(model: Any, data: Any) -> Any:
            return step(model, data, data.ctrl, 0)

        # threads trace too, and the libraries have one function for all
        with _tracing, mock.patch.object(library, "step", step), mock.patch.object(mjx, "forward", forward):
            yield


def _step(name: str, mj_model: mujoco.MjModel, model: Any, data: Any, action: Any, n_substeps: int = 1) -> Any:
    """Do ``mujoco_playground._src.mjx_env.step``; with 0 substeps ``mjx.forward``."""
    name = f"{name} {n_substeps}"
    if name not in _steppers:  # one for each name: a program that is loaded from a cache finds it by that
        fields = [field.name for field in dataclasses.fields(data) if field.name != "_impl"]
        _steppers[name] = _Stepper(mj_model, n_substeps, fields)
    stepper, data = _steppers[name], data.replace(ctrl=action)
    given = jnp.concatenate([getattr(data, field).ravel() for field in stepper.given])
    sizes = np.array([*stepper.results.values()])
    # one array: each argument and each result of a callback costs the host more than a row's physics
    (made,) = host_call(stepper, (jax.ShapeDtypeStruct((sizes.sum(),), given.dtype),), given, name=name)
    parts = zip(stepper.results, jnp.split(made, np.cumsum(sizes)[:-1]), strict=True)
    after = {field: part.reshape(getattr(data, field).shape) for field, part in parts}
    return data.replace(time=data.time + n_substeps * model.opt.timestep, **after)


class _Stepper:
    """Steps rows [..., given] to rows [..., results]: the fields' numbers, one after the other."""

    def __init__(self, model: mujoco.MjModel, num_substeps: int, fields: Iterable[str]) -> None:
        self._model, self._num_substeps = model, num_substeps
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._data = [mujoco.MjData(model) for _ in range(cores)]
        self._pool = ThreadPoolExecutor(cores)
        self._lock = threading.Lock()
        data = self._data[0]
        names = [name for name in fields if name not in _KEPT and hasattr(data, name)]
        moved = {name: getattr(data, name) for name in names}
        self.given = [name for name in _GIVEN if getattr(data, name).size]
        self.results = {name: x.size for name, x in moved.items() if x.size and x.dtype == np.float64}

    def __call__(self, given: Any) -> tuple[NDArray[Any]]:
        rows = np.asarray(given)
        flat = rows.reshape(-1, rows.shape[-1])
        made = np.empty((len(flat), sum(self.results.values())))
        with self._lock, ENGINE.of("physics"):
            bounds = np.linspace(0, len(flat), len(self._data) + 1).astype(int)
            parts = [slice(*each) for each in pairwise(bounds)]
            given_parts, made_parts = ([x[part] for part in parts] for x in (flat, made))
            list(self._pool.map(self._step_rows, self._data, given_parts, made_parts))
        return (made.astype(rows.dtype).reshape(*rows.shape[:-1], -1),)

    def _step_rows(self, data: mujoco.MjData, given: NDArray[Any], made: NDArray[Any]) -> None:
        # views, since each reading of a field would make one
        read, offset = [], 0
        for name in self.given:
            view = getattr(data, name).reshape(-1)
            read.append((view, slice(offset, offset + view.size)))
            offset += view.size
        written = [getattr(data, name).reshape(-1) for name in self.results]
        for row, out in zip(given, made, strict=True):
            data.time = _START
            for view, part in read:
                view[:] = row[part]
            if self._num_substeps:
                mujoco.mj_step(self._model, data, self._num_substeps)
            else:
                mujoco.mj_forward(self._model, data)
            np.concatenate(written, out=out)
            if data.time < _START or not np.isfinite(row).all():
                out[:] = np.nan
