"""GRPO: group advantages, masks, the reference, forced resets."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejax.algorithms.grpo import GRPOConfig, grpo_update
from ejax.build import build
from ejax.config import ConfigError, parse_config
from ejax.distributions import ActionSpec
from ejax.envs.point_mass import PointMassRL
from ejax.optim import OptimizerConfig, make_optimizer
from ejax.policies import ActorOnly, NetworkConfig
from ejax.returns import discounted_returns, first_episode_mask, group_advantages
from ejax.types import Rollout, TrainState
from ejax.unroll import reset

GOLDEN = Path(__file__).parent / "golden" / "head_grpo_kl0.npz"
RAW = {
    "trainer": {"learning_env": "PointMassRL", "num_envs": 8, "buffer_size": 6, "iterations": 3},
    "policy": {"name": "actor_only", "actor": {"type": "mlp", "hidden_sizes": [8], "activation": "tanh"}},
    "algorithm": {"name": "grpo", "cfg": {"batch_size": 16, "n_epochs": 1}},
}


def golden_params(golden: dict[str, np.ndarray], prefix: str) -> dict:
    """A torch state_dict of Linear layers at 0, 2, 4 as ejax parameters."""
    actor = {
        f"linear_{i}": {
            "kernel": jnp.asarray(golden[f"{prefix}/actor.{2 * i}.weight"].T),
            "bias": jnp.asarray(golden[f"{prefix}/actor.{2 * i}.bias"]),
        }
        for i in range(3)
    }
    return {"params": {"log_std": jnp.asarray(golden[f"{prefix}/log_std"]), "actor": actor}}


def golden_rollout(golden: dict[str, np.ndarray]) -> Rollout:
    """EmbodiChain's [N, T + 1] layout as [T, N]."""

    def field(name: str) -> jax.Array:
        return jnp.asarray(np.swapaxes(golden[f"rollout/{name}"][:, :-1], 0, 1))

    value = field("value")
    return Rollout(
        obs=field("obs"),
        action=field("action"),
        log_prob=field("sample_log_prob"),
        value=value,
        next_value=value,
        reward=field("reward"),
        terminated=field("terminated"),
        truncated=field("truncated"),
        extras={},
    )


def test_the_update_matches_embodichain() -> None:
    golden = dict(np.load(GOLDEN))
    spec = json.loads(str(golden["cfg_json"]))
    network = NetworkConfig(hidden_sizes=tuple(spec["hidden"]), activation=spec["activation"])
    policy = ActorOnly(ActionSpec("normal", (2,)), network)
    cfg = spec["cfg"] | {"optimizer": OptimizerConfig(**spec["cfg"]["optimizer"])}
    config = GRPOConfig(**cfg)
    optimizer = make_optimizer(config.optimizer)
    params = golden_params(golden, "init")
    state = TrainState(step=jnp.int32(0), params=params, opt_state=optimizer.init(params["params"]))
    state, metrics = grpo_update(
        state, golden_rollout(golden), jax.random.key(0), policy=policy, optimizer=optimizer, config=config
    )
    expected = golden_params(golden, "final")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), state.params, expected)
    for name in ("actor_loss", "entropy", "approx_ref_kl", "learning_rate"):
        np.testing.assert_allclose(metrics[name], golden[f"metric/{name}"], rtol=1e-4, atol=1e-6)


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
        ConfigError, match=r"trainer\.num_envs: got 8, not divisible by algorithm.cfg.group_size 3; give 6"
    ):
        parse_config(RAW, ["algorithm.cfg.group_size=3"])


def test_members_of_a_group_share_their_start() -> None:
    position = np.asarray(reset(PointMassRL(), jax.random.key(0), 8, 4).state.position)
    assert len(np.unique(position, axis=0)) == 2
    np.testing.assert_array_equal(position[:4], np.broadcast_to(position[0], (4, 2)))


def test_a_forced_reset_leaves_no_trace_in_the_episode_statistics() -> None:
    parts = build(parse_config(RAW, ["env.cfg.max_episode_steps=4"]))
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
    jax.tree.map(np.testing.assert_array_equal, state.train.reference, parts.state.train.params)
    assert float(metrics["train/approx_ref_kl"]) > 0.0


def test_kl_without_a_reference_is_refused() -> None:
    parts = build(parse_config(RAW, ["algorithm.cfg.kl_coef=0"]))
    assert parts.state.train.reference is None
    golden = dict(np.load(GOLDEN))
    with pytest.raises(ValueError, match=r"kl_coef > 0 needs state\.reference"):
        grpo_update(
            parts.state.train,
            golden_rollout(golden),
            jax.random.key(0),
            policy=parts.policy,
            optimizer=parts.optimizer,
            config=GRPOConfig(kl_coef=0.1),
        )
