"""Policies of one's own, the same tests for Flax Linen and Flax NNX."""

from functools import partial
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import own_policies
import pytest
from own_policies import HIDDEN, KINDS, OBS
from tiny import STEPS, tiny

import ejax
from ejax.algorithms.ppo import PPOConfig, ppo_loss
from ejax.config import parse_config
from ejax.envs.point_mass import PointMassRL
from ejax.policies.normalize import update_normalizer
from ejax.rollout import reset, unroll
from ejax.run import train
from ejax.training.build import build
from ejax.training.policies import uses_dropout
from ejax.training.saved_policy import evaluate_run

KEY = jax.random.key(0)
ROWS = jax.random.normal(KEY, (6, 4, OBS))
FRAMEWORKS = pytest.mark.parametrize("framework", ["linen", "nnx"])


def config(framework: str, kind: str, output_dir: Path, **trainer: Any) -> dict[str, Any]:
    raw = tiny(output_dir, save_frequency_updates=1, keep_checkpoints=4, **trainer)
    return raw | {"policy": {"name": "own_policies:make", "cfg": {"framework": framework, "kind": kind}}}


def keys_in(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]


@FRAMEWORKS
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_resumed_forked_evaluated_loaded_and_taken_on_from(framework: str, kind: str, tmp_path: Path) -> None:
    whole = train(parse_config(config(framework, kind, tmp_path)))
    first = whole.run_dir / "checkpoints" / f"tiny_step_{STEPS}"
    chex.assert_trees_all_equal(
        train(parse_config(config(framework, kind, tmp_path)), resume=str(first)).params, whole.params
    )
    forked = train(parse_config(config(framework, kind, tmp_path)), fork=first, run_dir=tmp_path / "forked")
    chex.assert_trees_all_equal(forked.params, whole.params)
    assert not keys_in(whole.params)
    assert np.isfinite(evaluate_run(whole.run_dir, num_episodes=2, num_envs=2)["eval/avg_reward"])
    acted = [ejax.load(whole.run_dir).act(np.asarray(ROWS[0])) for _ in range(2)]
    np.testing.assert_array_equal(*acted)
    raw = config(framework, kind, tmp_path, iterations=1)
    raw["policy"]["init_from"] = str(whole.run_dir)
    raw["algorithm"]["cfg"]["optimizer"] = {"learning_rate": 1e-30}
    taken_on = train(parse_config(raw)).params
    chex.assert_trees_all_close(taken_on["params"], whole.params["params"])


@FRAMEWORKS
def test_dropout_is_the_rows_own_and_off_without_a_seed(framework: str) -> None:
    policy = own_policies.make(framework, "dropout")
    params, seed = policy.init(KEY, ROWS), jnp.arange(24, dtype=jnp.uint32).reshape(6, 4)

    def mean(rows: Any, **keywords: Any) -> Any:
        return policy.apply(params, rows, **keywords)[0].mode()

    dropped, again = mean(ROWS, dropout_seed=seed), mean(ROWS, dropout_seed=seed)
    np.testing.assert_array_equal(dropped, again)
    np.testing.assert_allclose(mean(ROWS[2:3], dropout_seed=seed[2:3]), dropped[2:3], rtol=1e-5, atol=1e-6)
    assert not np.isclose(mean(ROWS, dropout_seed=seed + 1), dropped).any()
    same = jnp.broadcast_to(ROWS[:1, :1], ROWS.shape)
    assert np.ptp(mean(same, dropout_seed=seed), axis=(0, 1)).min() > 0.1  # a mask for each row
    np.testing.assert_allclose(np.ptp(mean(same), axis=(0, 1)), 0.0, atol=1e-6)
    seeds = jnp.arange(4096, dtype=jnp.uint32)[:, None]
    many = mean(jnp.broadcast_to(ROWS[:1, :1], (4096, 1, OBS)), dropout_seed=seeds).mean(axis=0)
    np.testing.assert_allclose(many, mean(ROWS[:1, :1])[0], atol=0.05)  # what is kept is scaled up


@FRAMEWORKS
def test_an_update_drops_what_was_dropped_in_acting(framework: str) -> None:
    policy, env = own_policies.make(framework, "dropout"), PointMassRL()
    params = policy.init(KEY, ROWS)
    rollout, _ = unroll(policy, env, params, reset(env, KEY, 4), KEY, num_steps=8, dropout=True)
    batch = {name: getattr(rollout, name) for name in ("obs", "action", "log_prob", "value", "dropout_seed")}
    batch |= {"advantage": rollout.reward, "value_target": rollout.reward}
    batch = {name: x.reshape(32, *x.shape[2:]) for name, x in batch.items()}
    loss = jax.jit(partial(ppo_loss, policy=policy, config=PPOConfig()))
    assert loss(params, batch)[1]["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    del batch["dropout_seed"]
    assert loss(params, batch)[1]["approx_kl"] > 1e-3


@FRAMEWORKS
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_drops_where_the_policy_has_dropout(framework: str, kind: str, tmp_path: Path) -> None:
    run = parse_config(config(framework, kind, tmp_path))
    parts = build(run)
    assert uses_dropout(run.policy, parts.policy) == (kind == "dropout")
    drawn = {var.aval.dtype for eqn in jax.make_jaxpr(parts.stepper.step)(parts.state, KEY).eqns for var in eqn.outvars}  # type: ignore[attr-defined]
    assert (jnp.dtype("uint32") in drawn) == (kind == "dropout")  # of each step's seed


@FRAMEWORKS
def test_running_averages_are_those_of_the_rows_that_count(framework: str) -> None:
    policy = own_policies.make(framework, "batch_norm")
    params = policy.init(KEY, ROWS)
    valid = np.ones((6, 4), bool)
    valid[0] = valid[3, 1] = False
    rows = np.array(ROWS)
    rows[1, 2, 0], rows[0, 0, 0] = np.nan, 1e30  # broken, and one that does not count
    counting = rows[valid & np.isfinite(rows).all(axis=-1)]
    hidden = jax.tree.leaves(params["params"], is_leaf=lambda x: isinstance(x, dict) and "kernel" in x)
    layer = next(x for x in hidden if isinstance(x, dict) and x["kernel"].shape == (OBS, HIDDEN))
    seen = counting @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"])
    after = update_normalizer(policy, params, jnp.asarray(rows), jnp.asarray(valid))
    assert after["params"] is params["params"]
    whole = update_normalizer(policy, params, jnp.asarray(np.resize(counting, (2 * 18, 1, OBS))))
    # 24 places are given to 18 rows: the first six of them count twice
    seen = np.concatenate([seen, seen[:6]])
    norm = after["batch_stats"]["norm"]
    np.testing.assert_allclose(norm["mean"], 0.1 * seen.mean(axis=0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(norm["var"], 0.9 + 0.1 * seen.var(axis=0), rtol=1e-4)
    np.testing.assert_allclose(whole["batch_stats"]["norm"]["mean"], 0.1 * seen[:18].mean(axis=0), rtol=1e-4, atol=1e-6)
    nothing = update_normalizer(policy, params, jnp.asarray(rows), jnp.zeros_like(valid))
    chex.assert_trees_all_equal(nothing, params)
