"""Tensors of a torch environment as checked NumPy arrays. On the CPU they share memory with the tensors."""

from collections.abc import Mapping
from typing import Any

import gymnasium
import jax
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from ejax.types import PyTree
from interop.dense import describe, is_dense


def numpy_of(x: Any, name: str, shape: tuple[int, ...] | None, *, boolean: bool = False) -> NDArray[Any]:
    """Return a tensor of this shape as an array. Floats that NumPy lacks (bfloat16) become float32.

    Args:
        shape: None: any.
        boolean: its dtype must be bool.

    Raises:
        ValueError: no tensor, or another shape or dtype.
    """
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}, must be a tensor; for NumPy use the family gymnasium")
    if not is_dense(x):
        raise ValueError(f"{name} is {describe(x)}; must be a dense tensor of floats, integers or bools")
    if shape is not None and tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {list(x.shape)}, must have {list(shape)}")
    if boolean and x.dtype != torch.bool:
        raise ValueError(f"{name} is {x.dtype}, must be torch.bool: (x > 0) makes it so")
    # NumPy has no bfloat16
    x = x.detach().cpu()
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()


def numpy_tree(obs: Any, space: gymnasium.Space[Any], num_envs: int, device: torch.device, name: str = "obs") -> Any:
    """Convert an observation of ``space`` (tensor, mapping or TensorDict, sequence) to arrays [N, ...].

    Parts that the space does not have are left out.

    Raises:
        ValueError: a part is missing, of another shape, or on another device.
    """
    if isinstance(space, spaces.Dict):
        if not isinstance(obs, Mapping):
            raise ValueError(f"{name} is a {type(obs).__name__}, its space is a Dict of {', '.join(space.spaces)}")
        missing = [key for key in space.spaces if key not in obs.keys()]  # noqa: SIM118  # TensorDict.__contains__ raises
        if missing:
            raise ValueError(
                f"{name} lacks {', '.join(missing)} of its space; it has {', '.join(map(str, obs.keys()))}"
            )
        return {
            key: numpy_tree(obs[key], part, num_envs, device, f"{name}.{key}") for key, part in space.spaces.items()
        }
    if isinstance(space, spaces.Tuple):
        parts = enumerate(space.spaces)
        return tuple(numpy_tree(obs[i], part, num_envs, device, f"{name}.{i}") for i, part in parts)
    array = numpy_of(obs, name, (num_envs, *(space.shape or ())))
    if obs.device.type != device.type or (obs.device.index or 0) != (device.index or 0):
        raise ValueError(f"{name} is on {obs.device}, the environment was to be on {device}; set env.cfg.device")
    return array


def facts_of(info: Mapping[str, Any], num_envs: int) -> tuple[dict[str, NDArray[np.float32]], list[str]]:
    """``success``, ``metrics/<name>`` and ``rewards/<name>`` of ``info`` as [N, ...] float32, copied; and the
    names of those that cannot be."""
    named = {"success": info["success"]} if "success" in info else {}
    for group in ("metrics", "rewards"):
        part = info.get(group)
        named |= {f"{group}/{name}": x for name, x in part.items()} if isinstance(part, Mapping) else {}
    rows = {name: x for name, x in named.items() if isinstance(x, torch.Tensor) and x.shape[:1] == (num_envs,)}
    shapes = {"success": (num_envs,)}
    facts = {name: numpy_of(x, f"info.{name}", shapes.get(name)).astype(np.float32) for name, x in rows.items()}
    return facts, [name for name in named if name not in rows]


def row_space(env: Any, what: str, num_envs: int) -> gymnasium.Space[Any]:
    """``single_<what>_space``, or one row of ``<what>_space``.

    Raises:
        ValueError: it has neither.
    """
    single = getattr(env, f"single_{what}_space", None)
    if isinstance(single, spaces.Space):
        return single
    batched = getattr(env, f"{what}_space", None)
    if not isinstance(batched, spaces.Space):
        raise ValueError(
            f"{type(env).__name__} has no single_{what}_space that is a space of Gymnasium, got {single!r}"
        )
    return _first_row(batched, num_envs)


def replace_rows(rows: NDArray[np.bool_], new: PyTree, old: PyTree) -> PyTree:
    def choose(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
        return np.where(rows.reshape(-1, *[1] * (b.ndim - 1)), a, b)

    return jax.tree.map(choose, new, old)


def same_rows(rows: NDArray[np.bool_], a: PyTree, b: PyTree) -> bool:
    """Return True if the rows are equal, NaN to NaN too."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x[rows], y[rows], equal_nan=True) for x, y in pairs)


def _first_row(space: gymnasium.Space[Any], num_envs: int) -> gymnasium.Space[Any]:
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: _first_row(part, num_envs) for name, part in space.spaces.items()})
    if isinstance(space, spaces.Box) and len(space.shape) > 1 and space.shape[0] == num_envs:
        dtype: Any = space.dtype  # Gymnasium's releases differ in what they call its type
        return spaces.Box(space.low[0], space.high[0], dtype=dtype.type)
    return space
