"""FlashSAC's gradient step on a CPU and the products that it is made of, in turns: a core's time, least of all rounds.

taskset -c 0 python benchmarks/flash_step.py [rounds]

Sizes of configs/gymnasium/flash_sac.yaml on HalfCheetah. Products: of both critics' 1,024 joint rows.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejax.algorithms.flash_sac import ALGORITHM, FlashSACConfig, ReturnScale, flash_sac_update
from ejax.algorithms.off_policy import OffPolicyState
from ejax.algorithms.replay_buffer import init_replay
from ejax.distributions import ActionSpec
from ejax.numerics.reward_scale import init_reward_scale
from ejax.policies.flash import FlashQ
from ejax.policies.mlp import dense_product
from ejax.runtime.device import matmul_precision, prepare_jax
from ejax.types import Rollout, init_train_state

STEPS, OBS, ACTIONS, CRITICS, ROWS, OUTER, INNER = 16, 17, 6, 2, 1024, 256, 1024


def make_update() -> tuple[Callable[[], Any], float]:
    """Compile an update of 16 gradient steps; return a call of it and the GFLOP of a step by XLA's count."""
    policy = FlashQ(ActionSpec("tanh_normal", (ACTIONS,), (-1.0,) * ACTIONS, (1.0,) * ACTIONS))
    config = FlashSACConfig(gradient_steps=STEPS, learning_starts=0, lr_scheduler={"name": None})
    optimizer, rng = ALGORITHM.make_optimizer(config), np.random.default_rng(0)
    begin = jax.jit(init_train_state, static_argnums=(0, 1), static_argnames="target")
    train = begin(policy, optimizer, jax.random.key(0), jnp.zeros((1, OBS)), target=True)
    replay = init_replay(config.replay, jnp.zeros((1, OBS)), jnp.zeros((1, ACTIONS)))
    rows = jax.tree.map(lambda x: jnp.asarray(rng.uniform(-1.0, 1.0, x.shape), x.dtype), replay.rows)
    replay = replace(replay, rows=rows, size=jnp.full(1, config.replay.capacity, jnp.int32))
    scale = ReturnScale(returns=init_reward_scale(1), largest=jnp.full((), 5.0))
    state = [(train, OffPolicyState(replay=replay, extra=scale))]
    zeros = lambda *shape: jnp.zeros((STEPS, 1, *shape))  # noqa: E731
    rollout = Rollout(
        obs=zeros(OBS),
        next_obs=zeros(OBS),
        action=zeros(ACTIONS),
        terminated=zeros() > 0,
        truncated=zeros() > 0,
        **dict.fromkeys(("reward", "log_prob", "value", "next_value"), zeros()),
    )
    given = {"policy": policy, "optimizer": optimizer, "config": config}
    update = jax.jit(flash_sac_update, static_argnames=tuple(given), donate_argnums=0)
    compiled = update.lower(state[0], rollout, jax.random.key(1), **given).compile()

    def call() -> Any:
        state[0], metrics = compiled(state[0], rollout, jax.random.key(2))
        return state[0], metrics

    # a loop's body, two steps, is counted once
    return call, float(compiled.cost_analysis()["flops"]) / config.policy_delay / 1e9


def make_products() -> dict[str, Callable[[], Any]]:
    """Compile the three products of a critic's widest layers."""
    shapes = {"x": (ROWS, OUTER), "w": (OUTER, INNER), "h": (ROWS, INNER), "v": (INNER, OUTER)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    x, w, h, v = (jax.random.normal(k, (CRITICS, *shape)) for k, shape in zip(keys, shapes.values(), strict=True))

    def gradient(h: jax.Array, v: jax.Array, dy: jax.Array) -> jax.Array:
        return jax.vmap(lambda h, v, dy: jax.vjp(lambda v: dense_product(h, v), v)[1](dy)[0])(h, v, dy)

    calls = {"x·w": (jnp.matmul, (x, w)), "dy·wᵀ": (lambda dy, v: jnp.matmul(dy, v.mT), (x, v))}
    calls |= {"hᵀ·dy": (gradient, (h, v, x))}
    return {name: partial(jax.jit(f).lower(*args).compile(), *args) for name, (f, args) in calls.items()}


def main() -> None:
    prepare_jax("cpu")
    with matmul_precision("float32", "cpu"):
        update, gflop = make_update()
        calls = {"step": update, **make_products()}
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 8):
        for name, call in calls.items():
            for _ in range(3 if name != "step" else 1):  # the first one after a step finds a cold cache
                began = time.process_time()
                jax.block_until_ready(call())
                least[name] = min(least[name], time.process_time() - began)
    product = 2e-9 * CRITICS * ROWS * OUTER * INNER
    rates = {name: product / seconds for name, seconds in least.items() if name != "step"}
    step = least["step"] / STEPS
    print(f"a gradient step: {1e3 * step:.1f} ms of a core, {gflop:.1f} GFLOP by XLA, {gflop / step:.0f} GFLOP/s")
    print("products: " + ", ".join(f"{name} {rate:.0f} GFLOP/s" for name, rate in rates.items()))
    best = max(rates.values())
    print(
        f"at {best:.0f} GFLOP/s the step would take {1e3 * gflop / best:.1f} ms: {gflop / best / step:.0%} of its time"
    )


if __name__ == "__main__":
    main()
