"""Checks of what environments outside JAX answer, where NumPy would take None for False and ``"1.0"`` for 1."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import jax
import numpy as np

from ejax.schema.messages import short_repr
from ejax.schema.paths import leaves
from ejax.types import HostTimestep, PyTree

OLD_GYM = (
    "Gymnasium's environments have reset(seed=None, options=None) -> (obs, info) and step(action) -> (obs, reward, "
    "terminated, truncated, info); write yours so, or wrap one of gym's in shimmy's GymV21CompatibilityV0(env=…)"
)
"""Remedy for the forms that gym had before 0.26."""
_NUMBER, _FLAG = "fiub", "b"  # kinds of dtypes; a flag is a number too
_NUMBERS, _FLAGS = frozenset({float, int, np.float64, np.float32}), frozenset({bool, np.bool_})


def answering(env: gymnasium.Env[Any, Any], row: int) -> gymnasium.Env[Any, Any]:
    """Make ``step`` raise ValueError for an answer that is none, before a vector writes it; ``row``: its number."""
    step, shape, dtype, array = env.step, env.observation_space.shape, env.observation_space.dtype, np.ndarray
    name, reset = type(env.unwrapped).__name__, env.reset
    is_box = isinstance(env.observation_space, gymnasium.spaces.Box)
    has_parts = _part_check(env.observation_space) if hasattr(env.observation_space, "spaces") else None

    def checked(action: Any) -> Any:
        try:
            answer = step(action)
        except ValueError as error:  # of a wrapper, such as TimeLimit
            if "(expected 5, got 4)" not in str(error):
                raise
            raise ValueError(f"{error}: {OLD_GYM}") from error
        if type(answer) is not tuple or len(answer) != 5:  # a call costs, too
            check_answer(name, answer)
        obs, reward, terminated, truncated, info = answer
        # by type first: each of these costs every step of every environment 20 ns, a call of ``_check`` 2 µs
        if type(reward) not in _NUMBERS or type(terminated) not in _FLAGS or type(truncated) not in _FLAGS:
            _check(f"reward of row {row}", reward, (), _NUMBER)
            _check(f"terminated of row {row}", terminated, (), _FLAG)
            _check(f"truncated of row {row}", truncated, (), _FLAG)
        if is_box and (type(obs) is not array or obs.shape != shape or obs.dtype is not dtype):
            _check(f"the observation of row {row}", np.asarray(obs), shape or (), _NUMBER)
        elif has_parts is not None and not has_parts(obs):
            check_host_obs(obs, env.observation_space, (), f"the observation of row {row}")
        plain = type(info) is dict and "rewards" not in info and "metrics" not in info
        return answer if plain else (*answer[:4], _facts(name, info))

    def started(**options: Any) -> Any:
        try:
            obs, info = check_answer(name, reset(**options), 2)
            check_host_obs(obs, env.observation_space, (), f"the first observation of row {row}")
            return obs, _facts(name, info)
        except TypeError as error:
            if not re.search("unexpected keyword argument '(seed|options)'", str(error)):
                raise
            raise ValueError(f"{error}: {OLD_GYM}") from error

    env.step = checked  # type: ignore[method-assign]  # a wrapper's frame would cost three times as much
    env.reset = started  # type: ignore[method-assign]
    return env


def _part_check(space: Any) -> Callable[[Any], bool]:
    """Make a test, of 0.3 µs, whether an observation has the parts of a Dict or Tuple, and is a plain dict or tuple."""
    is_dict, parts = isinstance(space, gymnasium.spaces.Dict), space.spaces
    number: int = len(parts)
    names: Any = parts.keys() if is_dict else ()
    kind: Any = dict if is_dict else tuple
    inside = {
        key: _part_check(x) for key, x in dict(parts if is_dict else enumerate(parts)).items() if hasattr(x, "spaces")
    }

    def has_parts(obs: Any) -> bool:
        there = type(obs) is kind and (names <= obs.keys() if is_dict else len(obs) == number)
        return there and (not inside or all(check(obs[key]) for key, check in inside.items()))

    return has_parts


def check_answer(name: str, given: Any, size: int = 5) -> Any:
    """Return what Gymnasium's ``step`` gave, or with ``size`` 2 its ``reset``. ValueError: it has another form."""
    if isinstance(given, tuple | list) and len(given) == size and (size == 5 or isinstance(given[1], Mapping | None)):
        return given
    what = f"{len(given)} values" if isinstance(given, tuple) else f"a {type(given).__name__} alone"
    raise ValueError(f"{name}.{'step' if size == 5 else 'reset'}() returns {what}: {OLD_GYM}")


