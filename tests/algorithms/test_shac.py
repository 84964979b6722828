"""SHAC: the short-horizon return, its gradient, TD(lambda) targets, the target critic, skipped updates, whole runs."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import chex
import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused

from ejax.algorithms.shac import SHACConfig, shac_update, short_horizon_return
from ejax.config import parse_config
from ejax.distributions import Normal, action_spec
from ejax.envs.tasks.planar_reach import PlanarReachRL
from ejax.evaluation import evaluate
from ejax.numerics.weight_average import acting_params
from ejax.optim import OptimizerConfig, make_actor_critic_optimizer
from ejax.policies import MLP, ActorCritic, ActorOnly, NetworkConfig
from ejax.rollout import EnvCarry, reset
from ejax.run import train
from ejax.store.checkpoint import load_checkpoint, load_params
from ejax.training.build import build
from ejax.types import Array, Env, Key, Timestep, TrainState, make_train_state

RUNNING, TERMINATES, TRUNCATES = 0, 1, 2
GAMMA, LAMBDA, STEPS, ENDS_AFTER = 0.9, 0.7, 5, 3


@dataclass(frozen=True)
class Lanes:
    """x' = x + ½a, r = −x'². A lane of kind TERMINATES or TRUNCATES ends after 3 steps; what follows starts at 0.3.

    ``poison``: the reward is NaN.
    """

    poison: bool = False
    max_episode_steps: int = 1000

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,))
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))

    def reset(self, key: Key) -> tuple[tuple[Array, Array, Array], Array]:
        del key
        x = jnp.full((1,), 0.3)
        return (x, jnp.zeros((), jnp.int32), jnp.int32(RUNNING)), x

    def step(self, state: tuple[Array, Array, Array], action: Array, key: Key) -> tuple[Any, Timestep]:
        del key
        x, t, kind = state[0] + 0.5 * action, state[1] + 1, state[2]
        reward = -jnp.square(x[0]) + (jnp.nan if self.poison else 0.0)
        timestep = Timestep(
            obs=x,
            reward=reward,
            terminated=(t >= ENDS_AFTER) & (kind == TERMINATES),
            truncated=(t >= ENDS_AFTER) & (kind == TRUNCATES),
            info={},
        )
        return (x, t, kind), timestep


LANES = Lanes()
START = np.array([[0.9], [-0.6], [0.7]])
KINDS = (RUNNING, TERMINATES, TRUNCATES)
POLICY = ActorCritic(
    action_spec(LANES.action_space),
    actor=NetworkConfig(hidden_sizes=(4,), activation="tanh"),
    critic=NetworkConfig(hidden_sizes=(5,), activation="tanh"),
)


class Plain(nn.Module):
    """The same networks without ``ActorCritic``'s cast of observations to float32, which finite differences feel."""

    @nn.compact
    def __call__(self, obs: Array) -> tuple[Normal, Array]:
        mean = MLP(POLICY.actor, 1, name="actor")(obs)
        return Normal(mean, jnp.zeros_like(mean)), MLP(POLICY.critic, 1, name="critic")(obs)[..., 0]


SGD = OptimizerConfig(name="sgd", learning_rate=1.0)  # parameters move by exactly the gradient
BASE: dict[str, Any] = {
    "segment_length": STEPS,
    "deterministic_actions": True,
    "optimizer": SGD,
    "critic_optimizer": SGD,
    "gamma": GAMMA,
    "td_lambda": LAMBDA,
    "critic_epochs": 1,
    "num_mini_batches": 1,
    "max_grad_norm": float("inf"),
}


def lanes_carry() -> EnvCarry:
    x = jnp.asarray(START)
    return EnvCarry(state=(x, jnp.zeros(3, jnp.int32), jnp.array(KINDS, jnp.int32)), obs=x)


def start(policy: Any, config: SHACConfig, obs: Array) -> TrainState:
    """Make a state whose target critic is not its critic."""
    params = policy.init(jax.random.key(1), obs)
    target = {
        **params,
        "params": {**params["params"], "critic": policy.init(jax.random.key(2), obs)["params"]["critic"]},
    }
    optimizer = make_actor_critic_optimizer(config.optimizer, config.critic_optimizer)
    return make_train_state(params, optimizer, target=target)


