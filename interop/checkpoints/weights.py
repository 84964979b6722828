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
    critic_encoder. ..., critic_memory. ...               the same, where the critic has a memory of its own

Source: EmbodiChain's MLP, ActorCritic and ActorOnly; it has no encoders of its own.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ejax.policies.actor_critic import ActorCritic
from ejax.policies.actor_only import ActorOnly
from ejax.policies.mlp import NetworkConfig
from ejax.policies.recurrence import MemoryConfig
from ejax.policies.vision import KERNELS, VisionPolicy, encoder_name
from ejax.policies.vla.policy import VLAPolicy
from ejax.policies.with_memory import ActorCriticWithMemory
from ejax.schema.registry import did_you_mean
from ejax.types import Params, Policy
from interop.checkpoints.vla_weights import vla_state_dict

StateDict: TypeAlias = dict[str, NDArray[Any]]


def state_dict_from_params(policy: Policy, params: Params) -> StateDict:
    """The ``state_dict`` of EmbodiChain's policy with these parameters, all arrays copies.

    Args:
        policy: ``ActorCritic``, ``ActorOnly``, either with memory, or ``VisionPolicy``; a ``VLAPolicy``'s names are
            those of ``interop.checkpoints.vla_weights``.

    Raises:
        TypeError: another policy: it has no counterpart in torch.
    """
    if isinstance(policy, VLAPolicy):
        return vla_state_dict(policy, params)
    return {entry.key: entry.to_torch(get(params, entry.path)) for entry in tensors(policy)}


def params_from_state_dict(policy: Policy, state_dict: Mapping[str, Any]) -> Params:
    """The inverse of ``state_dict_from_params``: Flax variables of NumPy arrays.

    Args:
        state_dict: arrays, or anything that ``np.asarray`` takes, such as torch tensors on the CPU.

    Raises:
        TypeError: as ``state_dict_from_params``.
        ValueError: keys that are missing or not the policy's, arrays of another shape or dtype; all of them named.
    """
    arrays = {key: np.asarray(x) for key, x in state_dict.items()}
    entries = list(tensors(policy))
    problems = _misfits(arrays, entries, policy)
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise ValueError(f"the state_dict is not of this {type(policy).__name__}: {shown}")
    params: Params = {}
    for entry in entries:
        if entry.kind != "deviation":
            put(params, entry.path, entry.to_flax(arrays[entry.key]))
    return params


Kind = Literal["vector", "kernel", "convolution", "row", "deviation", "count"]
"""kernel: transposed; convolution: [rows·columns·in, out] here, [out, in, rows, columns] there; row: [O] here, [1, O]
there; deviation: √ of a variance (torch's √ may differ in the last bit); count: float here, int64 there."""


class Entry(NamedTuple):
    """One tensor of the state_dict and its place in the Flax variables."""

    key: str
    path: tuple[str, ...]
    kind: Kind
    shape: tuple[int | None, ...]
    """In torch; None where any number fits: the width of an observation."""

    @property
    def trained(self) -> bool:
        return self.path[0] == "params"

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.int64 if self.kind == "count" else np.float32)

    def to_torch(self, x: Any) -> NDArray[Any]:
        x = np.asarray(x)
        if self.kind == "kernel":
            x = x.T
        elif self.kind == "convolution":
            x = x.reshape(*self.shape[2:], -1, x.shape[-1]).transpose(3, 2, 0, 1)
        elif self.kind == "count":
            x = np.rint(x)
        elif self.kind in ("row", "deviation"):
            x = x[None] if self.kind == "row" else np.sqrt(x)[None]
        return np.array(x, self.dtype, order="C")

    def to_flax(self, x: NDArray[Any]) -> NDArray[Any]:
        if self.kind == "kernel":
            x = x.T
        elif self.kind == "convolution":
            x = x.transpose(2, 3, 1, 0).reshape(-1, len(x))
        elif self.kind == "row":
            x = x[0]
        return np.array(x, np.float32, order="C")


def tensors(policy: Policy) -> Iterator[Entry]:
    """Every tensor of the policy's state_dict, in torch's order."""
    if not isinstance(policy, ActorCritic | ActorOnly | ActorCriticWithMemory | VisionPolicy):
        raise TypeError(
            f"{type(policy).__name__} has no counterpart in torch; ActorCritic, ActorOnly and VisionPolicy have"
        )
    spec = policy.action_spec
    if spec.continuous:
        yield Entry("log_std", ("params", "log_std"), "vector", spec.sizes)
    if isinstance(policy, VisionPolicy):
        for name in policy.images:
            yield from _encoder_entries(encoder_name(name), policy.channels)
    if isinstance(policy, ActorCriticWithMemory):
        yield from _memory_entries("actor", policy.actor_memory)
    yield from _mlp_entries("actor", policy.actor, spec.num_outputs)
    critic = None if isinstance(policy, ActorOnly) else policy.critic
    if critic is not None:
        if isinstance(policy, ActorCriticWithMemory):
            yield from _memory_entries("critic", policy.critic_memory)
        yield from _mlp_entries("critic", critic, 1)
    if policy.actor_obs_normalization:
        yield from _normalizer_entries("actor_obs_normalizer")
    own = isinstance(policy, ActorCriticWithMemory) and critic is not None and policy.critic_memory.type != "actor"
    if (isinstance(policy, ActorCritic) or own) and policy.critic_obs_normalization:
        yield from _normalizer_entries("critic_obs_normalizer")


