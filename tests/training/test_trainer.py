"""A ``Trainer`` of objects: the numbers of the config that describes them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from damages import same, what_is_left
from helpers.tiny import EPISODE, EVALUATED, NUM_ENVS, STEPS, tiny

from ejax.algorithms.ppo import ALGORITHM, PPOConfig
from ejax.config import ConfigError, parse_config
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.play.saved_policy import evaluate_run
from ejax.run import Trainer, train
from ejax.store.run_dir import RunDirectory
from ejax.training.build import build
from ejax.types import Env, Policy


def raw(folder: Path | None = None, **trainer: Any) -> dict[str, Any]:
    return tiny(folder, **EVALUATED, **trainer)


def policy_of(config: dict[str, Any]) -> Policy:
    return build(parse_config(config)).policy


def trainer_of(config: dict[str, Any], env: Any = None, **options: Any) -> Trainer:
    env = PointMassRL(max_episode_steps=EPISODE) if env is None else env
    return Trainer(
        env, policy_of(config), ALGORITHM, options=config["algorithm"]["cfg"], **config["trainer"], **options
    )


@pytest.mark.slow
def test_objects_train_to_the_bits_of_the_config_that_names_them(tmp_path: Path) -> None:
    config = raw(tmp_path, save_frequency_updates=1)
    trainer = trainer_of(config)
    mine = trainer.train(run_dir=tmp_path / "objects")
    named = train(parse_config(config), run_dir=tmp_path / "named")
    assert same(*(what_is_left(tmp_path / name, "tiny") for name in ("objects", "named")), log=True)
    assert mine.best_eval_value == named.best_eval_value
    # the folder describes them: it is evaluated, and gone on with, as any other
    assert trainer.config.env == parse_config(config).env and trainer.config.algorithm == parse_config(config).algorithm
    metrics = [evaluate_run(tmp_path / name, num_episodes=2, num_envs=2) for name in ("objects", "named")]
    assert metrics[0]["eval/avg_reward"] == metrics[1]["eval/avg_reward"]


def test_a_trainer_goes_on_with_its_run(tmp_path: Path) -> None:
    config = raw(tmp_path)
    trainer_of(config).train(2 * STEPS, run_dir=tmp_path / "run")
    again = trainer_of(config).train(4 * STEPS, run_dir=tmp_path / "run", resume="latest")
    whole = trainer_of(config).train(4 * STEPS, run_dir=tmp_path / "whole")
    assert again.global_step == whole.global_step == 4 * STEPS
    assert same(*(what_is_left(tmp_path / name, "tiny") for name in ("run", "whole")), log=True)


def test_options_are_a_config_a_mapping_or_the_defaults() -> None:
    config = raw()
    env, policy = PointMassRL(), policy_of(config)
    options = PPOConfig(batch_size=16, n_epochs=1)
    of_config = Trainer(env, policy, ALGORITHM, options=options).config
    of_mapping = Trainer(env, policy, "ppo", options={"batch_size": 16, "n_epochs": 1}).config
    assert of_config == of_mapping and of_config.algorithm.cfg == options
    assert Trainer(env, policy, ALGORITHM).config.algorithm.cfg == PPOConfig()


@dataclass(frozen=True)
class Wrapped:
    """An environment that no registry knows."""

    inner: Env
    bonus: float = 0.5

    @property
    def observation_space(self) -> gymnasium.Space[Any]:
        return self.inner.observation_space

    @property
    def action_space(self) -> gymnasium.Space[Any]:
        return self.inner.action_space

    @property
    def max_episode_steps(self) -> int | None:
        return self.inner.max_episode_steps

    def reset(self, key: Any) -> Any:
        return self.inner.reset(key)

    def step(self, state: Any, action: Any, key: Any) -> Any:
        state, timestep = self.inner.step(state, action, key)
        return state, timestep.replace(reward=timestep.reward + self.bonus)


@pytest.mark.slow
def test_an_environment_of_ones_own_needs_no_name(tmp_path: Path) -> None:
    config = raw(tmp_path)
    env = Wrapped(PointMassRL(max_episode_steps=EPISODE))
    mine = trainer_of(config, env).train(run_dir=tmp_path / "mine")
    plain = train(parse_config(config), run_dir=tmp_path / "plain")
    length = mine.last_eval_metrics["eval/avg_length"]
    gained = mine.eval_history[0]["eval/avg_reward"] - plain.eval_history[0]["eval/avg_reward"]
    assert length == EPISODE and gained != 0.0
    assert trainer_of(config, env).train(run_dir=tmp_path / "mine", resume="latest").finished


def test_host_environments_are_objects_too(tmp_path: Path) -> None:
    config = tiny(tmp_path, env="gymnasium:Pendulum-v1", **EVALUATED)

    def envs(number: int) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
        return gymnasium.make_vec("Pendulum-v1", number, max_episode_steps=EPISODE)

    policy = policy_of(config)
    options = {"options": config["algorithm"]["cfg"], **config["trainer"]}
    trainer = Trainer(envs(NUM_ENVS), policy, ALGORITHM, eval_env=envs(2), **options)
    trainer.train(run_dir=tmp_path / "objects")
    assert RunDirectory(tmp_path / "objects", "tiny").periodic()
    with pytest.raises(ConfigError, match=r"enable_eval: got true, but an environment outside JAX .* give eval_env"):
        Trainer(envs(NUM_ENVS), policy, ALGORITHM, **options).train(run_dir=tmp_path / "other")
    with pytest.raises(ConfigError, match=r"num_envs: got 8, but the environment that was given has 4; give 4"):
        Trainer(envs(NUM_ENVS), policy, ALGORITHM, eval_env=envs(2), **options | {"num_envs": 8}).train(
            run_dir=tmp_path / "other"
        )
    assert not (tmp_path / "other").exists()


def test_a_wrong_key_is_refused_when_the_trainer_is_made() -> None:
    with pytest.raises(ConfigError, match="num_env"):
        Trainer(PointMassRL(), policy_of(raw()), ALGORITHM, num_env=4)
