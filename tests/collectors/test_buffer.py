"""Buffers to hold: of steps, and of whole rollouts between threads."""

import queue
import re
import threading
from functools import partial
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import refusals, refused
from host_tasks import Drift, Linear

import ejax
from ejax.algorithms.batch import flatten_rollout
from ejax.algorithms.grpo import GRPOConfig, grpo_update
from ejax.algorithms.ppo import PPOConfig, ppo_advantage, ppo_update
from ejax.optim import make_optimizer
from ejax.types import Rollout, make_train_state

KEY = jax.random.key(5)
POLICY = Linear()
PARAMS = POLICY.init(jax.random.key(1), None)
T, N = 6, 3
RATES = {"gamma": 0.9, "gae_lambda": 0.8}
CONFIG = PPOConfig(batch_size=5, n_epochs=2, **RATES)
OPTIMIZER = make_optimizer(CONFIG.optimizer)


def collected() -> Rollout:
    """Collect steps among which episodes are cut off."""
    return ejax.unroll(POLICY, Drift(limit=4), PARAMS, ejax.reset(Drift(limit=4), KEY, N), KEY, num_steps=T)[0]


def filled(rollout: Rollout, buffer: Any = None) -> Any:
    """Add a rollout's steps to a buffer one by one."""
    buffer = ejax.RolloutBuffer(T, N, 2, 1) if buffer is None else buffer
    for t in range(T):
        step = jax.tree.map(lambda x, t=t: x[t], rollout)
        ends = {"truncated": step.truncated, "final_value": step.next_value}
        buffer.add(step.obs, step.action, step.reward, step.done, step.value, step.log_prob, **ends)
    return buffer


@pytest.mark.slow
def test_a_filled_buffer_is_the_rollout_and_trains_to_the_same_bits() -> None:
    rollout = collected()
    assert rollout.truncated.any()
    buffer = filled(rollout)
    advantage, value_target = buffer.finalize(rollout.next_value[-1], **RATES)
    plain = CONFIG.model_copy(update={"normalize_advantage": False})
    chex.assert_trees_all_equal((advantage, value_target), ppo_advantage(rollout, config=plain))
    chex.assert_trees_all_equal(buffer.steps["obs"], rollout.obs)
    state = make_train_state(PARAMS, OPTIMIZER)
    learned = [
        ppo_update(state, each, KEY, policy=POLICY, optimizer=OPTIMIZER, config=CONFIG)
        for each in (rollout, buffer.rollout)
    ]
    chex.assert_trees_all_equal(*learned)


def test_done_alone_is_the_end_of_the_task_and_truncation_still_has_a_value() -> None:
    ones, last = np.ones(1, np.float32), np.float32([10.0])
    ends, cut = ejax.RolloutBuffer(1, 1, 1, 1), ejax.RolloutBuffer(1, 1, 1, 1)
    ends.add(ones[None], ones[None], ones, [True], 0 * ones, ones)
    cut.add(ones[None], ones[None], ones, [True], 0 * ones, ones, truncated=[True], final_value=4 * ones)
    assert ends.finalize(last, gamma=0.5, gae_lambda=1.0)[0] == 1.0
    assert cut.finalize(last, gamma=0.5, gae_lambda=1.0)[0] == 1.0 + 0.5 * 4.0
    assert ends.rollout.terminated.all() and not cut.rollout.terminated.any()
    with pytest.raises(ValueError, match="truncated and final_value belong together"):
        ejax.RolloutBuffer(1, 1, 1, 1).add(ones[None], ones[None], ones, [True], ones, ones, truncated=[True])


