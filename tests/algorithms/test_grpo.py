"""GRPO: group advantages, masks, the reference, forced resets."""

import json
from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_pairs import load, rollout_of, train_state, under

from ejax.algorithms.grpo import GRPOConfig, grpo_loss, grpo_update
from ejax.config import ConfigError, parse_config
from ejax.distributions import ActionSpec
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.optim import make_optimizer
from ejax.policies import ActorOnly, NetworkConfig
from ejax.returns import discounted_returns, first_episode_mask, group_advantages
from ejax.rollout import reset
from ejax.training.build import build
from ejax.types import init_train_state

RAW = {
    "trainer": {"learning_env": "PointMassRL", "num_envs": 8, "buffer_size": 6, "iterations": 3},
    "policy": {"name": "actor_only", "actor": {"type": "mlp", "hidden_sizes": [8], "activation": "tanh"}},
    "algorithm": {"name": "grpo", "cfg": {"batch_size": 16, "n_epochs": 1}},
}


def test_returns_restart_after_done_and_have_no_bootstrap() -> None:
    reward = jnp.array([[1.0], [2.0], [4.0], [8.0]])
    done = jnp.array([[False], [True], [False], [False]])
    # G3 = 8; G2 = 4 + 8/2; G1 = 2 (done); G0 = 1 + 2/2
    expected = [[2.0], [2.0], [8.0], [8.0]]
    np.testing.assert_allclose(discounted_returns(reward, done, gamma=0.5), expected)


def test_the_mask_covers_the_first_episode_with_its_last_step() -> None:
    done = jnp.array([[False, True], [True, False], [False, False]])
    np.testing.assert_array_equal(first_episode_mask(done), [[1, 1], [1, 0], [0, 0]])


def test_advantages_compare_the_living_members_of_a_group_with_the_population_deviation() -> None:
    step_return = jnp.array([[1.0, 3.0, 5.0, 7.0, 2.0, 2.0, 9.0, 9.0]])
    mask = jnp.array([[1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0]])
    sigma = np.sqrt(8 / 3)  # of 1, 3, 5
    expected = [[-2 / sigma, 0.0, 2 / sigma, 0.0, 0.0, 0.0, 0.0, 0.0]]  # a lone member has nothing to compare with
    np.testing.assert_allclose(group_advantages(step_return, mask, group_size=4, eps=0.0 + 1e-8), expected, rtol=1e-5)


def test_num_envs_must_be_divisible_by_group_size() -> None:
    with pytest.raises(ValueError, match=r"num_envs \(6\) must be divisible by group_size \(4\)"):
        group_advantages(jnp.zeros((2, 6)), jnp.ones((2, 6)), group_size=4, eps=1e-8)
    with pytest.raises(
        ConfigError, match=r"trainer\.num_envs: got 8, not divisible by algorithm.cfg.group_size 3; use 6"
    ):
        parse_config(RAW, ["algorithm.cfg.group_size=3"])


def test_members_of_a_group_share_their_start() -> None:
    position = np.asarray(reset(PointMassRL(), jax.random.key(0), 8, 4).state.position)
    assert len(np.unique(position, axis=0)) == 2
    np.testing.assert_array_equal(position[:4], np.broadcast_to(position[0], (4, 2)))


@pytest.mark.slow
@pytest.mark.parametrize(("shared_start", "starts"), [(True, 2), (False, 8)])
def test_a_rollout_starts_its_groups_together_by_default(shared_start: bool, starts: int) -> None:
    parts = build(parse_config(RAW, [f"algorithm.cfg.shared_start={shared_start}"]))
    state, _ = parts.stepper.step(parts.state, jax.random.key(0))
    goal = np.asarray(state.envs.state.goal_position)  # stays for an episode, and no episode ends here
    assert len(np.unique(goal, axis=0)) == starts


