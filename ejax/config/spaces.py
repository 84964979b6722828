"""Problems of a policy's config with its class and its environment's spaces."""

from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import gymnasium

from ejax.config.annotations import argument_problems
from ejax.config.models import PolicyConfig
from ejax.distributions import action_spec
from ejax.schema.frozen import thaw
from ejax.schema.messages import short_repr
from ejax.schema.problems import Problem
from ejax.schema.registry import did_you_mean

_GIVEN = {
    *PolicyConfig.model_fields.keys() - {"name"},
    *("action_spec", "action_space", "observation_space", "instructions", "held_out_instructions"),
}
_OF_LINEN = {"name", "parent"}


def class_problems(policy: PolicyConfig) -> list[Problem]:
    """Find problems of ``policy.cfg``, or a class that is not there."""
    try:
        record = policy.record
        if record.mlps:
            return []
        make = record.make
        given = _GIVEN | _OF_LINEN if isinstance(make, type) and issubclass(make, nn.Module) else _GIVEN
        return argument_problems(make, thaw(policy.cfg), "policy.cfg", given)
    except (ImportError, TypeError, ValueError) as error:  # the last two: no class and no function
        return [Problem("policy.name", f"'{policy.name}' cannot be imported: {error}")]


def space_problems(
    policy: PolicyConfig, action_space: gymnasium.Space, observation_space: gymnasium.Space, *, action_chunk: int = 1
) -> list[Problem]:
    """Find problems of ``action_dim``, ``squash_actions``, ``obs_groups``, and of pictures where an MLP reads them."""
    try:
        spec = action_spec(action_space, squash=policy.squash_actions)
    except ValueError as error:
        key = "policy.squash_actions" if policy.squash_actions and _can_act(action_space) else "env"
        return [Problem(key, str(error)), *_groups(policy, observation_space)]
    problems = [*_groups(policy, observation_space), *_pictures(policy, observation_space)]
    if policy.action_dim not in (None, count := spec.num_actions * action_chunk):
        text = f"got {policy.action_dim}, but the env's actions have {count}; give {count}, or leave it out"
        problems.insert(0, Problem("policy.action_dim", text))
    return problems


def _can_act(space: gymnasium.Space) -> bool:
    try:
        return bool(action_spec(space))
    except ValueError:
        return False


def _groups(policy: PolicyConfig, space: gymnasium.Space) -> Iterator[Problem]:
    there = paths(space)
    for network in ("actor", "critic"):
        for path in getattr(policy.obs_groups, network):
            if path not in there:
                text = f"'{path}' is no part of the observation, which is one array without parts; leave it out"
                if there:
                    text = f"'{path}' is no part of the observation; there is {', '.join(there)}"
                yield Problem(f"policy.obs_groups.{network}", text + did_you_mean(path, there))


def _pictures(policy: PolicyConfig, space: gymnasium.Space) -> Iterator[Problem]:
    leaves = _leaves(space)
    if policy.record.images is not None:
        yield from _seen(policy.record.images(policy), leaves)
    seen = [path for path, shape in leaves.items() if len(shape) == 3 and path]
    for network in policy.record.mlps:
        groups = getattr(policy.obs_groups, network)
        read = [path for path in seen if not groups or any(f"{path}.".startswith(f"{group}.") for group in groups)]
        if read and (network == "actor" or groups):
            others = ", ".join(path for path in leaves if path not in seen) or "no vectors"
            text = (
                f"{policy.name} reads vectors, and {', '.join(read)} is a picture; name the others ({others}), or use "
            )
            yield Problem(f"policy.obs_groups.{network}", text + "the policy vision, with it in policy.cfg.images")


def _seen(images: Any, leaves: Mapping[str, tuple[int, ...]]) -> Iterator[Problem]:
    pictures = [path for path, shape in leaves.items() if len(shape) == 3 and path]
    wrong = [name for name in images if name not in pictures] if isinstance(images, tuple) else []
    if wrong or not images:
        named, there = ", ".join(map(short_repr, wrong)), ", ".join(pictures)
        text = f"names {named or 'no picture'}; the observation has {there or 'none'}"
        yield Problem("policy.cfg.images", text + did_you_mean(str(wrong[:1]), pictures))


def _leaves(space: gymnasium.Space, above: str = "") -> dict[str, tuple[int, ...]]:
    if isinstance(space, gymnasium.spaces.Dict):
        inside = [_leaves(part, f"{above}.{name}" if above else name) for name, part in space.spaces.items()]
        return {path: shape for each in inside for path, shape in each.items()}
    return {above: tuple(space.shape or ())}


def paths(space: gymnasium.Space, above: str = "") -> list[str]:
    """Return the dotted paths of a space's parts, sections first; none of a single array's."""
    parts = space.spaces if isinstance(space, gymnasium.spaces.Dict) else {}
    return [path for name, part in parts.items() for path in (f"{above}{name}", *paths(part, f"{above}{name}."))]
