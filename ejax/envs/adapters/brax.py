"""Brax environments, ``brax:ant``, those of MuJoCo Playground, ``playground:CartpoleBalance``, which have Brax's
interface, and the adapter for every environment with it."""

import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter
from typing import Any
from unittest import mock

import gymnasium
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from flax import struct
from flax.traverse_util import flatten_dict
from numpy.typing import NDArray

from ejax.envs.adapters.library import LibraryEnv, as_vectors, check_name, check_options, import_library, resolve_dtypes
from ejax.envs.mujoco.engines.warp import import_warp, lost_flags
from ejax.numerics.finite import all_finite
from ejax.runtime.host_call import host_call
from ejax.runtime.stopwatch import ENGINE
from ejax.types import Array, Key, PyTree, Timestep

_REWARD_TERM = "reward/"
_LONG_RESETS = ("CheetahRun",)  # 200 physics steps
_GIVEN = ("qpos", "qvel", "act", "qacc_warmstart", "mocap_pos", "mocap_quat", "ctrl")
_KEPT = (*_GIVEN[4:], "qfrc_applied", "xfrc_applied", "eq_active", "userdata", "plugin_state", "history", "time")
"""Fields that a physics step leaves as they are."""
_START = 1.0  # s: the time that a row's steps begin at. The engine sets a row that breaks back to 0.
_WARP_OF_MJX = "mujoco.mjx.third_party.mujoco_warp"  # Playground steps by MJX, which has a copy
_tracing = threading.RLock()
_steppers: dict[str, "_Stepper"] = {}


@struct.dataclass(kw_only=True)
class BraxEnvState:
    inner: PyTree  # the library's ``State``
    episode_step: Array


@dataclass(frozen=True)
class BraxEnv(LibraryEnv):
    """The bare environment, without the library's wrappers: ``done`` is ``terminated``, the time limit is counted here.

    Actions in ±1, clipped. Observations are vectors, or a dict of them; images are flattened. Metrics named
    ``reward/<term>`` are ``info["rewards"]``; a metric ``success`` is also ``info["success"]``.
    """

    action_repeat: int
    long_reset: bool = False
    """A reset takes so many physics steps that only the rows that ended should make it."""

    def reset(self, key: Key) -> tuple[BraxEnvState, PyTree]:
        inner = self.env.reset(jax.random.key_data(key))  # Brax is written for keys that are plain arrays
        state = BraxEnvState(inner=resolve_dtypes(inner), episode_step=jnp.zeros((), jnp.int32))
        return state, as_vectors(inner.obs)

    def step(self, state: BraxEnvState, action: Array, key: Key) -> tuple[BraxEnvState, Timestep]:
        del key  # the environment keeps its own in its state
        self.check_action(action)
        action = jnp.clip(action, -1.0, 1.0)

        def one_step(inner: PyTree, _: None) -> tuple[PyTree, tuple[Array, Array]]:
            # a copy: some environments write into the metrics and info that they are given
            after = self.env.step(jax.tree.map(lambda x: x, inner), action)
            return resolve_dtypes(after, like=inner), (jnp.float32(after.reward), jnp.asarray(after.done, bool))

        # The library's wrapper takes the last step's done; here no termination between repeats is lost.
        inner, (reward, done) = jax.lax.scan(one_step, state.inner, None, self.action_repeat)
        episode_step = state.episode_step + 1
        info = _info(inner.metrics)
        if "success" in info:
            info["success"] &= all_finite(inner.obs, reward)
        timestep = Timestep(
            obs=as_vectors(inner.obs),
            reward=reward.sum(),
            terminated=done.any(),
            truncated=episode_step >= self.max_episode_steps,
            info=info,
        )
        return BraxEnvState(inner=inner, episode_step=episode_step), timestep


def make(
    name: str, *, max_episode_steps: int = 1000, action_repeat: int = 1, backend: str | None = None, **options: Any
) -> BraxEnv:
    """Make a Brax environment; ``options`` are for its constructor.

    Args:
        max_episode_steps: time limit. Brax's default for all of its environments: 1000.
        action_repeat: steps of the environment in one step here.
        backend: ``generalized``, ``positional``, ``spring`` or ``mjx``. None: the environment's own.

    Raises ModuleNotFoundError: Brax is not installed; TypeError: a wrong option; ValueError: a wrong name or backend.
    """
    envs = import_library("brax.envs", "brax")
    check_name("brax", name, envs._envs)  # Brax lists its names nowhere else
    options |= {} if backend is None else {"backend": backend}
    with jax.ensure_compile_time_eval():  # constants, even if called while a program is traced
        env = envs.get_environment(name, **options)
    return adapt(f"brax:{name}", env, max_episode_steps=max_episode_steps, action_repeat=action_repeat, options=options)


def adapt(
    name: str,
    env: Any,
    *,
    max_episode_steps: int,
    action_repeat: int = 1,
    long_reset: bool = False,
    options: Mapping[str, Any],
) -> BraxEnv:
    """Adapt an object with Brax's interface; equal ``name`` and ``options`` share compiled programs.
    Raises ValueError: ``max_episode_steps`` or ``action_repeat`` is not positive.
    """
    if max_episode_steps <= 0 or action_repeat <= 0:
        raise ValueError(f"max_episode_steps and action_repeat must be > 0, got {max_episode_steps}, {action_repeat}")
    shapes = jax.eval_shape(env.reset, jax.random.PRNGKey(0))
    return BraxEnv(
        name=name,
        max_episode_steps=max_episode_steps,
        action_repeat=action_repeat,
        long_reset=long_reset,
        options=dict(options),
        env=env,
        observation_space=vector_space(shapes.obs),
        action_space=gymnasium.spaces.Box(-1.0, 1.0, (env.action_size,), np.float32),
    )


