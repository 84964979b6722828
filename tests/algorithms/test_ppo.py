"""PPO against a hand-computed update, NumPy, and problems of which each tests one part."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from case_tables import cases, refused
from flax import struct

from ejax.algorithms.ppo import PPOConfig, ppo_advantage, ppo_loss, ppo_update
from ejax.distributions import Normal, action_spec
from ejax.optim import OptimizerConfig, ScheduleConfig, get_learning_rate, make_optimizer
from ejax.policies import ActorCritic, NetworkConfig
from ejax.rollout import reset, unroll
from ejax.types import Params, Rollout, Timestep, TrainState, make_train_state

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
KEY = jax.random.key(0)


def fresh(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    return make_train_state(params, optimizer)


class Bandit:
    """No observation: the mean, its log std and the value are the parameters themselves."""

    def init(self, key: jax.Array, obs: Any) -> dict[str, Any]:
        del key, obs
        return {"params": {"mean": jnp.zeros(1), "log_std": jnp.zeros(1), "value": jnp.zeros(())}}

    def apply(self, params: Params, obs: Any) -> tuple[Normal, jax.Array]:
        p, rows = params["params"], obs.shape[:-1]
        mean, log_std = (jnp.broadcast_to(p[name], (*rows, 1)) for name in ("mean", "log_std"))
        return Normal(mean, log_std), jnp.broadcast_to(p["value"], rows)


BANDIT = Bandit()
SGD = OptimizerConfig(name="sgd", learning_rate=1.0)
SGD_STEP = make_optimizer(SGD)


def two_pulls(reward: tuple[float, ...] = (1.0, 0.0)) -> Rollout:
    """One step of two environments: actions 1 and −1 of a standard normal, then both end."""
    action = jnp.array([[[1.0], [-1.0]]])
    zeros = jnp.zeros((1, 2))
    return Rollout(
        obs=jnp.zeros((1, 2, 1)),
        action=action,
        log_prob=Normal(jnp.zeros((1, 2, 1)), jnp.zeros((1, 2, 1))).log_prob(action),
        value=zeros,
        next_value=zeros,
        reward=jnp.array([reward]),
        terminated=zeros == 0,
        truncated=zeros > 0,
    )


def pull(rollout: Rollout | None = None, state: Any = None, **options: Any) -> Any:
    config = PPOConfig(**{"optimizer": SGD, "n_epochs": 1, "max_grad_norm": math.inf, **options})
    state = fresh(BANDIT.init(None, None), SGD_STEP) if state is None else state
    rollout = two_pulls() if rollout is None else rollout
    return ppo_update(state, rollout, KEY, policy=BANDIT, optimizer=SGD_STEP, config=config)


@pytest.fixture(scope="module")
def by_hand() -> Any:
    return pull()


def test_one_update_by_hand(by_hand: Any) -> None:
    # advantages (1, 0) normalize to ±1/√2; the ratio is 1; d log π/d mean = action, d log π/d log_std = action² − 1 = 0
    #   mean:    −E[A·action] = −1/√2         value:   ½·2·E[V − R] = −½          log_std: −ent_coef·1
    params = by_hand[0].params["params"]
    assert params["mean"] == pytest.approx(1 / math.sqrt(2))
    assert params["value"] == pytest.approx(0.5)
    assert params["log_std"] == pytest.approx(0.01)


def test_the_metrics_of_one_update_by_hand(by_hand: Any) -> None:
    metrics = by_hand[1]
    assert metrics["actor_loss"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["value_loss"] == pytest.approx(0.5)
    assert metrics["entropy"] == pytest.approx(0.5 + 0.5 * math.log(2 * math.pi))
    assert metrics["grad_norm"] == pytest.approx(math.sqrt(0.5 + 0.25 + 0.0001))
    assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["clip_fraction"] == 0.0
    assert metrics["explained_variance"] == pytest.approx(0.0)
    assert metrics["skipped_minibatches"] == 0.0


def test_repeated_updates_compile_once(by_hand: Any) -> None:
    compiled = ppo_update._cache_size()
    pull(two_pulls((0.0, 2.0)), by_hand[0])
    assert ppo_update._cache_size() == compiled


@cases("desired_kl factor", (1e-12, 1 / 1.5), (1e6, 1.5), (None, 1.0), ids=["too far", "too little", "as desired"])
def test_the_rate_changes_once_in_an_update_of_many_steps(desired_kl: float | None, factor: float) -> None:
    acted = Normal(jnp.zeros((1, 2, 1)), jnp.zeros((1, 2, 1)))
    rollout, small = replace(two_pulls(), distribution=acted), OptimizerConfig(name="sgd", learning_rate=1e-3)
    state = fresh(BANDIT.init(None, None), make_optimizer(small))
    options = {"schedule": "adaptive_per_update", "n_epochs": 8, "batch_size": 1, "optimizer": small}
    if desired_kl is None:
        desired_kl = float(pull(rollout, state, desired_kl=1.0, **options)[1]["kl"])
    after, metrics = pull(rollout, state, desired_kl=desired_kl, **options)
    assert get_learning_rate(after.opt_state) == pytest.approx(1e-3 * factor)
    assert metrics["learning_rate"] == pytest.approx(1e-3 * factor) and metrics["kl"] > 0.0
    # a rate at its limit stays there
    held = {"minimum_learning_rate": 1e-3, "maximum_learning_rate": 1e-3}
    after, _ = pull(rollout, state, desired_kl=desired_kl, **options, **held)
    assert get_learning_rate(after.opt_state) == pytest.approx(1e-3)


def test_a_rollout_of_one_transition_trains_without_nan() -> None:
    rollout = jax.tree.map(lambda x: x[:, :1], two_pulls())
    state, _ = pull(rollout)
    assert state.params["params"]["mean"] == 0.0  # a single advantage normalizes to 0
    assert state.params["params"]["value"] == pytest.approx(1.0)


def test_a_reward_that_is_not_finite_changes_nothing_and_is_counted() -> None:
    state, metrics = pull(two_pulls((math.nan, 0.0)))
    assert all(not leaf.any() for leaf in jax.tree.leaves(state.params))
    assert metrics["skipped_minibatches"] == 1.0


def test_the_schedule_steps_once_for_each_update() -> None:
    options = {"lr_scheduler": ScheduleConfig(name="linear", kwargs={"total_iters": 4}), "n_epochs": 2}
    state, metrics = pull(**options)
    assert metrics["learning_rate"] == pytest.approx(0.75)
    state, metrics = pull(state=state, **options)
    assert metrics["learning_rate"] == pytest.approx(0.5)
    assert get_learning_rate(state.opt_state) == pytest.approx(0.5)


def test_target_kl_stops_the_remaining_minibatches() -> None:
    # the first step moves the mean by 1/√2, which the second sees
    stopped, metrics = pull(target_kl=1e-3, n_epochs=5)
    assert metrics["stopped_early"] == 1.0
    assert stopped.params["params"]["mean"] == pytest.approx(1 / math.sqrt(2))


def advantage_by_loop(rollout: Rollout, mode: str, gamma: float, gae_lambda: float, reward_scale: float) -> np.ndarray:
    r = {f: np.asarray(getattr(rollout, f)) for f in ("reward", "value", "next_value", "terminated", "truncated")}
    T, N = r["reward"].shape
    advantage = np.zeros((T, N))
    for n in range(N):
        following = 0.0
        for t in reversed(range(T)):
            done = r["terminated"][t, n] or r["truncated"][t, n]
            reward = reward_scale * r["reward"][t, n]
            if mode == "exact":
                reward += 0.0 if r["terminated"][t, n] else gamma * r["next_value"][t, n]
            elif not done:
                reward += gamma * r["next_value"][t, n]
            if mode == "embodichain-0.3" and r["truncated"][t, n]:
                reward += gamma * r["value"][t, n]
            following = reward - r["value"][t, n] + (0.0 if done else gamma * gae_lambda * following)
            advantage[t, n] = following
    return advantage


@pytest.fixture(scope="module")
def mixed_rollout() -> Rollout:
    rng = np.random.default_rng(5)
    reward, value, next_value = jnp.asarray(rng.normal(size=(3, 9, 7)), jnp.float32)
    terminated, truncated = jnp.asarray(rng.random((2, 9, 7)) < 0.3)
    zeros = jnp.zeros((9, 7))
    return Rollout(
        obs=zeros[..., None],
        action=zeros[..., None],
        log_prob=zeros,
        value=value,
        next_value=next_value,
        reward=reward,
        terminated=terminated,
        truncated=truncated,
    )


@pytest.mark.parametrize("mode", ["exact", "embodichain", "embodichain-0.2", "embodichain-0.3"])
def test_every_timeout_rule_is_its_loop(mixed_rollout: Rollout, mode: str) -> None:
    config = PPOConfig(timeout_bootstrap=mode, normalize_advantage=False, gamma=0.9, gae_lambda=0.8, reward_scale=0.5)
    advantage, target = jax.jit(partial(ppo_advantage, config=config))(mixed_rollout)
    expected = advantage_by_loop(mixed_rollout, mode, 0.9, 0.8, 0.5)
    np.testing.assert_allclose(advantage, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(target, expected + mixed_rollout.value, rtol=1e-4, atol=1e-5)


def test_advantages_are_normalized_over_the_rollout_unless_left_to_the_minibatches(mixed_rollout: Rollout) -> None:
    raw = ppo_advantage(mixed_rollout, config=PPOConfig(normalize_advantage=False))[0]
    whole = ppo_advantage(mixed_rollout, config=PPOConfig())[0]
    later = ppo_advantage(mixed_rollout, config=PPOConfig(normalize_advantage_per_mini_batch=True))[0]
    np.testing.assert_allclose(whole, (raw - raw.mean()) / np.std(raw, ddof=1), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(later, raw)


def test_arrays_that_are_not_time_by_envs_are_refused() -> None:
    rollout = jax.tree.map(lambda x: x[0], two_pulls())
    refused(lambda: ppo_advantage(rollout, config=PPOConfig()), match=r"\[T, N\].*\(2,\)")


def loss_batch() -> dict[str, Any]:
    rng = np.random.default_rng(6)
    batch = {name: rng.normal(size=8) for name in ("value", "advantage", "value_target")}
    batch |= {"obs": np.zeros((8, 1)), "action": rng.normal(size=(8, 1)), "log_prob": rng.normal(-1.0, 0.3, size=8)}
    return batch | {"weight": rng.dirichlet(np.ones(8))}


LOSS_OPTIONS = {"use_clipped_value_loss": True, "action_bound_coef": 0.7, "ent_coef": 0.1, "vf_coef": 0.3}
LOSS_PARAMS = {"params": {"mean": np.array([1.5]), "log_std": np.array([-0.4]), "value": np.array(0.2)}}


def loss_by_numpy(params: Params, batch: dict[str, Any]) -> Any:
    mean, log_std, value = (params["params"][name] for name in ("mean", "log_std", "value"))
    w = batch["weight"]
    log_prob = (-0.5 * ((batch["action"] - mean) / np.exp(log_std)) ** 2 - log_std - 0.5 * np.log(2 * np.pi))[:, 0]
    ratio = np.exp(log_prob - batch["log_prob"])
    actor = -np.minimum(ratio * batch["advantage"], np.clip(ratio, 0.8, 1.2) * batch["advantage"])
    clipped = batch["value"] + np.clip(value - batch["value"], -0.2, 0.2)
    squared = np.maximum((value - batch["value_target"]) ** 2, (clipped - batch["value_target"]) ** 2)
    entropy = 0.5 + 0.5 * np.log(2 * np.pi) + log_std[0]
    return (w * (actor + 0.3 * squared)).sum() - 0.1 * entropy + 0.7 * (mean[0] - 1.0) ** 2


def test_the_loss_is_its_equation_under_weights() -> None:
    loss = jax.jit(partial(ppo_loss, policy=BANDIT, config=PPOConfig(**LOSS_OPTIONS)))
    value, _ = loss(LOSS_PARAMS, loss_batch())
    assert value == pytest.approx(loss_by_numpy(LOSS_PARAMS, loss_batch()), rel=1e-4)


def test_the_gradient_of_the_loss_is_its_finite_difference() -> None:
    with jax.enable_x64(True):
        loss = partial(ppo_loss, policy=BANDIT, config=PPOConfig(**LOSS_OPTIONS))
        gradient = jax.device_get(jax.jit(jax.grad(loss, has_aux=True))(LOSS_PARAMS, loss_batch())[0])
    for name, value in LOSS_PARAMS["params"].items():
        above, below = (
            loss_by_numpy({"params": {**LOSS_PARAMS["params"], name: value + shift}}, loss_batch())
            for shift in (1e-5, -1e-5)
        )
        assert gradient["params"][name].sum() == pytest.approx((above - below) / 2e-5, rel=1e-6)


def test_a_minibatch_is_what_torchs_chunk_cuts() -> None:
    # torch.arange(10).chunk(n): ceil(10 / n) each
    sizes = [PPOConfig(num_mini_batches=n).minibatches(10, 1, 1).batch_size for n in (1, 2, 3, 4, 10)]
    assert sizes == [10, 5, 4, 3, 1]
    assert PPOConfig(batch_size=7).minibatches(10, 1, 1).batch_size == 7


@cases(
    "given text",
    ({"schedule": "adaptive"}, "desired_kl"),
    ({"schedule": "adaptive", "desired_kl": 0.01, "lr_scheduler": {"name": "linear"}}, "linear"),
    ({"minimum_learning_rate": 0.1, "maximum_learning_rate": 0.01}, "below minimum_learning_rate 0.1"),
    ({"batch_size": 0}, "batch_size"),
    ({"gamma": 1.5}, "gamma"),
    ({"clip_coeff": 0.2}, "clip_coeff"),
)
def test_wrong_options_are_refused_by_name(given: dict[str, Any], text: str) -> None:
    refused(PPOConfig, **given, match=text)


KINDS = ("constant", "observed", "delayed", "chosen", "matched")
GAMMA = 0.5


@struct.dataclass
class ProbeState:
    kind: jax.Array
    bit: jax.Array
    second: jax.Array


@dataclass(frozen=True)
class Probes:
    """Episodes of five kinds; the observation is [which kind, a random bit, whether this is the second step].

    Each kind needs one part of the update to be right. Source: rejax's test environments.
    Rewards: constant 1; observed: ±1 by the bit; delayed: 1 after a second step; chosen: the action (0 or 1);
    matched: 1 where the action is the bit.
    """

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (7,))
    action_space = gymnasium.spaces.Discrete(2)
    max_episode_steps = 2

    def reset(self, key: jax.Array) -> tuple[ProbeState, Any]:
        key_kind, key_bit = jax.random.split(key)
        kind = jax.random.randint(key_kind, (), 0, len(KINDS))
        state = ProbeState(kind, jax.random.bernoulli(key_bit).astype(jnp.float32), jnp.zeros(()))
        return state, self.observe(state)

    def step(self, state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, Timestep]:
        del key
        reward = jnp.stack([1.0, 2 * state.bit - 1, state.second, action * 1.0, (action == state.bit) * 1.0])[
            state.kind
        ]
        ended = (state.kind != KINDS.index("delayed")) | (state.second > 0)
        state = replace(state, second=jnp.ones(()))
        never = jnp.zeros((), bool)
        return state, Timestep(obs=self.observe(state), reward=reward, terminated=ended, truncated=never, info={})

    def observe(self, state: Any) -> jax.Array:
        return jnp.concatenate([jax.nn.one_hot(state.kind, len(KINDS)), jnp.stack([state.bit, state.second])])


@pytest.fixture(scope="module")
def trained() -> Any:
    """``(value, probability of action 1)`` by kind, bit and second, after training on all probes at once."""
    env, network = Probes(), NetworkConfig(hidden_sizes=(32,), activation="tanh")
    policy = ActorCritic(action_spec(env.action_space), network, network)
    adam = OptimizerConfig(learning_rate=0.01)
    config = PPOConfig(optimizer=adam, gamma=GAMMA, n_epochs=4, batch_size=256, ent_coef=0.0, max_grad_norm=10.0)
    optimizer = make_optimizer(config.optimizer)
    carry = reset(env, KEY, 128)
    state = fresh(policy.init(KEY, carry.obs), optimizer)

    @jax.jit
    def train(state: Any, carry: Any) -> Any:
        def one(i: Any, both: Any) -> tuple[Any, Any]:
            state, carry = both
            key_collect, key_update = jax.random.split(jax.random.fold_in(KEY, i))
            rollout, carry = unroll(policy, env, state.params, carry, key_collect, num_steps=8)
            state, _ = ppo_update(state, rollout, key_update, policy=policy, optimizer=optimizer, config=config)
            return state, carry

        return jax.lax.fori_loop(0, 100, one, (state, carry))

    state, _ = train(state, carry)

    def ask(kind: str, bit: float = 0.0, second: float = 0.0) -> tuple[float, float]:
        obs = env.observe(ProbeState(jnp.asarray(KINDS.index(kind)), jnp.asarray(bit), jnp.asarray(second)))
        distribution, value = policy.apply(state.params, obs)
        return float(value), float(jnp.exp(distribution.log_prob(jnp.asarray(1))))

    return ask


@pytest.mark.slow
def test_probe_a_constant_reward_is_the_value(trained: Any) -> None:
    assert trained("constant")[0] == pytest.approx(1.0, abs=0.1)


def test_probe_a_reward_that_the_observation_tells_is_the_value(trained: Any) -> None:
    assert trained("observed", bit=1.0)[0] == pytest.approx(1.0, abs=0.1)
    assert trained("observed", bit=0.0)[0] == pytest.approx(-1.0, abs=0.1)


def test_probe_a_later_reward_is_discounted(trained: Any) -> None:
    assert trained("delayed", second=1.0)[0] == pytest.approx(1.0, abs=0.1)
    assert trained("delayed", second=0.0)[0] == pytest.approx(GAMMA, abs=0.1)


def test_probe_the_rewarded_action_is_chosen(trained: Any) -> None:
    assert trained("chosen")[1] > 0.95


@pytest.mark.slow
def test_probe_the_action_that_the_observation_asks_for_is_chosen(trained: Any) -> None:
    assert trained("matched", bit=1.0)[1] > 0.95
    assert trained("matched", bit=0.0)[1] < 0.05


@pytest.mark.slow
def test_dropout_leaves_the_ratio_at_one_before_the_first_step() -> None:
    env, network = Probes(), NetworkConfig(hidden_sizes=(32,), dropout_p=0.5)
    policy = ActorCritic(action_spec(env.action_space), network, network)
    carry = reset(env, KEY, 16)
    params = jax.jit(policy.init)(KEY, carry.obs)
    rollout, _ = unroll(policy, env, params, carry, KEY, num_steps=4, dropout=True)
    batch = {"obs": rollout.obs, "action": rollout.action, "log_prob": rollout.log_prob, "value": rollout.value}
    batch |= {"advantage": rollout.reward, "value_target": rollout.reward}
    batch = {name: x.reshape(64, *x.shape[2:]) for name, x in batch.items()}
    seeds = {"dropout_seed": rollout.dropout_seed.reshape(64)}
    loss = jax.jit(partial(ppo_loss, policy=policy, config=PPOConfig()))
    assert loss(params, batch | seeds)[1]["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert loss(params, batch)[1]["approx_kl"] > 1e-3  # with other units dropped it is not