@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "count"), [([], 48.0), (["compat=embodichain-0.3"], 0.0)])
def test_normalizers_take_in_each_rollout_but_under_embodichains_rule(overrides: list[str], count: float) -> None:
    block = {"type": "mlp", "hidden_sizes": [8]}
    policy = {"name": "actor_critic", "actor": block, "critic": block, "actor_obs_normalization": True}
    parts = build(parse_config({**RAW, "policy": policy}, overrides))
    state, _ = parts.stepper.step(parts.state, jax.random.key(0))
    before, after = (x.train.params["normalizer"]["actor_obs_normalizer"] for x in (parts.state, state))
    assert float(after["count"]) == count
    assert bool((after["mean"] == before["mean"]).all()) == (count == 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("truncate", [True, False])
def test_a_forced_reset_leaves_no_trace_in_the_episode_statistics(truncate: bool) -> None:
    overrides = ["env.cfg.max_episode_steps=4", f"algorithm.cfg.truncate_at_first_done={truncate}"]
    parts = build(parse_config(RAW, overrides))
    state, key = parts.state, jax.random.key(0)
    for _ in range(3):  # each rollout: one whole episode of 4 steps, and 2 steps that are cut off
        state, _ = parts.stepper.step(state, key)
    assert int(state.episodes.num_episodes) == 3 * 8
    lengths = np.asarray(state.episodes.lengths[:24])
    assert lengths.max() <= 4.0


def test_the_divergence_is_measured_to_the_first_parameters() -> None:
    parts = build(parse_config(RAW, ["algorithm.cfg.n_epochs=4"]))
    state, metrics = parts.state, {}
    for i in range(3):
        state, metrics = parts.stepper.step(state, jax.random.key(i))
    chex.assert_trees_all_equal(state.train.reference, parts.state.train.params)
    assert float(metrics["train/approx_ref_kl"]) > 0.0


def test_kl_without_a_reference_is_refused() -> None:
    parts = build(parse_config(RAW, ["algorithm.cfg.kl_coef=0"]))
    assert parts.state.train.reference is None
    with pytest.raises(ValueError, match=r"kl_coef > 0 needs state\.reference"):
        grpo_update(
            parts.state.train,
            rollout_of(load("head_grpo_kl0.npz")),
            jax.random.key(0),
            policy=parts.policy,
            optimizer=parts.optimizer,
            config=GRPOConfig(kl_coef=0.1),
        )


@pytest.mark.parametrize("normalized", [False, True])
def test_with_length_normalization_each_episode_weighs_the_same(normalized: bool) -> None:
    config = GRPOConfig(batch_size=10**6, group_size=2, n_epochs=1, kl_coef=0.0, length_normalization=normalized)
    policy = ActorOnly(ActionSpec("normal", (2,)), NetworkConfig(hidden_sizes=(8, 8), activation="tanh"))
    optimizer, rollout = make_optimizer(config.optimizer), rollout_of(load("head_grpo_kl0.npz"))
    num_steps, num_envs = rollout.reward.shape
    done = np.zeros((num_steps, num_envs), bool)
    done[0, 0] = done[1, 1] = True  # first episodes of one step, of two, and of all
    rollout = replace(rollout, terminated=jnp.asarray(done), truncated=jnp.zeros_like(rollout.truncated))
    env = jnp.broadcast_to(jnp.arange(num_envs), (num_steps, num_envs))
    weights = np.zeros(num_envs)

    def loss(params: Any, batch: Any, **given: Any) -> Any:
        jax.debug.callback(lambda env, weight: np.add.at(weights, env, weight), batch["env"], batch["weight"])
        return grpo_loss(params, {name: x for name, x in batch.items() if name != "env"}, **given)

    state = init_train_state(policy, optimizer, jax.random.key(0), rollout.obs)
    bound = {"policy": policy, "optimizer": optimizer, "config": config}
    grpo_update(state, rollout, jax.random.key(1), **bound, loss=loss, columns=lambda rollout: {"env": env})
    jax.effects_barrier()
    wanted = np.ones(num_envs) if normalized else np.array([1.0, 2.0, *[num_steps] * (num_envs - 2)])
    np.testing.assert_allclose(weights, wanted / wanted.sum(), rtol=1e-5)


def test_an_episode_that_ends_in_no_transition_is_left_out_and_others_are_not() -> None:
    """One environment breaks in its second episode, another takes a step to reset between two."""
    golden = load("head_grpo_kl0.npz")
    cfg = json.loads(str(golden["cfg_json"]))["cfg"]
    config = GRPOConfig(**{**cfg, "truncate_at_first_done": False, "reset_every_rollout": False})
    network = NetworkConfig(hidden_sizes=tuple(json.loads(str(golden["cfg_json"]))["hidden"]), activation="tanh")
    policy, optimizer = ActorOnly(ActionSpec("normal", (2,)), network), make_optimizer(config.optimizer)
    rollout = rollout_of(golden)
    state = train_state(policy, rollout.obs, under(golden, "init/"), optimizer, reference=True)
    num_steps, num_envs = rollout.reward.shape
    valid, done = np.ones((num_steps, num_envs), bool), np.zeros((num_steps, num_envs), bool)
    done[[1, 3], [0, 0]] = True
    valid[3, 0] = False  # its second episode, steps 2 and 3, was broken
    done[0, 1] = True
    valid[1, 1] = False  # a reset
    broken = replace(rollout, terminated=jnp.asarray(done), truncated=0 * done > 0, valid=jnp.asarray(valid))
    _, metrics = grpo_update(state, broken, jax.random.key(0), policy=policy, optimizer=optimizer, config=config)
    assert metrics["mask_fraction"] == pytest.approx(1.0 - 3 / rollout.reward.size)
