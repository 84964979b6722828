"""A policy's parameters as EmbodiChain's torch ``state_dict``, and back. NumPy only.

Keys and order of a ``state_dict`` (weights of a Linear are [out, in], those of a Flax Dense [in, out]):

    log_std                                               [A]; not in policies with discrete actions
    actor.<i·s>.weight, .bias                             hidden Linear i
    actor.<i·s + 1>.weight, .bias                         its LayerNorm, if any
    actor.<L·s>.weight, .bias                             output Linear
    critic. ...                                           the same; not in ActorOnly
    actor_obs_normalizer.{mean, variance, standard_deviation, count}, critic_obs_normalizer. ...      if any

where s = 2 + [LayerNorm] + [dropout] counts the modules of a hidden layer and L the hidden layers. A VisionPolicy has,
behind log_std, for each image

    encoder_<image>.<i>.weight, .bias                     convolution i, [out, in, rows, columns]; an image's dots as _

and a policy with memory, before actor and before critic, torch's names of a GRU or an LSTM

    actor_encoder.<i·s>.weight, .bias, ...                the MLP before it, if any
    actor_memory.{weight_ih, weight_hh, bias_ih, bias_hh}_l<layer>
    critic_encoder. ..., critic_memory. ...               the same, where the critic has its own memory

A FlashActor of B blocks has no log_std, and as its actor

    actor.0.weight, .bias                                 the first Linear
    actor.<b>.{0, 2}.weight, .bias                        the two of block b, 1 to B
    actor.<B + r + 1>.weight, .bias                       output Linear, r = 1 with an RMSNorm

Source: EmbodiChain's MLP, ActorCritic and ActorOnly; it has neither encoders nor blocks.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ejax.schema.messages import did_you_mean
from ejax.types import Params, Policy
from interop.exporters.entries import Entry, StateDict, get, put
from interop.exporters.record import exporter_of


def state_dict_from_params(policy: Policy, params: Params) -> StateDict:
    """Make the ``state_dict`` of EmbodiChain's policy with these parameters, all arrays copies. ``policy``:
    ``ActorCritic``, ``ActorOnly``, either with memory, ``VisionPolicy``, ``FlashQ`` (its ``FlashActor``'s) or
    ``FlashActor``; a ``VLAPolicy``'s names are those of ``interop.exporters.vla``. Raises TypeError: another policy: it
    has no counterpart in torch."""
    if (own := exporter_of(policy).state_dict) is not None:
        return own(policy, params)
    return {entry.key: entry.to_torch(get(params, entry.path)) for entry in tensors(policy)}


def params_from_state_dict(policy: Policy, state_dict: Mapping[str, Any]) -> Params:
    """Invert ``state_dict_from_params``: make Flax variables of NumPy arrays.

    Args:
        state_dict: arrays, or anything that ``np.asarray`` takes, such as torch tensors on the CPU.

    Raises:
        TypeError: as ``state_dict_from_params``.
        ValueError: keys that are missing or not the policy's, arrays of another shape or dtype; all of them named. The
            widths of observations, which a policy does not know, are the caller's to compare.
    """
    arrays = {key: np.asarray(x) for key, x in state_dict.items()}
    entries = list(tensors(policy))
    problems = _misfits(arrays, entries)
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise ValueError(f"the state_dict is not of this {type(policy).__name__}: {shown}")
    params: Params = {}
    for entry in entries:
        if entry.kind != "deviation":
            put(params, entry.path, entry.to_flax(arrays[entry.key]))
    return params


def tensors(policy: Policy) -> Iterator[Entry]:
    """Yield every tensor of the policy's state_dict, in torch's order."""
    make = exporter_of(policy).tensors
    if make is None:
        raise TypeError(f"{type(policy).__name__} has no counterpart in EmbodiChain")
    return make(policy)


def _misfits(arrays: StateDict, entries: list[Entry]) -> list[str]:
    wanted = {entry.key: entry for entry in entries}
    missing = [key for key in wanted if key not in arrays]
    unknown = [key for key in arrays if key not in wanted]
    problems = [f"lacks {key}{did_you_mean(key, unknown)}" for key in missing]
    problems += [f"has {key}, which the policy lacks{did_you_mean(key, missing)}" for key in unknown]
    for key, entry in wanted.items():
        if key not in arrays:
            continue
        x = arrays[key]
        fits = len(x.shape) == len(entry.shape) and all(
            want in (None, have) for have, want in zip(x.shape, entry.shape, strict=True)
        )
        if not fits or x.dtype != entry.dtype:
            shape = ", ".join("any" if size is None else str(size) for size in entry.shape)
            problems.append(f"{key} is {x.dtype}{list(x.shape)}, the policy needs {entry.dtype}[{shape}]")
    return problems
