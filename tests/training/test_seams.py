"""Room for what comes: memory of a policy, state of an algorithm's own, several members of one run."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import refused
from pydantic import BaseModel, ConfigDict
from tiny import EPISODE, tiny

from ejax.algorithms.ppo import PPOConfig, ppo_update
from ejax.algorithms.record import Algorithm, ResetPolicy
from ejax.algorithms.step import RunState, Step, finish, init_run_state, make_rollout_step, spread_episodes
from ejax.config import parse_config
from ejax.distributions import Normal, action_spec
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.optim import OptimizerConfig, ScheduleConfig, make_optimizer
from ejax.policies import ActorCritic, NetworkConfig
from ejax.rollout import EnvCarry, reset, unroll, with_memory
from ejax.run import train
from ejax.schema.registry import register_algorithm
from ejax.store.checkpoint import load_checkpoint
from ejax.training.build import build
from ejax.types import Env, Key, Metrics, Params, Policy, PyTree

KEY = jax.random.key(0)


@dataclass(frozen=True)
class Counter:
    """A policy that remembers how many actions it has taken in this episode, and answers with that number."""

    def init(self, key: Key, obs: PyTree) -> Params:
        del key, obs
        return {"params": {"scale": jnp.ones(())}}

    def init_memory(self, num_rows: int) -> PyTree:
        return {"count": jnp.zeros((num_rows, 1))}

    def apply(self, params: Params, obs: PyTree, *, memory: PyTree) -> Any:
        count = memory["count"]
        mean = params["params"]["scale"] * jnp.concatenate([count, -count], axis=-1)
        return Normal(mean, jnp.full_like(mean, -2.0)), count[..., 0], {"count": count + 1.0}


@pytest.mark.slow
def test_a_policys_memory_goes_with_the_environments_and_starts_again_with_each_episode() -> None:
    env, policy = PointMassRL(max_episode_steps=3), Counter()
    params = policy.init(KEY, None)
    carry = with_memory(reset(env, KEY, 2), policy)
    rollout, carry = unroll(policy, env, params, carry, KEY, num_steps=4)
    np.testing.assert_array_equal(rollout.value[:, 0], [0.0, 1.0, 2.0, 0.0])
    np.testing.assert_array_equal(rollout.next_value[:, 0], [1.0, 2.0, 3.0, 1.0])  # of the true next observation
    again, _ = unroll(policy, env, params, carry, KEY, num_steps=2)
    np.testing.assert_array_equal(again.value[:, 0], [1.0, 2.0])  # where the first rollout left off
    # a sequence can be taken up at any step: what was remembered there is in the rollout
    distribution, _, _ = policy.apply(params, rollout.obs, memory=rollout.memory)
    np.testing.assert_allclose(distribution.log_prob(rollout.action), rollout.log_prob, rtol=1e-6)


class RememberingConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_scheduler: ScheduleConfig = ScheduleConfig()
    capacity: int = 6


def make_remembering_step(
    policy: Policy, env: Env, optimizer: Any, config: RememberingConfig, *, num_steps: int, dropout: bool
) -> Step:
    """Keep the mean reward of the last rollouts, and learn nothing."""
    del optimizer, dropout

    def step(state: RunState, key: Key) -> tuple[RunState, Metrics]:
        rollout, envs = unroll(policy, env, state.train.params, state.envs, key, num_steps=num_steps)
        ring = state.own["reward"].at[state.update % config.capacity].set(rollout.reward.mean())
        losses = {"kept": (ring != 0.0).sum().astype(jnp.float32)}
        return finish(replace(state, envs=envs, own={"reward": ring}), rollout, losses)

    return step


def make_ring(options: RememberingConfig, policy: Policy, env: Env, num_envs: int) -> PyTree:
    del policy, env, num_envs
    return {"reward": jnp.zeros(options.capacity)}


REMEMBERING = Algorithm(Config=RememberingConfig, make_step=make_remembering_step, make_own=make_ring)


@pytest.mark.slow
def test_what_an_algorithm_keeps_is_part_of_the_run_and_of_its_checkpoints(tmp_path: Path) -> None:
    register_algorithm("remembering", REMEMBERING, override=True)
    raw = tiny(tmp_path, iterations=3) | {"algorithm": {"name": "remembering"}}
    result = train(parse_config(raw), run_dir=tmp_path / "run")
    assert result.last_train_metrics["train/kept"] == 3.0
    more = train(parse_config(raw, ["trainer.iterations=5"]), resume="latest", run_dir=tmp_path / "run")
    assert more.last_train_metrics["train/kept"] == 5.0
    assert more.latest_checkpoint_path is not None
    state, _ = load_checkpoint(more.latest_checkpoint_path, build(parse_config(raw)).state)
    assert (state.own["reward"] != 0.0).tolist() == [True] * 5 + [False]


@pytest.mark.slow
def test_members_of_a_population_are_one_step_under_vmap() -> None:
    """Two members in one program compute what each computes alone, up to the order of sums."""
    env = PointMassRL()
    network = NetworkConfig(hidden_sizes=(8,))
    policy = ActorCritic(action_spec(env.action_space), actor=network, critic=network)
    config = PPOConfig(batch_size=8, n_epochs=1)
    optimizer = make_optimizer(config.optimizer)
    step = make_rollout_step(
        policy, env, optimizer, config, update=ppo_update, resets=ResetPolicy(), num_steps=4, dropout=False
    )
    keys = jax.random.split(KEY, 2)
    first = partial(init_run_state, policy, env, optimizer, num_envs=4)
    states = jax.vmap(lambda key: first(key))(keys)
    together, _ = jax.jit(jax.vmap(step))(states, keys)
    for i in range(2):
        alone, _ = jax.jit(step)(first(keys[i]), keys[i])
        mine = jax.tree.map(lambda x, i=i: x[i], together)
        chex.assert_trees_all_close(mine.train.params, alone.train.params, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_first_episodes_at_random_steps_end_apart_and_begin_as_others_do() -> None:
    config = tiny(init_at_random_ep_len=True, num_envs=64)
    parts, plain = build(parse_config(config)), build(parse_config(config, ["trainer.init_at_random_ep_len=false"]))
    step = np.asarray(parts.state.envs.state.episode_step)
    assert set(step) == set(range(EPISODE))
    chex.assert_trees_all_equal(parts.state.envs.obs, plain.state.envs.obs)
    chex.assert_trees_all_equal(parts.state.train, plain.state.train)
    rollout, _ = unroll(
        parts.policy, PointMassRL(EPISODE), parts.state.train.params, parts.state.envs, KEY, num_steps=EPISODE
    )
    ended = np.asarray(rollout.done)
    # unless it succeeded before, an episode is cut off when its steps are over
    np.testing.assert_array_equal(
        ended.argmax(0)[~rollout.terminated.any(0)], (EPISODE - 1 - step)[~rollout.terminated.any(0)]
    )


def test_first_episodes_at_random_steps_need_a_count_of_steps() -> None:
    envs = EnvCarry(state={"clock": jnp.zeros(4)}, obs=jnp.zeros((4, 2)))
    refused(lambda: spread_episodes(PointMassRL(), envs, KEY), match="PointMassRL has no episode_step in its state")


@pytest.mark.parametrize("mode", ["host", "async"])
def test_first_episodes_at_random_steps_are_refused_where_environments_are_stepped_outside(mode: str) -> None:
    config = parse_config(tiny(init_at_random_ep_len=True, collector={"mode": mode}))
    refused(build, config, match=r"trainer.init_at_random_ep_len: got true, which is for environments inside")
