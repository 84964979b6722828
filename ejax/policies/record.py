"""Record of a policy, at the end of its file and named in the registry: ``"vision": "ejax.policies.vision:POLICY"``.

Your own class needs none; with one, named ``package.module:POLICY``, it can have its own rules too.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ejax.schema.problems import Problem
from ejax.schema.registry import resolve


@dataclass(frozen=True, kw_only=True)
class PolicyKind:
    """A policy's class and the rules of its config; ``section`` is its ``PolicyConfig``."""

    make: Callable[..., Any]
    """Factory from ``policy.cfg`` and those arguments of ``ejax.training.policies.make_policy`` that it takes."""
    with_memory: Callable[..., Any] | None = None
    """Form of it for ``policy.actor.memory``. None: ``make`` takes ``actor_memory``, or has no memory."""
    mlps: tuple[str, ...] = ()
    """``actor`` and ``critic`` if it needs them: it reads vectors alone. Empty: other parts."""
    takes_cfg: bool = False
    """With ``mlps``: it has further options in ``policy.cfg``."""
    images: Callable[[Any], Any] | None = None
    """``section -> dotted paths`` of parts of the observation that must be pictures. None: not known."""
    unread: Mapping[str, str] = field(
        default_factory=lambda: {"vla_config": "belongs to the policy vla, not to {name}; leave it out"}
    )
    """Unused keys of the section -> the text of the refusal."""
    problems: Callable[[Any], Iterable[Problem]] = lambda section: ()
    """``section -> problems`` that only this policy has."""
    section_of: Callable[[Any], dict[str, Any]] | None = None
    """``policy -> section`` without the name, by which ``make`` makes the like. None: its fields are ``policy.cfg``."""
    load_actor: Callable[..., Any] | None = None
    """``(policy, params, saved, squashed=…) -> params`` with the actor of an ``actor_critic`` or ``actor_only``. None:
    it takes over a policy of its own kind alone."""
    loaded_actor_note: Callable[..., str] = lambda *, squashed: ""
    """A message about what ``load_actor`` takes over."""
    exporters: Mapping[type, str] = field(default_factory=dict)
    """Class of its policies -> place of its ``interop.exporters.record.Exporter``. Empty: that of all others."""

    @property
    def built_in(self) -> bool:
        return str(getattr(self.make, "__module__", "")).startswith("ejax.")

    @property
    def exported_to(self) -> str:
        """Formats of ``ejax export``, in words."""
        formats = "pt, safetensors, pt2, onnx, torchscript, stablehlo"
        return formats if self.exporters else f"{formats}; stablehlo alone where torch lacks one of its operations"

    @property
    def has_critic(self) -> bool:
        return not self.mlps or "critic" in self.mlps


def find_policy(name: str) -> PolicyKind:
    """Find the record of a registered name, or of ``package.module:Name``; a class without one gets the plainest.
    Raises ImportError, UnknownNameError or UntrustedCodeError as ``ejax.schema.registry.resolve``."""
    found = resolve("policy", name)
    return found if isinstance(found, PolicyKind) else PolicyKind(make=found)  # a user's class needs no record


def section_problems(section: Any, kind: PolicyKind) -> Iterator[Problem]:
    """Find problems of ``policy`` alone, besides those of single values."""
    low, high = section.log_std_range
    if not low < high:
        yield Problem("policy.log_std_range", f"got [{low}, {high}]; the first must be below the second")
    elif not low <= section.initial_log_std <= high:
        text = f"got {section.initial_log_std}, outside log_std_range [{low}, {high}]: it would never learn"
        yield Problem("policy.initial_log_std", text)
    # where its own rules fail, unread keys are most likely another policy's: one problem is enough
    own = list(kind.problems(section))
    yield from own
    for key, text in () if own else kind.unread.items():
        # given or not: the default changes nothing
        if getattr(section, key) != type(section).model_fields[key].default:
            yield Problem(f"policy.{key}", text.format(name=section.name))
    yield from _memories(section, kind)
    for name in kind.mlps:
        if getattr(section, name) is None:
            text = f"is missing: {section.name} needs {{type: mlp, network_cfg: {{hidden_sizes: […]}}}}"
            yield Problem(f"policy.{name}", text)
    if kind.mlps and section.cfg and not kind.takes_cfg:
        yield Problem("policy.cfg", f"{section.name} takes no cfg; its keys are directly under policy")


def _memories(section: Any, kind: PolicyKind) -> Iterator[Problem]:
    actor, critic = (block.memory if block else None for block in (section.actor, section.critic))
    if kind.built_in and kind.with_memory is None:
        if actor or critic:
            text = f"{section.name} has no memory; actor_critic and actor_only do; leave it out"
            yield Problem("policy.actor.memory", text)
    elif actor and not actor.remembers:
        text = f"got '{actor.type}', which is for a critic; use gru, lstm or history"
        yield Problem("policy.actor.memory.type", text)
    elif critic and not actor:
        text = "is given, but the actor has none; set policy.actor.memory too, such as {type: gru}"
        yield Problem("policy.critic.memory", text)
    elif critic and critic.type == "actor":
        text = "but the critic reads what the actor's memory gives (policy.critic.memory.type: actor)"
        if section.obs_groups.critic not in ((), section.obs_groups.actor):
            yield Problem("policy.obs_groups.critic", f"is given, {text}; leave it out")
        if section.critic_obs_normalization:
            yield Problem("policy.critic_obs_normalization", f"got true, {text}; set it to false")
