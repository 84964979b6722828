"""``ejax.load(run).act(obs)``."""

from pathlib import Path

import jax
import numpy as np
import pytest
from tiny import tiny

import ejax
from ejax.config import parse_config
from ejax.rollout import reset, unroll
from ejax.run import train
from ejax.training.acting import Actor


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


def test_numbers_of_a_simulator_in_double_precision_will_do(actor: Actor, obs: np.ndarray) -> None:
    np.testing.assert_array_equal(actor.act(obs.astype(np.float64)), actor.act(obs))


def test_samples_differ_from_call_to_call(actor: Actor, obs: np.ndarray) -> None:
    first, second = (actor.act(obs, deterministic=False) for _ in range(2))
    assert np.isfinite(first).all() and not np.array_equal(first, second)


@pytest.mark.parametrize("wrong", [np.zeros(3, np.float32), np.zeros((2, 3), np.float32), {"robot": np.zeros(9)}])
def test_another_observation_is_refused_by_its_form(actor: Actor, wrong: object) -> None:
    with pytest.raises(ValueError, match="PointMassRL"):
        actor.act(wrong)


def test_a_run_may_be_named_without_its_time_and_a_checkpoint_by_its_path(run: Path, obs: np.ndarray) -> None:
    (checkpoint,) = (run / "checkpoints").glob("tiny_step_*")
    named = ejax.load(str(run.parent / "tiny"))
    assert named.checkpoint == ejax.load(run, checkpoint=str(checkpoint)).checkpoint


def test_a_policy_with_memory_remembers_until_it_is_reset(tmp_path: Path) -> None:
    raw = tiny(tmp_path)
    raw["policy"]["actor"] = raw["policy"]["actor"] | {"memory": {"type": "gru", "hidden_size": 4}}
    actor = ejax.load(train(parse_config(raw)).run_dir)
    envs = reset(actor.env, jax.random.key(1), 2)
    first, again = (actor.act(np.asarray(envs.obs)) for _ in range(2))
    assert not np.array_equal(first, again)
    np.testing.assert_array_equal(actor.act(np.asarray(envs.obs), starts=np.array([True, True])), first)
    actor.reset()
    np.testing.assert_array_equal(actor.act(np.asarray(envs.obs)), first)


def test_what_is_loaded_can_be_unrolled(actor: Actor) -> None:
    carry = reset(actor.env, jax.random.key(0), 2)
    rollout, _ = unroll(actor.policy, actor.env, actor.params, carry, jax.random.key(1), num_steps=3)
    assert rollout.reward.shape == (3, 2)
