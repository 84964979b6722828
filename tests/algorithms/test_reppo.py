"""REPPO: its returns and losses against loops in NumPy, one update by hand, whole runs."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from case_tables import cases
from soft_actors_in_numpy import draw, mlp_critics, mlp_moments, softmax
from tiny import EPISODE, tiny
from whole_runs import assert_goes_on_with_the_same_bits, assert_refused

from ejax.algorithms.reppo import ALGORITHM, REPPOConfig, reppo_loss, reppo_target, reppo_update
from ejax.config import parse_config
from ejax.distributions import ActionSpec
from ejax.numerics.value_bins import hl_gauss
from ejax.policies.actor_q import ActorQ
from ejax.policies.mlp import NetworkConfig
from ejax.training.build import build
from ejax.types import Params, Rollout, TrainState, init_train_state, make_train_state

KEY = jax.random.key(1)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
NETWORK = NetworkConfig(hidden_sizes=(6,), activation="tanh")
NUM_BINS = 11
CONFIG = REPPOConfig(batch_size=6, n_epochs=2, vmin=-5.0, vmax=5.0, gamma=0.9, lmbda=0.7)
BINS = np.linspace(-5.0, 5.0, NUM_BINS)
T, N = 6, 4


def make_policy(half_width: float = 2.0, num_critics: int = 2) -> ActorQ:
    spec = ActionSpec("tanh_normal", (2,), (-half_width,) * 2, (half_width,) * 2)
    more: Any = {"initial_alpha": 0.3, "initial_kl_coef": 0.2, "num_bins": NUM_BINS}
    return ActorQ(spec, NETWORK, NETWORK, num_critics=num_critics, **more)


def make_params(policy: ActorQ) -> Params:
    return policy.init(jax.random.key(3), jnp.zeros((1, 3)))


def make_rollout(policy: ActorQ, params: Params, **flags: Any) -> Rollout:
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=(T, N, *shape)), jnp.float32)  # noqa: E731
    obs, zeros = normal(3), jnp.zeros((T, N))
    distribution, _ = policy.apply(params, obs)
    action = distribution.sample(jax.random.key(8))
    ends = {name: jnp.asarray(rng.random((T, N)) < 0.2) for name in ("terminated", "truncated")}
    return Rollout(
        obs=obs,
        action=action,
        log_prob=distribution.log_prob(action),
        value=zeros,
        next_value=zeros,
        reward=normal(),
        distribution=distribution,
        next_obs=normal(3),
        **{**ends, **flags},
    )


def probabilities(critic: Any, obs: Any, unit_action: np.ndarray) -> np.ndarray:
    """Return each critic's, [critics, ..., bins]."""
    prior = 40.0 * np.asarray(hl_gauss(jnp.zeros(()), CONFIG.vmin, CONFIG.vmax, NUM_BINS))
    return softmax(prior + mlp_critics(critic, obs, unit_action))


@pytest.mark.slow
@pytest.mark.parametrize("lmbda", [0.0, 0.7, 1.0])
def test_the_returns_are_the_recursion_and_ends_are_told_apart(lmbda: float) -> None:
    policy, key = make_policy(), jax.random.key(5)
    params = make_params(policy)
    rollout = make_rollout(policy, params)
    found = reppo_target(params, rollout, key, policy=policy, config=CONFIG.replace(lmbda=lmbda))

    networks, gamma = params["params"], CONFIG.gamma
    action, log_prob = draw(*mlp_moments(networks, rollout.next_obs), jax.random.normal(key, (T, N, 2)))
    q = (probabilities(networks["critic"], rollout.next_obs, action) @ BINS).min(0)
    reward, terminated, truncated = map(np.asarray, (rollout.reward, rollout.terminated, rollout.truncated))
    expected = np.zeros((T, N))
    for i in range(N):
        following = q[-1, i]
        for t in reversed(range(T)):
            total = reward[t, i]
            if not terminated[t, i]:
                goes_on = not truncated[t, i] and t < T - 1
                ahead = lmbda * following + (1 - lmbda) * q[t, i] if goes_on else q[t, i]
                total += gamma * (ahead - 0.3 * log_prob[t, i])
            expected[t, i] = following = total
    assert (terminated & ~truncated)[:-1].any() and (truncated & ~terminated)[:-1].any()
    np.testing.assert_allclose(found, expected, **CLOSE)


