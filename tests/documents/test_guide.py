"""The guide of the reviewed pull request, section by section: both modes, collectors, buffers, a VLA, the questions."""

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_tasks import Drift
from tiny import NETWORK

import ejax
from ejax.algorithms.ppo import PPOConfig
from ejax.collectors import AsyncCollector, HostCollector, Schedule
from ejax.config import ConfigError, RunConfig, parse_config
from ejax.distributions import Normal
from ejax.envs.host.pure_host import PureHostEnv
from ejax.run import RunResult, train
from ejax.schema.trust import trust
from ejax.training.build import build

T, N = 8, 4
KEY = jax.random.key(0)
ENV = Drift()
POLICY = ejax.build_policy({"name": "actor_critic", "actor": NETWORK, "critic": NETWORK}, ENV)
CFG = PPOConfig(learning_rate=3e-4, gamma=0.99, n_epochs=1, batch_size=16)
OPTIMIZER = ejax.make_optimizer(CFG.optimizer)


def quick_start(mode: str, **changes: Any) -> RunConfig:
    """Make the guide's config, with the environment and networks that it leaves out; ``buffer_size`` is small."""
    trust("host_tasks:Drift")
    size = T * N if mode == "vla" else T  # there it counts the transitions of all environments
    raw = {
        "trainer": {"buffer_size": size, "model_type": mode, "num_envs": N, "iterations": 2, "console": False},
        "env": {"id": "host_tasks:Drift"},
        "policy": {"name": "actor_critic", "actor": NETWORK, "critic": NETWORK},
        "algorithm": {"name": "ppo", "cfg": {"learning_rate": 3e-4, "gamma": 0.99, "n_epochs": 1, "batch_size": 16}},
    }
    return parse_config({**raw, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["standard", "vla"])
def test_the_quick_start_trains_in_both_modes(mode: str, tmp_path: Path) -> None:
    result = train(quick_start(mode), run_dir=tmp_path / "run")
    assert result.global_step == 2 * T * N and np.isfinite(result.last_train_metrics["train/loss"])
    assert (tmp_path / "run" / "schedule.json").exists() == (mode == "vla")


def test_keys_of_the_review_are_read() -> None:
    keys = {"num_envs": N, "enable_eval": True, "num_eval_episodes": 3, "buffer_type": "vla", "import_modules": ["a.b"]}
    config = quick_start("standard", trainer={**keys, "rollout_steps": T})
    assert (config.trainer.buffer_size, config.trainer.num_eval_episodes) == (T, 3)
    texts = {notice.key: notice.text for notice in config.notices}
    assert "no effect" in texts["trainer.buffer_type"] and "not imported" in texts["trainer.import_modules"]
    policy = {"name": "actor_critic", "action_dim": 7, "actor": NETWORK, "critic": NETWORK}
    with pytest.raises(ConfigError, match=r"policy\.action_dim: got 7"):
        build(quick_start("standard", policy=policy))


@pytest.mark.slow
def test_the_vla_workflow() -> None:
    initial = jax.jit(ejax.init_train_state, static_argnums=(0, 1))
    state, versions = initial(POLICY, OPTIMIZER, KEY, jnp.zeros((N, 2))), []
    collector = HostCollector(POLICY, [PureHostEnv(ENV, N)], num_steps=T, seed=3)
    with AsyncCollector(collector, KEY, schedule=Schedule(max_staleness=1)) as background:
        background.start(state.params)
        for number in range(3):
            collected = background.collect()
            assert collected is not None
            versions.append(int(np.asarray(collected.rollout.version)[0, 0]))
            state, losses = ejax.ppo_update(
                state, collected.rollout, KEY, policy=POLICY, optimizer=OPTIMIZER, config=CFG
            )
            background.publish(state.params, number + 1)
    assert np.isfinite(losses["loss"])
    assert versions == [0, 0, 1]  # at most one update old, each used once


class MyVLAModel(nn.Module):
    """A model of one's own: a Flax module ``obs -> (distribution, value)`` in place of three methods of torch."""

    action_spec: Any
    width: int = 8

    @nn.compact
    def __call__(self, obs: Any) -> tuple[Normal, Any]:
        x = nn.tanh(nn.Dense(self.width)(obs))
        mean = nn.Dense(self.action_spec.num_outputs)(x)
        return Normal(mean, jnp.zeros_like(mean)), nn.Dense(1)(x)[..., 0]


@pytest.mark.slow
def test_a_vla_model_is_named_loaded_and_trained(tmp_path: Path) -> None:
    trust(f"{__name__}:MyVLAModel")

    def run(folder: str, **weights: str) -> RunResult:
        vla = {"model_class": f"{__name__}.MyVLAModel", "model_config": {"width": 8}, **weights}
        return train(quick_start("vla", policy={"name": "vla", "vla_config": vla}), run_dir=tmp_path / folder)

    first = run("first")
    assert first.finished and isinstance(first.policy, MyVLAModel)
    log_prob, entropy, value = ejax.evaluate_actions(first.policy, first.params, jnp.ones((N, 2)), jnp.ones((N, 1)))
    assert log_prob.shape == entropy.shape == value.shape == (N,)
    assert run("second", model_path=str(first.latest_checkpoint_path)).finished


@pytest.mark.slow
def test_the_grpo_config_of_the_review_trains(tmp_path: Path) -> None:
    cfg = {
        "learning_rate": 1e-5,
        "n_epochs": 4,
        "batch_size": 32,
        "gamma": 0.99,
        "clip_coef": 0.2,
        "ent_coef": 0.001,
        "kl_coef": 0.02,
        "group_size": 4,
        "eps": 1e-8,
        "max_grad_norm": 1.0,
        "truncate_at_first_done": True,
    }
    policy = {"name": "actor_only", "action_dim": 1, "actor": NETWORK}
    config = quick_start("standard", algorithm={"name": "grpo", "cfg": cfg}, policy=policy)
    assert train(config, run_dir=tmp_path / "run").finished
