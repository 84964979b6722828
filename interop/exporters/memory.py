"""Export of ``ActorCriticWithMemory``: a deployed actor takes its memory as an input, and gives the next one."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ejax.policies.recurrence import MemoryConfig
from ejax.policies.with_memory import ActorCriticWithMemory
from interop.artefacts.cases import draw_cases
from interop.exporters.entries import Entry, mlp_entries
from interop.exporters.mlp import actor_fields, actor_groups, describe_mlp, network_entries, network_of, network_spec
from interop.exporters.record import Exporter
from interop.standalone_verify import Case
from interop.twin.spec import MemorySpec, Paths, PolicySpec


def _describe(policy: ActorCriticWithMemory, leaves: Mapping[str, Any], paths: Paths) -> tuple[Any, PolicySpec]:
    critic_memory = None
    if policy.critic is not None and policy.critic_memory.type != "none":
        critic_memory = _memory_spec(policy.critic_memory, policy.critic_width)
    memory = _memory_spec(policy.actor_memory, policy.actor_width)
    return policy, replace(describe_mlp(policy, leaves, paths)[1], memory=memory, critic_memory=critic_memory)


def _memory_spec(config: MemoryConfig, num_observed: int) -> MemorySpec:
    if not config.remembers:
        return MemorySpec(type="actor")
    size: Any = {"type": config.type, "size": config.size(num_observed)}
    if config.type == "history":
        return MemorySpec(**size, length=config.length or 0)
    encoder = None if config.encoder is None else network_spec(config.encoder, (), False)
    return MemorySpec(**size, width=config.width, depth=config.depth, encoder=encoder)


def _memory_of(spec: MemorySpec) -> MemoryConfig:
    """Invert ``_memory_spec``."""
    if spec.type == "history":
        return MemoryConfig(type="history", length=spec.length)
    encoder = None if spec.encoder is None else network_of(spec.encoder)
    kind: Any = spec.type
    return MemoryConfig(type=kind, hidden_size=spec.width, num_layers=spec.depth, encoder=encoder)


def _policy_of(spec: PolicySpec) -> ActorCriticWithMemory | None:
    if spec.memory is None:
        return None
    return ActorCriticWithMemory(
        **actor_fields(spec),
        actor_obs_groups=actor_groups(spec),
        actor_memory=_memory_of(spec.memory),
        actor_width=len(spec.read_of_all),
    )


def _tensors(policy: ActorCriticWithMemory) -> Iterator[Entry]:
    if policy.critic_memory.type == "actor":  # such a critic reads no observation that it could normalize
        policy = policy.clone(critic_obs_normalization=False)
    memories = {"actor": policy.actor_memory, "critic": policy.critic_memory}
    return network_entries(policy, lambda network: _memory_entries(network, memories[network]))


def _memory_entries(name: str, config: MemoryConfig) -> Iterator[Entry]:
    if config.type not in ("gru", "lstm"):
        return
    module = ("params", f"{name}_memory")
    if config.encoder is not None:
        yield from mlp_entries(f"{name}_encoder", config.encoder, config.width, (*module, "encoder"))
    gates = (3 if config.type == "gru" else 4) * config.width
    for layer in range(config.depth):
        width = config.width if layer > 0 or config.encoder is not None else None
        for kind, inputs in (("ih", width), ("hh", config.width)):
            key = f"weight_{kind}_l{layer}"
            yield Entry(f"{name}_memory.{key}", (*module, key), "kernel", (gates, inputs))
        for key in (f"bias_ih_l{layer}", f"bias_hh_l{layer}"):
            yield Entry(f"{name}_memory.{key}", (*module, key), "vector", (gates,))


def _actor_of(policy: ActorCriticWithMemory) -> Any:
    return policy.clone(critic=None)


def _draw_cases(policy: ActorCriticWithMemory, *rest: Any) -> list[Case]:
    return draw_cases(_actor_of(policy), *rest)  # the memory of a critic is not an input of an export


EXPORTER = Exporter(
    describe=_describe, actor_of=_actor_of, tensors=_tensors, policy_of=_policy_of, draw_cases=_draw_cases
)