@pytest.mark.slow
def test_a_step_that_is_no_transition_cuts_the_return_before_it() -> None:
    policy, key = make_policy(), jax.random.key(5)
    params, never = make_params(policy), jnp.zeros((T, N), bool)
    rollout = make_rollout(policy, params, terminated=never, truncated=never)
    given: Any = {"policy": policy, "config": CONFIG}
    skipped = replace(rollout, valid=jnp.ones((T, N), bool).at[3].set(False), reward=rollout.reward.at[3].set(100.0))
    cut = replace(rollout, truncated=rollout.truncated.at[2].set(True))
    found, expected = (reppo_target(params, each, key, **given) for each in (skipped, cut))
    np.testing.assert_array_equal(found[:3], expected[:3])


def flat_batch(policy: ActorQ, params: Params) -> dict[str, Any]:
    rollout = make_rollout(policy, params)
    rows = jax.tree.map(
        lambda x: x.reshape(T * N, *x.shape[2:]),
        {"obs": rollout.obs, "action": rollout.action, "distribution": rollout.distribution},
    )
    rng = np.random.default_rng(1)
    weight = jnp.asarray(rng.dirichlet(np.ones(T * N)), jnp.float32)
    target = jnp.asarray(3.0 * rng.normal(size=T * N), jnp.float32)
    return rows | {"key": jax.random.split(jax.random.key(2), T * N), "weight": weight, "value_target": target}


def moved(params: Params, by: float) -> Params:
    """Change the actor, so that it diverges from the one that acted."""
    noise = jax.random.normal(jax.random.key(4), (6, 4))
    networks = params["params"]
    layer = networks["actor"]["linear_1"]
    actor = {**networks["actor"], "linear_1": {**layer, "kernel": layer["kernel"] + by * noise}}
    return {"params": {**networks, "actor": actor}}


def test_the_losses_are_the_formulas_row_by_row() -> None:
    policy = make_policy()
    acted = make_params(policy)
    params, batch = moved(acted, 0.25), flat_batch(policy, acted)
    loss, metrics = reppo_loss(params, batch, policy=policy, config=CONFIG)

    noise = np.stack([jax.random.normal(key, (2,)) for key in batch["key"]])
    action, log_prob = draw(*mlp_moments(params["params"], batch["obs"]), noise)
    critic = params["params"]["critic"]
    q = (probabilities(critic, batch["obs"], action) @ BINS).min(0)
    (old_mean, old_log_std), (mean, log_std) = (mlp_moments(each["params"], batch["obs"]) for each in (acted, params))
    p = probabilities(critic, batch["obs"], np.asarray(batch["action"]) / 2.0)
    expected = {"critic_loss": 0.0, "actor_loss": 0.0, "alpha_loss": 0.0, "kl_coef_loss": 0.0, "kl_exceeded": 0.0}
    for i, weight in enumerate(np.asarray(batch["weight"])):
        ratio = np.exp(old_log_std[i] - log_std[i]) ** 2
        shift = ((old_mean[i] - mean[i]) / np.exp(log_std[i])) ** 2
        kl = np.sum(0.5 * (ratio + shift - 1.0) + log_std[i] - old_log_std[i])
        improves = kl < 0.1
        target = np.asarray(hl_gauss(batch["value_target"][i], -5.0, 5.0, NUM_BINS))
        expected["critic_loss"] += weight * sum(-np.sum(target * np.log(p[c, i])) for c in range(2))
        expected["actor_loss"] += weight * (0.3 * log_prob[i] - q[i] if improves else 0.2 * kl)
        expected["alpha_loss"] += weight * 0.3 * (-log_prob[i] + 0.5 * 2)
        expected["kl_coef_loss"] += weight * -0.2 * (kl - 0.1)
        expected["kl_exceeded"] += weight * (not improves)
    assert 0.1 < expected["kl_exceeded"] < 0.9
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, err_msg=name, **CLOSE)
    np.testing.assert_allclose(loss, sum(value for name, value in expected.items() if "loss" in name), **CLOSE)


