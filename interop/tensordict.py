"""Rollouts and observations in the TensorDict layouts of EmbodiChain, and back.

    layout    batch        where                 content
    head      [N, T + 1]   EmbodiChain 0.2, 0.3  ``obs`` and ``value`` fill the last slot, other fields are zero in it
    pr122     [N, T]       its pull request 122  ``observation``, [N, T, 1] scalars, a step's results under ``next``
    seed      [T, N]       its first versions    ``obs, actions, rewards, dones, values, logprobs``

A layout is a nested dict of NumPy arrays (``*_dict``, which needs no torch) or a ``tensordict.TensorDict``
(``*_tensordict``). The extras of a rollout are stored next to the layout's fields, and so is data that a
layout has no field for (``next_value`` in head and seed, ``terminated`` and ``truncated`` in seed): EmbodiChain ignores
it, and the way back is exact. Without it (a rollout that EmbodiChain collected) the way back has EmbodiChain's reading:

    head      next_value[t] = value[t + 1]; after an episode's end that is the value of the *reset* observation, so
              train with ``timeout_bootstrap: embodichain``
    seed      the same, and 0 after the last step; a done is a termination

Advantages and value targets are written where the rollout's extras have them, [T, N] under ejax's names: as
``advantage`` and ``return`` in head, ``advantage``, ``value_target`` and ``return`` in pr122, ``advantages`` and
``returns`` in seed; and read back from there:

    advantage, value_target = ejax.gae(rollout.reward, rollout.value, ..., gamma=0.99, gae_lambda=0.95)
    rollout = rollout.replace(extras={"advantage": advantage, "value_target": value_target})

EmbodiChain's buffers hold flat observations: flatten nested ones first, by ``ejax.policies.observations``.
"""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ejax.schema.paths import named
from ejax.types import PyTree, Rollout
from interop.layouts import LAYOUTS, Read, Write, check_batch

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

RolloutLayout = Literal["head", "pr122", "seed"]


def rollout_to_dict(
    rollout: Rollout, layout: RolloutLayout, *, last_obs: PyTree = None, extras: bool = True
) -> dict[str, Any]:
    """Make a nested dict of NumPy arrays, all of them copies.

    Args:
        last_obs: leaves [N, ...], the observation after the last step (``EnvCarry.obs``); head and pr122 store it.
        extras: also data that EmbodiChain has no field for; see above.

    Raises:
        ValueError: an unknown layout, no ``last_obs`` where it is stored, an extra named like a field, arrays of
            another batch than the rest.
    """
    write, _ = _layout(layout)
    rollout, last_obs = jax.tree.map(np.asarray, (rollout, last_obs))
    check_batch(rollout, last_obs)
    return _copied(write(rollout, last_obs, extras, np))


def rollout_from_dict(data: Mapping[str, Any], layout: RolloutLayout) -> tuple[Rollout, PyTree]:
    """Make ``(rollout, last_obs)`` as ``rollout_to_dict`` takes them, of NumPy arrays; all of them copies.

    Returns:
        ``last_obs`` is None in the seed layout, which does not store it.

    Raises:
        ValueError: an unknown layout, fields of it that are missing, arrays of another batch than the rest.
    """
    _, read = _layout(layout)
    rollout, last_obs = read(_plain(data), np)
    check_batch(rollout, last_obs)
    return _copied((rollout, last_obs))


def rollout_to_tensordict(
    rollout: Rollout,
    layout: RolloutLayout,
    *,
    last_obs: PyTree = None,
    extras: bool = True,
    device: "torch.device | str" = "cpu",
    copy: bool = True,
) -> "TensorDict":
    """Convert as ``rollout_to_dict``, to a TensorDict on ``device``.

    Args:
        copy: False: tensors share the memory of the JAX arrays where the layout allows it (a transposed view; never in
            head, which pads). Only read such tensors: JAX takes its arrays to be immutable, and writing into one
            changes results elsewhere.
    """
    import torch
    from tensordict import TensorDict

    write, _ = _layout(layout)
    rollout, last_obs = jax.tree.map(lambda x: _to_torch(x, device), (rollout, last_obs))
    check_batch(rollout, last_obs)
    # first to torch, then to the layout: a transposed view shares memory, which JAX's transpose would not
    data = write(rollout, last_obs, extras, torch)
    if copy and layout != "head":  # padding was a copy
        data = jax.tree.map(lambda x: x.clone(memory_format=torch.contiguous_format), data)
    batch_size = data["actions" if layout == "seed" else "action"].shape[:2]
    return TensorDict(data, batch_size=batch_size, device=torch.device(device))