def update(
    config: SHACConfig, state: TrainState | None = None, env: Env = LANES, policy: Any = POLICY
) -> tuple[TrainState, TrainState, dict[str, Array]]:
    """State before, state after, metrics."""
    before = start(policy, config, jnp.asarray(START)) if state is None else state
    optimizer = make_actor_critic_optimizer(config.optimizer, config.critic_optimizer)
    after, _, metrics = shac_update(
        before, lanes_carry(), jax.random.key(3), policy=policy, env=env, optimizer=optimizer, config=config
    )
    return before, after, metrics


def as_double(tree: Any) -> Any:
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda x: np.asarray(x, np.float64) if is_float(x) else x, tree)


def network(layers: Any, x: np.ndarray) -> np.ndarray:
    """Linear, tanh, linear, in NumPy."""
    hidden = np.tanh(x @ np.asarray(layers["linear_0"]["kernel"]) + np.asarray(layers["linear_0"]["bias"]))
    return hidden @ np.asarray(layers["linear_1"]["kernel"]) + np.asarray(layers["linear_1"]["bias"])


def episodes_by_loop(actor: Any, target: Any) -> list[list[tuple[np.ndarray, float, float]]]:
    """(observation, reward, V' of the next observation or 0 if terminated), by piece of an episode and step."""
    episodes = []
    for lane, kind in enumerate(KINDS):
        x, t = START[lane], 0
        episodes.append([])
        for _ in range(STEPS):
            before, x, t = x, x + 0.5 * network(actor, x), t + 1
            ended = kind != RUNNING and t == ENDS_AFTER
            value = 0.0 if ended and kind == TERMINATES else network(target, x).item()
            episodes[-1].append((before, -(x.item() ** 2), value))
            if ended:
                x, t, kind = np.array([0.3]), 0, RUNNING
                episodes.append([])
    return episodes


def objective_by_loop(actor: Any, target: Any) -> float:
    """Compute the actor's objective: each piece of an episode is paid its rewards, and V' of its end."""
    total = 0.0
    for episode in episodes_by_loop(actor, target):
        total += sum(GAMMA**t * reward for t, (_, reward, _) in enumerate(episode))
        total += GAMMA ** len(episode) * episode[-1][2]
    return total / (len(KINDS) * STEPS)


def targets_by_loop(actor: Any, target: Any) -> tuple[np.ndarray, np.ndarray]:
    """Observations and TD(λ) targets, from the definition: (1 − λ)·Σₖ λᵏ⁻¹·Gᵏ + λᴷ⁻¹·Gᴷ, G of k steps."""
    observations, targets = [], []
    for episode in episodes_by_loop(actor, target):
        for i, (obs, _, _) in enumerate(episode):
            rest = episode[i:]
            returns = [
                sum(GAMMA**j * rest[j][1] for j in range(k)) + GAMMA**k * rest[k - 1][2]
                for k in range(1, len(rest) + 1)
            ]
            mixed = (1 - LAMBDA) * sum(LAMBDA**k * g for k, g in enumerate(returns[:-1]))
            observations.append(obs)
            targets.append(mixed + LAMBDA ** (len(rest) - 1) * returns[-1])
    return np.array(observations), np.array(targets)


def test_returns_of_running_terminated_and_truncated_lanes_are_those_worked_out_by_hand() -> None:
    reward = jnp.tile(jnp.array([[1.0], [2.0], [4.0]]), (1, 5))
    next_value = jnp.tile(jnp.array([[100.0], [6.0], [8.0]]), (1, 5))
    at = lambda t, *lanes: jnp.zeros((3, 5), bool).at[t, jnp.array(lanes)].set(True)  # noqa: E731
    terminated, truncated = at(1, 1, 4) | at(2, 3), at(1, 2, 4)
    expected = [
        1 + 0.5 * 2 + 0.25 * (4 + 0.5 * 8),  # runs on: the last value
        1 + 0.5 * 2 + (4 + 0.5 * 8),  # terminated after two steps: no value there, a new discount after it
        1 + 0.5 * (2 + 0.5 * 6) + (4 + 0.5 * 8),  # truncated after two steps: the value of the final observation
        1 + 0.5 * 2 + 0.25 * 4,  # terminated in the last step
        1 + 0.5 * 2 + (4 + 0.5 * 8),  # terminated and truncated at once: terminated
    ]
    np.testing.assert_allclose(short_horizon_return(reward, next_value, terminated, truncated, gamma=0.5), expected)