def _encoder_entries(name: str, channels: tuple[int, ...]) -> Iterator[Entry]:
    inputs: int | None = None
    for i, (outputs, size) in enumerate(zip(channels, KERNELS, strict=True)):
        module = ("params", name, f"conv_{i}", "linear_0")  # a product with patches in Flax
        yield Entry(f"{name}.{i}.weight", (*module, "kernel"), "convolution", (outputs, inputs, size, size))
        yield Entry(f"{name}.{i}.bias", (*module, "bias"), "vector", (outputs,))
        inputs = outputs


def _memory_entries(name: str, config: MemoryConfig) -> Iterator[Entry]:
    if config.type not in ("gru", "lstm"):
        return
    module = ("params", f"{name}_memory")
    if config.encoder is not None:
        yield from _mlp_entries(f"{name}_encoder", config.encoder, config.width, (*module, "encoder"))
    gates = (3 if config.type == "gru" else 4) * config.width
    for layer in range(config.depth):
        width = config.width if layer > 0 or config.encoder is not None else None
        for kind, inputs in (("ih", width), ("hh", config.width)):
            key = f"weight_{kind}_l{layer}"
            yield Entry(f"{name}_memory.{key}", (*module, key), "kernel", (gates, inputs))
        for key in (f"bias_ih_l{layer}", f"bias_hh_l{layer}"):
            yield Entry(f"{name}_memory.{key}", (*module, key), "vector", (gates,))


def _mlp_entries(
    name: str, config: NetworkConfig, num_outputs: int, path: tuple[str, ...] | None = None
) -> Iterator[Entry]:
    path = path or ("params", name)
    stride = 2 + config.use_layernorm + (config.dropout_p > 0.0)
    width: int | None = None
    for i, size in enumerate((*config.hidden_sizes, num_outputs)):
        linear, module = f"{name}.{i * stride}", (*path, f"linear_{i}")
        yield Entry(f"{linear}.weight", (*module, "kernel"), "kernel", (size, width))
        yield Entry(f"{linear}.bias", (*module, "bias"), "vector", (size,))
        if config.use_layernorm and i < len(config.hidden_sizes):
            layernorm, module = f"{name}.{i * stride + 1}", (*path, f"layernorm_{i}")
            yield Entry(f"{layernorm}.weight", (*module, "scale"), "vector", (size,))
            yield Entry(f"{layernorm}.bias", (*module, "bias"), "vector", (size,))
        width = size


def _normalizer_entries(name: str) -> Iterator[Entry]:
    statistics = ("normalizer", name)
    yield Entry(f"{name}.mean", (*statistics, "mean"), "row", (1, None))
    yield Entry(f"{name}.variance", (*statistics, "variance"), "row", (1, None))
    yield Entry(f"{name}.standard_deviation", (*statistics, "variance"), "deviation", (1, None))
    yield Entry(f"{name}.count", (*statistics, "count"), "count", ())


def _misfits(arrays: StateDict, entries: list[Entry], policy: Policy) -> list[str]:
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
    if not problems:
        problems = _unlike_widths(arrays, policy)
    return problems


def _unlike_widths(arrays: StateDict, policy: Policy) -> list[str]:
    """Networks and normalizers that read the same observation, yet expect different widths."""
    if isinstance(policy, VisionPolicy):
        return _unlike_numbers(arrays, policy)
    if isinstance(policy, ActorCriticWithMemory):  # the first layers read a memory
        return []
    widths = {}
    for name in ("actor", "critic"):
        if f"{name}.0.weight" in arrays:
            widths[name] = arrays[f"{name}.0.weight"].shape[1]
        for statistic in ("mean", "variance", "standard_deviation"):
            key = f"{name}_obs_normalizer.{statistic}"
            if key in arrays and arrays[key].shape[1] != widths[name]:
                return [f"{key} has {arrays[key].shape[1]} numbers, but {name}.0.weight reads {widths[name]}"]
    shared = isinstance(policy, ActorCritic) and policy.actor_obs_groups == policy.critic_obs_groups
    if shared and widths["actor"] != widths["critic"]:
        return [
            f"actor and critic read {widths['actor']} and {widths['critic']} numbers, but the policy's obs_groups are "
            "the same for both"
        ]
    return []


def _unlike_numbers(arrays: StateDict, policy: VisionPolicy) -> list[str]:
    """``_unlike_widths`` where networks also read encoders' features, and the actor not all of the numbers."""
    features = 2 * policy.channels[-1] * len(policy.images)
    counts = {key: x.shape[1] for key, x in arrays.items() if key.startswith("actor_obs_normalizer.") and x.ndim}
    if "critic.0.weight" in arrays:
        counts["critic.0.weight"] = arrays["critic.0.weight"].shape[1] - features
    width = arrays["actor.0.weight"].shape[1]
    if not counts:
        return [] if width >= features else [f"actor.0.weight reads {width} numbers, the images alone have {features}"]
    key, count = next(iter(counts.items()))
    for other, its_count in counts.items():
        if its_count != count:
            return [f"{key} is for {count} numbers beside the images' {features}, but {other} for {its_count}"]
    read = count - sum(0 <= i < count for i in set(policy.hidden_entries))
    if width == features + read:
        return []
    return [
        f"actor.0.weight reads {width} numbers, but the images have {features}, and {read} of the {count} others are "
        "not in hidden_entries"
    ]


def get(tree: Params, path: tuple[str, ...]) -> Any:
    """The leaf at ``path``."""
    for name in path:
        tree = tree[name]
    return tree


def put(tree: Params, path: tuple[str, ...], leaf: NDArray[Any]) -> None:
    """Set the leaf at ``path``, in place."""
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = leaf
