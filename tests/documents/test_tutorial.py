"""EmbodiChain's tutorial on RL, listing by listing: its config, its script, its three extensions."""

import json
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from tiny import NETWORK

import ejax
from ejax.config import RunConfig, load_config, parse_config
from ejax.distributions import Normal
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.policies import build_mlp_from_cfg
from ejax.run import train
from ejax.schema import registry
from ejax.training.build import build_env

ROOT = Path(__file__).parents[2]
PRINTED = ROOT / "configs/agents/rl/push_cube/train_config.json"
CART_POLE = ROOT / "configs/agents/rl/basic/cart_pole/train_config.json"
PLAIN = {"type": "mlp", "hidden_sizes": [256, 256], "activation": "relu"}
FEW = ("trainer.iterations=1", "trainer.num_envs=4", "trainer.rollout_steps=8", "algorithm.cfg.batch_size=16")
POLICY = {"name": "actor_critic", "cfg": {}, "actor": PLAIN, "critic": PLAIN}
ALGORITHM = {"name": "ppo", "cfg": {"learning_rate": 0.0001, "n_epochs": 10, "batch_size": 64, "vf_coef": 0.5}}
PUSH_CUBE = {
    "id": "PushCubeRL",
    "cfg": {"num_envs": 4, "obs_mode": "state", "episode_length": 100, "action_scale": 0.1, "success_threshold": 0.1},
}


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def small(**changes: Any) -> RunConfig:
    """Make a config of a few steps, as the document's sections have them."""
    raw = {
        "trainer": {"num_envs": 4, "rollout_steps": 8, "iterations": 1, "console": False},
        "env": {"id": "PointMassRL", "cfg": {}},
        "policy": {"name": "actor_critic", "actor": NETWORK, "critic": NETWORK},
        "algorithm": {"name": "ppo", "cfg": {"batch_size": 16, "n_epochs": 1}},
    }
    return parse_config({**raw, **changes})


def test_the_config_is_read_as_printed() -> None:
    config = load_config(PRINTED, device="cpu")
    trainer, cfg = config.trainer, config.algorithm.cfg
    read = (trainer.exp_name, trainer.seed, trainer.num_updates, trainer.buffer_size)
    assert read == ("push_cube_ppo", 42, 1000, 1024)
    assert (cfg.optimizer.learning_rate, cfg.batch_size, cfg.n_epochs) == (0.0001, 8192, 10)
    assert [camera.name for camera in trainer.cameras] == ["main_cam"] and trainer.num_eval_envs == 4
    assert {notice.key for notice in config.notices} == {"trainer.headless", "trainer.eval_freq"}


@pytest.mark.slow
@pytest.mark.parametrize("file", [PRINTED, CART_POLE], ids=lambda file: file.parent.name)
def test_the_launch_command_trains_as_written(file: Path, tmp_path: Path) -> None:
    from ejax.train import main

    folder = f"trainer.events.eval.record_camera.params.save_path={tmp_path}"
    files = ["--config", str(file.relative_to(ROOT)), "--device", "cpu", "--run", str(tmp_path / "run")]
    assert main([*files, *FEW, folder, "trainer.num_eval_episodes=1", "trainer.num_eval_envs=1"]) == 0
    assert (tmp_path / "run" / "logs").is_dir() and list((tmp_path / "run" / "checkpoints").iterdir())
    assert list(tmp_path.glob("*main_cam*.mp4"))


def test_sections_are_those_of_the_document(tmp_path: Path) -> None:
    runtime = {"exp_name": "x", "seed": 3, "cuda": False, "headless": True, "iterations": 2, "rollout_steps": 16}
    config = parse_config({"runtime": runtime, "env": PUSH_CUBE, "policy": POLICY, "algorithm": ALGORITHM})
    assert (config.trainer.device, config.trainer.num_envs, config.trainer.buffer_size) == ("cpu", 4, 16)
    assert config.policy.actor is not None and config.policy.actor.network_cfg.hidden_sizes == (256, 256)
    assert build_env(config, phase="train", num_envs=4).episode_length == 100


def test_defaults_are_those_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "gym.json").write_text(json.dumps({"id": "PushCubeRL", "env": {"num_envs": 4}}))
    raw = {"trainer": {"gym_config": "gym.json"}, "policy": POLICY, "algorithm": ALGORITHM}
    (tmp_path / "train.json").write_text(json.dumps(raw))
    trainer = load_config(tmp_path / "train.json").trainer
    assert (trainer.exp_name, trainer.seed, trainer.device) == ("generic_exp", 1, "cpu")
    assert (trainer.iterations, trainer.buffer_size) == (250, 2048)
    assert (trainer.eval_freq, trainer.save_freq, trainer.num_eval_envs) == (10000, 50000, 4)


class Writer:
    """In place of a ``SummaryWriter``."""

    def __init__(self) -> None:
        self.tags: set[str] = set()

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.tags.add(tag)

    def close(self) -> None: ...