def test_a_value_that_does_not_count_may_be_anything() -> None:
    reward, next_value = jnp.ones((2, 1)), jnp.array([[jnp.nan], [jnp.inf]])
    terminated = jnp.array([[False], [True]])
    total = short_horizon_return(reward, next_value, terminated, jnp.zeros_like(terminated), gamma=0.5)
    np.testing.assert_allclose(total, [1.5])


@pytest.mark.slow
def test_the_objective_is_that_of_an_explicit_loop() -> None:
    before, _, metrics = update(SHACConfig(**BASE))
    expected = objective_by_loop(before.params["params"]["actor"], before.target["params"]["critic"])
    np.testing.assert_allclose(metrics["objective"], expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], -expected, rtol=1e-5)


@pytest.mark.slow
def test_the_gradient_is_the_central_difference_of_the_loop() -> None:
    """In float64; the observations that the values depend on are part of it."""
    with jax.enable_x64(True):
        state = as_double(start(Plain(), SHACConfig(**BASE), jnp.asarray(START)))
        before, after, metrics = update(SHACConfig(**BASE), state, policy=Plain())
        actor, target = before.params["params"]["actor"], before.target["params"]["critic"]
        np.testing.assert_allclose(metrics["objective"], objective_by_loop(actor, target), rtol=1e-12)
        for layer, name, index in (
            ("linear_0", "kernel", (0, 1)),
            ("linear_0", "bias", (3,)),
            ("linear_1", "kernel", (2, 0)),
            ("linear_1", "bias", (0,)),
        ):
            shifted = []
            for sign in (1.0, -1.0):
                moved = jax.tree.map(np.copy, actor)
                moved[layer][name][index] += sign * 1e-5
                shifted.append(objective_by_loop(moved, target))
            moved_by = after.params["params"]["actor"][layer][name] - actor[layer][name]
            np.testing.assert_allclose(moved_by[index], (shifted[0] - shifted[1]) / 2e-5, rtol=1e-6)


def test_the_critic_descends_on_td_lambda_targets_of_the_target_critic() -> None:
    before, after, metrics = update(SHACConfig(**BASE))
    obs, target = targets_by_loop(before.params["params"]["actor"], before.target["params"]["critic"])
    assert len(target) == 3 * STEPS

    def loss(critic: Any) -> Array:
        params = {**before.params, "params": {**before.params["params"], "critic": critic}}
        return jnp.square(POLICY.apply(params, jnp.asarray(obs))[1] - jnp.asarray(target)).mean()

    critic = before.params["params"]["critic"]
    value, gradient = jax.value_and_grad(loss)(critic)
    expected = jax.tree.map(jnp.subtract, critic, gradient)
    np.testing.assert_allclose(metrics["value_loss"], value, rtol=1e-5)
    chex.assert_trees_all_close(after.params["params"]["critic"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.9])
def test_the_target_critic_keeps_alpha_of_itself(alpha: float) -> None:
    before, after, _ = update(SHACConfig(**BASE, target_critic_alpha=alpha))
    old, new = before.target["params"]["critic"], after.params["params"]["critic"]
    expected = jax.tree.map(lambda o, n: alpha * o + (1.0 - alpha) * n, old, new)
    chex.assert_trees_all_close(after.target["params"]["critic"], expected, rtol=1e-6)
    chex.assert_trees_all_equal(after.target["params"]["actor"], after.params["params"]["actor"])


@pytest.mark.slow
def test_actor_and_critic_have_their_own_optimizers() -> None:
    still = OptimizerConfig(name="sgd", learning_rate=0.0)
    for frozen, moving, key in (("critic", "actor", "critic_optimizer"), ("actor", "critic", "optimizer")):
        before, after, _ = update(SHACConfig(**{**BASE, key: still}))
        old, new = before.params["params"], after.params["params"]
        chex.assert_trees_all_equal(old[frozen], new[frozen])
        assert not np.allclose(old[moving]["linear_0"]["kernel"], new[moving]["linear_0"]["kernel"], rtol=1e-3)


@pytest.mark.slow
def test_each_optimizer_counts_its_own_steps() -> None:
    adam = OptimizerConfig(name="adam")
    config = SHACConfig(
        **{**BASE, "optimizer": adam, "critic_optimizer": adam, "critic_epochs": 3, "num_mini_batches": 2}
    )
    _, after, _ = update(config)
    counts = {name: int(after.opt_state[name][0].count) for name in ("actor", "critic")}
    assert counts == {"actor": 1, "critic": 6}