def vector_space(obs: PyTree) -> gymnasium.Space:
    """Return the unbounded space of ``as_vectors(obs)``. Raises ValueError: a container other than mappings."""
    if isinstance(obs, Mapping):
        return gymnasium.spaces.Dict({name: vector_space(part) for name, part in obs.items()})
    if not hasattr(obs, "shape"):
        raise ValueError(f"observations must be arrays or mappings of them, got {type(obs).__name__}")
    return gymnasium.spaces.Box(-np.inf, np.inf, (int(np.prod(obs.shape)),), np.float32)


def _info(metrics: Mapping[str, Any]) -> dict[str, Any]:
    scalars = {name: jnp.asarray(x) for name, x in metrics.items() if jnp.ndim(x) == 0}
    terms = {name.removeprefix(_REWARD_TERM): x for name, x in scalars.items() if name.startswith(_REWARD_TERM)}
    others = {name: x for name, x in scalars.items() if not name.startswith(_REWARD_TERM)}
    success = {"success": scalars["success"] > 0.5} if "success" in scalars else {}
    return {"rewards": terms, "metrics": others, **success}


def make_playground(name: str, *, max_episode_steps: int | None = None, impl: str = "jax", **overrides: Any) -> BraxEnv:
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
        import_warp(_WARP_OF_MJX)
    library = import_library("mujoco_playground", "playground")
    registry = library.registry
    check_name("playground", name, registry.ALL_ENVS)
    if name not in library.dm_control_suite.ALL_ENVS:
        _check_models(name)
        if impl == "c":
            text = "impl 'c' is for tasks of the DeepMind Control Suite, which read no contacts of MJX"
            raise ValueError(f"{text}; playground:{name} may: use 'jax' or 'warp'")
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

    action_size = property(attrgetter("env.action_size"))

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
        lost = (after.data._impl.overflow & lost_flags(import_warp(_WARP_OF_MJX)[1])) != 0

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


@dataclass(frozen=True)
class HostPhysicsEnv:
    """A Playground environment, stepped by the C engine. Its states are without MJX's own part, contacts among it,
    which an environment that reads it finds to be NaN.

    Args:
        name: the same in each process, and of no other environment or config.
    """

    env: Any
    name: str

    action_size = property(attrgetter("env.action_size"))

    def reset(self, key: Any) -> Any:
        with self._host_steps():
            return self._public(self.env.reset(key))

    def step(self, state: Any, action: Any) -> Any:
        def unknown(x: Any) -> Any:
            return jnp.full(x.shape, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 0, x.dtype)

        with self._host_steps():
            inner = jax.tree.map(unknown, jax.eval_shape(self.env.reset, jax.random.PRNGKey(0)).data._impl)
            return self._public(self.env.step(state.replace(data=state.data.replace(_impl=inner)), action))

    def _public(self, state: Any) -> Any:
        return state.replace(data=state.data.replace(_impl=None))

    @contextmanager
    def _host_steps(self) -> Iterator[None]:
        """Put host steps in the place of MJX's while the environment is traced."""
        library, mjx = (import_library(name, "playground") for name in ("mujoco_playground._src.mjx_env", "mujoco.mjx"))
        step = partial(_step, self.name, self.env.mj_model)

        def forward(model: Any, data: Any) -> Any:
            return step(model, data, data.ctrl, 0)

        # threads trace too, and the libraries have one function for all
        with _tracing, mock.patch.object(library, "step", step), mock.patch.object(mjx, "forward", forward):
            yield


def _step(name: str, mj_model: mujoco.MjModel, model: Any, data: Any, action: Any, n_substeps: int = 1) -> Any:
    """Do ``mujoco_playground._src.mjx_env.step``; with 0 substeps ``mjx.forward``."""
    name = f"{name} {n_substeps}"
    if name not in _steppers:  # one for each name: a program that is loaded from a cache finds it by that
        names = [field.name for field in fields(data) if field.name != "_impl"]
        _steppers[name] = _Stepper(mj_model, n_substeps, names)
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
        moved = {name: getattr(data, name) for name in fields if name not in _KEPT and hasattr(data, name)}
        self.given = [name for name in _GIVEN if getattr(data, name).size]
        self.results = {name: x.size for name, x in moved.items() if x.size and x.dtype == np.float64}

    def __call__(self, given: Any) -> tuple[NDArray[Any]]:
        rows = np.asarray(given)
        flat = rows.reshape(-1, rows.shape[-1])
        made = np.empty((len(flat), sum(self.results.values())))
        with self._lock, ENGINE.of("physics"):
            parts = (np.array_split(x, len(self._data)) for x in (flat, made))
            list(self._pool.map(self._step_rows, self._data, *parts))
        return (made.astype(rows.dtype).reshape(*rows.shape[:-1], -1),)

    def _step_rows(self, data: mujoco.MjData, given: NDArray[Any], made: NDArray[Any]) -> None:
        # views, since each reading of a field would make one
        read, written = ([getattr(data, name).reshape(-1) for name in names] for names in (self.given, self.results))
        columns = np.split(given, np.cumsum([view.size for view in read])[:-1], axis=1)
        for row, out, *parts in zip(given, made, *columns, strict=True):
            data.time = _START
            for view, part in zip(read, parts, strict=True):
                view[:] = part
            if self._num_substeps:
                mujoco.mj_step(self._model, data, self._num_substeps)
            else:
                mujoco.mj_forward(self._model, data)
            np.concatenate(written, out=out)
            if data.time < _START or not np.isfinite(row).all():
                out[:] = np.nan