@pytest.mark.slow
def test_the_script_runs_with_objects(tmp_path: Path) -> None:
    trainer_cfg, algo_block = {"rollout_steps": 8}, {"name": "ppo", "cfg": {"batch_size": 16, "n_epochs": 1}}
    policy_block: dict[str, Any] = {"name": "actor_critic", "actor": NETWORK, "critic": NETWORK}
    env, eval_env, writer = PointMassRL(max_episode_steps=5), PointMassRL(max_episode_steps=5), Writer()

    obs_dim, action_dim = env.observation_space.shape[-1], env.action_space.shape[-1]
    actor = build_mlp_from_cfg(policy_block.pop("actor"), obs_dim, action_dim)
    critic = build_mlp_from_cfg(policy_block.pop("critic"), obs_dim, 1)
    policy = ejax.build_policy(policy_block, env.observation_space, env.action_space, actor=actor, critic=critic)
    algo = ejax.build_algo(algo_block["name"].lower(), algo_block["cfg"], policy)
    trainer = ejax.Trainer(
        policy=policy,
        env=env,
        algorithm=algo,
        num_steps=trainer_cfg["rollout_steps"],
        batch_size=algo_block["cfg"]["batch_size"],
        writer=writer,
        eval_freq=32,
        save_freq=32,
        checkpoint_dir=tmp_path / "generic_exp" / "checkpoints",
        exp_name="generic_exp",
        use_wandb=False,
        eval_env=eval_env,
        event_cfg={},
        eval_event_cfg={},
        num_envs=4,
        num_eval_envs=2,
        num_eval_episodes=2,
        console=False,
    )
    assert {"actor_critic", "vla"} <= {*ejax.get_registered_policy_names()}
    assert {"ppo", "grpo"} <= {*ejax.get_registered_algo_names()}
    result = trainer.train(total_steps := 1 * 8 * 4)
    assert result.global_step == total_steps and result.run_dir == tmp_path / "generic_exp"
    assert {"train/loss", "eval/avg_reward", "charts/SPS"} <= writer.tags
    writer.close()


@pytest.mark.slow
def test_adding_an_algorithm(tmp_path: Path) -> None:
    @ejax.register_algo("my_algo")
    class MyAlgorithm(ejax.BaseAlgorithm):
        record = ejax.PPO.record  # what a Trainer compiles; without it the methods serve loops of your own

        def initialize_buffer(self, num_steps: int, num_envs: int, obs_dim: Any = None, action_dim: Any = None) -> None:
            super().initialize_buffer(num_steps, num_envs, obs_dim, action_dim)
            self.buffer = ejax.RolloutBuffer(num_steps, num_envs, obs_dim, action_dim, self.device)

        def update(self) -> dict[str, float]:
            return {"loss": 0.0}

    try:
        policy = ejax.build_policy({"name": "actor_critic", "actor": NETWORK, "critic": NETWORK}, PointMassRL())
        algorithm = ejax.build_algo("my_algo", {"batch_size": 16}, policy)
        algorithm.initialize_buffer(8, 4, obs_dim=14, action_dim=2)
        assert isinstance(algorithm, MyAlgorithm) and algorithm.collect_rollout(PointMassRL(), policy, None, 8)
        assert algorithm.update() == {"loss": 0.0} and not algorithm.buffer.is_full()
        assert train(small(algorithm={"name": "my_algo", "cfg": {"batch_size": 16}}), run_dir=tmp_path / "run").finished
    finally:
        del registry.ALGORITHMS["my_algo"]


@pytest.mark.slow
def test_adding_a_policy(tmp_path: Path) -> None:
    @ejax.register_policy("my_policy")
    class MyPolicy(nn.Module):
        action_spec: Any

        @nn.compact
        def __call__(self, obs: Any) -> tuple[Any, Any]:
            mean = nn.Dense(self.action_spec.num_outputs)(obs)
            return Normal(mean, jnp.zeros_like(mean)), nn.Dense(1)(obs)[..., 0]

    try:
        result = train(small(policy={"name": "my_policy"}), run_dir=tmp_path / "run")
        obs, key = jnp.ones((3, 14)), jax.random.key(0)
        assert ejax.get_action(result.policy, result.params, obs, key)[0].shape == (3, 2)
    finally:
        del registry.POLICIES["my_policy"]


@pytest.mark.slow
def test_adding_an_environment(tmp_path: Path) -> None:
    @ejax.register_env("MyTaskRL", max_episode_steps=100, override=True)
    class MyTaskEnv(PointMassRL):
        """In place of an ``EmbodiedEnv`` subclass: any environment in JAX, such as a ``MuJoCoTask``."""

    try:
        config = small(env={"id": "MyTaskRL", "cfg": {"success_threshold": 0.1}})
        env = build_env(config, phase="train", num_envs=4)
        assert (env.max_episode_steps, env.success_threshold) == (100, 0.1) and isinstance(env, MyTaskEnv)
        assert train(config, run_dir=tmp_path / "run").finished
    finally:
        del registry.ENVS["MyTaskRL"]
