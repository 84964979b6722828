"""Gymnasium environments as a ``HostEnv``: ``gymnasium:HalfCheetah-v5``, or any vector environment that exists."""

import os
import pickle
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any, Literal, ParamSpec, TypeVar

import gymnasium
import jax
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv
from gymnasium.vector.async_vector_env import AsyncState
from numpy.typing import NDArray

from ejax.envs.actions import action_form, to_action
from ejax.envs.adapters.library import check_name
from ejax.envs.host.answers import answering, check_answer, check_flags_and_reward, check_success
from ejax.envs.host.calls import EnvExit, call_env, short_error
from ejax.envs.host.rows import as_rows, next_seed, put_rows, rows_space
from ejax.envs.wrappers.action_chunk import chunk_space
from ejax.envs.wrappers.asymmetric import part_space
from ejax.runtime.process_exit import GUARD, refuse_rerun
from ejax.runtime.streams import keep_streams
from ejax.schema.paths import nest
from ejax.schema.trust import check_trusted, import_trusted
from ejax.types import HostTimestep, PyTree

_P = ParamSpec("_P")
_R = TypeVar("_R")
Mask = NDArray[np.bool_]
_OF_OLD_GYM = ("GymV21Environment-v0", "GymV26Environment-v0")
"""Gymnasium's ids for environments of gym, which name theirs as ``env_id``."""


