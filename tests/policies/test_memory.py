"""Policies with memory: their networks, sequences, updates, and runs."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import chex
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from pytest import MonkeyPatch
from tiny import NETWORK as NETWORK_BLOCK
from tiny import STEPS, tiny

from ejax.algorithms.batch import apply_to_batch, evaluate_rollout, flatten_rollout, reference_log_prob, sequence_cut
from ejax.algorithms.bc import ALGORITHM as BC
from ejax.algorithms.bc import BCConfig, bc_loss
from ejax.algorithms.ppo import PPOConfig, ppo_loss, ppo_update
from ejax.algorithms.sgd import _in_chunks
from ejax.config import ConfigError, parse_config
from ejax.distributions import ActionSpec
from ejax.envs.host.pure_host import PureHostEnv
from ejax.episodes import record_episodes
from ejax.evaluation import evaluate, evaluate_host
from ejax.optim import make_optimizer
from ejax.policies.mlp import NetworkConfig
from ejax.policies.recurrence import MemoryConfig, Recurrence, history_step
from ejax.policies.with_memory import ActorCriticWithMemory
from ejax.rollout import reset, unroll, with_memory
from ejax.run import train
from ejax.schema.registry import ENVS
from ejax.store.checkpoint import load_checkpoint
from ejax.training.build import build
from ejax.types import Key, PolicyWithMemory, Timestep, make_train_state

KEY = jax.random.key(0)
NETWORK = NetworkConfig(hidden_sizes=(8,), activation="tanh")
NUM_OBSERVED, NUM_STEPS, NUM_ROWS = 3, 6, 4
MEMORIES = {
    "gru": MemoryConfig(type="gru", hidden_size=5, num_layers=2, encoder=NETWORK),
    "lstm": MemoryConfig(type="lstm", hidden_size=5, num_layers=2),
    "history": MemoryConfig(type="history", length=3),
}

OF_ACTOR, NONE = MemoryConfig(type="actor"), MemoryConfig(type="none")


def sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-x))


def layers_of(config: MemoryConfig) -> tuple[Any, Any]:
    """Make a recurrence without an encoder, and random parameters."""
    module = Recurrence(config.model_copy(update={"encoder": None}))
    x, memory = jnp.zeros((NUM_ROWS, NUM_OBSERVED)), jnp.zeros((NUM_ROWS, config.size(NUM_OBSERVED)))
    return module, jax.jit(module.init)(KEY, x, memory)


def numpy_steps(kind: str, xs: Any, params: Any, depth: int, width: int) -> Any:
    """Compute the outputs [T, B, H] of torch's formulas from zeros, gate by gate."""
    for layer in range(depth):
        w, u = (np.asarray(params[f"weight_{name}_l{layer}"], np.float64) for name in ("ih", "hh"))
        b, c = (np.asarray(params[f"bias_{name}_l{layer}"], np.float64) for name in ("ih", "hh"))
        h = cell = np.zeros((xs.shape[1], width))
        outputs = []
        for x in xs:
            given, own = (
                np.split(x @ w + b, w.shape[1] // width, axis=1),
                np.split(h @ u + c, w.shape[1] // width, axis=1),
            )
            if kind == "gru":
                r, z = sigmoid(given[0] + own[0]), sigmoid(given[1] + own[1])
                h = (1 - z) * np.tanh(given[2] + r * own[2]) + z * h
            else:
                i, f, g, o = (a + b for a, b in zip(given, own, strict=True))
                cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
                h = sigmoid(o) * np.tanh(cell)
            outputs.append(h)
        xs = np.stack(outputs)
    return xs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_recurrences_follow_their_equations(kind: str) -> None:
    config = MEMORIES[kind]
    module, params = layers_of(config)
    xs = np.random.default_rng(0).normal(size=(NUM_STEPS, NUM_ROWS, NUM_OBSERVED))
    memory, made = jnp.zeros((NUM_ROWS, config.size(NUM_OBSERVED))), []
    step = jax.jit(module.apply)
    for x in xs:
        y, memory = step(params, jnp.asarray(x, jnp.float32), memory)
        made.append(y)
    expected = numpy_steps(kind, xs, params["params"], config.depth, config.width)
    np.testing.assert_allclose(np.stack(made), expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_torch_loads_the_parameters_and_gives_the_same(kind: str) -> None:
    torch = pytest.importorskip("torch")
    config = MEMORIES[kind]
    module, params = layers_of(config)
    theirs = (torch.nn.GRU if kind == "gru" else torch.nn.LSTM)(NUM_OBSERVED, config.width, config.depth)
    arrays = {name: torch.tensor(np.asarray(x.T)) for name, x in params["params"].items()}
    theirs.load_state_dict(arrays, strict=True)
    xs = np.random.default_rng(1).normal(size=(NUM_STEPS, NUM_ROWS, NUM_OBSERVED)).astype(np.float32)
    with torch.no_grad():
        expected, _ = theirs(torch.tensor(xs))
    memory = jnp.zeros((NUM_ROWS, config.size(NUM_OBSERVED)))
    made, _ = module.apply(params, jnp.asarray(xs), memory, jnp.zeros((NUM_STEPS, NUM_ROWS), bool))
    np.testing.assert_allclose(made, expected.numpy(), atol=1e-6)


@pytest.mark.slow
def test_torchs_init_is_uniform_and_the_other_orthogonal_gate_by_gate() -> None:
    _, params = layers_of(MEMORIES["gru"])
    bound = 1.0 / np.sqrt(MEMORIES["gru"].width)
    every = np.concatenate([np.ravel(x) for x in jax.tree.leaves(params)])
    assert np.abs(every).max() <= bound and np.abs(every).max() > 0.9 * bound
    _, params = layers_of(MEMORIES["lstm"].model_copy(update={"orthogonal_init": True}))
    for gate in np.split(params["params"]["weight_hh_l1"], 4, axis=1):
        np.testing.assert_allclose(gate.T @ gate, np.eye(5), atol=1e-5)
    assert not params["params"]["bias_hh_l0"].any()


def policy_of(kind: str, **fields: Any) -> ActorCriticWithMemory:
    memory = MEMORIES[kind]
    given = {"critic": NETWORK, "critic_memory": memory, "actor_obs_normalization": True} | fields
    widths = {"actor_width": NUM_OBSERVED, "critic_width": NUM_OBSERVED}
    return ActorCriticWithMemory(ActionSpec("normal", (2,)), actor=NETWORK, actor_memory=memory, **widths, **given)


def init(policy: Any, obs: Any) -> Any:
    return jax.jit(policy.init)(KEY, obs)


def with_statistics(params: Any) -> Any:
    """Add a normalizer that is not the identity to the parameters."""
    if "normalizer" not in params:
        return params
    statistics = {"mean": jnp.full(NUM_OBSERVED, 0.3), "variance": jnp.full(NUM_OBSERVED, 2.0), "count": jnp.ones(())}
    return {**params, "normalizer": dict.fromkeys(params["normalizer"], statistics)}


@pytest.fixture(scope="module")
def sequence() -> tuple[Any, Any]:
    """Observations [L, B, F], and the steps [L, B] that episodes start at: none, the first one, one in between, two."""
    obs = jax.random.normal(KEY, (NUM_STEPS, NUM_ROWS, NUM_OBSERVED))
    first = jnp.zeros((NUM_STEPS, NUM_ROWS), bool).at[0, 1].set(True).at[3, 2].set(True).at[2, 3].set(True)
    return obs, first.at[5, 3].set(True)


@pytest.mark.slow
@cases(
    "kind fields",
    *((kind, {}) for kind in MEMORIES),
    *(("gru", fields) for fields in ({"critic_memory": OF_ACTOR}, {"critic_memory": NONE}, {"critic": None})),
    ids=str,
)
def test_a_sequence_is_its_steps_one_after_the_other(kind: str, fields: dict[str, Any], sequence: Any) -> None:
    policy, (obs, first) = policy_of(kind, **fields), sequence
    params = with_statistics(init(policy, obs[0]))
    memory = jax.tree.map(lambda x: x + 1.0, policy.init_memory(NUM_ROWS))
    step = jax.jit(lambda obs, memory: policy.apply(params, obs, memory=memory))
    distribution, value, after = jax.jit(policy.apply)(params, obs, memory=memory, first=first)
    for t in range(NUM_STEPS):
        memory = jax.tree.map(lambda x, t=t: jnp.where(first[t][:, None], 0.0, x), memory)
        one, its_value, memory = step(obs[t], memory)
        np.testing.assert_allclose(distribution.mean[t], one.mean, atol=1e-6)
        np.testing.assert_allclose(value[t], its_value, atol=1e-6)
    chex.assert_trees_all_close(after, memory, rtol=1e-7, atol=1e-6)


@pytest.mark.slow_cases("[lstm]")
@pytest.mark.parametrize("kind", MEMORIES)
def test_what_was_before_an_episodes_start_has_no_effect_nor_gradient(kind: str, sequence: Any) -> None:
    policy, (obs, _) = policy_of(kind), sequence
    params = init(policy, obs[0])
    first = jnp.zeros((NUM_STEPS, NUM_ROWS), bool).at[3].set(True)

    memory = policy.init_memory(NUM_ROWS)

    def last_mean(obs: Any, first: Any) -> Any:
        mean = policy.apply(params, obs, memory=memory, first=first)[0].mean[-1]
        return jnp.square(mean).sum(), mean

    slope, mean = jax.jit(jax.grad(last_mean, has_aux=True))(obs, first)
    _, alone = jax.jit(last_mean)(obs[3:], first[3:] & False)
    np.testing.assert_allclose(mean, alone, atol=1e-6)
    assert not slope[:3].any() and slope[3:].any(axis=(1, 2)).all()


def test_a_history_begins_with_copies_of_an_episodes_first_observation() -> None:
    policy = policy_of("history", actor_obs_normalization=False)
    obs = jnp.arange(12.0).reshape(4, 1, 3)
    memory: Any = policy.init_memory(1)
    seen = []
    state = memory["actor"]
    for x in obs:
        window, state = history_step(x, state, length=3)
        seen.append(window[0, :, 0].tolist())
    assert seen == [[0.0, 0.0, 0.0], [0.0, 0.0, 3.0], [0.0, 3.0, 6.0], [3.0, 6.0, 9.0]]


@pytest.mark.slow
def test_without_a_memory_an_episode_starts_and_statistics_see_single_observations() -> None:
    for kind in MEMORIES:
        policy = policy_of(kind)
        assert isinstance(policy, PolicyWithMemory)
        obs = jax.random.normal(KEY, (7, NUM_OBSERVED))
        params = init(policy, obs)
        given = jax.jit(policy.apply)(params, obs, memory=policy.init_memory(7))[0]
        ((distribution, *_), after) = jax.jit(partial(policy.apply, observe=True, mutable=["normalizer"]))(params, obs)
        np.testing.assert_allclose(distribution.mean, given.mean, atol=1e-6)
        statistics = after["normalizer"]["actor_obs_normalizer"]
        np.testing.assert_allclose(statistics["mean"], obs.mean(axis=0), rtol=1e-5)
        assert statistics["count"] == 7.0


@dataclass(frozen=True)
class Recall:
    """A cue of ±1 is shown at the first step; the action of the last one earns 1 − |action − cue|."""

    length: int = 4

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (NUM_OBSERVED,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

    @property
    def max_episode_steps(self) -> int:
        return self.length

    def reset(self, key: Key) -> tuple[Any, Any]:
        state = {"cue": jax.random.rademacher(key, (), jnp.float32), "t": jnp.zeros(())}
        return state, self._obs(state)

    def step(self, state: Any, action: Any, key: Key) -> tuple[Any, Timestep]:
        del key
        state = {**state, "t": state["t"] + 1.0}
        last = state["t"] >= self.length
        reward = jnp.where(last, 1.0 - jnp.abs(action[0] - state["cue"]), 0.0)
        return state, Timestep(
            obs=self._obs(state), reward=reward, terminated=last, truncated=jnp.bool_(False), info={}
        )

    def _obs(self, state: Any) -> Any:
        begins = (state["t"] == 0.0).astype(jnp.float32)
        return jnp.stack([begins * state["cue"], state["t"] / self.length, begins])


ENV = Recall()
OPTIONS = {"batch_size": 16, "n_epochs": 1, "gamma": 0.9, "ent_coef": 0.0}


@pytest.fixture(scope="module", params=MEMORIES)
def collected(request: Any) -> Any:
    """``(policy, params, rollout)``: eight steps of eight environments, two steps into their second episodes."""
    policy = policy_of(request.param)
    carry = with_memory(reset(ENV, KEY, 8), policy)
    params = with_statistics(init(policy, carry.obs))
    _, carry = unroll(policy, ENV, params, carry, KEY, num_steps=6)
    return policy, params, unroll(policy, ENV, params, carry, jax.random.key(1), num_steps=8)[0]


@pytest.mark.slow_cases("lstm", "gru-8")
@pytest.mark.parametrize("length", [2, 8])
def test_sequences_see_what_the_policy_saw_when_it_acted(collected: Any, length: int) -> None:
    policy, params, rollout = collected
    log_prob, value = jax.jit(evaluate_rollout, static_argnums=2, static_argnames="policy")(
        params, rollout, length, policy=policy
    )
    np.testing.assert_allclose(log_prob, rollout.log_prob, atol=1e-5)
    np.testing.assert_allclose(value, rollout.value, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strata", [1, 2])
def test_sequences_stay_whole_and_weigh_what_their_steps_do(collected: Any, strata: int) -> None:
    policy, params, rollout = collected
    mask = jnp.arange(64.0).reshape(8, 8)
    batch = flatten_rollout(rollout, strata, 4, mask=mask)
    assert batch["obs"].shape == (16, 4, 3) and batch["first"].shape == (16, 4)
    rows = batch["share"] * batch["mask"][:, None]
    second = 4 if strata == 2 else 1  # row 4 of two strata: the second half of the first environment
    np.testing.assert_allclose(rows[second], mask[4:, 0] if strata == 2 else mask[:4, 1], rtol=1e-6)
    batch["weight"] = batch.pop("mask") / mask.sum()
    distribution, _, steps = apply_to_batch(policy, params, batch)
    np.testing.assert_allclose(distribution.log_prob(steps["action"]), steps["log_prob"], atol=1e-5)
    np.testing.assert_allclose(steps["weight"].sum(), 1.0, rtol=1e-6)


def ratio_of_first_step(policy: Any, params: Any, rollout: Any, **options: Any) -> Any:
    config = PPOConfig(**OPTIONS | {"batch_size": 64} | options)
    optimizer = make_optimizer(config.optimizer)
    state = make_train_state(params, optimizer)
    return ppo_update(state, rollout, KEY, policy=policy, optimizer=optimizer, config=config)[1]


@pytest.mark.slow
@cases("options", {}, {"staleness_correction": "vtrace"}, {"schedule": "adaptive", "desired_kl": 0.01}, ids=str)
def test_the_ratio_is_one_before_the_first_gradient_step(collected: Any, options: dict[str, Any]) -> None:
    metrics = ratio_of_first_step(*collected, sequence_length=4, **options)
    assert metrics["approx_kl"] < 1e-10 and metrics["clip_fraction"] == 0.0
    assert metrics.get("kl", 0.0) < 1e-10 and metrics.get("behave_approx_kl", 0.0) < 1e-10


@pytest.mark.slow
def test_dropped_units_are_those_of_when_the_policy_acted() -> None:
    network = NETWORK.model_copy(update={"dropout_p": 0.5})
    memory = MemoryConfig(type="gru", hidden_size=5, encoder=network)
    policy = policy_of("gru").clone(actor=network, actor_memory=memory)
    carry = with_memory(reset(ENV, KEY, 8), policy)
    params = init(policy, carry.obs)
    rollout, _ = unroll(policy, ENV, params, carry, KEY, num_steps=8, dropout=True)
    assert ratio_of_first_step(policy, params, rollout)["approx_kl"] < 1e-10
    assert ratio_of_first_step(policy, params, replace(rollout, dropout_seed=None))["approx_kl"] > 1e-4


@pytest.mark.slow
def test_steps_that_are_no_transitions_have_no_part_and_end_what_is_remembered(collected: Any) -> None:
    policy, params, rollout = collected
    valid = jnp.ones((8, 8), bool).at[3].set(False)
    junk = jax.tree.map(lambda x: x.at[3].set(7.0), rollout.obs)
    broken = replace(rollout, valid=valid, obs=junk)
    log_prob, _ = evaluate_rollout(params, broken, 8, policy=policy)
    ended = replace(rollout, terminated=rollout.terminated.at[3].set(True))
    expected, _ = evaluate_rollout(params, ended, 8, policy=policy)
    np.testing.assert_allclose(log_prob[4:], expected[4:], atol=1e-6)
    np.testing.assert_allclose(log_prob[:3], expected[:3], atol=1e-6)


@pytest.mark.slow
def test_the_references_memory_begins_with_the_episode_or_the_rollout(collected: Any) -> None:
    policy, params, rollout = collected
    state = make_train_state(params, make_optimizer(PPOConfig().optimizer), reference=params)
    log_prob = reference_log_prob(state, rollout, policy=policy, kl_coef=1.0)
    begins = int(jnp.argmax(rollout.done[:, 0])) + 1
    np.testing.assert_allclose(log_prob[begins:], rollout.log_prob[begins:], atol=1e-5)
    assert np.abs(log_prob[0] - rollout.log_prob[0]).max() > 1e-4  # of an episode that began before


def test_the_length_of_sequences_divides_rollouts_and_minibatches(collected: Any) -> None:
    policy, _, rollout = collected

    def length(**options: Any) -> int | None:
        return sequence_cut(policy, rollout, PPOConfig(**options))[1]

    assert [length(batch_size=size) for size in (64, 12, 3)] == [8, 4, 1]
    assert length(num_mini_batches=2) == 8
    assert length(batch_size=8, minibatch_strata=2) == 4
    assert length(batch_size=64, sequence_length=2) == 2
    refused(length, batch_size=64, sequence_length=3, match="do not make whole sequences of 3")


@pytest.mark.slow
def test_gradients_in_chunks_add_up(collected: Any) -> None:
    policy, params, rollout = collected
    advantage, target = jax.random.normal(KEY, (2, 8, 8))
    batch = flatten_rollout(rollout, 1, 4, advantage=advantage, value=rollout.value, value_target=target)
    batch["weight"] = batch.pop("mask") / 64.0

    def grad(trained: Any, params: Any, batch: Any) -> Any:
        loss = partial(ppo_loss, policy=policy, config=PPOConfig())
        return jax.grad(lambda trained: loss({**params, "params": trained}, batch), has_aux=True)(trained)

    whole, parts = (
        each(params["params"], params, batch)[0] for each in (grad, _in_chunks(grad, 4, skip_weightless=True))
    )
    chex.assert_trees_all_close(whole, parts, rtol=1e-7, atol=1e-6)


@pytest.mark.slow
@cases("memory", None, {"type": "gru", "hidden_size": 16}, {"type": "history", "length": 4}, ids=str)
def test_recalling_a_cue_takes_a_memory(memory: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = {"network_cfg": {"hidden_sizes": [16], "activation": "tanh"}, "memory": memory}
    trainer = {"num_envs": 64, "buffer_size": 8, "iterations": 60, "console": False, "seed": 3}
    optimizer = {"name": "adam", "learning_rate": 0.003}
    raw = {
        "trainer": trainer,
        "env": {"id": "recall"},
        "policy": {
            "name": "actor_critic",
            "actor": actor,
            "critic": {"network_cfg": actor["network_cfg"]},
            "initial_log_std": -1.0,
        },
        "algorithm": {"name": "ppo", "cfg": {**OPTIONS, "batch_size": 128, "n_epochs": 4, "optimizer": optimizer}},
    }
    monkeypatch.setitem(ENVS, "recall", Recall)
    parts = build(parse_config(raw))
    state = parts.stepper.start(parts.state)
    moved = parts.stepper.advance(state, 60, lambda: False)
    assert moved is not None
    params = moved[0].train.params
    score = float(evaluate(parts.policy, ENV, params, KEY, num_envs=64, num_episodes=64)["return"].mean())
    assert score > 0.9 if memory else score < 0.1  # without one the best is 0, in the middle


def remembering(folder: Path, memory: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    raw = tiny(folder, **changes)
    raw["policy"]["actor"] = {**NETWORK_BLOCK, "memory": memory or {"type": "lstm", "hidden_size": 4}}
    return raw


COLLECTORS = {"device": {}, "host": {"mode": "host", "num_groups": 2}, "async": {"mode": "async", "max_staleness": 0}}


@pytest.mark.slow
@pytest.mark.parametrize("where", COLLECTORS)
def test_a_run_resumes_to_the_same_bits_with_what_it_remembered(where: str, tmp_path: Path) -> None:
    raw = remembering(tmp_path, collector=COLLECTORS[where], save_frequency_updates=1)
    whole = train(parse_config(raw, ["trainer.iterations=3"]), run_dir=tmp_path / "whole")
    train(parse_config(raw, ["trainer.iterations=1"]), run_dir=tmp_path / "cut")  # in the middle of episodes
    cut = train(parse_config(raw, ["trainer.iterations=3"]), resume="latest", run_dir=tmp_path / "cut")
    assert whole.latest_checkpoint_path is not None and cut.latest_checkpoint_path is not None
    states = [load_checkpoint(run.latest_checkpoint_path, build(parse_config(raw)).state)[0] for run in (whole, cut)]
    chex.assert_trees_all_equal(*states)
    memories = [x for path, x in jax.tree_util.tree_leaves_with_path(states[0].envs) if "memory" in str(path)]
    assert memories and all(np.any(x) for x in memories)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["device", "host"])
def test_all_collectors_see_what_the_policy_saw_when_it_acted(where: str, tmp_path: Path) -> None:
    raw = remembering(tmp_path, collector=COLLECTORS[where], ppo={"n_epochs": 1, "batch_size": STEPS})
    metrics = train(parse_config(raw), run_dir=tmp_path / "run").last_train_metrics
    assert metrics["train/approx_kl"] < 1e-9 and metrics["train/clip_fraction"] == 0.0


@pytest.mark.slow
def test_evaluation_remembers_within_episodes_on_the_device_and_outside() -> None:
    policy = policy_of("lstm")
    obs = jnp.zeros((1, NUM_OBSERVED))
    params = jax.tree.map(lambda x: x + 0.1, init(policy, obs))

    def played(env: Any, num_episodes: int) -> Any:
        """Compute returns by stepping one environment without the batched code."""
        returns = []
        for key in jax.random.split(KEY, num_episodes):
            state, obs = env.reset(key)
            memory, total, done = policy.init_memory(1), 0.0, False
            while not done:
                distribution, _, memory = jax.jit(policy.apply)(params, obs[None], memory=memory)
                state, timestep = env.step(state, distribution.mode()[0], key)
                obs, total, done = timestep.obs, total + float(timestep.reward), bool(timestep.terminated)
            returns.append(total)
        return returns

    # two cues: what an episode returns depends on its cue alone
    expected = {round(x, 4) for x in played(ENV, 8)}
    assert len(expected) == 2
    device = evaluate(policy, ENV, params, KEY, num_envs=2, num_episodes=8)["return"]
    outside = evaluate_host(policy, PureHostEnv(ENV, 2), params, 0, num_episodes=8)["return"]
    for found in (device, outside):
        for x in np.asarray(found):
            assert min(abs(float(x) - y) for y in expected) < 1e-4
    states, done = record_episodes(policy, ENV, params, KEY, num_envs=2)
    assert states["t"].shape == done.shape == (4, 2)


@pytest.mark.parametrize("name", ["apg", "shac"])
def test_algorithms_of_single_steps_refuse_a_memory(name: str, tmp_path: Path) -> None:
    raw = remembering(tmp_path) | {"algorithm": {"name": name}}
    with pytest.raises(ConfigError, match="learns from single steps, but the policy has a memory; use ppo, grpo or bc"):
        build(parse_config(raw))


@pytest.mark.slow
def test_options_that_do_not_go_together_are_refused_before_anything_is_built(tmp_path: Path) -> None:
    for key, value, text in (
        ("algorithm.cfg.sequence_length", 3, r"got 3, which does not divide trainer.buffer_size 8"),
        ("policy.actor.memory", {"type": "actor"}, "got 'actor', which is for a critic"),
        (
            "policy.actor.memory",
            {"type": "history", "hidden_size": 4, "length": 2},
            "hidden_size belongs to gru and lstm",
        ),
        ("policy.actor.memory", {"type": "history"}, "length must be at least 2"),
        ("policy.actor.memory", {"type": "gru", "length": 4}, "length belongs to history"),
        ("policy.critic_obs_normalization", True, "but the critic reads what the actor's memory gives"),
        ("policy.name", "vision", "vision has no memory"),
    ):
        raw = remembering(tmp_path)
        raw["policy"]["critic"] = {**NETWORK_BLOCK, "memory": {"type": "actor"}}
        *sections, last = key.split(".")
        section = raw
        for each in sections:
            section = section[each]
        section[last] = value
        refused(parse_config, raw, match=text)
    with pytest.raises(ConfigError, match="got 4, but the policy has no memory"):
        build(parse_config(tiny(tmp_path, ppo={"sequence_length": 4})))
    raw = tiny(tmp_path)
    raw["policy"]["critic"] = {**NETWORK_BLOCK, "memory": {"type": "gru"}}
    refused(parse_config, raw, match="is given, but the actor has none")


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["nll", "mse"])
def test_cloning_reads_windows_frame_by_frame_from_an_episodes_start(loss: Any) -> None:
    policy = policy_of("gru", critic=None)
    obs, action = jax.random.normal(KEY, (4, 6, NUM_OBSERVED)), jax.random.normal(KEY, (4, 6, 2))
    params = init(policy, obs[:, 0])
    memory, terms = policy.init_memory(4), []
    for t in range(6):
        distribution, _, memory = jax.jit(policy.apply)(params, obs[:, t], memory=memory)
        squared = jnp.square(distribution.mode() - action[:, t]).mean(axis=-1)
        terms.append(squared if loss == "mse" else -distribution.log_prob(action[:, t]))
    config = BCConfig(loss=loss)
    made, _ = jax.jit(partial(bc_loss, policy=policy, config=config))(params, {"obs": obs, "action": action})
    np.testing.assert_allclose(made, np.mean(terms), rtol=1e-5)
    with pytest.raises(ValueError, match="a policy with memory reads every frame"):
        raise ConfigError(list(BC.policy_problems(config.model_copy(update={"frames_per_window": 2}), policy)))


@pytest.mark.slow
def test_devices_compute_what_one_does_with_as_many_strata(tmp_path: Path) -> None:
    one = remembering(tmp_path, ppo={"batch_size": 32, "minibatch_strata": 2, "sequence_length": 4}, num_envs=8)
    two = remembering(tmp_path, ppo={"batch_size": 16, "sequence_length": 4}, num_envs=4, distributed=True)
    states = []
    for raw, devices in ((one, None), (two, jax.devices()[:2])):
        with MonkeyPatch.context() as patch:
            if devices:
                patch.setattr("ejax.training.build.all_devices", lambda config: devices)  # noqa: B023
            parts = build(parse_config(raw))
            moved = parts.stepper.advance(parts.stepper.start(parts.state), 2, lambda: False)
        assert moved is not None
        states.append(jax.device_get(moved[0].train.params))
    chex.assert_trees_all_close(*states, rtol=1e-4, atol=1e-5)
