"""Behaviour cloning: its loss, its streams of demonstrations, its runs, and fine-tuning from it."""

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pretrain_tasks
import pytest
from case_tables import cases, refused

from ejax.algorithms.bc import BCConfig, bc_loss, bc_update, chunk_targets
from ejax.algorithms.ppo import PPOConfig, ppo_loss
from ejax.config import load_config, parse_config
from ejax.config.embodichain.check import check
from ejax.data import EngineState, OnlineDataWorkerError
from ejax.data.lerobot.write import EpisodeWriter
from ejax.distributions import ActionSpec
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.envs.tasks.push_cube import PushCubeRL
from ejax.envs.wrappers.action_chunk import ActionChunk
from ejax.envs.wrappers.rendered import RenderedEnv
from ejax.optim import OptimizerConfig, make_optimizer
from ejax.policies.actor_critic import ActorOnly
from ejax.policies.mlp import NetworkConfig
from ejax.policies.recurrence import MemoryConfig
from ejax.policies.vision import VisionPolicy, patches
from ejax.policies.with_memory import ActorCriticWithMemory
from ejax.rollout import reset, step
from ejax.run import train
from ejax.store.checkpoint import CheckpointError
from ejax.store.resume_rules import may_change, with_changes
from ejax.train import main
from ejax.training.build import build
from ejax.training.cloning import Demonstrations
from ejax.types import CameraView, make_train_state

NETWORK = {"type": "mlp", "network_cfg": {"hidden_sizes": [32, 32], "activation": "tanh"}}
OPTIONS = {"task": "pretrain_tasks:Reach", "buffer_size": 16, "max_episode_steps": 40}
ENGINE = {"source": "engine", "engine": OPTIONS}


def engine(**options: Any) -> dict[str, Any]:
    return {"source": "engine", "engine": OPTIONS | options}


def tree(data: dict[str, Any], algorithm: dict[str, Any] | None = None, **trainer: Any) -> dict[str, Any]:
    return {
        "env": {"id": "PointMassRL"},
        "trainer": {"exp_name": "tiny", "console": False, "iterations": 4, **trainer},
        "policy": {"name": "actor_critic", "actor": NETWORK, "critic": NETWORK, "actor_obs_normalization": True},
        "algorithm": {"name": "bc", "cfg": {"batch_size": 32, "updates_per_step": 2, **(algorithm or {})}},
        "data": data,
    }


def record(folder: Path, count: int, first: int = 0, append: bool = False) -> None:
    task = pretrain_tasks.Reach()
    with EpisodeWriter(folder, task.spec(), fps=60, append=append) as writer:
        for seed in range(first, first + count):
            writer.append(task.generate(seed), "reach the goal", seed=seed)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("kept") / "reach"
    record(folder, 8)
    return {"source": "recorded", "folder": str(folder), "chunk_size": 2}


