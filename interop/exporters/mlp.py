"""Export of ``ActorCritic`` and ``ActorOnly``."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ejax.distributions import ActionSpec
from ejax.policies import ActorCritic, ActorOnly, NetworkConfig
from ejax.schema.paths import within
from interop.exporters.entries import Entry, StateDict, mlp_entries, normalizer_entries
from interop.exporters.record import Exporter
from interop.twin.spec import WHOLE, NetworkSpec, Paths, PolicySpec


def describe(policy: Any, leaves: Mapping[str, Any], paths: Paths) -> tuple[Any, PolicySpec]:
    observation = {name: int(x.shape[-1]) for name, x in leaves.items()}
    fields = network_specs(policy, observation) | action_fields(policy)
    return policy, PolicySpec(observation=observation, paths=paths, **fields)


def network_specs(policy: Any, observation: Mapping[str, int]) -> dict[str, Any]:
    """``actor`` and ``critic`` of a spec, from a policy with the fields of ``ActorCritic`` or ``ActorOnly``."""
    specs = {}
    for name in ("actor", "critic"):
        network = getattr(policy, name, None)
        groups = getattr(policy, f"{name}_obs_groups", ())
        normalized = getattr(policy, f"{name}_obs_normalization", False)
        specs[name] = network and network_spec(network, within(observation, groups), normalized)
    return specs


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
    return () if list(spec.observation) == [WHOLE] else spec.actor.inputs


def network_entries(policy: Any, before: Callable[[str], Iterable[Entry]] = lambda network: ()) -> Iterator[Entry]:
    """Yield a policy's tensors in torch's order: log_std, actor, critic, normalizers.

    Args:
        before: ``"actor"`` or ``"critic"`` -> the tensors in front of that network.
    """
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


def _misfits(arrays: StateDict, policy: ActorCritic | ActorOnly) -> list[str]:
    """Networks and normalizers that read the same observation, yet expect different widths."""
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


EXPORTER = Exporter(
    describe=describe, actor_of=actor_only, tensors=network_entries, misfits=_misfits, policy_of=_policy_of
)
