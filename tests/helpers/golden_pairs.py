"""Golden files as arrays, and the updates of PPO and GRPO that they record, made again by ejax."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ejax.algorithms.grpo import GRPOConfig, grpo_update
from ejax.algorithms.ppo import PPOConfig, ppo_update
from ejax.distributions import Normal
from ejax.optim import make_optimizer
from ejax.types import Params, Policy, Rollout, TrainState
from interop.checkpoints.weights import params_from_state_dict, state_dict_from_params

GOLDEN = Path(__file__).parents[1] / "golden"
KEY = jax.random.key(0)
Golden = Mapping[str, np.ndarray]


class Pair(NamedTuple):
    """A computed array and the recorded one."""

    what: str
    name: str
    got: Any
    expected: np.ndarray
    rtol: float = 1e-4
    atol: float = 1e-5


@cache
def load(file: str) -> Golden:
    with np.load(GOLDEN / file) as arrays:
        return dict(arrays)


def under(golden: Golden, prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): x for name, x in golden.items() if name.startswith(prefix)}


def cases(file: str, key: str = "cases") -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(str(load(file)[key]))
    return recorded


def rollout_of(golden: Golden) -> Rollout:
    """Turn an upstream rollout [N, T + 1] into ours [T, N]; its next value is the one of the next column."""
    fields = {name: jnp.asarray(x).swapaxes(0, 1) for name, x in under(golden, "rollout/").items()}
    now = {name: x[:-1] for name, x in fields.items()}
    known = "action_mean" in now
    distribution = Normal(now["action_mean"], jnp.log(now["action_std"])) if known else None
    return Rollout(
        obs=now["obs"],
        action=now["action"],
        log_prob=now["sample_log_prob"],
        value=now["value"],
        next_value=fields["value"][1:],
        reward=now["reward"],
        terminated=now["terminated"],
        truncated=now["truncated"],
        distribution=distribution,
    )


def train_state(
    policy: Policy, obs: Any, state_dict: Golden, optimizer: optax.GradientTransformation, *, reference: bool = False
) -> TrainState:
    """Before the first update; ``state_dict``: of the trained tensors at least."""
    fresh = jax.jit(policy.init)(KEY, obs)
    params: Params = params_from_state_dict(policy, {**state_dict_from_params(policy, fresh), **state_dict})
    params = jax.tree.map(jnp.asarray, params)
    return TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=optimizer.init(params["params"]),
        reference=params if reference else None,
    )


def updated(
    policy: Policy, config: PPOConfig | GRPOConfig, golden: Golden, rollout: Rollout, names: Sequence[str]
) -> Iterator[Pair]:
    """After updates on ``rollout`` from ``init/*``: ``final/*``, and the metrics of these names, ``metric/*``.

    There are as many updates as recorded metrics.
    """
    optimizer = make_optimizer(config.optimizer)
    state = train_state(
        policy, rollout.obs, under(golden, "init/"), optimizer, reference=isinstance(config, GRPOConfig)
    )
    update: Any = grpo_update if isinstance(config, GRPOConfig) else ppo_update
    history = []
    for _ in range(golden[f"metric/{names[0]}"].size):
        state, metrics = update(state, rollout, KEY, policy=policy, optimizer=optimizer, config=config)
        history.append(metrics)
    yield from state_dict_pairs("parameters", policy, state.params, under(golden, "final/"))
    for name in names:
        recorded = golden[f"metric/{name}"]
        yield Pair("metrics", name, np.reshape([m[name] for m in history], recorded.shape), recorded)


def state_dict_pairs(what: str, policy: Policy, params: Params, recorded: Golden) -> Iterator[Pair]:
    ours = state_dict_from_params(policy, params)
    if ours.keys() != recorded.keys():
        raise ValueError(f"the state_dict has {sorted(ours)}, the golden one {sorted(recorded)}")
    for name, x in ours.items():
        yield Pair(what, name, x, recorded[name])