@pytest.mark.slow
def test_a_schedule_moves_both_learning_rates_from_their_own_start() -> None:
    schedule = {"name": "step", "kwargs": {"step_size": 1, "gamma": 0.5}}
    slow = OptimizerConfig(name="sgd", learning_rate=0.1)
    _, _, metrics = update(SHACConfig(**{**BASE, "critic_optimizer": slow, "lr_scheduler": schedule}))
    np.testing.assert_allclose(metrics["learning_rate"], 0.5)
    np.testing.assert_allclose(metrics["critic_learning_rate"], 0.05)


@pytest.mark.slow
def test_a_nonfinite_update_is_skipped_and_counted() -> None:
    schedule = {"name": "step", "kwargs": {"step_size": 1}}
    before, after, metrics = update(SHACConfig(**BASE, lr_scheduler=schedule), env=Lanes(poison=True))
    chex.assert_trees_all_equal(before, after)  # target critic and schedule have not moved either
    assert metrics["skipped_update"] == 1.0
    assert np.isnan(metrics["grad_norm"])


@pytest.mark.slow
@pytest.mark.parametrize("which", ["optimizer", "critic_optimizer"])
def test_a_step_that_is_not_finite_is_skipped_though_its_gradient_was(which: str) -> None:
    overflows = OptimizerConfig(name="sgd", learning_rate=1e38, kwargs={"weight_decay": 1e38})
    before, after, metrics = update(SHACConfig(**(BASE | {which: overflows})))
    networks = before.params["params"], after.params["params"]
    chex.assert_trees_all_equal(*(each["critic"] for each in networks))
    assert metrics["skipped_update"] == (which == "optimizer")
    assert metrics["skipped_fraction"] == 1.0 or which == "optimizer"
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
    if which == "optimizer":
        chex.assert_trees_all_equal(before, after)


@pytest.mark.slow
def test_observation_statistics_move_after_the_update_and_the_target_has_the_same() -> None:
    policy = POLICY.clone(actor_obs_normalization=True, critic_obs_normalization=True)
    _, after, metrics = update(SHACConfig(**BASE), policy=policy)
    assert metrics["skipped_update"] == 0.0
    for name in ("actor_obs_normalizer", "critic_obs_normalizer"):
        assert after.params["normalizer"][name]["count"] == 3 * STEPS
    chex.assert_trees_all_equal(after.target["normalizer"], after.params["normalizer"])


@pytest.mark.slow
def test_adjoints_are_clipped_and_reported() -> None:
    _, _, metrics = update(SHACConfig(**BASE, action_adjoint_max_norm=1e-3))
    assert metrics["action_adjoint_clipped_fraction"] == 1.0
    assert metrics["action_adjoint_nonfinite_fraction"] == 0.0


def test_a_policy_without_a_critic_or_a_state_without_a_target_is_refused() -> None:
    config = SHACConfig(**BASE)
    before = start(POLICY, config, jnp.asarray(START))
    refused(lambda: update(config, replace(before, target=None)), match="got target=None; start with init_train_state")
    actor_only = ActorOnly(action_spec(LANES.action_space), NetworkConfig(hidden_sizes=(4,)))
    params = actor_only.init(jax.random.key(0), jnp.asarray(START))
    with pytest.raises(ValueError, match="a network 'critic', got one with actor, log_std; use actor_critic"):
        update(config, replace(before, params=params), policy=actor_only)


RAW: dict[str, Any] = {
    "trainer": {
        "learning_env": "PointMassRL",
        "exp_name": "shac",
        "num_envs": 4,
        "iterations": 6,
        "segment_length": 8,
        "save_frequency_updates": 3,
        "console": False,
    },
    "policy": {
        "name": "actor_critic",
        "actor": {"type": "mlp", "hidden_sizes": [8]},
        "critic": {"type": "mlp", "hidden_sizes": [8]},
        "actor_obs_normalization": True,
    },
    "algorithm": {"name": "shac", "cfg": {"lr_scheduler": {"name": "linear"}, "critic_epochs": 2}},
}


