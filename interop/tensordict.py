"""Rollouts and observations in the TensorDict layouts of EmbodiChain, and back.

    layout    batch        where                 what lies there
    head      [N, T + 1]   EmbodiChain 0.2, 0.3  ``obs`` and ``value`` fill the last slot, other fields are zero in it
    pr122     [N, T]       its pull request 122  ``observation``, [N, T, 1] scalars, what follows a step under ``next``
    seed      [T, N]       its first versions    ``obs, actions, rewards, dones, values, logprobs``

A layout is a nested dict of NumPy arrays (``*_dict``, which needs no torch) or a ``tensordict.TensorDict``
(``*_tensordict``). The extras of a rollout stand beside the layout's fields. What a layout has no field for
(``next_value`` in head and seed, ``terminated`` and ``truncated`` in seed) does too: EmbodiChain passes over it, and
the way back is exact. Without it (a rollout that EmbodiChain collected) the way back has EmbodiChain's reading:

    head      next_value[t] = value[t + 1]; after an episode's end that is the value of the *reset* observation, so
              train with ``timeout_bootstrap: embodichain``
    seed      the same, and 0 after the last step; a done is a termination

EmbodiChain's buffers hold flat observations: flatten nested ones first, by ``ejax.policies.observations``.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from ejax.types import PyTree, Rollout
from interop.layouts import LAYOUTS, Read, Write

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

Layout = Literal["head", "pr122", "seed"]


def rollout_to_dict(
    rollout: Rollout, layout: Layout, *, last_obs: PyTree = None, extras: bool = True
) -> dict[str, Any]:
    """A nested dict of NumPy arrays, all of them copies.

    Args:
        last_obs: leaves [N, ...], the observation after the last step (``EnvCarry.obs``); head and pr122 store it.
        extras: also what EmbodiChain has no field for; see above.

    Raises:
        ValueError: an unknown layout, no ``last_obs`` where it is stored, an extra named like a field.
    """
    write, _ = _layout(layout)
    rollout, last_obs = jax.tree.map(np.asarray, (rollout, last_obs))
    return _copied(write(rollout, last_obs, extras, np))


def rollout_from_dict(data: Mapping[str, Any], layout: Layout) -> tuple[Rollout, PyTree]:
    """``(rollout, last_obs)`` as ``rollout_to_dict`` takes them, of NumPy arrays; all of them copies.

    Returns:
        ``last_obs`` is None in the seed layout, which does not store it.

    Raises:
        ValueError: an unknown layout, or fields of it that are missing.
    """
    _, read = _layout(layout)
    return _copied(read(_plain(data), np))


def rollout_to_tensordict(
    rollout: Rollout,
    layout: Layout,
    *,
    last_obs: PyTree = None,
    extras: bool = True,
    device: "torch.device | str" = "cpu",
    copy: bool = True,
) -> "TensorDict":
    """As ``rollout_to_dict``, as a TensorDict on ``device``.

    Args:
        copy: False: tensors share the memory of the JAX arrays where the layout allows it (a transposed view; never in
            head, which pads). Only read such tensors: JAX takes its arrays to be immutable, and writing into one
            changes results elsewhere.
    """
    import torch
    from tensordict import TensorDict

    write, _ = _layout(layout)
    rollout, last_obs = jax.tree.map(lambda x: _to_torch(x, device), (rollout, last_obs))
    data = write(rollout, last_obs, extras, torch)
    if copy and layout != "head":  # padding was a copy
        data = jax.tree.map(lambda x: x.clone(memory_format=torch.contiguous_format), data)
    batch_size = data["actions" if layout == "seed" else "action"].shape[:2]
    return TensorDict(data, batch_size=batch_size, device=torch.device(device))


def rollout_from_tensordict(td: "TensorDict", layout: Layout, *, copy: bool = True) -> tuple[Rollout, PyTree]:
    """As ``rollout_from_dict``, of JAX arrays.

    Args:
        copy: False: arrays share the tensors' memory where that is contiguous in [T, N]. Do not write into the tensors
            as long as the arrays are in use.
    """
    import torch

    _, read = _layout(layout)
    rollout, last_obs = read(td.to_dict(), torch)
    return jax.tree.map(lambda x: _to_jax(x, copy), (rollout, last_obs))


def dict_to_tensordict(obs: Any, device: "torch.device | str") -> "TensorDict":
    """An observation as a TensorDict on ``device``: a TensorDict is moved, a lone tensor becomes ``{"obs": tensor}``.

    Args:
        obs: TensorDict, tensor [N, ...] or [O], or nested mapping of tensors [N, ...].

    Raises:
        TypeError: anything else.

    Source: the rule of EmbodiChain 0.3.
    """
    import torch
    from tensordict import TensorDict

    if isinstance(obs, TensorDict):
        return obs.to(device)
    if isinstance(obs, torch.Tensor):
        return TensorDict({"obs": obs}, batch_size=obs.shape[: int(obs.ndim > 1)], device=device)
    if isinstance(obs, Mapping):
        return TensorDict.from_dict(dict(obs), device=torch.device(device))
    raise TypeError(f"an observation must be a tensor, a mapping or a TensorDict, got {type(obs).__name__}")


def flatten_dict_observation(obs: Any) -> "torch.Tensor":
    """All tensors of an observation, keys sorted at each level, depth first, each flattened behind N: [N, O].

    Args:
        obs: TensorDict or nested mapping of tensors [N, ...]; what is neither is passed over, as EmbodiChain does.

    Raises:
        ValueError: no tensor in it.
    """
    import torch

    tensors = [leaf.flatten(start_dim=1) for leaf in _sorted_leaves(obs) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise ValueError("the observation holds no tensor")
    return torch.cat(tensors, dim=-1)


def _layout(name: str) -> tuple[Write, Read]:
    if name not in LAYOUTS:
        raise ValueError(f"no layout '{name}'; there is {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def _to_torch(x: Any, device: Any) -> "torch.Tensor":
    """Through DLPack; without a copy where the array lies on ``device`` already."""
    import torch

    if isinstance(x, jax.Array) and (torch.device(device).type == "cpu" or len(x.devices()) > 1):
        x = jax.device_put(x, jax.devices("cpu")[0])  # also gathers what is sharded
    if not isinstance(x, jax.Array):
        x = np.array(x)  # torch takes no read-only memory
    return torch.from_dlpack(x).to(device)


def _to_jax(x: "torch.Tensor", copy: bool) -> jax.Array:
    """Through DLPack. 64-bit tensors become 32-bit arrays unless ``jax_enable_x64``, as everywhere in JAX."""
    import torch

    x = x.detach()
    return jax.dlpack.from_dlpack(x.clone(memory_format=torch.contiguous_format) if copy else x.contiguous())


def _copied(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: np.array(x, order="C"), tree)


def _plain(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(x) if isinstance(x, Mapping) else np.asarray(x) for name, x in data.items()}


def _sorted_leaves(obs: Any) -> list[Any]:
    if not isinstance(obs, Mapping):  # a TensorDict is one
        return [obs]
    return [leaf for name in sorted(obs.keys()) for leaf in _sorted_leaves(obs[name])]
