"""Export of ``ActorCritic`` and ``ActorOnly``; of ``ActorQ`` the actor, as an ``ActorOnly`` of the same deterministic
actions."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from ejax.distributions import ActionSpec
from ejax.policies import ActorOnly, NetworkConfig
from ejax.policies.actor_q import ActorQ
from ejax.schema.paths import within
from ejax.types import Params
from interop.exporters.entries import Entry, mlp_entries, normalizer_entries
from interop.exporters.record import Exporter
from interop.twin.spec import WHOLE_OBS, NetworkSpec, Paths, PolicySpec


def describe_mlp(policy: Any, leaves: Mapping[str, Any], paths: Paths) -> tuple[Any, PolicySpec]:
    """Describe a policy with the fields of ``ActorCritic`` or ``ActorOnly``."""
    observation = {name: int(x.shape[-1]) for name, x in leaves.items()}
    specs: dict[str, Any] = {}
    for name in ("actor", "critic"):
        network = getattr(policy, name, None)
        groups = getattr(policy, f"{name}_obs_groups", ())
        normalized = getattr(policy, f"{name}_obs_normalization", False)
        specs[name] = network and network_spec(network, within(observation, groups), normalized)
    return policy, PolicySpec(observation=observation, paths=paths, **specs, **action_fields(policy))


def action_fields(policy: Any) -> dict[str, Any]:
    """Fields of a spec on the distribution."""
    action = policy.action_spec
    return {
        "head": action.kind,
        "sizes": action.sizes,
        "low": action.low,
        "high": action.high,
        "log_std_range": policy.log_std_range,
    }


def network_spec(network: NetworkConfig, inputs: tuple[str, ...], normalized: bool) -> NetworkSpec:
    fields = network.model_dump(exclude={"orthogonal_init"})
    return NetworkSpec(inputs=inputs, normalized=normalized, **fields)


def network_of(spec: NetworkSpec) -> NetworkConfig:
    """Invert ``network_spec``."""
    fields = {name: getattr(spec, name) for name in NetworkConfig.model_fields if hasattr(spec, name)}
    return NetworkConfig.model_validate(fields)


def actor_fields(spec: PolicySpec) -> dict[str, Any]:
    """Fields that the actors of all specs have."""
    return {
        "action_spec": ActionSpec(spec.head, spec.sizes, spec.low, spec.high),
        "actor": network_of(spec.actor),
        "log_std_range": spec.log_std_range,
        "actor_obs_normalization": spec.actor.normalized,
    }


def actor_groups(spec: PolicySpec) -> tuple[str, ...]:
    """``actor_obs_groups``"""
    return () if list(spec.observation) == [WHOLE_OBS] else spec.actor.inputs


def network_entries(policy: Any, before: Callable[[str], Iterable[Entry]] = lambda network: ()) -> Iterator[Entry]:
    """Yield a policy's tensors in torch's order: log_std, actor, critic, normalizers. ``before``: ``"actor"`` or
    ``"critic"`` -> the tensors in front of that network."""
    critic = getattr(policy, "critic", None)
    if policy.action_spec.continuous:
        yield Entry("log_std", ("params", "log_std"), "vector", policy.action_spec.sizes)
    yield from before("actor")
    yield from mlp_entries("actor", policy.actor, policy.action_spec.num_outputs)
    if critic is not None:
        yield from before("critic")
        yield from mlp_entries("critic", critic, 1)
    if policy.actor_obs_normalization:
        yield from normalizer_entries("actor_obs_normalizer")
    if critic is not None and getattr(policy, "critic_obs_normalization", False):
        yield from normalizer_entries("critic_obs_normalizer")


def actor_only(policy: Any) -> ActorOnly:
    """Make the actor of a policy with the fields of ``ActorOnly``."""
    return ActorOnly(
        action_spec=policy.action_spec,
        actor=policy.actor,
        log_std_range=policy.log_std_range,
        actor_obs_groups=policy.actor_obs_groups,
        actor_obs_normalization=policy.actor_obs_normalization,
    )


def _policy_of(spec: PolicySpec) -> ActorOnly | None:
    if spec.encoder is not None or spec.memory is not None or spec.actor.num_blocks:
        return None
    return ActorOnly(**actor_fields(spec), actor_obs_groups=actor_groups(spec))


EXPORTER = Exporter(describe=describe_mlp, actor_of=actor_only, tensors=network_entries, policy_of=_policy_of)


def _describe_actor_q(policy: ActorQ, leaves: Mapping[str, Any], paths: Paths) -> tuple[ActorOnly, PolicySpec]:
    return describe_mlp(actor_only(policy), leaves, paths)


def _actor_q_params(policy: ActorQ, params: Params) -> Params:
    """Keep of the last layer the means, half of its outputs. The other half, by which the deviation depends on the
    observation, is for exploring: its bias stays, as a constant deviation."""
    last = f"linear_{len(policy.actor.hidden_sizes)}"
    actor = params["params"]["actor"]
    (kernel, _), (bias, log_std) = (jnp.split(actor[last][name], 2, axis=-1) for name in ("kernel", "bias"))
    networks = {
        "actor": {**actor, last: {"kernel": kernel, "bias": bias}},
        "log_std": jnp.clip(log_std + policy.initial_log_std, *policy.log_std_range),
    }
    statistics = {name: x for name, x in params.get("normalizer", {}).items() if name.startswith("actor")}
    return {"params": networks} | ({"normalizer": statistics} if statistics else {})


ACTOR_Q = Exporter(describe=_describe_actor_q, actor_of=actor_only, exported_params=_actor_q_params)