def test_each_loss_moves_its_own_parameters_alone() -> None:
    policy = make_policy()
    acted = make_params(policy)
    params, batch = moved(acted, 0.25), flat_batch(policy, acted)

    def loss(networks: Any) -> Any:
        return reppo_loss({"params": networks}, batch, policy=policy, config=CONFIG)[0]

    gradient = jax.jit(jax.grad(loss))(params["params"])
    # ∂/∂log α of α·E[H − H̄] is the loss itself, and so for the divergence's weight
    _, metrics = reppo_loss(params, batch, policy=policy, config=CONFIG)
    np.testing.assert_allclose(gradient["log_alpha"], metrics["alpha_loss"], **CLOSE)
    np.testing.assert_allclose(gradient["log_kl_coef"], metrics["kl_coef_loss"], **CLOSE)

    def cross_entropy(critic: Any) -> Any:
        networks = {**params["params"], "critic": critic}
        logits = policy.apply({"params": networks}, batch["obs"], batch["action"], method="action_values")
        logits += 40.0 * hl_gauss(jnp.zeros(logits.shape[:-1]), CONFIG.vmin, CONFIG.vmax, NUM_BINS)
        target = hl_gauss(batch["value_target"], CONFIG.vmin, CONFIG.vmax, NUM_BINS)
        return jnp.sum(batch["weight"] * optax.softmax_cross_entropy(logits, jnp.stack([target] * 2)).sum(axis=0))

    expected = jax.jit(jax.grad(cross_entropy))(params["params"]["critic"])
    jax.tree.map(partial(np.testing.assert_allclose, **CLOSE), gradient["critic"], expected)


@pytest.mark.slow
def test_the_actors_gradient_is_that_of_finite_differences_through_the_critic() -> None:
    policy = make_policy()
    acted = make_params(policy)
    narrow = (acted, flat_batch(policy, acted))
    with jax.enable_x64(True):
        params, batch = jax.tree.map(_widened, narrow)

        @jax.jit
        def losses(bias: Any) -> Any:
            networks = params["params"]
            layer = {**networks["actor"]["linear_1"], "bias": bias}
            networks = {**networks, "actor": {**networks["actor"], "linear_1": layer}}
            return reppo_loss({"params": networks}, batch, policy=policy, config=CONFIG)

        bias = params["params"]["actor"]["linear_1"]["bias"]
        found = jax.jit(jax.grad(lambda bias: losses(bias)[0]))(bias)
        for i, step in enumerate(1e-6 * np.eye(4)):
            low, high = (losses(bias + sign * step)[1]["actor_loss"] for sign in (-1, 1))
            np.testing.assert_allclose(found[i], (high - low) / 2e-6, rtol=1e-4, atol=1e-6)


def _widened(x: Any) -> Any:
    return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def test_the_loss_does_not_depend_on_the_units_of_actions() -> None:
    losses = []
    for half_width in (1.0, 4.0):
        policy = make_policy(half_width)
        acted = make_params(policy)
        params = moved(acted, 0.25)
        losses.append(reppo_loss(params, flat_batch(policy, acted), policy=policy, config=CONFIG)[1])
    jax.tree.map(partial(np.testing.assert_allclose, **CLOSE), *losses)


def update(rollout: Rollout, params: Params, policy: ActorQ, **options: Any) -> tuple[TrainState, Any]:
    config = CONFIG.replace(**options)
    optimizer = ALGORITHM.make_optimizer(config)
    state = make_train_state(params, optimizer)
    return reppo_update(state, rollout, KEY, policy=policy, optimizer=optimizer, config=config)


SGD: Any = {"optimizer": {"name": "sgd", "learning_rate": 0.1}, "n_epochs": 1, "batch_size": T * N}


