"""EmbodiChain's three rollout layouts as pairs of functions over nested dicts; see ``interop.tensordict``.

``write_<layout>(rollout, last_obs, extras, xp) -> data`` and ``read_<layout>(data, xp) -> (rollout, last_obs)`` move
arrays of the library ``xp``, NumPy or torch, and copy only where a layout pads or shifts.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax.serialization import to_state_dict

from ejax.distributions import Categorical, MultiCategorical, Normal, TanhNormal
from ejax.types import PyTree, Rollout

Write = Callable[[Rollout, PyTree, bool, Any], dict[str, Any]]
Read = Callable[[Mapping[str, Any], Any], tuple[Rollout, PyTree]]

_SAME = {name: name for name in ("reward", "done", "terminated", "truncated")}
_HEAD = {"obs": "obs", "action": "action", "log_prob": "sample_log_prob", "value": "value", **_SAME}
_PR122 = {"obs": "observation", "action": "action", "log_prob": "sample_log_prob", "value": "value"}
_PR122_NEXT = {"next_value": "value", **_SAME}
_SEED = {
    "obs": "obs",
    "action": "actions",
    "reward": "rewards",
    "done": "dones",
    "value": "values",
    "log_prob": "logprobs",
}
"""Each layout's own fields: a rollout's name -> EmbodiChain's."""
_HEAD_TARGETS = {"advantage": ("advantage",), "value_target": ("return",)}
_PR122_TARGETS = {"advantage": ("advantage",), "value_target": ("value_target", "return")}  # its code, its documents
_SEED_TARGETS = {"advantage": ("advantages",), "value_target": ("returns",)}
"""Extras that each layout has fields for, once they are computed: a rollout's name -> EmbodiChain's."""
_BESIDE = ("info", "distribution", "dropout_seed", "valid", "version", "memory")
"""Fields of a rollout that no layout has, and that may be missing."""


def write_head(rollout: Rollout, last_obs: PyTree, extras: bool, xp: Any) -> dict[str, Any]:
    """[N, T + 1]. The last ``value`` is V of the true next observation, where EmbodiChain's is V of the reset one: done
    masks either."""

    def padded(x: Any) -> Any:
        x = _swap(x)
        return xp.concatenate([x, xp.zeros_like(x[:, :1])], axis=1)

    def extended(x: Any, last: Any) -> Any:
        return xp.concatenate([_swap(x), last[:, None]], axis=1)

    fields = _renamed(rollout, _HEAD, padded)
    fields["obs"] = obs = jax.tree.map(extended, rollout.obs, _required(last_obs, "head"))
    fields["value"] = extended(rollout.value, rollout.next_value[-1])
    if isinstance(obs, dict) and obs.keys() == {"obs", "critic_obs"}:  # 0.3: a critic that sees something else
        fields |= obs
    fields |= _moments(rollout.distribution, ("action_mean", "action_std"), padded, xp)
    fields |= _targets(rollout, _HEAD_TARGETS, padded)
    rest = {"next_value": rollout.next_value, **_beside(rollout)} if extras else {}
    return _joined(fields, jax.tree.map(padded, to_state_dict(rest)))


def read_head(data: Mapping[str, Any], xp: Any) -> tuple[Rollout, PyTree]:
    """Invert ``write_head``."""
    _check_fields(data, _HEAD, "head")
    steps = {name: jax.tree.map(lambda x: _swap(x[:, :-1]), field) for name, field in data.items()}
    last_obs = jax.tree.map(lambda x: x[:, -1], data["obs"])
    if "critic_obs" in data:
        steps["obs"] = {"obs": steps["obs"], "critic_obs": steps.pop("critic_obs")}
        last_obs = {"obs": last_obs, "critic_obs": data["critic_obs"][:, -1]}
    fields, rest = _taken(steps, _HEAD)
    fields["next_value"] = rest.pop("next_value", _swap(data["value"][:, 1:]))
    rest |= _taken_targets(rest, _HEAD_TARGETS)
    return _rollout(fields, rest, ("action_mean", "action_std"), xp), last_obs