@pytest.mark.slow
def test_minibatches_are_those_of_sgd_epochs() -> None:
    rollout = collected()
    buffer = filled(rollout)
    advantage, _ = buffer.finalize(rollout.next_value[-1], **RATES)
    row = jnp.arange(T * N, dtype=jnp.float32).reshape(T, N)
    buffer.set_extras({"row": row})
    seen: list[Any] = []

    def loss(params: Any, batch: Any) -> Any:
        jax.debug.callback(
            lambda row, weight: seen.append(row[weight > 0]), batch["row"], batch["weight"], ordered=True
        )
        return params["params"]["x"] * batch["weight"].sum(), {}

    rows = flatten_rollout(rollout, row=row)
    state = make_train_state({"params": {"x": jnp.ones(())}}, OPTIMIZER)
    options = ejax.MinibatchConfig(n_epochs=2, batch_size=5, max_grad_norm=1.0)
    ejax.sgd_epochs(state, rows, KEY, loss=loss, optimizer=OPTIMIZER, minibatches=options)
    jax.effects_barrier()
    batches = list(buffer.iterate_minibatches(5, KEY, n_epochs=2))
    assert [len(each["row"]) for each in batches] == [5, 5, 5, 3] * 2
    chex.assert_trees_all_equal([each["row"] for each in batches], seen)
    for each in batches:
        at = each["row"].astype(int)
        np.testing.assert_array_equal(each["obs"], rows["obs"][at])
        np.testing.assert_array_equal(each["advantage"], advantage.reshape(-1)[at])
    assert sorted(np.concatenate([each["row"] for each in batches[:4]])) == list(range(T * N))


def test_columns_that_are_not_time_major_are_refused_though_they_have_as_many_rows() -> None:
    refused(flatten_rollout, collected(), own=jnp.zeros((N, T)), key="'own'", word="(3, 6) != (6, 3)")


def test_observations_of_many_parts_and_discrete_actions() -> None:
    obs = {"image": np.ones((N, 4, 4, 3), np.uint8), "state": np.ones((N, 2))}
    buffer = ejax.RolloutBuffer(1, N, obs, np.zeros(N, np.int32))
    x = np.ones(N)
    buffer.add(obs, np.zeros(N, np.int32), x, x > 1, x, x)
    assert {name: str(part.dtype) for name, part in buffer.steps["obs"].items()} == {
        "image": "uint8",
        "state": "float32",
    }


def test_what_was_handed_out_stays_and_what_was_given_may_change() -> None:
    rollout = collected()
    buffer = filled(rollout)
    before = buffer.steps
    buffer.clear()
    assert len(buffer) == 0 and not buffer.is_full()
    reused = np.zeros((N, 2), np.float32)
    step = (jnp.zeros((N, 1)), jnp.zeros(N), jnp.zeros(N, bool), jnp.zeros(N), jnp.zeros(N))
    for t in range(T):
        reused[:] = t
        buffer.add(reused, *step)
    np.testing.assert_array_equal(buffer.steps["obs"][:, 0, 0], np.arange(T))
    chex.assert_trees_all_equal(before["obs"], rollout.obs)


OBS, ACTION, X, FLAG = np.zeros((N, 2)), np.zeros((N, 1)), np.zeros(N), np.zeros(N, bool)


@refusals(
    ((0, N, 2, 1), "num_steps", "got 0 and 3"),
    ((T, N, (2, 2), 1), "obs_dim", "arrays of 3 environments"),
    ((1, N, {"state": np.ones((4, 2))}, 1), "obs/state", "arrays of 3 environments"),
)
def test_a_buffer_of_odd_sizes_is_refused(given: tuple[Any, ...], key: str, word: str) -> None:
    refused(ejax.RolloutBuffer, *given, key=key, word=word)


@refusals(
    ((OBS, ACTION, X[:, None], FLAG, X, X), "step 0", "reward"),
    ((OBS, ACTION, X, X, X, X), "step 0", "done"),  # as numbers
    (({"state": OBS}, ACTION, X, FLAG, X, X), "step 0", "state"),
)
def test_a_step_of_another_form_is_refused(given: tuple[Any, ...], key: str, word: str) -> None:
    refused(ejax.RolloutBuffer(T, N, 2, 1).add, *given, key=key, word=word)