@pytest.mark.slow
def test_one_update_is_a_step_along_the_losses_gradient_clipped_for_each_network() -> None:
    """All rows are one state and one action, so that their order does not matter; the entropy's weight is small, so
    that the noise does not either."""
    policy = make_policy(num_critics=1)
    params = make_params(policy)
    params = {"params": {**params["params"], "log_alpha": jnp.float32(-30.0)}}
    rollout = make_rollout(policy, params, terminated=jnp.ones((T, N), bool))
    rollout = jax.tree.map(lambda x: jnp.broadcast_to(x[:1, :1], x.shape), rollout)
    state, metrics = update(rollout, params, policy, max_grad_norm=0.01, **SGD)

    # the episode ends: the return is the reward; KL is 0, below its bound: d(−β·(0 − 0.1))/d log β = 0.1·β
    networks, reward = params["params"], float(rollout.reward[0, 0])
    p = probabilities(networks["critic"], rollout.obs[0, 0], np.asarray(rollout.action[0, 0]) / 2.0)[0]
    d_logits = p - np.asarray(hl_gauss(jnp.float32(reward), -5.0, 5.0, NUM_BINS))
    layers = jax.tree.map(lambda x: np.asarray(x)[0], networks["critic"])
    x = np.concatenate([rollout.obs[0, 0], rollout.action[0, 0] / 2.0])
    hidden = np.tanh(x @ layers["linear_0"]["kernel"] + layers["linear_0"]["bias"])
    d_hidden = (layers["linear_1"]["kernel"] @ d_logits) * (1 - hidden**2)
    gradient = [np.outer(x, d_hidden), d_hidden, np.outer(hidden, d_logits), d_logits]
    norm = np.sqrt(sum(np.sum(g**2) for g in gradient))
    after = jax.tree.map(lambda x: np.asarray(x)[0], state.params["params"]["critic"])
    leaves = [(f"linear_{i}", name) for i in range(2) for name in ("kernel", "bias")]
    for (layer, name), g in zip(leaves, gradient, strict=True):
        step = 0.1 * g * 0.01 / norm
        np.testing.assert_allclose(layers[layer][name] - after[layer][name], step, rtol=1e-2, atol=1e-6)
    np.testing.assert_allclose(metrics["value_target"], reward, rtol=1e-5)
    assert int(state.step) == 1


@pytest.mark.slow
def test_the_weight_of_the_divergence_falls_while_it_is_within_its_bound_and_grows_beyond() -> None:
    policy = make_policy()
    params = make_params(policy)
    rollout = make_rollout(policy, params)
    far = replace(rollout, distribution=policy.apply(moved(params, 1.0), rollout.obs)[0])
    near, beyond = (update(each, params, policy, **SGD)[0].params["params"]["log_kl_coef"] for each in (rollout, far))
    assert near < np.log(0.2) < beyond


@pytest.mark.slow
def test_rows_that_are_no_transitions_change_nothing() -> None:
    policy = make_policy()
    params = make_params(policy)
    valid = jnp.ones((T, N), bool).at[2, 1].set(False).at[4, 0].set(False)
    rollout = replace(make_rollout(policy, params), valid=valid)
    other = replace(
        rollout, reward=jnp.where(valid, rollout.reward, 50.0), obs=jnp.where(valid[..., None], rollout.obs, 9)
    )
    other = replace(other, action=jnp.where(valid[..., None], rollout.action, 0.1))
    one, two = (update(each, params, policy)[0].params for each in (rollout, other))
    jax.tree.map(np.testing.assert_array_equal, one, two)


@pytest.mark.slow
def test_a_minibatch_that_is_not_finite_is_skipped_and_counted() -> None:
    policy = make_policy()
    params = make_params(policy)
    rollout = make_rollout(policy, params)
    state, metrics = update(replace(rollout, obs=rollout.obs * jnp.nan), params, policy)
    assert metrics["skipped_fraction"] == 1.0
    jax.tree.map(np.testing.assert_array_equal, state.params, params)


def raw_run(tmp_path: Path, **trainer: Any) -> dict[str, Any]:
    """Make the config of a tiny run."""
    network = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "tanh"}}
    networks = {"actor": network, "critic": network, "critic_obs_normalization": True}
    cfg = {"num_critics": 1, "num_bins": NUM_BINS, "initial_kl_coef": 0.01}
    policy = {"name": "actor_q", "squash_actions": True, "cfg": cfg, **networks}
    algorithm = {"name": "reppo", "cfg": {"batch_size": 16, "n_epochs": 2, "vmin": -10.0, "vmax": 10.0}}
    env_cfg = {"max_episode_steps": EPISODE}
    return tiny(tmp_path, env_cfg=env_cfg, **trainer) | {"policy": policy, "algorithm": algorithm}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["device", "host", "async"])