def write_pr122(rollout: Rollout, last_obs: PyTree, extras: bool, xp: Any) -> dict[str, Any]:
    """[N, T]. The next observation is the one acted on next: after an episode's end, the reset one."""

    def following(x: Any, last: Any) -> Any:
        return _swap(xp.concatenate([x[1:], last[None]]))

    next_obs = jax.tree.map(following, rollout.obs, _required(last_obs, "pr122"))
    fields = _renamed(rollout, _PR122, _swap)
    fields["next"] = {"observation": next_obs, **_columns(_renamed(rollout, _PR122_NEXT, _swap))}
    fields |= _columns({name: fields[name] for name in ("sample_log_prob", "value")})
    fields |= _moments(rollout.distribution, ("loc", "scale"), _swap, xp)
    fields |= _columns(_targets(rollout, _PR122_TARGETS, _swap))
    return _joined(fields, jax.tree.map(_swap, to_state_dict(_beside(rollout) if extras else {})))


def read_pr122(data: Mapping[str, Any], xp: Any) -> tuple[Rollout, PyTree]:
    """Invert ``write_pr122``."""
    _check_fields(data, {**_PR122, "next": "next"}, "pr122")
    _check_fields(data["next"], {"obs": "observation", **_PR122_NEXT}, "pr122, under next")
    fields, rest = _taken(jax.tree.map(_swap, data), _PR122)
    following = rest.pop("next")
    scalars = {"log_prob": fields["log_prob"], "value": fields["value"], **_taken(following, _PR122_NEXT)[0]}
    fields |= {name: x[..., 0] for name, x in scalars.items()}
    rest |= {name: x[..., 0] for name, x in _taken_targets(rest, _PR122_TARGETS).items()}
    last_obs = jax.tree.map(lambda x: x[-1], following["observation"])
    return _rollout(fields, rest, ("loc", "scale"), xp), last_obs


def write_seed(rollout: Rollout, last_obs: PyTree, extras: bool, xp: Any) -> dict[str, Any]:
    """[T, N], unchanged."""
    del last_obs, xp
    unstored = {name: getattr(rollout, name) for name in ("next_value", "terminated", "truncated")}
    rest = to_state_dict({**unstored, **_beside(rollout)}) if extras else {}
    fields = _renamed(rollout, _SEED, lambda x: x) | _targets(rollout, _SEED_TARGETS, lambda x: x)
    return _joined(fields, rest)


def read_seed(data: Mapping[str, Any], xp: Any) -> tuple[Rollout, PyTree]:
    """Invert ``write_seed``; there is no last observation."""
    _check_fields(data, _SEED, "seed")
    fields, rest = _taken(data, _SEED)
    value, done = data["values"], data["dones"]
    bootstrap = xp.concatenate([value[1:], xp.zeros_like(value[:1])])
    unstored = {"next_value": bootstrap, "terminated": done, "truncated": xp.zeros_like(done)}
    fields |= {name: rest.pop(name, x) for name, x in unstored.items()}
    rest |= _taken_targets(rest, _SEED_TARGETS)
    return _rollout(fields, rest, (), xp), None


def check_batch(rollout: Rollout, last_obs: PyTree) -> None:
    """Refuse arrays that are not of one [T, N], T ≥ 1, and a ``last_obs`` that is not like one step of ``obs``. Raises
    ValueError: naming the array and both shapes."""
    batch = tuple(rollout.reward.shape[:2])
    if len(batch) < 2 or batch[0] == 0:
        raise ValueError(f"a rollout's reward is [T, N] with T >= 1, got {list(rollout.reward.shape)}")
    for path, x in jax.tree_util.tree_leaves_with_path(rollout):
        if tuple(x.shape[:2]) != batch:
            name = jax.tree_util.keystr(path).lstrip(".")
            raise ValueError(f"{name} has shape {list(x.shape)} in [T, N, ...], but reward has {list(batch)}")
    if last_obs is None:
        return
    there, here = (str(jax.tree.structure(tree)) for tree in (last_obs, rollout.obs))
    if there != here:
        raise ValueError(f"last_obs is not like obs: {there} instead of {here}")
    for last, x in zip(jax.tree.leaves(last_obs), jax.tree.leaves(rollout.obs), strict=True):
        if last.shape != x.shape[1:] or last.dtype != x.dtype:
            given, wanted = f"{last.dtype}{list(last.shape)}", f"{x.dtype}{list(x.shape[1:])}"
            raise ValueError(f"last_obs is the observation after the last step, like one of obs: {wanted}, got {given}")