def rollout_from_tensordict(
    td: "TensorDict | Mapping[str, Any]", layout: RolloutLayout, *, copy: bool = True
) -> tuple[Rollout, PyTree]:
    """Convert as ``rollout_from_dict``, to JAX arrays.

    Args:
        td: TensorDict, or nested mapping of tensors.
        copy: False: arrays share the tensors' memory where that is contiguous in [T, N]. Do not write into the tensors
            as long as the arrays are in use.

    Raises:
        ValueError: as ``rollout_from_dict``; a field that is not a dense tensor, such as NonTensorData; 64-bit integers
            that 32 bits do not hold, without ``jax_enable_x64``.
    """
    import torch

    _, read = _layout(layout)
    rollout, last_obs = read(_tensors(td), torch)
    check_batch(rollout, last_obs)
    return jax.tree.map(lambda x: _to_jax(x, copy), (rollout, last_obs))


def dict_to_tensordict(obs: Any, device: "torch.device | str", key: str | None = None) -> "TensorDict":
    """Make a TensorDict on ``device``: a TensorDict is moved, a lone tensor becomes ``{"obs": tensor}``.

    Args:
        obs: TensorDict, tensor [N, ...] or [O], or nested mapping of tensors [N, ...]. Arrays of JAX and NumPy count as
            tensors; those of JAX are copied.
        key: the name to put all of it under, in a TensorDict of [N]; EmbodiChain's pull request 122 has
            ``observation``. None: EmbodiChain 0.3's rule, no outer name but a lone tensor's.

    Raises:
        TypeError: anything else. ValueError: a tensor that is not dense; with ``key``, tensors of different N.
    """
    import torch
    from tensordict import TensorDict

    obs = obs.to(device) if isinstance(obs, TensorDict) else _tensors_for_arrays(obs)
    if isinstance(obs, torch.Tensor):
        return TensorDict({key or "obs": obs}, batch_size=obs.shape[: int(obs.ndim > 1)], device=device)
    if not isinstance(obs, Mapping):  # a TensorDict is one
        raise TypeError(f"an observation must be a tensor, a mapping or a TensorDict, got {type(obs).__name__}")
    if key is not None:
        rows = _rows([leaf for leaf in named(obs).values() if isinstance(leaf, torch.Tensor)])
        return TensorDict({key: obs}, batch_size=rows, device=torch.device(device))
    return obs if isinstance(obs, TensorDict) else TensorDict.from_dict(obs, device=torch.device(device))


def flatten_dict_observation(obs: Any) -> "torch.Tensor":
    """Concatenate an observation's tensors, keys sorted at each level, depth first, each flattened behind N: [N, O].

    Args:
        obs: TensorDict or nested mapping of tensors [N, ...], or of arrays; anything else is ignored, as by
            EmbodiChain. One of [N], which EmbodiChain cannot flatten, is a column.

    Raises:
        ValueError: no tensor in it, tensors of different N, or one that is not dense.
    """
    import torch

    from interop.dense import in_words, is_dense

    leaves = [leaf for leaf in named(_tensors_for_arrays(obs)).values() if isinstance(leaf, torch.Tensor)]
    if not leaves:
        raise ValueError("the observation holds no tensor")
    if odd := [in_words(leaf) for leaf in leaves if not is_dense(leaf)]:
        raise ValueError(f"the observation's tensors must be dense, of real numbers; it holds {', '.join(odd)}")
    _rows(leaves)
    return torch.cat([leaf[:, None].flatten(start_dim=1) for leaf in leaves], dim=-1)


def _rows(leaves: list[Any]) -> tuple[int, ...]:
    """Return (N,) of tensors [N, ...], and () of none; ValueError if they differ in it."""
    sizes = {tuple(leaf.shape[:1]) for leaf in leaves}
    if len(sizes) > 1 or () in sizes:
        raise ValueError(f"the observation's tensors must be [N, ...] of one N, got {[list(x.shape) for x in leaves]}")
    return next(iter(sizes), ())


