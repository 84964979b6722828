"""Golden gradient steps by FlashSAC's own code beside ejax's, from the same parameters, rows and noise."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from golden_pairs import Golden, Pair, load, under

from ejax.algorithms.flash_sac import ALGORITHM, FlashSACConfig, ReturnScale, flash_sac_step
from ejax.algorithms.replay_buffer import Transition
from ejax.distributions import ActionSpec
from ejax.numerics.reward_scale import init_reward_scale
from ejax.policies.flash import FlashQ
from ejax.types import TrainState, init_train_state


def steps() -> Iterator[Pair]:
    """Follow every step's losses, then parameters, running statistics, target and moments of Adam."""
    golden = load("flash_sac.npz")
    spec = json.loads(str(golden["config"]))
    rows, num_steps = under(golden, "rows/"), len(golden["rows/reward"])
    num_actions = rows["action"].shape[-1]
    sizes = {name: spec[name] for name in ("actor_width", "critic_width", "num_blocks", "num_bins", "value_range")}
    policy = FlashQ(ActionSpec("tanh_normal", (num_actions,), (-1.0,) * num_actions, (1.0,) * num_actions), **sizes)
    adam = {"name": "adam", "learning_rate": spec["learning_rate"]}
    options: Any = {"optimizer": adam, "critic_optimizer": adam, "lr_scheduler": {"name": None}}
    config = FlashSACConfig(tau=spec["tau"], target_std=spec["target_std"], **options)
    optimizer = ALGORITHM.make_optimizer(config)
    state = _begin(policy, optimizer, under(golden, "init/"), rows["observation"][0])
    # its deviation is the larger of the two divisors
    moments = (jnp.float32(4.0), jnp.ones(1), jnp.full(1, spec["reward_divisor"] ** 2))
    scale = ReturnScale(returns=replace(init_reward_scale(1), moments=moments), largest=jnp.ones(()))
    step = jax.jit(flash_sac_step, static_argnums=4, static_argnames=("policy", "optimizer", "config"))
    for i in range(num_steps):
        moves_actor, key = i % 2 == 0, jax.random.key(spec["first_key"] + i)
        for name, half in zip(("actor", "next"), jax.random.split(key), strict=True):
            noise = golden[f"noise/{name}"][i]
            yield Pair("noise", f"{name} {i}", jax.random.normal(half, noise.shape), noise)
        batch = Transition(
            obs=rows["observation"][i],
            action=rows["action"][i],
            reward=rows["reward"][i],
            next_obs=rows["next_observation"][i],
            discount=spec["gamma"] * (1.0 - rows["terminated"][i]),
        )
        given: Any = {"policy": policy, "optimizer": optimizer, "config": config}
        state, _, metrics = step(state, scale, batch, key, moves_actor, **given)
        yield Pair("loss", f"critic {i}", metrics["critic_loss"], golden["metric/critic_loss"][i])
        if moves_actor:
            expected = golden["metric/actor_loss"][i] + golden["metric/temperature_loss"][i]
            yield Pair("loss", f"actor and alpha {i}", metrics["actor_loss"], expected)
    final = under(golden, "final/")
    params, statistics = _networks(final, "critic")
    yield from _pairs("parameters", state.params["params"], params)
    yield from _pairs("statistics", state.params["batch_stats"], statistics)
    yield from _pairs("target", state.target["params"]["critic"], _networks(final, "target")[0]["critic"])
    # as close as their sizes, 1e-2 and 2e-5, need
    for ours, theirs, atol in (("mu", "exp_avg", 2e-6), ("nu", "exp_avg_sq", 1e-8)):
        for name in ("actor", "critic"):
            expected = _parameters(under(golden, f"adam/{name}/{theirs}/"))
            yield from _pairs(f"{ours} of {name}", getattr(state.opt_state[name][0], ours)[name], expected, atol)


def _begin(policy: FlashQ, optimizer: Any, recorded: Golden, obs: np.ndarray) -> TrainState:
    begin = jax.jit(init_train_state, static_argnums=(0, 1), static_argnames="target")
    state = begin(policy, optimizer, jax.random.key(0), jnp.asarray(obs), target=True)
    start, target = ({**state.params, **_variables(recorded, name)} for name in ("critic", "target"))
    return replace(state, params=start, target=target)


def _variables(recorded: Golden, critic: str) -> dict[str, Any]:
    return dict(zip(("params", "batch_stats"), jax.tree.map(jnp.asarray, _networks(recorded, critic)), strict=True))


def _networks(recorded: Golden, critic: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``(parameters, running statistics)`` as a ``FlashQ`` names them."""
    parts = {"actor": under(recorded, "actor/"), "critic": under(recorded, f"{critic}/")}
    params = {name: _parameters(part) for name, part in parts.items()}
    log_alpha = recorded["temperature/log_temp"][0]
    return {**params, "log_alpha": log_alpha}, {name: _statistics(part) for name, part in parts.items()}


def _parameters(part: Golden) -> dict[str, Any]:
    weight = "w.weight" if "embedder.w.w.weight" in part else "weight"

    def linear(name: str) -> dict[str, np.ndarray]:
        return {"kernel": part[f"{name}.{weight}"].swapaxes(-1, -2)}

    def norm(name: str) -> dict[str, np.ndarray]:
        return {"scale": part[f"{name}.weight"], "bias": part[f"{name}.bias"]}

    blocks = _blocks(part, lambda block, i: {f"linear_{i}": linear(f"{block}.w{i + 1}")})
    norms = _blocks(part, lambda block, i: {f"norm_{i}": norm(f"{block}.norm{i + 1}")})
    if "predictor.bias" in part:
        output = {**linear("predictor.w"), "bias": part["predictor.bias"]}
    else:
        heads = [linear(f"predictor.{head}_w") | {"bias": part[f"predictor.{head}_bias"]} for head in ("mean", "std")]
        output = {name: np.concatenate([head[name] for head in heads], axis=-1) for name in ("kernel", "bias")}
    return {
        "norm": norm("embedder.norm"),
        "embed": linear("embedder.w"),
        **{name: block | norms[name] for name, block in blocks.items()},
        "post_norm": {"scale": part["post_norm.weight"]},
        "output": output,
    }


def _statistics(part: Golden) -> dict[str, Any]:
    def moments(name: str) -> dict[str, np.ndarray]:
        return {"mean": part[f"{name}.running_mean"], "variance": part[f"{name}.running_var"]}

    blocks = _blocks(part, lambda block, i: {f"norm_{i}": moments(f"{block}.norm{i + 1}")})
    return {"norm": moments("embedder.norm"), **blocks}


def _blocks(part: Golden, make: Callable[[str, int], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    count = len({name.split(".")[1] for name in part if name.startswith("encoder.")})
    return {f"block_{k}": make(f"encoder.{k}", 0) | make(f"encoder.{k}", 1) for k in range(count)}


def _pairs(what: str, got: Any, expected: Any, atol: float = 1e-5) -> Iterator[Pair]:
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        yield Pair(what, jax.tree_util.keystr(path), x, y, atol=atol)