def test_wrong_uses_of_a_buffer_are_refused() -> None:
    buffer = ejax.RolloutBuffer(T, N, 2, 1)
    buffer.add(OBS, ACTION, X, FLAG, X, X)
    stats = {"buffer_size": 1, "buffer_capacity": T, "buffer_usage": 1 / T, "total_transitions": N}
    assert buffer.get_stats() == stats
    full = filled(collected())
    for use, key in (
        (lambda: buffer.steps, "1 of 6 steps"),
        (lambda: buffer.finalize(X, **RATES), "1 of 6 steps"),
        (lambda: filled(collected(), full), "call clear"),
        (lambda: full.iterate_minibatches(4, KEY), "call finalize"),
        (lambda: full.rollout, "call finalize"),
        (lambda: full.finalize(np.zeros(2), **RATES), "last_value"),
        (lambda: full.set_extras({"returns": np.zeros((N, T))}), "returns"),
        (lambda: full.set_extras({"reward": np.zeros((T, N))}), "'reward'"),
    ):
        refused(use, key=key)


def test_rollouts_are_delivered_once_in_order_and_never_overwritten() -> None:
    rollout, waiting = collected(), ejax.RolloutQueue(capacity=2)
    rollouts = [rollout.replace(reward=rollout.reward + i) for i in range(3)]
    for each in rollouts[:2]:
        waiting.add_rollout(each)
    assert waiting.is_full() and len(waiting) == 2
    stats = {"buffer_size": 2, "buffer_capacity": 2, "buffer_usage": 1.0}
    assert waiting.get_stats() == {**stats, "total_transitions": 2 * T * N, "total_added": 2}
    refused(waiting.add_rollout, rollouts[2], match="2 of 2 rollouts wait", error=queue.Full)
    assert waiting.get() is rollouts[0] and waiting.get() is rollouts[1]
    refused(waiting.get, timeout_s=0.01, match="no rollout waits", error=queue.Empty)
    waiting.add_rollout(rollouts[2])
    waiting.clear()
    assert len(waiting) == 0
    refused(ejax.RolloutQueue, 0, match="capacity must be at least 1, got 0")


def test_a_full_queue_holds_its_producer_up_until_the_learner_takes_one() -> None:
    rollout, waiting = collected(), ejax.RolloutQueue(capacity=1)

    def produce() -> None:
        for i in range(20):
            waiting.add_rollout(rollout.replace(version=jnp.full((T, N), i)), timeout_s=30.0)

    producer = threading.Thread(target=produce)
    producer.start()
    versions = [int(waiting.get(timeout_s=30.0).version[0, 0]) for _ in range(20)]
    producer.join()
    assert versions == list(range(20))


def test_flattened_rows_are_taken_by_no_update_and_no_queue() -> None:
    """D15, D21"""
    rollout, waiting = collected(), ejax.RolloutQueue(capacity=1)
    waiting.add_rollout(rollout)
    rows = waiting.get(flatten=True)
    np.testing.assert_array_equal(rows["obs"], rollout.obs.reshape(T * N, 2))
    assert rows["reward"].shape == (T * N,)
    state = make_train_state(PARAMS, OPTIMIZER)
    flat = Rollout(**rows)
    for update, config in ((ppo_update, CONFIG), (grpo_update, GRPOConfig(group_size=3, kl_coef=0.0))):
        learn = partial(update, policy=POLICY, optimizer=OPTIMIZER, config=config)
        refused(learn, state, rows, KEY, key="ejax.Rollout", word="got a dict")
        refused(learn, state, flat, KEY, key="[T, N]", word="reward (18,)")
    refused(waiting.add_rollout, rows, word="got a dict")
    refused(waiting.add_rollout, rollout.replace(obs=rollout.obs[1:]), key="[T, N, ...]", word="obs")
    refused(waiting.add_rollout, rollout.replace(truncated=rollout.reward), key="terminated and truncated", word="bool")


@pytest.mark.slow
def test_the_code_of_the_manuals_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "rollouts.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(code, names)
    assert "float32[16, 8, " in capsys.readouterr().out