@pytest.fixture(scope="module")
def cloned(recorded: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train four updates, never interrupted."""
    return train(parse_config(tree(recorded)), run_dir=tmp_path_factory.mktemp("cloned") / "run")


def linear_policy(width: int) -> ActorOnly:
    return ActorOnly(action_spec=ActionSpec("normal", (width,)), actor=NetworkConfig(hidden_sizes=()))


def same(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_the_gradient_of_the_likelihood_is_the_one_by_hand() -> None:
    """−log N(a; Wo + b, σ) has the gradients −z·o/σ, −z/σ and 1 − z² with z = (a − Wo − b)/σ, here averaged."""
    policy = linear_policy(2)
    rng = np.random.default_rng(0)
    obs, action = rng.normal(size=(5, 1, 3)).astype(np.float32), rng.normal(size=(5, 1, 2)).astype(np.float32)
    params = policy.init(jax.random.key(1), obs)
    params["params"]["log_std"] = jnp.array([0.3, -0.7])
    grads = jax.grad(lambda p: bc_loss(p, {"obs": obs, "action": action}, policy=policy, config=BCConfig())[0])(params)
    layer = params["params"]["actor"]["linear_0"]
    sigma = np.exp([0.3, -0.7])
    z = (action[:, 0] - obs[:, 0] @ np.asarray(layer["kernel"]) - np.asarray(layer["bias"])) / sigma
    by_hand = {
        "kernel": np.mean([-np.outer(o, e / sigma) for o, e in zip(obs[:, 0], z, strict=True)], axis=0),
        "bias": (-z / sigma).mean(axis=0),
    }
    for name, expected in by_hand.items():
        np.testing.assert_allclose(grads["params"]["actor"]["linear_0"][name], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grads["params"]["log_std"], (1.0 - z**2).mean(axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_chunk_is_taught_the_frames_that_follow_and_none_beyond_the_window() -> None:
    action = jnp.arange(2 * 4 * 1, dtype=jnp.float32).reshape(2, 4, 1)
    target, known = chunk_targets(action, 3)
    assert target[1, 0, :, 0].tolist() == [4.0, 5.0, 6.0]
    assert target[1, 1, :, 0].tolist() == [5.0, 6.0, 7.0]
    assert known[0].tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0]]

    policy = linear_policy(3)
    batch = {"obs": jnp.ones((2, 4, 5)), "action": action}
    params = policy.init(jax.random.key(0), batch["obs"])
    loss, metrics = bc_loss(params, batch, policy=policy, config=BCConfig(loss="mse"))
    mean = np.asarray(policy.apply(params, batch["obs"])[0].mode())
    errors = [(mean[b, t, k] - 4 * b - t - k) ** 2 for b in range(2) for t in range(4) for k in range(3) if t + k < 4]
    np.testing.assert_allclose(loss, np.mean(errors), rtol=1e-5)
    assert metrics["mse"] == loss


VALID = np.array([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0]], bool)
"""Windows of two frames before the present one: an episode's start, its end, its middle; an episode of one frame."""
LOSS_MASK = VALID & (np.arange(6) >= 2)


def around_a_frame(width: int, padding: float) -> dict[str, Any]:
    """Make a batch of windows with whichever numbers in what is padded."""
    rng = np.random.default_rng(0)
    batch = {"obs": rng.normal(size=(4, 6, 3)).astype(np.float32), "action": rng.normal(size=(4, 6, width))}
    batch["action"] = batch["action"].astype(np.float32)
    return {name: np.where(VALID[..., None], x, np.float32(padding)) for name, x in batch.items()} | {
        "valid": VALID,
        "loss_mask": LOSS_MASK,
    }


@pytest.mark.slow
@pytest.mark.parametrize("num_actions", [1, 3])
def test_a_masked_window_is_taught_where_its_mask_says_and_each_action_counts_alike(num_actions: int) -> None:
    policy, config = linear_policy(num_actions), BCConfig(loss="mse", batch_size=4, updates_per_step=1)
    optimizer = make_optimizer(config.optimizer)
    batch = around_a_frame(1, padding=1e3)
    params = policy.init(jax.random.key(0), batch["obs"])
    mean = np.asarray(policy.apply(params, batch["obs"])[0].mode())
    errors = [
        (mean[b, t, k] - batch["action"][b, t + k, 0]) ** 2
        for b, t, k in itertools.product(range(4), range(6), range(num_actions))
        if LOSS_MASK[b, t] and t + k < 6 and LOSS_MASK[b, t + k]
    ]
    assert len(errors) == {1: 11, 3: 22}[num_actions]
    loss, _ = bc_loss(params, batch, policy=policy, config=config)
    np.testing.assert_allclose(loss, np.mean(errors), rtol=1e-5)
    _, metrics = bc_update(
        make_train_state(params, optimizer), batch, jax.random.key(1), policy=policy, optimizer=optimizer, config=config
    )
    np.testing.assert_allclose(metrics["mse"], np.mean(errors), rtol=1e-5)


@pytest.mark.slow
def test_padding_has_no_part_in_parameters_or_statistics() -> None:
    """A memory would read what is before an episode's start, and a normalizer all of it."""
    policy = ActorCriticWithMemory(
        action_spec=ActionSpec("normal", (2,)),
        actor=NetworkConfig(hidden_sizes=(4,)),
        actor_memory=MemoryConfig(type="gru", hidden_size=4),
        actor_obs_normalization=True,
        actor_width=3,
    )
    config = BCConfig(batch_size=2, updates_per_step=2)
    optimizer = make_optimizer(config.optimizer)
    update = partial(bc_update, policy=policy, optimizer=optimizer, config=config)
    params = policy.init(jax.random.key(0), around_a_frame(2, 0.0)["obs"])
    learned = [
        update(make_train_state(params, optimizer), around_a_frame(2, padding), jax.random.key(1))[0].params
        for padding in (0.0, 50.0)
    ]
    assert same(*learned) and not same(params, learned[0])
    seen = around_a_frame(2, 0.0)["obs"][LOSS_MASK]
    (statistics,) = learned[0]["normalizer"].values()
    assert float(statistics["count"]) == 11.0
    np.testing.assert_allclose(statistics["mean"], seen.mean(axis=0), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_memory_begins_behind_the_padding_and_remembers_what_is_not_taught() -> None:
    policy = ActorCriticWithMemory(
        action_spec=ActionSpec("normal", (2,)),
        actor=NetworkConfig(hidden_sizes=(4,)),
        actor_memory=MemoryConfig(type="history", length=3),
        actor_width=3,
    )
    batch = around_a_frame(2, padding=7.0)
    params = policy.init(jax.random.key(0), batch["obs"])
    terms = []
    for b in range(4):
        memory = policy.init_memory(1)
        for t in np.flatnonzero(VALID[b]):
            distribution, _, memory = policy.apply(params, batch["obs"][b : b + 1, t], memory=memory)
            if LOSS_MASK[b, t]:
                terms.append(-distribution.log_prob(batch["action"][b : b + 1, t])[0])
    loss, _ = bc_loss(params, batch, policy=policy, config=BCConfig())
    np.testing.assert_allclose(loss, np.mean(terms), rtol=1e-5)


def test_masked_choices_are_taught_where_the_mask_says() -> None:
    policy = ActorOnly(action_spec=ActionSpec("categorical", (3,)), actor=NetworkConfig(hidden_sizes=()))
    batch = around_a_frame(1, padding=0.0) | {"action": np.where(VALID, np.arange(6) % 3, 0)}
    params = policy.init(jax.random.key(0), batch["obs"])
    wanted = -np.asarray(policy.apply(params, batch["obs"])[0].log_prob(batch["action"]))[LOSS_MASK].mean()
    loss, _ = bc_loss(params, batch, policy=policy, config=BCConfig())
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    optimizer = make_optimizer(OptimizerConfig())
    state, config = make_train_state(params, optimizer), BCConfig(batch_size=4, updates_per_step=1)
    _, metrics = bc_update(state, batch, jax.random.key(1), policy=policy, optimizer=optimizer, config=config)
    np.testing.assert_allclose(metrics["nll"], wanted, rtol=1e-5)


@pytest.mark.slow
def test_some_frames_of_a_masked_window_are_asked_and_weighted_by_what_they_teach() -> None:
    policy, batch = linear_policy(2), around_a_frame(1, padding=1e3)
    params = policy.init(jax.random.key(0), batch["obs"])
    frame = np.array([[0, 2], [0, 3], [2, 5], [1, 2]])
    some = batch | {"frame": frame, "obs": batch["obs"][np.arange(4)[:, None], frame]}
    mean = np.asarray(policy.apply(params, some["obs"])[0].mode())
    errors = [
        (mean[b, i, k] - batch["action"][b, t + k, 0]) ** 2
        for b in range(4)
        for i, t in enumerate(frame[b])
        for k in range(2)
        if LOSS_MASK[b, t] and t + k < 6 and LOSS_MASK[b, t + k]
    ]
    loss, _ = bc_loss(params, some, policy=policy, config=BCConfig(loss="mse"))
    np.testing.assert_allclose(loss, np.mean(errors), rtol=1e-5)


def test_windows_are_successive_frames_of_one_episode(recorded: dict[str, Any]) -> None:
    config = parse_config(tree({**recorded, "chunk_size": 8}))
    assert config.data is not None
    kept = [pretrain_tasks.Reach().generate(seed).frames for seed in range(8)]
    with Demonstrations(config.data, 64, np.zeros((1, 14), np.float32)) as demonstrations:
        demonstrations.start(0, demonstrations.state())
        drawn = demonstrations.next(lambda: False)
    assert drawn is not None
    for obs, action in zip(np.asarray(drawn[0]["obs"]), np.asarray(drawn[0]["action"]), strict=True):
        (episode,) = [e for e in kept if np.array_equal(e["obs"][0, 4:6], obs[0, 4:6])]  # the goal names it
        (start,) = [t for t in range(33) if np.array_equal(episode["obs"][t : t + 8], obs)]
        np.testing.assert_array_equal(action, episode["actions"][start : start + 8])


def test_a_resumed_stream_leaves_later_episodes_alone_and_refuses_others(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    record(folder, 4)

    def draw(folder: Path, number: int, state: Any) -> tuple[Any, Any, list[str]]:
        config = parse_config(tree({"source": "recorded", "folder": str(folder)})).data
        assert config is not None
        with Demonstrations(config, 64, np.zeros((1, 14), np.float32)) as demonstrations:
            demonstrations.start(number, state or demonstrations.state())
            drawn = demonstrations.next(lambda: False)
            assert drawn is not None
            return drawn[0], demonstrations.state(), demonstrations.notes

    batch, state, _ = draw(folder, 5, None)
    record(folder, 3, first=4, append=True)
    again, same_state, told = draw(folder, 5, state)
    assert same(batch, again) and same(state, same_state)
    assert "continues with the first 4 episodes" in told[0]
    assert not same(batch, draw(folder, 5, None)[0]) and not same(batch, draw(folder, 6, state)[0])
    record(tmp_path / "other", 5, first=100)
    refused(draw, tmp_path / "other", 5, state, match="does not begin with the 4 episodes", error=CheckpointError)


REMEMBERING = {**NETWORK, "memory": {"type": "history", "length": 3}}


@pytest.mark.slow
@pytest.mark.parametrize("history_length", [None, 3])
def test_a_stopped_run_ends_with_the_bits_of_one_that_was_not(
    recorded: dict[str, Any], tmp_path: Path, history_length: int | None
) -> None:
    """From recorded episodes, also by windows around a frame."""

    def config(iterations: int, **data: Any) -> Any:
        raw = tree({**recorded, "history_length": history_length, **data}, iterations=iterations)
        return parse_config(raw | {"policy": {"name": "actor_only", "actor": REMEMBERING}} if history_length else raw)

    assert config(2).trainer.buffer_size == 2 * 32 * 2  # what is remembered is no sample
    whole = train(config(4), run_dir=tmp_path / "whole")
    part = train(config(2), run_dir=tmp_path / "part")
    resumed = train(config(4, num_workers=2, prefetch=3), resume="latest", run_dir=tmp_path / "part")
    assert part.num_updates == 2 and resumed.num_updates == 4 and whole.global_step == 4 * 2 * 32 * 2
    assert same(whole.params, resumed.params) and not same(part.params, resumed.params)
    assert whole.last_train_metrics["train/loss"] == resumed.last_train_metrics["train/loss"]
    if history_length is not None:
        without = train(parse_config(config(4).to_dict() | {"data": recorded}), run_dir=tmp_path / "without")
        assert not same(whole.params, without.params)


def test_where_episodes_may_not_be_drawn_any_more_new_ones_are_waited_for() -> None:
    data = engine(buffer_size=4, refill_policy="manual", episode_sample_budget=20) | {"num_workers": 3}
    config = parse_config(tree(data)).data
    assert config is not None
    with Demonstrations(config, 64, np.zeros((1, 14), np.float32)) as demonstrations:
        demonstrations.start(0, ())
        goals = []
        for _ in range(6):
            drawn = demonstrations.next(lambda: False)
            assert drawn is not None
            goals.append(np.asarray(drawn[0]["obs"])[:, 0, 4])
        stats = demonstrations.stats()
    each = np.unique(np.concatenate(goals), return_counts=True)[1]
    assert each.max() <= 20 and len(each) >= 6 * 64 / 20
    assert stats["data/fills"] >= 5.0 and stats["data/episodes"] == 4 * stats["data/fills"]


@pytest.mark.slow
def test_a_live_engine_is_learned_from_and_measured(tmp_path: Path) -> None:
    config = parse_config(
        tree(
            engine(task_cfg={"num_steps": 80}, max_episode_steps=80) | {"chunk_size": 4},
            {"optimizer": {"learning_rate": 3e-3}, "updates_per_step": 16, "batch_size": 64},
            iterations=40,
            enable_eval=True,
            eval_freq=10**9,
            num_eval_envs=32,
            num_eval_episodes=32,
        )
        | {"env": {"id": "PointMassRL", "cfg": {"success_threshold": 0.1}}}
    )
    result = train(config, run_dir=tmp_path / "run")
    first, last = result.train_history[0], result.last_train_metrics
    assert last["train/mse"] < 0.2 * first["train/mse"]
    assert last["train/nll"] < first["train/nll"]
    assert result.last_eval_metrics["eval/success_rate"] > 0.9
    assert last["data/fill"] == 1.0 and last["data/success_rate"] == 1.0 and last["data/episodes"] >= 16
    assert last["data/samples"] > 0.0 and last["data/wait_s"] >= 0.0 and last["data/age_s"] > 0.0
    lines = [json.loads(line) for line in (tmp_path / "run/logs/metrics.jsonl").read_text().splitlines()]
    assert any("data/wait_s" in line for line in lines)

    resumed = train(
        parse_config({**config.to_dict(), "trainer": {**config.to_dict()["trainer"], "iterations": 41}}),
        resume="latest",
        run_dir=tmp_path / "run",
    )
    assert resumed.num_updates == 41


@pytest.mark.slow
@cases(
    "task_cfg error text",
    ({"broken_at": 20}, ArithmeticError, "the point left the plane"),
    ({"speed": 3}, TypeError, "unexpected keyword argument 'speed'"),
)
def test_a_broken_task_ends_the_run_with_its_own_error(tmp_path: Path, task_cfg: dict, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        train(
            parse_config(tree(engine(task_cfg=task_cfg, refill_threshold=1), iterations=10_000)),
            run_dir=tmp_path / "run",
        )


def test_a_worker_that_is_ended_with_the_run_is_no_error_and_one_that_ends_by_itself_is() -> None:
    config = parse_config(tree(engine(task_cfg={"ended_at": 20}, refill_threshold=1))).data
    assert config is not None
    with Demonstrations(config, 64, np.zeros((1, 14), np.float32)) as demonstrations:
        demonstrations.start(0, ())
        while demonstrations.next(lambda: demonstrations.engine.state is EngineState.FAILED) is not None:
            pass
    assert demonstrations.notes == [] or "ended before the run did" in demonstrations.notes[0]  # whoever saw it first
    with (
        pytest.raises(OnlineDataWorkerError, match=r"exit code 0"),
        Demonstrations(config, 64, np.zeros((1, 14), np.float32)) as demonstrations,
    ):
        demonstrations.start(0, ())
        while demonstrations.next(lambda: False) is not None:
            pass


@pytest.mark.slow
@cases(
    "data key text",
    (engine(task_cfg={"misshapen": True}), "data.obs_field", "'obs' is [13], the environment's observation [14]"),
    ({"obs_field": "observation"}, "data.obs_field", "no field 'observation'; there is obs, actions"),
    ({"action_field": "obs"}, "data.action_field", "the demonstrated actions are [14], but"),
    (engine(task_cfg={"scale": 30.0}), "data.action_field", "beyond the bounds of the environment's, -1 to 1"),
)
def test_fields_that_do_not_fit_the_environment_are_named(data: dict, key: str, text: str, tmp_path: Path) -> None:
    error = refused(lambda: train(parse_config(tree({**ENGINE, **data})), run_dir=tmp_path / "run"))
    (problem,) = error.problems
    assert problem.key == key and text in problem.text


@pytest.mark.slow
def test_a_cloned_policy_is_fine_tuned_near_itself(cloned: Any, recorded: dict[str, Any], tmp_path: Path) -> None:
    config = tree(recorded)
    del config["data"]
    config["trainer"] |= {"num_envs": 4, "buffer_size": 8, "iterations": 3}
    config["policy"]["init_from"] = str(cloned.run_dir)
    config["algorithm"] = {"name": "ppo", "cfg": {"batch_size": 16, "n_epochs": 2, "kl_coef": 0.1}}
    tuned = train(parse_config(config), run_dir=tmp_path / "tuned")
    assert tuned.num_updates == 3 and not same(cloned.params, tuned.params)
    assert all(row["train/approx_ref_kl"] > 0.0 for row in tuned.train_history)


@pytest.mark.slow
def test_ppo_adds_the_divergence_to_the_reference_that_is_its_weight() -> None:
    """e^Δ − Δ − 1 with Δ = log π_ref − log π; without a weight the loss does not look at the reference."""
    policy = linear_policy(2)
    rng = np.random.default_rng(0)
    obs, action = rng.normal(size=(6, 3)).astype(np.float32), rng.normal(size=(6, 2)).astype(np.float32)
    params, reference = policy.init(jax.random.key(0), obs), policy.init(jax.random.key(1), obs)
    log_prob, wanted = (np.asarray(policy.apply(p, obs)[0].log_prob(action)) for p in (params, reference))
    zeros = np.zeros(6, np.float32)
    batch = {"obs": obs, "action": action, "log_prob": log_prob, "value": zeros}
    batch |= {"advantage": zeros, "value_target": zeros, "reference_log_prob": wanted}
    without, _ = ppo_loss(params, batch, policy=policy, config=PPOConfig())
    loss, metrics = ppo_loss(params, batch, policy=policy, config=PPOConfig(kl_coef=0.3))
    distance = np.mean(np.exp(wanted - log_prob) - (wanted - log_prob) - 1.0)
    np.testing.assert_allclose(metrics["approx_ref_kl"], distance, rtol=1e-5)
    np.testing.assert_allclose(loss - without, 0.3 * distance, rtol=1e-4)


@pytest.mark.slow
def test_a_policy_of_images_learns_where_things_are() -> None:
    """One bright spot in each picture, whose place is the action."""
    policy = VisionPolicy(
        action_spec=ActionSpec("normal", (2,)),
        actor=NetworkConfig(hidden_sizes=(32,)),
        critic=NetworkConfig(hidden_sizes=(8,)),
        channels=(4, 4, 4),
        hidden_entries=(1,),
        actor_obs_normalization=True,
    )
    config = BCConfig(batch_size=64, updates_per_step=8, loss="mse", optimizer=OptimizerConfig(learning_rate=1e-2))
    optimizer = make_optimizer(config.optimizer)
    rng = np.random.default_rng(0)

    def batch() -> dict[str, Any]:
        place = rng.integers(2, 14, (512, 1, 2))
        image = np.zeros((512, 1, 16, 16, 3), np.uint8)
        for i, (y, x) in enumerate(place[:, 0]):
            image[i, 0, y - 1 : y + 2, x - 1 : x + 2] = 255
        action = (place / 8.0 - 1.0).astype(np.float32)
        return {"obs": {"image": image, "state": rng.normal(size=(512, 1, 3)).astype(np.float32)}, "action": action}

    first = batch()
    params = policy.init(jax.random.key(0), first["obs"])
    distribution, value = policy.apply(params, first["obs"])
    assert distribution.mode().shape == (512, 1, 2) and value.shape == (512, 1)
    state = make_train_state(params, optimizer)
    errors = []
    for i in range(25):
        state, metrics = bc_update(state, batch(), jax.random.key(i), policy=policy, optimizer=optimizer, config=config)
        errors.append(float(metrics["mse"]))
    assert np.mean(errors[-3:]) < 0.2 * errors[0]
    assert float(metrics["skipped_minibatches"]) == 0.0


@pytest.mark.slow
def test_an_environment_draws_the_state_that_it_is_in() -> None:
    env = RenderedEnv(ActionChunk(PushCubeRL(), 2), width=24, height=16, camera_eye=(-1.9, -1.1, 1.0))
    envs = reset(env, jax.random.key(0), 2)
    envs, _ = jax.jit(step, static_argnums=0)(env, envs, jnp.full((2, 12), 0.5), jax.random.key(1))
    assert envs.obs["image"].shape == (2, 16, 24, 3) and envs.obs["image"].dtype == jnp.uint8
    one = jax.tree.map(lambda x: np.asarray(x[1]), envs.state)
    camera = CameraView((-1.9, -1.1, 1.0), (0.0, 0.0, 0.0), 45.0, effects=False)
    drawn = env.render(one, 24, 16, camera).astype(int)
    image = np.asarray(envs.obs["image"][1]).astype(int)
    assert np.abs(image - drawn).max() <= 1  # another thread's OpenGL context may round a level otherwise
    before = env.render(jax.tree.map(np.asarray, env.reset(jax.random.key(0))[0]), 24, 16, camera).astype(int)
    assert np.abs(image - before).max() > 20  # the arm has moved
    refused(lambda: RenderedEnv(PointMassRL()), match="PointMassRL cannot be drawn")


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "stride"), [(4, 2), (3, 2), (3, 1)])
def test_patches_times_a_matrix_are_a_convolution(kernel: int, stride: int) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 8, 8, 3)), rng.normal(size=(kernel, kernel, 3, 5))
    x, w = x.astype(np.float32), w.astype(np.float32)
    padding = [((kernel - 1) // 2, kernel // 2)] * 2
    axes = ("NHWC", "HWIO", "NHWC")
    wanted = jax.lax.conv_general_dilated(x, w, (stride, stride), padding, dimension_numbers=axes)
    wanted = wanted[:, : 8 // stride, : 8 // stride]
    given = patches(jnp.asarray(x), kernel, stride) @ w.reshape(-1, 5)
    np.testing.assert_allclose(given, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_actor_does_not_see_hidden_numbers_and_the_critic_does() -> None:
    policy = VisionPolicy(
        action_spec=ActionSpec("normal", (2,)),
        actor=NetworkConfig(hidden_sizes=(8,)),
        critic=NetworkConfig(hidden_sizes=(8,)),
        hidden_entries=(1,),
    )
    obs = {"image": jnp.zeros((1, 16, 16, 3), jnp.uint8), "state": jnp.zeros((1, 3))}
    other = {**obs, "state": jnp.array([[0.0, 5.0, 0.0]])}
    params = policy.init(jax.random.key(0), obs)
    (here, value), (there, other_value) = policy.apply(params, obs), policy.apply(params, other)
    assert same(here.mode(), there.mode()) and not same(value, other_value)
    with pytest.raises(ValueError, match="'image', which the observation lacks; it has one array without names"):
        policy.apply(params, obs["state"])
    refused(lambda: policy.clone(channels=(8, 8)).init(jax.random.key(0), obs), match="channels needs 3 numbers")


@cases(
    "change key text",
    ({"data": {"source": "engin"}}, "data.source", "Did you mean 'engine'?"),
    ({"data": {**ENGINE, "chunk_sise": 3}}, "data.chunk_sise", "Did you mean 'chunk_size'?"),
    ({"data": {"source": "engine"}}, "data.engine", "is missing: source 'engine' needs it"),
    ({"data": {"source": "engine", "engine": {}}}, "data.engine", "got neither"),
    ({"data": {"source": "engine", "engine": 3}}, "data.engine", "must be a section with the keys task"),
    ({"data": {"source": "recorded"}}, "data.folder", "is missing: source 'recorded' needs it"),
    ({"data": {"source": "recorded", "folder": "x", "buffer_size": 3}}, "data.buffer_size", "does not read it"),
    ({"data": {**ENGINE, "folder": "kept"}}, "data.folder", "source 'engine' does not read it"),
    ({"data": engine(task="Reech")}, "data.engine.task", "no task 'Reech'"),
    ({"data": engine(bufer_size=3)}, "data.engine.bufer_size", "Did you mean 'buffer_size'?"),
    ({"data": engine(buffer_size=0)}, "data.engine.buffer_size", "greater than or equal to 1"),
    ({"data": engine(seed=-1)}, "data.engine.seed", "greater than or equal to 0"),
    ({"data": engine(worker_timeout=0)}, "data.engine.worker_timeout", "greater than 0"),
    ({"data": None}, "data", "bc needs {source: engine"),
    ({"algorithm": {"name": "ppo"}}, "data", "ppo learns from its environments"),
    ({"algorithm": {"name": "bc", "cfg": {"los": "nll"}}}, "algorithm.cfg.los", "Did you mean 'loss'?"),
    ({"env": {"id": "PointMassRL", "cfg": {"action_chunk": 5}}}, "data.chunk_size", "decides on 5 actions together"),
    ({"data": {**ENGINE, "history_length": 2}}, "data.history_length", "the policy remembers nothing; set it to 1, or"),
    (
        {"data": {**ENGINE, "history_length": 1, "sampling_mode": "boundary"}},
        "data.sampling_mode",
        "have the modes episode and segment",
    ),
    (
        {"data": engine(refill_policy="manual", refill_threshold=3)},
        "data.engine.refill_threshold",
        "refill_policy 'manual' does not read it",
    ),
    (
        {"data": engine(episode_sample_budget=3)},
        "data.engine.episode_sample_budget",
        "allows 48 windows before new episodes come, and one update takes 64",
    ),
    ({"data": engine(episode_sample_hard_limit=3)}, "data.engine", "without episode_sample_budget"),
    ({"data": engine(action_contracts=[])}, "data.engine.action_contracts", "the task's spec() names its fields"),
    ({"data": engine(gym_config={"id": "PushCubeRL"})}, "data.engine", "got both"),
    ({"data": {"source": "engine", "gym_config": "no.json"}}, "data.gym_config", "there is no 'no.json'; looked for"),
    (
        {"data": {"source": "engine", "gym_config": {"id": "CartPoleRL", "env": {}}}},
        "data.gym_config.id",
        "ejax has no expert for 'CartPoleRL'",
    ),
    (
        {"data": engine(lifecycle_event_capacity=64)},
        "data.engine.lifecycle_event_capacity",
        "reads no lifecycle events",
    ),
)
def test_what_is_wrong_is_named_by_its_key(change: dict[str, Any], key: str, text: str) -> None:
    error = refused(lambda: parse_config(tree(ENGINE) | change))
    assert [text in problem.text for problem in error.problems if problem.key == key] == [True], error


def test_fields_of_embodichains_engine_are_told_one_by_one(tmp_path: Path) -> None:
    fields = {"include_provenance": True, "language_buffer_bytes": 2048, "buffer_device": "cpu", "state_dim": 9}
    fields |= {"action_semantics": "policy_request", "refill_policy": "manual", "shutdown_timeout": 30.0}
    file = tmp_path / "bc.json"
    file.write_text(json.dumps(tree(engine(task="PushCubeExpert", **fields))))
    notes = {note.key: note for note in check(file)}
    assert {name: notes[f"data.engine.{name}"].status for name in fields} == {
        "include_provenance": "without effect",
        "language_buffer_bytes": "without effect",
        "buffer_device": "used",
        "state_dim": "used",
        "action_semantics": "unsupported",
        "refill_policy": "used",
        "shutdown_timeout": "used",
    }
    assert all(
        notes[f"data.engine.{name}"].text
        for name in ("include_provenance", "language_buffer_bytes", "action_semantics")
    )


def test_a_gym_config_is_read_from_its_file_and_checked_key_by_key(tmp_path: Path) -> None:
    scene = Path(__file__).parents[1] / "gym_configs" / "push_cube.json"
    (tmp_path / "scene.json").write_text(scene.read_text())
    data = {"source": "engine", "gym_config": "scene.json", "action_config": {"noise": 0.2}, "state_dim": 8}
    file = tmp_path / "bc.json"
    file.write_text(json.dumps(tree(data)))
    config = load_config(file)
    assert config.data is not None and config.data.engine is not None
    assert config.data.engine.gym_config["id"] == "PushCubeRL" and config.data.engine.action_config == {"noise": 0.2}
    assert parse_config(config.to_dict()) == config
    assert {note.key: note.status for note in check(file)}["data.gym_config"] == "renamed"
    assert "data.gym_config.max_episodes" in {note.key for note in config.notices}
    file.write_text(json.dumps(tree({**data, "action_config": {"nois": 0.2}})))
    refused(load_config, file, match=r"data\.action_config\.nois: unknown key; .* Did you mean 'noise'")


def test_of_the_engines_options_a_resumed_run_may_change_its_patience() -> None:
    config = parse_config(tree(ENGINE))
    assert may_change(config, "data.engine.worker_timeout") and not may_change(config, "data.engine.buffer_size")
    now = parse_config(tree(engine(worker_timeout=7.0, buffer_size=3)))
    assert with_changes(config, now) == parse_config(tree(engine(worker_timeout=7.0)))


def test_flat_keys_of_the_engine_load() -> None:
    config = parse_config(tree(engine(seed=3, refill_threshold=7)))
    whole = config.to_dict()["data"]
    flat = {key: value for key, value in whole.pop("engine").items() if key not in ("seed", "lifecycle_event_capacity")}
    assert parse_config(tree({**whole, **flat, "seed": 3})).data == config.data.replace(
        seed=3, engine=config.data.engine.replace(seed=0)
    )


@pytest.mark.usefixtures("nothing_trusted")
def test_a_file_alone_cannot_start_a_task_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "bc.json"
    file.write_text(json.dumps(tree(ENGINE)))
    refused(load_config, file, match=r"data\.engine\.task: .*add --trust pretrain_tasks:Reach to the command line")
    config = load_config(file, ["data.engine.task=pretrain_tasks:Reach"])
    assert config.trainer.buffer_size == 64 and config.trainer.num_envs == 1
    assert parse_config(config.to_dict()) == config
    notes = {note.key: note.status for note in check(file, ["data.engine.task=pretrain_tasks:Reach"])}
    assert set(notes.values()) == {"used"}


@pytest.mark.slow
def test_the_command_runs_and_tells_of_samples(
    recorded: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bc.json"
    file.write_text(json.dumps(tree(recorded)))
    code = main(["--config", str(file), "--run", str(tmp_path / "run"), "trainer.iterations=2"], "pretrain")
    assert code == 0
    assert "samples" in capsys.readouterr().out
    assert main(["--config", str(file), "data.chunk_size=0"], "pretrain") == 2
    assert "ejax pretrain" in capsys.readouterr().err


@pytest.mark.slow
def test_what_the_first_update_compiles_is_booked_as_that(recorded: dict[str, Any]) -> None:
    parts = build(parse_config(tree(recorded)))
    with parts.stepper as stepper:
        state = stepper.start(parts.state)
        moved = [stepper.advance(state, 1, lambda: False) for _ in range(2)]
    assert [each is not None and "time/compile_s" in each[1] for each in moved] == [True, False]
