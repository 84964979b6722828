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

_HEAD = ("obs", "action", "sample_log_prob", "value", "reward", "done", "terminated", "truncated")
_PR122 = ("observation", "action", "sample_log_prob", "value", "next")
_PR122_NEXT = ("observation", "reward", "done", "terminated", "truncated", "value")
_SEED = ("obs", "actions", "rewards", "dones", "values", "logprobs")
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

    obs = jax.tree.map(extended, rollout.obs, _required(last_obs, "head"))
    fields = {
        "obs": obs,
        "action": padded(rollout.action),
        "sample_log_prob": padded(rollout.log_prob),
        "value": extended(rollout.value, rollout.next_value[-1]),
        "reward": padded(rollout.reward),
        "done": padded(rollout.done),
        "terminated": padded(rollout.terminated),
        "truncated": padded(rollout.truncated),
    }
    if isinstance(obs, dict) and obs.keys() == {"obs", "critic_obs"}:  # 0.3: a critic that sees something else
        fields |= obs
    fields |= _moments(rollout.distribution, ("action_mean", "action_std"), padded, xp)
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
    rollout = Rollout(
        obs=steps["obs"],
        action=steps["action"],
        log_prob=steps["sample_log_prob"],
        value=steps["value"],
        next_value=steps.pop("next_value", _swap(data["value"][:, 1:])),
        reward=steps["reward"],
        terminated=steps["terminated"],
        truncated=steps["truncated"],
        **_read_beside(steps, _HEAD, ("action_mean", "action_std"), xp),
    )
    return rollout, last_obs


def write_pr122(rollout: Rollout, last_obs: PyTree, extras: bool, xp: Any) -> dict[str, Any]:
    """[N, T]. The next observation is the one acted on next: after an episode's end, the reset one."""

    def column(x: Any) -> Any:
        return _swap(x)[..., None]

    def following(x: Any, last: Any) -> Any:
        return _swap(xp.concatenate([x[1:], last[None]]))

    fields = {
        "observation": jax.tree.map(_swap, rollout.obs),
        "action": _swap(rollout.action),
        "sample_log_prob": column(rollout.log_prob),
        "value": column(rollout.value),
        "next": {
            "observation": jax.tree.map(following, rollout.obs, _required(last_obs, "pr122")),
            "reward": column(rollout.reward),
            "done": column(rollout.done),
            "terminated": column(rollout.terminated),
            "truncated": column(rollout.truncated),
            "value": column(rollout.next_value),
        },
    }
    fields |= _moments(rollout.distribution, ("loc", "scale"), _swap, xp)
    return _joined(fields, jax.tree.map(_swap, to_state_dict(_beside(rollout) if extras else {})))


def read_pr122(data: Mapping[str, Any], xp: Any) -> tuple[Rollout, PyTree]:
    """Invert ``write_pr122``."""
    _check_fields(data, _PR122, "pr122")
    _check_fields(data["next"], _PR122_NEXT, "pr122, under next")
    steps = jax.tree.map(_swap, data)
    following = steps["next"]
    rollout = Rollout(
        obs=steps["observation"],
        action=steps["action"],
        log_prob=steps["sample_log_prob"][..., 0],
        value=steps["value"][..., 0],
        next_value=following["value"][..., 0],
        reward=following["reward"][..., 0],
        terminated=following["terminated"][..., 0],
        truncated=following["truncated"][..., 0],
        **_read_beside(steps, _PR122, ("loc", "scale"), xp),
    )
    return rollout, jax.tree.map(lambda x: x[-1], following["observation"])


def write_seed(rollout: Rollout, last_obs: PyTree, extras: bool, xp: Any) -> dict[str, Any]:
    """[T, N], unchanged."""
    del last_obs, xp
    fields = {
        "obs": rollout.obs,
        "actions": rollout.action,
        "rewards": rollout.reward,
        "dones": rollout.done,
        "values": rollout.value,
        "logprobs": rollout.log_prob,
    }
    unstored = {name: getattr(rollout, name) for name in ("next_value", "terminated", "truncated")}
    return _joined(fields, to_state_dict({**unstored, **_beside(rollout)}) if extras else {})


def read_seed(data: Mapping[str, Any], xp: Any) -> tuple[Rollout, PyTree]:
    """Invert ``write_seed``; there is no last observation."""
    _check_fields(data, _SEED, "seed")
    steps = dict(data)
    value, done = steps["values"], steps["dones"]
    bootstrap = xp.concatenate([value[1:], xp.zeros_like(value[:1])])
    rollout = Rollout(
        obs=steps["obs"],
        action=steps["actions"],
        log_prob=steps["logprobs"],
        value=value,
        next_value=steps.pop("next_value", bootstrap),
        reward=steps["rewards"],
        terminated=steps.pop("terminated", done),
        truncated=steps.pop("truncated", xp.zeros_like(done)),
        **_read_beside(steps, _SEED, (), xp),
    )
    return rollout, None


def check_batch(rollout: Rollout, last_obs: PyTree) -> None:
    """Refuse arrays that are not of one [T, N], T ≥ 1, and a ``last_obs`` that is not like one step of ``obs``.

    Raises:
        ValueError: naming the array and both shapes.
    """
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
        raise ValueError(f"layout '{layout}' stores the observation after the last step: give last_obs (EnvCarry.obs)")
    return last_obs


def _check_fields(data: Mapping[str, Any], fields: tuple[str, ...], layout: str) -> None:
    missing = [name for name in fields if name not in data]
    if missing:
        raise ValueError(f"no rollout of layout {layout}: it lacks {', '.join(missing)}; it has {', '.join(data)}")


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
    return {name: field for name, field in fields.items() if jax.tree.leaves(field)} | rollout.extras


def _read_beside(
    steps: Mapping[str, Any], fields: tuple[str, ...], moments: tuple[str, ...], xp: Any
) -> dict[str, Any]:
    """Read the rollout's fields outside the layout's own; unknown ones become its ``extras``.

    Mean and deviation become the distribution, unless that is there itself.
    """
    rest = {name: field for name, field in steps.items() if name not in fields}
    if moments and all(name in rest for name in moments):
        mean, std = (rest.pop(name) for name in moments)
        rest.setdefault("distribution", {"mean": mean, "log_std": xp.log(std)})
    if "distribution" in rest:
        rest["distribution"] = _distribution(rest["distribution"])
    known = {name: rest.pop(name) for name in _BESIDE if name in rest}
    return {**known, "extras": rest}


def _distribution(fields: Mapping[str, Any]) -> Any:
    """Make the distribution that has these fields."""
    if "logits" in fields:
        return Categorical(fields["logits"])
    if "parts" in fields:
        return MultiCategorical(tuple(_distribution(fields["parts"][str(i)]) for i in range(len(fields["parts"]))))
    if "base" in fields:
        return TanhNormal(_distribution(fields["base"]), fields["center"], fields["half_width"])
    return Normal(fields["mean"], fields["log_std"])