LAYOUTS: dict[str, tuple[Write, Read]] = {
    "head": (write_head, read_head),
    "pr122": (write_pr122, read_pr122),
    "seed": (write_seed, read_seed),
}


def _swap(x: Any) -> Any:
    return x.swapaxes(0, 1)


def _required(last_obs: PyTree, layout: str) -> PyTree:
    if last_obs is None:
        raise ValueError(f"layout '{layout}' stores the observation after the last step: pass last_obs (EnvCarry.obs)")
    return last_obs


def _check_fields(data: Mapping[str, Any], names: Mapping[str, str], layout: str) -> None:
    missing = [name for name in names.values() if name not in data]
    if missing:
        raise ValueError(f"no rollout of layout {layout}: it lacks {', '.join(missing)}; it has {', '.join(data)}")


def _renamed(rollout: Rollout, names: Mapping[str, str], move: Callable[[Any], Any]) -> dict[str, Any]:
    return {theirs: jax.tree.map(move, getattr(rollout, ours)) for ours, theirs in names.items()}


def _taken(data: Mapping[str, Any], names: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a layout's fields under a rollout's names, and everything else. ``done`` follows from them."""
    fields = {ours: data[theirs] for ours, theirs in names.items() if ours != "done"}
    return fields, {name: x for name, x in data.items() if name not in names.values()}


def _targets(rollout: Rollout, names: Mapping[str, Any], move: Callable[[Any], Any]) -> dict[str, Any]:
    """Find the advantages and value targets in the rollout's extras, under EmbodiChain's names."""
    there = [(ours, theirs) for ours, theirs in names.items() if ours in rollout.extras]
    return {name: move(rollout.extras[ours]) for ours, theirs in there for name in theirs}


def _taken_targets(rest: dict[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Take advantages and value targets out of ``rest``; of two names of one the first counts."""
    taken = {ours: [rest.pop(name) for name in theirs if name in rest] for ours, theirs in names.items()}
    return {ours: found[0] for ours, found in taken.items() if found}


def _columns(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x[..., None] for name, x in fields.items()}


def _joined(fields: dict[str, Any], extras: dict[str, Any]) -> dict[str, Any]:
    taken = sorted(fields.keys() & extras.keys())
    if taken:
        raise ValueError(f"the rollout's extras {', '.join(taken)} are named like fields of the layout; rename them")
    return {**fields, **extras}


def _moments(distribution: Any, names: tuple[str, ...], move: Callable[[Any], Any], xp: Any) -> dict[str, Any]:
    """Mean and standard deviation of the policy that acted, under EmbodiChain's names."""
    if not isinstance(distribution, Normal):
        return {}
    return dict(zip(names, (move(distribution.mean), move(xp.exp(distribution.log_std))), strict=True))


def _beside(rollout: Rollout) -> dict[str, Any]:
    """Collect the rollout's fields that no layout has, without those that hold no arrays."""
    fields = {name: getattr(rollout, name) for name in _BESIDE}
    extras = {name: x for name, x in rollout.extras.items() if name not in _SEED_TARGETS}  # they have fields
    return {name: field for name, field in fields.items() if jax.tree.leaves(field)} | extras


def _rollout(fields: Mapping[str, Any], rest: dict[str, Any], moments: tuple[str, ...], xp: Any) -> Rollout:
    """Make a rollout of the layout's own fields and of everything else, which becomes its ``extras`` where unknown.

    Mean and deviation become the distribution, unless that is there itself.
    """
    # the moments alone are EmbodiChain's way to store a normal distribution
    if moments and all(name in rest for name in moments):
        mean, std = (rest.pop(name) for name in moments)
        rest.setdefault("distribution", {"mean": mean, "log_std": xp.log(std)})
    if "distribution" in rest:
        rest["distribution"] = _distribution(rest["distribution"])
    known = {name: rest.pop(name) for name in _BESIDE if name in rest}
    return Rollout(**fields, **known, extras=rest)


def _distribution(fields: Mapping[str, Any]) -> Any:
    """Make the distribution that has these fields."""
    if "logits" in fields:
        return Categorical(fields["logits"])
    if "parts" in fields:
        return MultiCategorical(tuple(_distribution(fields["parts"][str(i)]) for i in range(len(fields["parts"]))))
    if "base" in fields:
        return TanhNormal(_distribution(fields["base"]), fields["center"], fields["half_width"])
    return Normal(fields["mean"], fields["log_std"])
