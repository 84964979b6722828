"""Checks of what environments outside JAX answer, where NumPy would take None for False and ``"1.0"`` for 1."""

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from ejax.schema.messages import short_repr
from ejax.types import HostTimestep, PyTree

_NUMBER, _FLAG = "fiub", "b"
_PLAIN = {_NUMBER: frozenset({float, int, np.float64, np.float32}), _FLAG: frozenset({bool, np.bool_})}
_ALLOWED = {_NUMBER: "a number, such as 1.0", _FLAG: "True or False"}


def answering(env: gymnasium.Env[Any, Any], row: int) -> gymnasium.Env[Any, Any]:
    """Make ``step`` raise ValueError for an answer that is none, before a vector writes it; ``row``: its number."""
    step, shape, dtype, array = env.step, env.observation_space.shape, env.observation_space.dtype, np.ndarray
    is_box = isinstance(env.observation_space, gymnasium.spaces.Box)
    numbers, flags = _PLAIN[_NUMBER], _PLAIN[_FLAG]

    def checked(action: Any) -> Any:
        answer = obs, reward, terminated, truncated, _ = step(action)
        # each costs every step of every environment 20 ns
        if type(reward) not in numbers or type(terminated) not in flags or type(truncated) not in flags:
            _check_one("reward", reward, _NUMBER, row)
            _check_one("terminated", terminated, _FLAG, row)
            _check_one("truncated", truncated, _FLAG, row)
        if is_box and (type(obs) is not array or obs.shape != shape or obs.dtype is not dtype):
            _check_array(f"the observation of row {row}", np.asarray(obs), shape or (), _NUMBER)
        return answer

    env.step = checked  # type: ignore[method-assign]  # a wrapper's frame would cost three times as much
    return env


def check_timestep(timestep: HostTimestep, space: gymnasium.Space[Any], num_envs: int) -> None:
    """Raise ValueError unless this is an answer of ``num_envs`` environments whose observations are of ``space``."""
    check_flags_and_reward(timestep.reward, timestep.terminated, timestep.truncated, num_envs)
    check_obs(timestep.obs, space, num_envs)
    if timestep.final_obs is not timestep.obs:
        check_obs(timestep.final_obs, space, num_envs, "final_obs")


def check_flags_and_reward(reward: Any, terminated: Any, truncated: Any, num_envs: int) -> None:
    _check_array("reward", reward, (num_envs,), _NUMBER)
    _check_array("terminated", terminated, (num_envs,), _FLAG)
    _check_array("truncated", truncated, (num_envs,), _FLAG)


def check_success(name: str, given: Any) -> None:
    """Raise ValueError unless ``info[name]`` is numbers, None where one is not known."""
    values = np.asarray(given)
    for row, value in enumerate(values if values.dtype.kind not in _NUMBER else ()):
        if value is not None:
            _check_one(f"info['{name}']", value, _NUMBER, row)


def check_choices(obs: Any, space: Any) -> None:
    count = space.n if isinstance(space, gymnasium.spaces.Discrete) else space.nvec
    for row, choice in enumerate(np.asarray(obs)):
        if not ((choice >= space.start) & (choice < space.start + count)).all():
            raise ValueError(f"the observation of row {row} is {short_repr(choice.tolist())}; must be of {space}")


def check_obs(obs: PyTree, space: gymnasium.Space[Any], num_envs: int, what: str = "obs") -> None:
    """Raise ValueError unless each leaf of ``obs`` is numbers [N, ...] of the shape that ``space`` has."""
    if isinstance(space, gymnasium.spaces.Dict):
        if not isinstance(obs, Mapping) or obs.keys() != space.spaces.keys():
            given = sorted(obs) if isinstance(obs, Mapping) else type(obs).__name__
            raise ValueError(f"{what} is {short_repr(given)}; must be a dict of {sorted(space.spaces)}")
        for name, part in space.spaces.items():
            check_obs(obs[name], part, num_envs, f"{what}/{name}")
        return
    _check_array(what, obs, (num_envs, *(space.shape or ())), _NUMBER)


def _check_one(what: str, given: Any, kind: str, row: int) -> None:
    array = np.asarray(given)
    if array.shape != () or array.dtype.kind not in kind:
        text = f"{what} of row {row} is {short_repr(given)} ({type(given).__name__})"
        raise ValueError(f"{text}; must be {_ALLOWED[kind]}")


def _check_array(what: str, given: Any, shape: tuple[int, ...], kind: str) -> None:
    if getattr(given, "shape", None) == shape and given.dtype.kind in kind:
        return
    array = np.asarray(given)
    values = "" if array.dtype.kind in _NUMBER else f", {short_repr(array.tolist())}"
    allowed = "booleans" if kind == _FLAG else "numbers"
    raise ValueError(f"{what} is {array.dtype}{list(array.shape)}{values}; must be {allowed} {list(shape)}")