class GymnasiumVector:
    """A ``gymnasium.vector.VectorEnv`` in any of its autoreset modes, owned and closed by this object.

    - ``DISABLED``: rows that ended are reset here, each from its own seed: every episode can be played again.
    - ``SAME_STEP``: the true next observation is ``info["final_obs"]``.
    - ``NEXT_STEP``: the step after an episode's end only resets; it is not a transition (``info["valid"]`` False).

    Observations become vectors (``as_rows``). ``info["success"]`` is its ``success`` or ``is_success``, else NaN;
    ``rewards`` and ``metrics`` are those numbers in its own that the first step has, NaN where a later step has none.
    ``clip_actions`` clips Box actions to their space; its ``step`` takes actions, not a policy's
    choices. Raises ValueError: an environment that does not state its mode.
    """

    def __init__(self, env: VectorEnv, *, clip_actions: bool = True, max_episode_steps: int = 0) -> None:
        mode = env.metadata.get("autoreset_mode")
        if not isinstance(mode, AutoresetMode):
            text = "so what its step returns after an episode's end is unknown; set it to an AutoresetMode"
            raise ValueError(f"{type(env).__name__} has no metadata['autoreset_mode'], {text}")
        self.env, self.mode, self.clip_actions = env, mode, clip_actions
        self.num_envs, self.max_episode_steps = int(env.num_envs), max_episode_steps
        self.observation_space = rows_space(env.single_observation_space)
        self.action_space = env.single_action_space
        self._form = action_form(self.action_space, clips=clip_actions)._replace(start=())  # given actions, not choices
        self.seeds_rows = mode is AutoresetMode.DISABLED
        self._takes_seeds = bool(env.metadata.get("takes_seeds", self.seeds_rows))
        self.row_seed = np.zeros(self.num_envs, np.uint32)
        self._resets_next = np.zeros(self.num_envs, bool)
        self._names: tuple[tuple[str, Any], ...] | None = None

    def reset(self, seed: NDArray[np.uint32], rows: Mask | None = None) -> PyTree:
        chosen = np.ones(self.num_envs, bool) if rows is None else rows
        self.row_seed = np.where(chosen, seed, self.row_seed)
        self._resets_next &= ~chosen
        return self._reset(chosen, everything=rows is None)

    def step(self, action: NDArray[Any]) -> HostTimestep:
        step = self.env.step(to_action(self._form, action))
        raw, reward, terminated, truncated, info = check_answer(type(self.env).__name__, step)
        check_flags_and_reward(reward, terminated, truncated, self.num_envs)
        obs = final_obs = as_rows(self.env.single_observation_space, raw)
        done = terminated | truncated
        valid = ~self._resets_next
        if self.mode is AutoresetMode.NEXT_STEP:
            self._resets_next = done.copy()
        elif done.any() and self.mode is AutoresetMode.DISABLED:
            # of one seed the whole series of episodes follows, so each can be played again
            self.row_seed = np.where(done, next_seed(self.row_seed), self.row_seed)
            obs = self._reset(done)
        elif done.any():
            final_obs = self._final_obs(obs, info)
        success = np.full(self.num_envs, np.nan, np.float32)  # not known, where nobody says it
        for name in ("success", "is_success"):
            for source in (info, info.get("final_info", {})):
                if name in source:
                    check_success(name, source[name])
                    success = np.where(source.get(f"_{name}", True), source[name], success).astype(np.float32)
        return HostTimestep(
            obs=obs,
            reward=np.asarray(reward, np.float32),
            terminated=np.array(terminated, bool),
            truncated=np.array(truncated, bool),
            info={"success": success, "valid": valid, **self._reported(info)},
            final_obs=final_obs,
        )

    def _reported(self, info: Mapping[str, Any]) -> dict[str, Any]:
        if self._names == ():
            return {}
        found: dict[tuple[str, Any], Any] = {}
        for source, group in product((info, info.get("final_info")), ("rewards", "metrics")):
            part: Any = source.get(group) if isinstance(source, Mapping) else None
            for name, x in part.items() if isinstance(part, Mapping) else ():
                if np.shape(x) == (self.num_envs,) and x.dtype.kind in "fiub" and not str(name).startswith("_"):
                    found[group, name] = np.where(part.get(f"_{name}", True), x, found.get((group, name), np.nan))
        # a rollout's arrays need the same names at every step
        self._names = tuple(found) if self._names is None else self._names
        return nest((each, np.full(self.num_envs, found.get(each, np.nan), np.float32)) for each in self._names)

    @property
    def frames_per_second(self) -> float:
        return float(self.env.metadata.get("render_fps") or 30)  # for an environment that does not give its own

    def pictures(self) -> NDArray[np.uint8]:
        """Draw every row: [N, height, width, 3] RGB.

        Raises:
            ValueError: there are none, as without ``render_mode``. ImportError: it needs a package that is not here.
        """
        try:
            drawn: Any = self.env.render()
        except gymnasium.error.DependencyNotInstalled as error:  # neither of Python's errors nor of ours
            raise ImportError(str(error)) from error
        if not drawn or any(np.ndim(each) != 3 for each in drawn):
            raise ValueError(f"{type(self.env).__name__} draws nothing: it needs env.cfg.render_mode rgb_array")
        return np.stack([np.asarray(each, np.uint8) for each in drawn])

    def close(self) -> None:
        """Close it, and kill workers that do not end by themselves, or are in an abandoned call."""
        if not isinstance(self.env, AsyncVectorEnv):
            self.env.close()
            return
        try:
            if self.env._state is AsyncState.DEFAULT:
                self.env.close()
        finally:
            self.env.closed = True
            for process in self.env.processes:
                process.kill()  # an environment can ignore any other signal

    def _reset(self, rows: Mask, *, everything: bool = False) -> PyTree:
        seeds: Any = [int(each) for each in self.row_seed]  # one per row, which Gymnasium takes despite its annotation
        if everything:
            raw = self.env.reset(seed=seeds if self._takes_seeds else seeds[0])
        else:
            raw = self.env.reset(seed=seeds, options={"reset_mask": rows.copy()})
        return as_rows(self.env.single_observation_space, check_answer(type(self.env).__name__, raw, 2)[0])

    def _final_obs(self, obs: PyTree, info: Mapping[str, Any]) -> PyTree:
        if "final_obs" not in info:
            raise ValueError(f"{type(self.env).__name__} resets in the same step, but gave no info['final_obs']")
        space, ended = self.env.single_observation_space, np.flatnonzero(info["_final_obs"])
        if isinstance(info["final_obs"], Mapping):  # one array of all rows for each name
            final_obs = jax.tree.map(lambda x: np.asarray(x)[ended], info["final_obs"])
        else:  # an observation for each row
            final_obs = jax.tree.map(lambda *rows: np.stack(rows), *info["final_obs"][ended])
        return put_rows(ended, as_rows(space, final_obs), obs)