def _layout(name: str) -> tuple[Write, Read]:
    if name not in LAYOUTS:
        raise ValueError(f"no layout '{name}'; there is {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def _to_torch(x: Any, device: Any) -> "torch.Tensor":
    """Through DLPack; without a copy where the array lies on ``device`` already."""
    import torch

    if isinstance(x, torch.Tensor):
        return x.to(device)
    if not isinstance(x, jax.Array):
        x = np.array(x)  # torch takes no read-only memory
        if x.dtype.isbuiltin != 1:  # bfloat16 and its like, which NumPy's DLPack does not know
            x = jnp.asarray(x)
    if isinstance(x, jax.Array) and (torch.device(device).type == "cpu" or len(x.devices()) > 1):
        x = jax.device_put(x, jax.devices("cpu")[0])  # also gathers sharded arrays
    return torch.from_dlpack(x).to(device)


def _to_jax(x: "torch.Tensor", copy: bool) -> jax.Array:
    """Through DLPack. 64-bit tensors become 32-bit arrays unless ``jax_enable_x64``, as everywhere in JAX."""
    import torch

    x = x.detach().resolve_conj().resolve_neg()  # DLPack does not carry a sign that is stored separately
    if x.dtype in (torch.int64, torch.uint64) and not jax.config.read("jax_enable_x64"):
        _check_fits_32_bits(x)
    return jax.dlpack.from_dlpack(x.clone(memory_format=torch.contiguous_format) if copy else x.contiguous())


def _check_fits_32_bits(x: "torch.Tensor") -> None:
    import torch

    bounds = torch.iinfo(torch.int32 if x.dtype == torch.int64 else torch.uint32)
    signed = x.view(torch.int64)  # torch has no min() of uint64; numbers beyond int64 are negative here
    if x.numel() and (int(signed.min()) < bounds.min or int(signed.max()) > bounds.max):
        text = f"a tensor of {x.dtype} holds numbers outside [{bounds.min}, {bounds.max}],"
        raise ValueError(f"{text} which JAX's 32 bits do not hold; set jax_enable_x64, or leave it out")


def _copied(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: np.array(x, order="C"), tree)


def _plain(data: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return a nested mapping of a rollout's fields as NumPy arrays."""
    return {
        name: _plain(x, f"{path}{name}.") if isinstance(x, Mapping) else _array(x, f"{path}{name}")
        for name, x in data.items()
    }


def _array(x: Any, name: str) -> Any:
    try:
        array = np.asarray(x)
    except (TypeError, ValueError, RuntimeError) as error:  # NonTensorData, sparse tensors, rows of different lengths
        raise ValueError(f"'{name}' must be an array of numbers [., ., ...], got a {type(x).__name__}") from error
    if array.dtype.kind in "OUSMm" or array.ndim < 2:
        raise ValueError(f"'{name}' must be an array of numbers [., ., ...], got {array.dtype}{list(array.shape)}")
    return array


def _is_tensordict(x: Any) -> bool:
    package = sys.modules.get("tensordict")  # without it there is none
    return package is not None and isinstance(x, package.TensorDictBase)


def _tensors(data: Any, path: str = "") -> Any:
    """Return a TensorDict or nested mapping of a rollout's fields as dicts of tensors."""
    import torch

    from interop.dense import in_words, is_dense

    held = _is_tensordict(data)  # its tensors stay where they are
    made: dict[str, Any] = {}
    for name, x in (data.to_dict() if held else data).items():
        if isinstance(x, Mapping):
            made[name] = _tensors(x, f"{path}{name}.")
        elif isinstance(x, torch.Tensor):
            if not is_dense(x) or x.ndim < 2:
                raise ValueError(f"'{path}{name}' must be a dense tensor of numbers [., ., ...], got {in_words(x)}")
            made[name] = x if held else x.cpu()
        else:
            made[name] = _to_torch(x if isinstance(x, jax.Array) else _array(x, f"{path}{name}"), "cpu")
    return made


def _tensors_for_arrays(obs: Any, path: str = "obs") -> Any:
    """``obs`` with a tensor for each array; one of JAX is copied.

    Raises:
        ValueError: a tensor that is not dense, or an array of something other than numbers.
    """
    import torch

    from interop.dense import in_words, is_dense

    if isinstance(obs, Mapping) and not _is_tensordict(obs):
        return {name: _tensors_for_arrays(x, f"{path}.{name}") for name, x in obs.items()}
    if isinstance(obs, torch.Tensor) and not is_dense(obs):
        raise ValueError(f"{path} must be a dense tensor of numbers, got {in_words(obs)}")
    if isinstance(obs, np.ndarray) and obs.dtype.kind in "OUSMm":
        raise ValueError(f"{path} must be an array of numbers, got {obs.dtype}{list(obs.shape)}")
    if isinstance(obs, jax.Array | np.ndarray):
        tensor = _to_torch(obs, "cpu")
        return tensor.clone() if isinstance(obs, jax.Array) else tensor
    return obs
