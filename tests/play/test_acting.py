"""``ejax.load(run).act(obs)``."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from tiny import tiny

import ejax
from ejax.config import parse_config
from ejax.play.acting import Actor
from ejax.rollout import reset, unroll
from ejax.run import train
from ejax.training.build import build


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(parse_config(tiny(tmp_path_factory.mktemp("run")))).run_dir


@pytest.fixture(scope="module")
def actor(run: Path) -> Actor:
    return ejax.load(run)


@pytest.fixture(scope="module")
def obs(actor: Actor) -> np.ndarray:
    return np.asarray(reset(actor.env, jax.random.key(0), 3).obs)


def test_it_acts_by_the_mode_of_the_policy(actor: Actor, obs: np.ndarray) -> None:
    distribution, _ = actor.policy.apply(actor.params, obs)
    np.testing.assert_allclose(actor.act(obs), distribution.mode(), rtol=1e-6)


def test_one_observation_gives_one_action(actor: Actor, obs: np.ndarray) -> None:
    action = actor.act(obs[1])
    assert action.shape == actor.env.action_space.shape
    np.testing.assert_allclose(action, actor.act(obs)[1], rtol=1e-5)


def test_an_observation_far_from_all_of_the_training_is_said_once(run: Path, obs: np.ndarray) -> None:
    """A number that stood still in training is divided by 0.01."""
    actor = ejax.load(run)
    known = actor.params["normalizer"]["actor_obs_normalizer"]
    known |= {"mean": obs.mean(axis=0), "variance": np.append(np.ones(13, np.float32), np.float32(1e-12))}
    actor = Actor(actor.config, actor.env, actor.policy, actor.params, checkpoint=actor.checkpoint)
    other = obs.copy()
    other[:, 13] = known["mean"][13]
    actor.act(other)  # as in training
    other[:, 13] += 1.5
    with pytest.warns(UserWarning, match=r"actor_obs_normalizer\[13\] is .*seen as 150"):
        actor.act(other)
    actor.act(other)


def test_samples_differ_from_call_to_call(actor: Actor, obs: np.ndarray) -> None:
    first, second = (actor.act(obs, deterministic=False) for _ in range(2))
    assert np.isfinite(first).all() and not np.array_equal(first, second)


@cases(
    "wrong word",
    *((x, "PointMassRL") for x in (np.zeros(3, np.float32), np.zeros((2, 3), np.float32), {"robot": np.zeros(9)})),
    *((np.full(14, x), "^obs: got ") for x in (2**24 + 1, 2**63 - 1, np.nan, -np.inf, 1e39, "0.5", None)),
    *((np.zeros(14, kind), "^obs: got ") for kind in (np.complex64, "datetime64[s]")),
)
def test_another_observation_is_refused_by_its_form_and_its_numbers(actor: Actor, wrong: Any, word: str) -> None:
    refused(actor.act, wrong, match=word)


def test_lists_and_odd_arrays_act_as_plain_ones_and_actions_may_be_written_into(actor: Actor, obs: np.ndarray) -> None:
    expected = actor.act(obs)
    for odd in (obs.tolist(), obs[::-1].copy()[::-1], obs.astype(">f4"), np.asfortranarray(obs), obs.astype(float)):
        np.testing.assert_array_equal(actor.act(odd), expected)
    expected *= 0.5


@pytest.mark.filterwarnings("ignore:the policy has not learned")
@pytest.mark.parametrize("right", [np.ones(14, x) for x in (np.int64, np.uint8, np.float16, bool, jnp.bfloat16)])
def test_numbers_of_other_types_act_as_they_are(actor: Actor, right: np.ndarray) -> None:
    np.testing.assert_array_equal(actor.act(right), actor.act(np.ones(14, np.float32)))


@pytest.mark.slow
@cases(
    "env options clips",
    ("gymnasium:Pendulum-v1", {"clip_actions": True}, True),
    ("gymnasium:Pendulum-v1", {"clip_actions": False}, False),
    ("PickPlaceRL", {}, True),
    ("PointMassRL", {}, True),
)
def test_actions_are_clipped_where_the_environment_clips_them(
    env: str, options: dict[str, bool], clips: bool, tmp_path: Path
) -> None:
    raw = tiny(tmp_path, env=env, env_cfg=options)
    raw["policy"]["initial_log_std"] = 2.0
    config = parse_config(raw)
    made = build(config)
    policy = Actor(config, made.env, made.policy, made.state.train.params, checkpoint=tmp_path)
    size = made.env.observation_space.shape
    actions = policy.act(np.zeros((64, *size), np.float32), deterministic=False)
    assert made.env.action_space.contains(actions[0]) or not clips
    assert (np.abs(actions) > made.env.action_space.high).any() == (not clips)


def test_a_run_may_be_named_without_its_time_and_a_checkpoint_by_its_path(run: Path, obs: np.ndarray) -> None:
    (checkpoint,) = (run / "checkpoints").glob("tiny_step_*")
    named = ejax.load(str(run.parent / "tiny"))
    assert named.checkpoint == ejax.load(run, checkpoint=str(checkpoint)).checkpoint


@pytest.mark.slow
def test_a_policy_with_memory_remembers_until_it_is_reset(tmp_path: Path) -> None:
    raw = tiny(tmp_path)
    raw["policy"]["actor"] = raw["policy"]["actor"] | {"memory": {"type": "gru", "hidden_size": 4}}
    actor = ejax.load(train(parse_config(raw)).run_dir)
    envs = reset(actor.env, jax.random.key(1), 2)
    first, again = (actor.act(np.asarray(envs.obs)) for _ in range(2))
    assert not np.array_equal(first, again)
    np.testing.assert_array_equal(actor.act(np.asarray(envs.obs), starts=np.array([True, True])), first)
    for wrong in (np.array([1, 0]), np.ones(3, bool)):
        refused(actor.act, np.asarray(envs.obs), starts=wrong, match=r"starts: got .*; must be bool \[2\]")
    actor.reset()
    np.testing.assert_array_equal(actor.act(np.asarray(envs.obs)), first)


@pytest.mark.slow
def test_what_is_loaded_can_be_unrolled(actor: Actor) -> None:
    carry = reset(actor.env, jax.random.key(0), 2)
    rollout, _ = unroll(actor.policy, actor.env, actor.params, carry, jax.random.key(1), num_steps=3)
    assert rollout.reward.shape == (3, 2)