@pytest.mark.slow
def test_a_run_resumes_to_the_same_bits_and_its_average_acts(tmp_path: Path) -> None:
    config = parse_config(RAW, [f"trainer.output_dir={tmp_path}", "algorithm.cfg.optimizer.ema_decay=0.9"])
    whole = train(config, run_dir=tmp_path / "whole")
    like = build(config).state
    middle = next(path for path in whole.latest_checkpoint_path.parent.iterdir() if path.name.endswith(f"_{3 * 4 * 8}"))
    expected, _ = load_checkpoint(whole.latest_checkpoint_path, like)
    resumed = train(config, resume=str(middle))
    assert resumed.num_updates == 6
    actual, _ = load_checkpoint(resumed.latest_checkpoint_path, like)
    start, _ = load_checkpoint(middle, like)
    chex.assert_trees_all_equal(expected, actual)
    kept = load_params(whole.latest_checkpoint_path, whole.params)
    chex.assert_trees_all_equal(whole.params, resumed.params, acting_params(expected.train), kept)
    trained = expected.train.params["params"]
    assert not np.array_equal(kept["params"]["actor"]["linear_0"]["kernel"], trained["actor"]["linear_0"]["kernel"])
    critic = lambda state: state.train.target["params"]["critic"]["linear_0"]["kernel"]  # noqa: E731
    assert not np.array_equal(critic(start), critic(expected))
    assert {"train/value_loss", "train/objective", "train/critic_learning_rate"} <= whole.last_train_metrics.keys()


@cases(
    "overrides message",
    (["policy.name=actor_only", "policy.critic=null"], r"policy\.name.*'actor_only', which has no critic"),
    (["algorithm.cfg.num_mini_batches=33"], r"num_mini_batches.*got 33, but a rollout has 32 rows"),
    (["algorithm.cfg.target_critic_alpha=1"], r"target_critic_alpha.*must be less than 1"),
    (["algorithm.cfg.update_horizon=16"], "update_horizon.*unknown key"),
)
def test_configs_that_cannot_train_are_refused(overrides: list[str], message: str) -> None:
    refused(parse_config, RAW, overrides, match=message)


@pytest.mark.slow
def test_a_rollout_is_a_segment_and_not_the_buffer_size() -> None:
    assert parse_config(RAW).trainer.buffer_size == 8
    config = parse_config(RAW, ["trainer.buffer_size=7"])
    assert config.trainer.buffer_size == 8
    assert ("trainer.buffer_size (override)", "no effect: the options of shac make it 8") in [
        (notice.key, notice.text) for notice in config.notices
    ]


@pytest.mark.slow
def test_it_learns_to_reach_and_compiles_once() -> None:
    """PlanarReachRL, 200 updates: a quarter of the untrained arm's cost in held-out episodes."""
    env = PlanarReachRL()
    actor = NetworkConfig(
        hidden_sizes=(64, 64), activation="relu", last_activation="tanh", orthogonal_init=(1.414, 1.414, 0.01)
    )
    critic = NetworkConfig(hidden_sizes=(64, 64), activation="relu")
    policy = ActorCritic(action_spec(env.action_space), actor=actor, critic=critic, initial_log_std=-2.0)
    adam = OptimizerConfig(learning_rate=1e-2, kwargs={"betas": (0.7, 0.95)})
    config = SHACConfig(
        segment_length=16,
        optimizer=adam,
        critic_optimizer=adam,
        lr_scheduler={"name": "linear", "kwargs": {"total_iters": 200}},
    )
    optimizer = make_actor_critic_optimizer(adam, adam)
    carry = reset(env, jax.random.key(0), 32)
    params = policy.init(jax.random.key(1), carry.obs)
    state = make_train_state(params, optimizer, target=params)

    def episode_return(params: Any) -> float:
        episodes = evaluate(policy, env, params, jax.random.key(9), num_envs=64, num_episodes=256)
        return float(episodes["return"].mean())

    untrained, compiled = episode_return(params), shac_update._cache_size()
    for i in range(200):
        state, carry, metrics = shac_update(
            state, carry, jax.random.key(i), policy=policy, env=env, optimizer=optimizer, config=config
        )
        assert metrics["skipped_update"] == 0.0
    assert shac_update._cache_size() == compiled + 1
    assert metrics["explained_variance"] > 0.9
    assert 0.25 * untrained < episode_return(state.params) < 0.0
