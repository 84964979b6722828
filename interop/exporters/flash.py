"""Export of ``FlashQ``: its actor as a plain network of the same outputs, a ``FlashActor``.

A norm by running statistics is a linear map: factor = scale/√(variance + 1e-5), shift = bias − mean·factor. Behind a
linear layer W it makes W·diag(factor) and a bias of shift, before it diag(factor)·W and shift·W; the scale of the
RMSNorm is a part of the last layer. All of it is computed in float64. The certificate compares the artefacts with the
policy as it was trained, before that.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.distributions import ActionSpec
from ejax.policies.flash import FlashActor, FlashQ
from ejax.schema.paths import within
from ejax.types import Params
from interop.exporters.entries import Entry, StateDict, get
from interop.exporters.mlp import action_fields, actor_groups
from interop.exporters.record import Exporter
from interop.twin.spec import NetworkSpec, Paths, PolicySpec


def folded(policy: FlashQ, params: Params) -> Params:
    """Make the parameters of the policy's ``FlashActor``, in float64."""
    actor, statistics = (
        jax.tree.map(lambda x: np.asarray(x, np.float64), params[name]["actor"]) for name in ("params", "batch_stats")
    )
    factor, shift = _affine(actor["norm"], statistics["norm"])
    kernel = actor["embed"]["kernel"]
    made = {"embed": {"kernel": factor[:, None] * kernel, "bias": shift @ kernel}}
    for i in range(policy.num_blocks):
        block, of_block = actor[f"block_{i}"], statistics[f"block_{i}"]
        made[f"block_{i}"] = {}
        for j in range(2):
            factor, shift = _affine(block[f"norm_{j}"], of_block[f"norm_{j}"])
            made[f"block_{i}"][f"linear_{j}"] = {"kernel": block[f"linear_{j}"]["kernel"] * factor, "bias": shift}
    scale = actor["post_norm"]["scale"] if policy.post_norm else np.ones(policy.actor_width)
    made["output"] = {**actor["output"], "kernel": scale[:, None] * actor["output"]["kernel"]}
    return {"params": {"actor": made}}


def _affine(norm: Mapping[str, Any], statistics: Mapping[str, Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    factor = norm["scale"] / np.sqrt(statistics["variance"] + 1e-5)
    return factor, norm["bias"] - statistics["mean"] * factor


def actor_of(policy: FlashQ) -> FlashActor:
    """Make the policy that ``folded`` gives the parameters of."""
    return FlashActor(
        action_spec=policy.action_spec,
        hidden_sizes=(policy.actor_width, policy.expansion * policy.actor_width),
        num_blocks=policy.num_blocks,
        post_norm=policy.post_norm,
        log_std_range=policy.log_std_range,
        actor_obs_groups=policy.actor_obs_groups,
    )


def _describe(policy: FlashActor, leaves: Mapping[str, Any], paths: Paths) -> tuple[FlashActor, PolicySpec]:
    observation = {name: int(x.shape[-1]) for name, x in leaves.items()}
    actor = NetworkSpec(
        inputs=within(observation, policy.actor_obs_groups),
        normalized=False,
        hidden_sizes=policy.hidden_sizes,
        activation="relu",
        last_activation=None,
        use_layernorm=False,
        dropout_p=0.0,
        num_blocks=policy.num_blocks,
        rms_norm=policy.post_norm,
    )
    return policy, PolicySpec(
        observation=observation, actor=actor, log_std="network", paths=paths, **action_fields(policy)
    )


def _policy_of(spec: PolicySpec) -> FlashActor | None:
    if spec.encoder is not None or spec.memory is not None or not spec.actor.num_blocks:
        return None
    outer, inner = spec.actor.hidden_sizes
    return FlashActor(
        action_spec=ActionSpec(spec.head, spec.sizes, spec.low, spec.high),
        hidden_sizes=(outer, inner),
        num_blocks=spec.actor.num_blocks,
        post_norm=spec.actor.rms_norm,
        log_std_range=spec.log_std_range,
        actor_obs_groups=actor_groups(spec),
    )


def _tensors(policy: FlashActor) -> Iterator[Entry]:
    outer, inner = policy.hidden_sizes
    yield from _linear("actor.0", ("embed",), outer, None)
    for i in range(policy.num_blocks):
        yield from _linear(f"actor.{1 + i}.0", (f"block_{i}", "linear_0"), inner, outer)
        yield from _linear(f"actor.{1 + i}.2", (f"block_{i}", "linear_1"), outer, inner)
    last = 1 + policy.num_blocks + policy.post_norm
    yield from _linear(f"actor.{last}", ("output",), 2 * policy.action_spec.num_outputs, outer)


def _linear(key: str, module: tuple[str, ...], num_outputs: int, num_inputs: int | None) -> Iterator[Entry]:
    place = ("params", "actor", *module)
    yield Entry(f"{key}.weight", (*place, "kernel"), "kernel", (num_outputs, num_inputs))
    yield Entry(f"{key}.bias", (*place, "bias"), "vector", (num_outputs,))


def _acting(policy: FlashQ, params: Params) -> Params:
    """Leave out the critics, and what is for exploring."""
    del policy
    networks = {name: params["params"][name] for name in ("actor", "log_alpha")}
    return {"params": networks, "batch_stats": {"actor": params["batch_stats"]["actor"]}}


def _state_dict(policy: FlashQ, params: Params) -> StateDict:
    plain = folded(policy, params)
    return {entry.key: entry.to_torch(get(plain, entry.path)) for entry in _tensors(actor_of(policy))}


EXPORTER = Exporter(
    describe=lambda policy, *observed: (policy, _describe(actor_of(policy), *observed)[1]),
    exported_params=_acting,
    actor_of=actor_of,
    actor_params=lambda policy, params: jax.tree.map(jnp.float32, folded(policy, params)),
    state_dict=_state_dict,
)
FOLDED = Exporter(describe=_describe, actor_of=lambda policy: policy, tensors=_tensors, policy_of=_policy_of)