def make(
    name: str,
    *,
    num_envs: int,
    vectorization: Literal["sync", "async"] = "sync",
    clip_actions: bool = True,
    action_chunk: int = 1,
    observation_indices: Sequence[int] | None = None,
    **env_kwargs: Any,
) -> GymnasiumVector:
    """Make ``name`` by ``gymnasium.make``, ``num_envs`` times.

    Args:
        name: a registered id; of ``package.module:Name-v0`` the module is imported first, which registers it, if
            ``ejax.schema.trust`` lets it through.
        vectorization: ``sync`` steps all in one process; ``async`` gives each a process, which pays where
            one step takes longer than about 0.2 ms.
        action_chunk: the policy decides every so many steps; see ``ChunkedSteps``.
        observation_indices: numbers of the observation that the policy is shown, in this order. None: all.

    Raises ValueError: a wrong option, or no such environment, with the nearest names; UntrustedCodeError: a
    ``package.module:Name-v0`` that only a file names.
    """
    registered = name.partition(":")[2] or name
    try:
        if registered != name:
            import_trusted(name)
    except ImportError as error:
        raise ValueError(f"'{name}' cannot be imported: {error}") from error
    check_name("gymnasium", registered, gymnasium.registry)
    spec = gymnasium.spec(registered)
    if spec.id in _OF_OLD_GYM and ":" in str(wrapped := env_kwargs.get("env_id")):
        check_trusted(str(wrapped))  # gym imports such a module as Gymnasium does
    make_row = partial(_make_row, name, action_chunk, observation_indices, dict(env_kwargs))
    makers = [partial(make_row, row) for row in range(num_envs)]
    if vectorization == "async":
        # of a server: a fork of this process has locks of JAX's threads, and without the threads that hold them
        makers = [partial(make_in_worker, make_one, os.getpid()) for make_one in makers]
        refuse_rerun()
        try:
            vector: VectorEnv = AsyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED, context="forkserver")
        except (ConnectionError, EOFError):  # says nothing
            text = "its worker process ended before the environment was made; the reason is printed above"
            raise RuntimeError(f"{name}: {text}; {GUARD}") from None
    else:
        vector = gymnasium.vector.SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)
    limit = env_kwargs.get("max_episode_steps", spec.max_episode_steps) or time_limit(vector)
    return GymnasiumVector(vector, clip_actions=clip_actions, max_episode_steps=-(-limit // action_chunk))


def time_limit(vector: Any) -> int:
    """Read the longest limit of the rows' outermost ``TimeLimit``, else that of their specs; 0: not known."""
    base = vector.unwrapped
    with suppress(AttributeError, TypeError, ValueError):  # not every vector can ask its rows
        if all(base.call("has_wrapper_attr", "_max_episode_steps")):
            return max(map(int, base.get_attr("_max_episode_steps")))
    specs = [each.spec for each in getattr(base, "envs", [vector])]
    return max((spec and spec.max_episode_steps) or 0 for spec in specs)


class ChunkedSteps(gymnasium.Wrapper[Any, Any, Any, Any]):
    """One action is a sequence of ``size`` actions, executed one after the other until the episode ends.
    The reward is the sum of the steps' rewards; ``gamma`` then counts decisions.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], size: int) -> None:
        super().__init__(env)
        self.size, self.action_space = size, chunk_space(env.action_space, size)

    def step(self, action: NDArray[Any]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        total = 0.0
        for each in np.reshape(action, (self.size, -1)):
            obs, reward, terminated, truncated, info = self.env.step(each)
            total += float(reward)
            if terminated or truncated:
                break  # the rest of the sequence was meant for the episode that ended
        return obs, total, terminated, truncated, info


def make_in_worker(make_one: Callable[[], Any], owner: int) -> "Contained":
    """Make one in another process, which leaves Ctrl-C to the owner, who ends the run in order."""
    if os.getpid() != owner:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        keep_streams()  # of a task that prints
    return Contained(_arriving(make_one))


class Contained(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment whose owner hears of exits too, and of exceptions that Gymnasium's workers cannot send."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return _arriving(self.env.reset, seed=seed, options=options)

    def step(self, action: Any) -> Any:
        return _arriving(self.env.step, action)

    def close(self) -> None:
        _arriving(self.env.close)


def vectorize(made: Any, make_one: Callable[[], Any], num_envs: int) -> Any:
    """Turn ``make_one()``'s result into a ``HostEnv``: a single environment ``num_envs`` times, in one process."""
    if isinstance(made, gymnasium.Env):
        call_env(type(made.unwrapped).__name__, "close", made.close)
        makers = [lambda row=row: answering(make_one(), row) for row in range(num_envs)]
        made = gymnasium.vector.SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)
    return GymnasiumVector(made, max_episode_steps=time_limit(made)) if isinstance(made, VectorEnv) else made


def _make_row(name: str, action_chunk: int, indices: Sequence[int] | None, kwargs: dict[str, Any], row: int) -> Any:
    env: Any = answering(gymnasium.make(name, **kwargs), row)
    if indices is not None:
        chosen = np.array(indices)
        part = part_space(env.observation_space, indices)
        env = gymnasium.wrappers.TransformObservation(env, lambda obs: obs[chosen], part)
    return env if action_chunk == 1 else ChunkedSteps(env, action_chunk)


def _arriving(function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Call the function; raise Python's own exceptions as they are, any other as a ``RuntimeError`` with its text."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        if _arrives(error):
            raise
        raise RuntimeError(short_error(error)) from error
    except BaseException as error:
        raise RuntimeError(EnvExit("", "", error).raised) from error


def _arrives(error: Exception) -> bool:
    # Gymnasium sends a class and its instance, and makes the owner's exception as ``class(instance)``
    try:
        return type(error).__module__ == "builtins" and bool(type(error)(pickle.loads(pickle.dumps(error))))
    except Exception:
        return False