def test_a_run_that_goes_on_has_the_bits_of_one_that_was_never_stopped(tmp_path: Path, mode: str) -> None:
    raw = raw_run(tmp_path, iterations=6, collector={"mode": mode, "max_staleness": 0})
    end = assert_goes_on_with_the_same_bits(raw, tmp_path)
    first = build(parse_config(raw)).state.train.params["params"]
    assert end.train.params["params"]["log_kl_coef"] != first["log_kl_coef"]


@pytest.mark.slow
def test_four_devices_compute_what_one_does(tmp_path: Path) -> None:
    raw = raw_run(tmp_path, iterations=3)
    states = []
    for changes in (
        ["trainer.distributed=true"],
        ["trainer.num_envs=16", "algorithm.cfg.batch_size=64", "algorithm.cfg.minibatch_strata=4"],
    ):
        parts = build(parse_config(raw, changes))
        with parts.stepper as stepper:
            states.append(stepper.advance(stepper.start(parts.state), 3, lambda: False)[0].train)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5), *states)


@cases(
    "changes key text",
    (["policy.name=actor_critic", "policy.cfg={}"], "policy.name", "values no actions; set policy.name to actor_q"),
    (["policy.cfg={initial_kl_coef: 0.01}"], "policy.cfg.num_bins", "is missing: reppo's critic gives"),
    (["policy.cfg={num_bins: 51}"], "policy.cfg.initial_kl_coef", "is missing: reppo learns the weight"),
    (["policy={name: flash_q, squash_actions: true}"], "policy.name", "whose statistics only flash_sac updates"),
    (["algorithm.cfg.vmax=-10"], "algorithm.cfg.vmax", "not above vmin"),
    (["algorithm.cfg.batch_size=64"], "algorithm.cfg.batch_size", "a rollout has 32 rows"),
    (["policy.actor.memory={type: gru}"], "policy.actor.memory", "has no memory"),
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, changes: list[str], key: str, text: str) -> None:
    assert_refused(raw_run(tmp_path), changes, key, text)


@pytest.mark.slow
def test_it_learns_the_action_that_pays_and_keeps_its_entropy() -> None:
    """In one step of reward 4 − 4·(a − 1)², a in ±2: the mode comes near 1, the entropy near −½·A of a/2."""
    policy = replace(make_policy(num_critics=1), action_spec=ActionSpec("tanh_normal", (1,), (-2.0,), (2.0,)))
    config = CONFIG.replace(batch_size=64, n_epochs=4, optimizer={"name": "adam", "learning_rate": 0.01})
    optimizer, obs, zeros = ALGORITHM.make_optimizer(config), jnp.ones((2, 64, 1)), jnp.zeros((2, 64))

    def one(state: TrainState, key: Any) -> tuple[TrainState, Any]:
        distribution, _ = policy.apply(state.params, obs)
        action, log_prob = distribution.sample_and_log_prob(key)
        rollout = Rollout(
            obs=obs,
            action=action,
            log_prob=log_prob,
            value=zeros,
            next_value=zeros,
            reward=4.0 - 4.0 * jnp.square(action[..., 0] - 1.0),
            terminated=zeros == 0.0,
            truncated=zeros > 0.0,
            distribution=distribution,
            next_obs=obs,
        )
        return reppo_update(state, rollout, key, policy=policy, optimizer=optimizer, config=config)

    state = init_train_state(policy, optimizer, jax.random.key(0), obs[0])
    state, metrics = jax.jit(lambda state, keys: jax.lax.scan(one, state, keys))(state, jax.random.split(KEY, 150))
    assert abs(policy.apply(state.params, obs[0, 0])[0].mode()[0] - 1.0) < 0.1
    assert abs(metrics["entropy"][-20:].mean() + 0.5) < 0.15
    assert metrics["kl"].max() < 0.3