def _facts(name: str, info: Any) -> dict[str, Any]:
    """Return an ``info``, {} for None, with the numbers in ``rewards`` and ``metrics`` as floats: a vector gives all
    rows the type of the first, and cuts 0.5 to 0 after a 1. ValueError: it is not a dict."""
    if not isinstance(info, Mapping | None):
        raise ValueError(f"the info of {name} is a {type(info).__name__}; must be a dict, {{}} for nothing")
    facts = dict(info or {})
    for group, part in facts.items():
        if group in ("rewards", "metrics") and isinstance(part, Mapping):
            scalars = {each: x for each, x in part.items() if isinstance(x, int | float) or hasattr(x, "dtype")}
            facts[group] = {each: float(x) for each, x in scalars.items() if np.ndim(x) == 0}
    return facts


def check_timestep(timestep: HostTimestep, space: gymnasium.Space[Any], num_envs: int) -> None:
    """Raise ValueError unless this is an answer of ``num_envs`` environments whose observations are of ``space``."""
    check_flags_and_reward(timestep.reward, timestep.terminated, timestep.truncated, num_envs)
    check_host_obs(timestep.obs, space, (num_envs,))
    if timestep.final_obs is not timestep.obs:  # the same arrays in most steps
        check_host_obs(timestep.final_obs, space, (num_envs,), "final_obs")


def check_flags_and_reward(reward: Any, terminated: Any, truncated: Any, num_envs: int) -> None:
    _check("reward", reward, (num_envs,), _NUMBER)
    _check("terminated", terminated, (num_envs,), _FLAG)
    _check("truncated", truncated, (num_envs,), _FLAG)


def check_info(info: Any, num_envs: int, before: Any) -> Any:
    """Return the structure of an ``info``. ValueError: it is not a dict of numeric arrays [N, ...], or differs from
    ``before``, the structure at the last step (None: this is the first)."""
    form = jax.tree.structure(info)
    if before is not None and form == before:
        return form  # the rest costs 20 µs
    for path, x in leaves({"info": info}):
        is_array = getattr(x, "shape", ())[:1] == (num_envs,) and x.dtype.kind not in "OUS"
        if not (is_array or (isinstance(x, Mapping) and not x)):
            text = f"{'/'.join(map(str, path))} is {short_repr(x)} ({type(x).__name__})"
            raise ValueError(f"{text}; info must be a dict of arrays of numbers [{num_envs}, ...]")
    if before is not None:
        raise ValueError(f"info is {form}, and was {before} before; it must have the same names at every step")
    return form


def check_success(name: str, given: Any) -> None:
    """Raise ValueError unless ``info[name]`` is numbers, None where one is not known."""
    values = np.asarray(given)
    for row, value in enumerate(values if values.dtype.kind not in _NUMBER or values.ndim > 1 else ()):
        if value is not None:
            _check(f"info['{name}'] of row {row}", value, (), _NUMBER)


def check_host_obs(obs: PyTree, space: Any, lead: tuple[int, ...], what: str = "obs") -> None:
    """Raise ValueError unless each leaf of ``obs`` is numbers [*lead, ...] of the shape that ``space`` has. ``lead``
    (): it is what one environment gives, before a vector writes it."""
    if not hasattr(space, "spaces"):
        _check(what, obs if lead else np.asarray(obs), (*lead, *(space.shape or ())), _NUMBER)
        if not lead and not np.can_cast(dtype := np.asarray(obs).dtype, space.dtype, "same_kind"):
            raise ValueError(f"{what} is of {dtype}, and its space of {space.dtype}; give both the same type")
        return
    kind, parts = "dict", space.spaces
    if not isinstance(space, gymnasium.spaces.Dict):
        kind, parts = "tuple", dict(enumerate(parts))
        obs = dict(enumerate(obs)) if isinstance(obs, tuple | list) else obs
    only = bool(lead) or kind == "tuple"  # of a Dict Gymnasium reads the parts that it knows
    if not isinstance(obs, Mapping) or parts.keys() - obs.keys() or (only and len(obs) > len(parts)):
        given = sorted(obs) if isinstance(obs, Mapping) else type(obs).__name__
        raise ValueError(f"{what} is {short_repr(given)}; must be a {kind} of {sorted(parts)}")
    for name, part in parts.items():
        check_host_obs(obs[name], part, lead, f"{what}/{name}")


def _check(what: str, given: Any, shape: tuple[int, ...], kind: str) -> None:
    array = np.asarray(given)
    # rows have to be arrays already: a list would be a tree of numbers to JAX
    if array.shape == shape and array.dtype.kind in kind and (shape == () or hasattr(given, "shape")):
        return
    if shape == ():
        allowed = "True or False" if kind == _FLAG else "a number, such as 1.0"
        raise ValueError(f"{what} is {short_repr(given)} ({type(given).__name__}); must be {allowed}")
    values = "" if array.dtype.kind in _NUMBER else f", {short_repr(array.tolist())}"
    allowed = "booleans" if kind == _FLAG else "numbers"
    raise ValueError(f"{what} is {array.dtype}{list(array.shape)}{values}; must be {allowed} {list(shape)}")
