import copy
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from shipped import load_shipped
from small_configs import BASE, ROOT, gym, make, trainer

from ejax.algorithms.demonstrations import DemonstrationConfig
from ejax.algorithms.distill import DistillConfig
from ejax.collectors.config import CollectorConfig
from ejax.collectors.replay_buffer import ReplayConfig
from ejax.config import ConfigError, load_config, parse_config
from ejax.config.data import DataConfig
from ejax.config.embodichain.check import check
from ejax.config.models import CameraConfig, PolicyConfig, TrainerConfig
from ejax.config.schema import make_schema, schema_text
from ejax.policies.vla.config import VLAConfig
from ejax.schema import registry
from ejax.train import main

CONFIGS = sorted(p for p in (ROOT / "configs").rglob("*.*") if p.name != "gym_config.json" and p.is_file())


@dataclass(frozen=True)
class Task:
    """A task of EmbodiChain's first releases, as the registry knows one."""

    episode_length: int = 50
    action_scale: float = 0.2
    sim_steps_per_control: int = 4
    obs_mode: str = "state"


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.ENVS, "TaskRL", Task)


def without(section: str, key: str) -> dict[str, int]:
    return {name: value for name, value in BASE[section].items() if name != key}


def keys_of(notices: tuple[Any, ...]) -> list[str]:
    return [notice.key for notice in notices]


# --- files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_every_shipped_config_loads_and_round_trips(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_shipped(path)
    assert parse_config(config.to_dict()) == config
    assert parse_config(json.loads(json.dumps(config.to_dict()))) == config


def test_json_and_yaml_give_the_same_config(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(BASE))
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(BASE))
    (tmp_path / "a.YML").write_text(yaml.safe_dump(BASE))
    assert load_config(tmp_path / "a.json") == load_config(tmp_path / "a.yaml") == load_config(tmp_path / "a.YML")


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_files_of_windows_are_read(encoding: str, ends: str, tmp_path: Path) -> None:
    for name, text in (("a.json", json.dumps(BASE, indent=1)), ("a.yaml", yaml.safe_dump(BASE))):
        (tmp_path / name).write_bytes(text.replace("\n", ends).encode(encoding))
        assert load_config(tmp_path / name) == make()
        (tmp_path / name).write_bytes(text.encode("utf-16"))
        with pytest.raises(ConfigError, match=r"UTF-16.*save it as UTF-8"):
            load_config(tmp_path / name)


PATHS = [
    (TrainerConfig, "output_dir"),
    (CameraConfig, "save_path"),
    (PolicyConfig, "init_from"),
    (DataConfig, "folder"),
    (ReplayConfig, "folder"),
    (CollectorConfig, "replay_schedule"),
    (DemonstrationConfig, "folder"),
    (DistillConfig, "teacher"),
    (VLAConfig, "model_path"),
]
"""Every key of a config that is a path; ``trainer.gym_config`` and a model's file are looked for by others."""


@pytest.mark.parametrize(("section", "key"), PATHS, ids=lambda x: getattr(x, "__name__", x))
def test_a_path_of_a_config_is_expanded(section: Any, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    field = section.model_fields[key]
    adapter = TypeAdapter(Annotated[field.annotation, None, *field.metadata])
    for path in ("~/a", "$HOME/a", "${HOME}/a"):
        assert adapter.validate_python(path) == "/home/me/a"
    with pytest.raises(ValueError, match=r"\$NOWHERE means nothing"):
        adapter.validate_python("$NOWHERE/a")


def test_no_path_of_a_config_keeps_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text(json.dumps(BASE))
    config = load_config("~/a.json", ["trainer.output_dir=~/runs"])
    assert config.trainer.output_dir == f"{tmp_path}/runs" and not any(x.key == "config" for x in config.notices)
    for override in ("trainer.output_dir", "policy.init_from", "trainer.gym_config"):
        with pytest.raises(ConfigError, match=r"\$NOWHERE means nothing"):
            load_config("$HOME/a.json", [f"{override}=$NOWHERE/a"])
    with pytest.raises(ConfigError, match=r"\$NOWHERE means nothing"):
        load_config("$NOWHERE/a.json")
    (tmp_path / "gym").mkdir()
    cart_pole = (ROOT / "tests" / "gym_configs" / "cart_pole.json").read_text()
    (tmp_path / "gym" / "cart_pole.json").write_text(cart_pole)
    (tmp_path / "a.json").write_text(json.dumps({**BASE, "trainer": {"gym_config": "~/gym/cart_pole.json"}}))
    assert load_config("a.json").env.cfg
    with pytest.raises(SystemExit):
        main(["--run=~no_one/run"])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "", "'.toml' is not the suffix of a config; allowed: .json, .yaml, .yml"),
        ("a.json", '{"trainer": {},\n"policy" {}}', r"a.json:2.*Expecting ':'"),
        ("a.json", '{"trainer": {"seed": 1, "seed": 2}}', "the key 'seed' is given twice"),
        ("a.yaml", "trainer:\n  seed: 1\n  seed: 2\n", r"a.yaml:3.*the key 'seed' is given twice"),
        ("a.yaml", "trainer: [1\npolicy: 2", r"a.yaml:2"),
        ("a.yaml", "", "holds nothing; must be a mapping"),
        ("a.yaml", "- 1", "holds a list; must be a mapping"),
    ],
)
def test_an_unreadable_file_is_located(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_config(tmp_path / name)


def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        load_config("nowhere.yaml")


# --- spellings --------------------------------------------------------------------------------------------


def test_first_and_latest_spelling_are_the_same_run() -> None:
    first = make(
        trainer={"env": {"id": "PointMassRL", "cfg": {"num_envs": 8}}, "rollout_steps": 16},
        policy={
            "name": "Actor_Critic",
            "actor": {"type": "mlp", "hidden_sizes": [8], "activation": "relu"},
            "critic": {"type": "mlp", "hidden_sizes": [8], "activation": "relu"},
        },
        algorithm={"name": "PPO", "cfg": {"learning_rate": "1e-4", "batch_size": 32}},
    )
    block = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "relu"}}
    latest = make(
        trainer={"learning_env": {"name": "pointmassrl"}, "num_envs": 8, "buffer_size": 16},
        policy={"name": "actor_critic", "actor": block, "critic": block},
        algorithm={"name": "ppo", "cfg": {"optimizer": {"learning_rate": 0.0001}, "batch_size": 32}},
    )
    assert first == latest
    assert hash(first) == hash(latest)


def test_env_may_stand_at_the_top() -> None:
    assert make(trainer=without("trainer", "learning_env"), env="PointMassRL") == make()


def test_standard_deviations_become_logarithms() -> None:
    policy = {**BASE["policy"], "initial_action_std": 0.5, "action_std_range": [0.1, 2.0]}
    config = make(policy=policy).policy
    assert config.initial_log_std == math.log(0.5)
    assert config.log_std_range == (math.log(0.1), math.log(2.0))


@pytest.mark.parametrize(("given_device", "device"), [("gpu", "cuda"), ("gpu:1", "cuda:1")])
def test_gpu_means_cuda(given_device: str, device: str) -> None:
    with pytest.raises(ConfigError, match=f"got '{device}', but the devices of jax here are cpu"):
        make(trainer=trainer(device=given_device))


def test_null_is_not_given_where_embodichain_reads_it_so() -> None:
    assert make(trainer=trainer(num_envs=None, events={"train": None, "eval": None})).trainer.num_envs == 64
    assert make(trainer=trainer(events=None)) == make()
    assert make(trainer=trainer(enable_eval=None, use_wandb=None, distributed=None)) == make()
    critic = {"network_cfg": {**BASE["policy"]["critic"]["network_cfg"], "use_layernorm": None}}
    policy = {**BASE["policy"], "critic": critic, "actor_obs_normalization": None, "obs_groups": None}
    assert make(policy=policy) == make()
    actor = {"network_cfg": {"hidden_sizes": [8], "activation": None}}
    assert make(policy={**BASE["policy"], "actor": actor}).policy.actor.network_cfg.activation == "none"


def test_the_text_none_is_told_and_refused_beside_compat_where_it_is_relu() -> None:
    actor = {"hidden_sizes": [8], "activation": "None", "last_activation": None}
    policy = {**BASE["policy"], "actor": actor}
    config = make(policy=policy)
    assert config.policy.actor.network_cfg.activation == "none"
    assert [(note.key, note.text) for note in config.notices] == [
        ("policy.actor.activation", "'None' means no activation; it is ReLU in EmbodiChain, unlike null")
    ]
    with pytest.raises(ConfigError, match=r"policy\.actor\.activation: got 'None', which is ReLU .*give relu or null"):
        make(policy=policy, compat="embodichain-0.3")
    assert make(policy={**policy, "actor": {**actor, "activation": None}}).notices == ()
    with pytest.raises(ConfigError, match=r"critic\.network_cfg\.last_activation .*which is ReLU"):
        make("policy.critic.network_cfg.last_activation=none", compat="embodichain-seed")


def test_names_may_have_any_case() -> None:
    network = {"type": "MLP", "network_cfg": {"hidden_sizes": [8, 8], "activation": "ReLU"}}
    cfg = {"batch_size": 32, "optimizer": {"name": "AdamW"}, "lr_scheduler": {"name": "Linear"}}
    config = make(policy={**BASE["policy"], "actor": network}, algorithm={"name": "PPO", "cfg": cfg})
    lower = {"batch_size": 32, "optimizer": {"name": "adamw"}, "lr_scheduler": {"name": "linear"}}
    assert config == make(algorithm={"name": "ppo", "cfg": lower})
    with pytest.raises(ConfigError, match=r"kwargs.bettas: unknown key; allowed: betas"):
        make(algorithm={"name": "ppo", "cfg": {**cfg, "optimizer": {"name": "AdamW", "kwargs": {"bettas": 1}}}})


def test_counts_may_be_written_as_whole_floats() -> None:
    assert make(trainer=trainer(iterations=1e3)).trainer.iterations == 1000


def test_a_learning_env_wins_over_a_gym_config_and_says_so() -> None:
    config = make(trainer=trainer(gym_config="nowhere.json"))
    assert config == make() and keys_of(config.notices) == ["trainer.gym_config"]


def test_a_global_event_is_an_event_and_says_so() -> None:
    video = {"func": "record_camera_data_async", "is_global": True}
    config = make(trainer=trainer(events={"train": {"video": video}}))
    assert len(config.trainer.cameras) == 1
    assert keys_of(config.notices) == ["trainer.events.train.video.is_global"]


def test_the_rate_of_a_videos_file_has_no_effect_and_is_told() -> None:
    video = {"func": "record_camera_data_async", "params": {"name": "main", "fps": 20}}
    config = make(trainer=trainer(events={"train": {"video": video}}))
    assert config.trainer.cameras[0].name == "main"
    assert keys_of(config.notices) == ["trainer.events.train.video.params.fps"]


def test_null_blocks_are_defaults() -> None:
    cfg = {"batch_size": 32, "optimizer": None, "lr_scheduler": None}
    assert make(algorithm={"name": "ppo", "cfg": cfg}) == make()


def test_scientific_notation_is_a_number_in_yaml(tmp_path: Path) -> None:
    text = yaml.safe_dump(BASE).replace("batch_size: 32", "batch_size: 32\n    optimizer:\n      learning_rate: 1e-4")
    (tmp_path / "a.yaml").write_text(text)
    assert load_config(tmp_path / "a.yaml").algorithm.cfg.optimizer.learning_rate == 1e-4


def test_text_is_a_number_only_where_a_number_is_wanted(tmp_path: Path) -> None:
    """PyYAML, by which a program may have read its config, gives text for 3e-4."""
    cfg = {"learning_rate": "3e-4", "optimizer": {"kwargs": {"eps": "1e-6"}}}
    keys = {"exp_name": "12e3", "output_dir": "1_000", "buffer_size": "1_024", "iterations": "2e0"}
    algorithm = {"name": "ppo", "cfg": cfg}
    config = make("env.cfg.success_bonus='5e-1'", trainer=trainer(**keys), algorithm=algorithm)
    assert (config.trainer.exp_name, config.trainer.output_dir) == ("12e3", "1_000")
    assert (config.trainer.buffer_size, config.trainer.iterations) == (1024, 2)
    optimizer = config.algorithm.cfg.optimizer
    assert (optimizer.learning_rate, dict(optimizer.kwargs)) == (3e-4, {"eps": 1e-6})
    assert config.env.cfg["success_bonus"] == 0.5
    (tmp_path / "a.json").write_text(json.dumps(config.to_dict()))
    assert load_config(tmp_path / "a.json") == config


def test_defaults_of_the_learning_env_path() -> None:
    config = make(trainer={"learning_env": "PointMassRL"})
    assert (
        config.trainer.model_dump()
        | {
            "exp_name": "PointMassRL_ppo",
            "seed": 1,
            "device": "cpu",
            "num_envs": 64,
            "buffer_size": 256,
            "iterations": 250,
            "enable_eval": False,
            "num_eval_envs": 16,
            "num_eval_episodes": 5,
            "eval_freq": 0,
            "save_freq": 0,
            "eval_seed": 10001,
        }
        == config.trainer.model_dump()
    )


def test_defaults_of_the_gym_config_path(tmp_path: Path, task: None) -> None:
    config = gym(tmp_path, {"id": "TaskRL"})
    assert (
        config.trainer.model_dump()
        | {
            "exp_name": "generic_exp",
            "seed": 1,
            "device": "cpu",
            "num_envs": 1,
            "buffer_size": 2048,
            "iterations": 250,
            "enable_eval": False,
            "num_eval_envs": 4,
            "num_eval_episodes": 5,
            "eval_freq": 10000,
            "save_freq": 50000,
            "eval_seed": 10001,
        }
        == config.trainer.model_dump()
    )


def test_eval_seed_follows_the_seed() -> None:
    assert make("trainer.seed=7").trainer.eval_seed == 10007


def test_total_timesteps_counts_whole_updates() -> None:
    assert make("trainer.total_timesteps=129").trainer.num_updates == 2


def test_iterations_of_the_command_line_win_over_the_timesteps_of_the_file() -> None:
    config = make("trainer.iterations=5", trainer=trainer(total_timesteps=1280))
    assert (config.trainer.num_updates, config.trainer.total_timesteps) == (5, None)


def test_the_seed_spelling_evaluates_and_says_so() -> None:
    config = make(trainer={"learning_env": "PointMassRL", "rollout_steps": 256, "eval_freq": 2})
    assert config.trainer.enable_eval
    assert "rollout_steps did" in config.notices[0].text


def test_buffer_size_wins_over_rollout_steps_and_says_so() -> None:
    config = make(trainer=trainer(rollout_steps=99, eval_freq=2))
    assert config == make("trainer.eval_freq=2") and not config.trainer.enable_eval
    assert keys_of(config.notices) == ["trainer.rollout_steps", "trainer.eval_freq"]
    assert config.notices[0].text == "no effect: trainer.buffer_size, which is given too, is 16"
    assert make(trainer=trainer(rollout_steps=16)).notices == ()


def test_actor_only_goes_without_a_critic_block_and_says_so() -> None:
    config = make("policy.name=actor_only", "policy.obs_groups.critic=[obs]", "policy.critic_obs_normalization=true")
    assert config == make(policy={"name": "actor_only", "actor": BASE["policy"]["actor"]})
    told = [notice.key for notice in config.notices if notice.status == "without effect"]
    assert told == [
        "policy.critic",
        "policy.critic_obs_normalization (override)",
        "policy.obs_groups.critic (override)",
    ]


@pytest.mark.parametrize("critic", [{}, {"critic": None}])
def test_a_critic_without_groups_reads_those_of_the_actor(critic: dict[str, None]) -> None:
    env = "env=gymnax:CartPole-v1"  # what it observes is known when it is built
    groups = make(env, policy={**BASE["policy"], "obs_groups": {"actor": ["a", "b.c"], **critic}}).policy.obs_groups
    assert groups.critic == groups.actor == ("a", "b.c")
    assert make(env, "policy.obs_groups={actor: [a], critic: []}").policy.obs_groups.critic == ()
    config = make(env, "policy.obs_groups.actor=[a]", "policy.name=actor_only")
    assert config.policy.obs_groups.critic == () and parse_config(config.to_dict()).notices == ()


def test_later_spellings_do_not_evaluate_unasked_and_say_so() -> None:
    config = make("trainer.eval_freq=2")
    assert not config.trainer.enable_eval
    assert keys_of(config.notices) == ["trainer.eval_freq (override)"]


# --- gym configs ------------------------------------------------------------------------------------------


def test_a_first_release_gym_config_fills_the_task(tmp_path: Path, task: None) -> None:
    env = {"num_envs": 8, "extensions": {"episode_length": 20, "action_scale": 0.1, "joint_limits": 0.5}}
    config = gym(tmp_path, {"id": "TaskRL", "env": env})
    assert config.trainer.num_envs == 8
    assert dict(config.env.cfg) == {"episode_length": 20, "action_scale": 0.1}
    assert keys_of(config.notices) == ["gym.json:env.extensions.joint_limits"]


def test_max_episode_steps_is_the_time_limit(tmp_path: Path, task: None) -> None:
    data = {"id": "TaskRL", "max_episode_steps": 30, "num_envs": 2, "env": {"sim_steps_per_control": 2}}
    assert dict(gym(tmp_path, data).env.cfg) == {"episode_length": 30, "sim_steps_per_control": 2}


def test_the_trainer_overrides_the_number_of_environments(tmp_path: Path, task: None) -> None:
    assert gym(tmp_path, {"id": "TaskRL", "num_envs": 2}, num_envs=4).trainer.num_envs == 4


def test_the_scene_of_a_first_release_task_is_announced(tmp_path: Path, task: None) -> None:
    data = {"id": "TaskRL", "max_episodes": 5, "env": {"extensions": {}}, "robot": {"uid": "r"}, "sensor": []}
    assert set(keys_of(gym(tmp_path, data).notices)) == {"gym.json:max_episodes", "gym.json:robot"}


def test_a_gym_config_is_found_beside_the_train_file_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: None
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gym.json").write_text(json.dumps({"id": "TaskRL", "num_envs": 3}))
    train = {**BASE, "trainer": {"gym_config": "gym.json"}}
    (tmp_path / "here" / "train.json").write_text(json.dumps(train))
    assert load_config("here/train.json").trainer.num_envs == 3
    (tmp_path / "here" / "gym.json").write_text(json.dumps({"id": "TaskRL", "num_envs": 5}))
    assert load_config("here/train.json").trainer.num_envs == 5


def test_a_gym_config_named_from_its_repository_is_not_one_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: None
) -> None:
    """EmbodiChain reads the working directory's; a file of the same name in another checkout is another task."""
    for place, num_envs in (("theirs", 3), ("mine", 5)):
        (tmp_path / place / "configs").mkdir(parents=True)
        (tmp_path / place / "configs" / "gym.json").write_text(json.dumps({"id": "TaskRL", "num_envs": num_envs}))
    train = tmp_path / "theirs" / "configs" / "train.json"
    train.write_text(json.dumps({**BASE, "trainer": {"gym_config": "configs/gym.json"}}))
    monkeypatch.chdir(tmp_path / "theirs")
    assert load_config(train).trainer.num_envs == 3 and load_config(train).notices == ()
    monkeypatch.chdir(tmp_path / "mine")
    config = load_config(train)
    theirs, mine = (tmp_path / place / "configs" / "gym.json" for place in ("theirs", "mine"))
    assert config.trainer.num_envs == 3
    assert [notice.text for notice in config.notices] == [f"read {theirs}, not {mine}, which differs"]
    os.truncate(mine, 1 << 40)  # the one that is not read may be anything
    assert [notice.text for notice in load_config(train).notices] == [f"read {theirs}, not {mine}, which differs"]


def test_a_gym_config_typed_on_the_command_line_is_one_of_the_working_directory_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: None
) -> None:
    (tmp_path / "here").mkdir()
    gym(tmp_path, {"id": "TaskRL", "num_envs": 3})
    (tmp_path / "here" / "gym.json").write_text(json.dumps({"id": "TaskRL", "num_envs": 5, "sensor": [1]}))
    monkeypatch.chdir(tmp_path / "here")
    train = tmp_path / "train.json"
    assert load_config(train).trainer.num_envs == 3
    assert load_config(train, ["trainer.gym_config=gym.json"]).trainer.num_envs == 5
    assert "gym.json:sensor" in [note.key for note in check(train, ["trainer.gym_config=gym.json"])]
    assert "gym.json:sensor" not in [note.key for note in check(train)]


def test_a_gym_config_of_the_working_directory_beside_a_copy_that_differs_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: None
) -> None:
    for place, num_envs in (("copies", 3), ("root/configs", 5)):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "gym.json").write_text(json.dumps({"id": "TaskRL", "num_envs": num_envs}))
    train = tmp_path / "copies" / "train.json"
    train.write_text(json.dumps({**BASE, "trainer": {"gym_config": "configs/gym.json"}}))
    monkeypatch.chdir(tmp_path / "root")
    config = load_config(train)
    assert config.trainer.num_envs == 5
    read, other = tmp_path / "root" / "configs" / "gym.json", tmp_path / "copies" / "gym.json"
    assert [notice.text for notice in config.notices] == [f"read {read}, not {other}, which differs"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"id": "TaskRL", "max_episode_step": 3}, "gym.json:max_episode_step: unknown key.*'max_episode_steps'"),
        ({"id": "TaskRL", "env": {"event": {}}}, "gym.json:env.event: unknown key.*Did you mean 'events'"),
        ({"id": "TaskRL", "env": {"extensions": {"actionscale": 1}}}, "gym.json:env.extensions.actionscale: unknown"),
        ({"id": "TaskR"}, "gym.json:id: no env 'TaskR'.*Did you mean 'TaskRL'"),
        ({"env": {}}, "gym.json must hold id"),
        (
            {"id": "TaskRL", "max_episode_steps": 3, "env": {"extensions": {"episode_length": 4}}},
            "gym.json:max_episode_steps: is 3, but env.extensions.episode_length is 4",
        ),
    ],
)
def test_a_bad_gym_config_is_located(tmp_path: Path, task: None, data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gym(tmp_path, data)


# --- notices ----------------------------------------------------------------------------------------------


def test_a_video_of_evaluations_that_do_not_happen_is_told_of() -> None:
    video = {"video": {"func": "record_camera_data_async"}}
    notices = make(trainer=trainer(events={"train": video, "eval": video}, enable_eval=False)).notices
    assert keys_of(notices) == ["trainer.events.eval.video"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("headless", True),
        ("renderer", "hybrid"),
        ("enable_rt", True),
        ("gpu_id", 1),
        ("import_modules", ["os"]),
        ("torch_deterministic", True),
        ("filter_dataset_saving", True),
    ],
)
def test_a_key_without_effect_is_announced(key: str, value: Any) -> None:
    assert keys_of(make(trainer=trainer(**{key: value})).notices) == [f"trainer.{key}"]


def test_vla_collects_in_the_background_and_counts_its_buffer_over_all_environments() -> None:
    config = make(trainer=trainer(model_type="vla", num_envs=8, buffer_size=512))
    assert (config.trainer.collector.mode, config.trainer.buffer_size) == ("async", 64)
    notices = {notice.key: notice.text for notice in config.notices}
    assert notices["trainer.buffer_size"].startswith("512 transitions of all envs, as model_type vla counts: 64 steps")
    assert notices["trainer.model_type"] == "vla: trainer.collector.mode is async"
    assert parse_config(config.to_dict()) == config
    in_turn = make(trainer=trainer(model_type="vla", num_envs=8, buffer_size=512, collector={"mode": "host"}))
    assert in_turn.trainer.collector.mode == "host"


def test_the_standard_model_type_changes_nothing() -> None:
    config = make(trainer=trainer(model_type="standard", num_envs=8, buffer_size=512))
    assert (config.trainer.collector.mode, config.trainer.buffer_size) == ("auto", 512)
    assert "trainer.model_type" not in keys_of(config.notices)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"model_type": "vla", "num_envs": 8, "buffer_size": 100},
            r"buffer_size: got 100; with model_type vla a multiple",
        ),
        ({"model_type": "vlm"}, r"trainer\.model_type: got 'vlm'; allowed: standard, vla"),
        ({"collector": {"mode": "thread"}}, r"collector\.mode: got 'thread'; allowed: auto, device, host, async"),
        ({"collector": {"schedule": "newest"}}, r"collector\.schedule: got 'newest'; allowed: fixed, free"),
        ({"collector": {"max_stalenes": 2}}, r"max_stalenes: unknown key; .* Did you mean 'max_staleness'\?"),
        ({"collector": {"max_staleness": -1}}, r"collector\.max_staleness: got -1; must be greater than or equal to 0"),
        ({"collector": {"num_groups": 3}, "num_envs": 8}, r"num_groups: got 3, which does not divide num_envs 8"),
        ({"collector": {"env_timeout_s": 0}}, r"collector\.env_timeout_s: got 0; must be greater than 0"),
    ],
)
def test_a_wrong_collector_is_told_with_its_key(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(trainer=trainer(**keys))


def test_imports_named_by_a_config_do_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "boom.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    make(trainer=trainer(import_modules=["boom"]))
    assert "boom" not in sys.modules


# --- overrides --------------------------------------------------------------------------------------------


def test_overrides_win_in_either_spelling() -> None:
    config = make("trainer.rollout_steps=32", "algorithm.cfg.learning_rate=1e-3", "policy.actor.hidden_sizes=[4]")
    assert config == make(
        "trainer.buffer_size=32",
        "algorithm.cfg.optimizer.learning_rate=0.001",
        "policy.actor.network_cfg.hidden_sizes=[4]",
    )


def test_an_override_of_a_section_replaces_it() -> None:
    assert make("trainer.learning_env={name: PointMassRL, cfg: {success_bonus: 1.0}}").env.cfg["success_bonus"] == 1.0
    assert dict(make("env.cfg.success_bonus=1.0", "trainer.learning_env=PointMassRL").env.cfg) == {}


def test_overrides_reach_into_a_gym_config(tmp_path: Path, task: None) -> None:
    gym(tmp_path, {"id": "TaskRL", "env": {"extensions": {"episode_length": 20}}})
    config = load_config(tmp_path / "train.json", ["env.cfg.action_scale=0.5"])
    assert dict(config.env.cfg) == {"episode_length": 20, "action_scale": 0.5}


def test_an_environment_override_replaces_the_gym_config(tmp_path: Path, task: None) -> None:
    gym(tmp_path, {"id": "TaskRL"})
    assert load_config(tmp_path / "train.json", ["trainer.learning_env=PointMassRL"]).env.id == "PointMassRL"


@pytest.mark.usefixtures("nothing_trusted")
def test_a_file_alone_does_not_start_foreign_code(tmp_path: Path) -> None:
    place = "ejax.envs.tasks.point_mass:PointMassRL"
    (tmp_path / "a.json").write_text(json.dumps({**BASE, "trainer": trainer(learning_env=place)}))
    with pytest.raises(ConfigError, match=f"learning_env: .*; if you know it, add --trust {place} to the command line"):
        load_config(tmp_path / "a.json")
    assert load_config(tmp_path / "a.json", [f"env.id={place}"]).env.id == place


# --- errors -----------------------------------------------------------------------------------------------

BAD_OVERRIDES = {
    "trainer.sead=3": r"trainer.sead \(override\): unknown key; allowed: .*Did you mean 'seed'\?",
    "trainer.rollout_step=3": r"Did you mean 'rollout_steps'\?",
    "policy.actor.hiden_sizes=[1]": r"policy.actor.hiden_sizes .*allowed: memory, network_cfg, type. Did you mean 'hid",
    "trainer.num_envs=0": "trainer.num_envs .*got 0; must be greater than 0",
    "trainer.num_envs=true": "trainer.num_envs .*got True; must be a valid integer",
    "trainer.num_envs='64'": "trainer.num_envs .*got '64'; must be a valid integer",
    "trainer.iterations=-1": "trainer.iterations .*got -1; must be greater than 0",
    "trainer.total_timesteps='1.5'": "total_timesteps .*got '1.5'; must be a valid integer",
    "trainer.keep_checkpoints=1e6": "got 1000000.0; must be an integer, such as 1000000",
    "trainer.exp_name=12e3": r"exp_name .*got 12000.0; must be a valid string: put it in quotes",
    "trainer.iterations=1:30": "trainer.iterations .*got '1:30'; must be a valid integer",
    "trainer.iterations=1_00": "trainer.iterations .*got '1_00'",
    "trainer.enable_eval=yes": "trainer.enable_eval .*got 'yes'; must be a valid boolean",
    "trainer.enable_eval=1": "trainer.enable_eval .*got 1; must be a valid boolean",
    "trainer.eval_freq=-1": "trainer.eval_freq .*got -1",
    "trainer.best_eval_mode=maximum": r"got 'maximum'; allowed: max, min. Did you mean 'max'\?",
    "trainer.best_eval_metric=eval/success": r"allowed: eval/avg_reward, .*Did you mean 'eval/success_rate'\?",
    "trainer.device=mps": "trainer.device .*got 'mps'; allowed: cpu, cuda",
    "trainer.device=cuda": "got 'cuda', but the devices of jax here are cpu.*--device cpu",
    "trainer.device=cpu:99": "got 'cpu:99', but the devices of jax here are cpu",
    "trainer.device=0": "trainer.device .*got 0; must be a valid string",
    "trainer.updates_per_dispatch=many": "trainer.updates_per_dispatch .*got 'many'",
    "trainer.exp_name=a/b": "must be part of a folder's name",
    "trainer.events=[1]": "trainer.events .*must be a section with the keys train, eval",
    "trainer.events.test={}": r"trainer.events.test .*unknown key; allowed: eval, train",
    "trainer.events.train.a={func: f}": "events.train.a.func.*: no events functor 'f'; there is randomize_",
    "trainer.learning_env=PointMas": r"no env 'PointMas'; there is .*Did you mean 'PointMassRL'\?",
    "env.cfg.sucess_bonus=1": r"env.cfg.sucess_bonus .*unknown key; allowed: .*Did you mean 'success_bonus'\?",
    "env.cfg.success_bonus=true": "env.cfg.success_bonus .*got True; must be a valid number",
    "env.cfg.success_bonus=-1": "success_bonus must be >= 0, got -1",
    "policy.name=actor_critc": r"policy.name .*no policy 'actor_critc'; .*Did you mean 'actor_critic'\?",
    "trainer.learning_env={name: PointMassRL, params: {}}": "trainer.learning_env.*params.*: unknown key; allowed: cfg",
    "policy.vla_config.model_path=a.pth": "vla_config.*belongs to the policy vla, not to actor_critic",
    "policy.name=vla": "policy.vla_config.*is missing: vla needs",
    "policy={name: vla, vla_config: {model_config: {widht: 8}}}": "vla_config.model_config.widht.*Did you mean 'width'",
    "policy={name: vla, vla_config: {}, squash_actions: true}": "policy.squash_actions: vla does not have it",
    "policy={name: vla, vla_config: {robot_type: CobotMagic}}": "vla_config.robot_type.*belongs to EmbodiChain's model",
    "policy={name: actor_only, critic: {hidden_sizes: [8]}}": "policy.actor: is missing: actor_only needs",
    "policy.action_dim=3": r"policy.action_dim .*got 3, but the env's actions have 2; give 2, or leave it out",
    "policy.critic=null": "policy.critic .*is missing: actor_critic needs",
    "policy.cfg.x=1": "policy.cfg: actor_critic takes no cfg",
    "policy.actor.type=cnn": "policy.actor.type .*got 'cnn'; allowed: mlp",
    "policy.actor.activation=rellu": r"got 'rellu'; allowed: relu, .*Did you mean 'relu'\?",
    "policy.actor.orthogonal_init=[1, 1]": "policy.actor.network_cfg.*needs one gain for each of the 3 Linear",
    "policy.actor.dropout_p=1": "got 1; must be less than 1",
    "policy.initial_log_std=9": r"got 9.0, outside log_std_range \[-5.0, 2.0\]",
    "policy.log_std_range=[1, 1]": "policy.log_std_range .*the first must be below the second",
    "policy.log_std_range=[1]": r"policy.log_std_range.1\b.*is missing",
    "policy.initial_action_std=0": "policy.initial_action_std .*got 0; must be a number above 0",
    "policy.action_std_range=[1]": r"policy.action_std_range .*got \[1\]; must be \[lowest, highest\]",
    "algorithm.name=pp": r"algorithm.name .*no algorithm 'pp'; there is apg, bc, distill.*Did you mean 'ppo'\?",
    "algorithm.cfg.batch_size=129": r"128 rows \(buffer_size 16 · num_envs 8\); give at most 128: "
    "algorithm.cfg.batch_size=128",
    "algorithm.cfg.num_mini_batches=129": "give at most 128: algorithm.cfg.num_mini_batches=128",
    "algorithm.cfg.gamma=1.5": "algorithm.cfg.gamma .*got 1.5; must be less than or equal to 1",
    "algorithm.cfg.gamma=true": "algorithm.cfg.gamma .*got True; must be a valid number",
    "algorithm.cfg.gamma=.nan": "algorithm.cfg.gamma .*must be a finite number",
    "algorithm.cfg.schedule=adaptive": "algorithm.cfg.desired_kl: is missing: schedule 'adaptive' needs it",
    "algorithm.cfg.optimizer.name=adm": r"got 'adm'; allowed: adam, .*Did you mean 'adam'\?",
    "algorithm.cfg.optimizer.kwargs.lr=1": "optimizer.kwargs: lr .*the learning rate is optimizer.learning_rate",
    "algorithm.cfg.optimizer.kwargs.bettas=1": r"kwargs.bettas .*allowed: betas, .*Did you mean 'betas'\?",
    "algorithm.cfg.optimizer.kwargs.eps=true": "kwargs.eps .*got True",
    "algorithm.cfg.optimizer=adam": "got 'adam'; must be a section with the keys name, learning_rate, kwargs",
    "algorithm.cfg.lr_scheduler={name: step}": "lr_scheduler.kwargs.step_size.*is missing",
    "algorithm.cfg.lr_scheduler.kwargs.gamma=1": "given without a name; name one of linear, cosine",
    "seed=3": r"seed \(override\): unknown key; allowed: algorithm, compat, data, env, policy, population, trainer",
    "trainer.num_envs.x=3": "override 'trainer.num_envs.x=3': trainer.num_envs is 8, not a section",
    "trainer.seed": "override 'trainer.seed': must read section.key=value",
    "trainer.seed=[": r"override 'trainer.seed=\[': ",
}


@pytest.mark.parametrize("override", BAD_OVERRIDES)
def test_a_bad_value_is_told_with_its_key_and_the_remedy(override: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){BAD_OVERRIDES[override]}") as caught:
        make(override)
    assert len(caught.value.problems) == 1


def test_an_output_folder_that_cannot_be_made_is_told_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ejax.runtime.device.prepare_jax", lambda device: None)  # it sets up the process for good
    (tmp_path / "file").write_text("")
    config = Path(__file__).parents[2] / "configs/point_mass/ppo.yaml"
    assert main(["--config", str(config), f"trainer.output_dir={tmp_path / 'file' / 'outputs'}"]) == 2
    assert f"Not a directory: '{tmp_path / 'file' / 'outputs'}" in capsys.readouterr().err


def test_a_command_without_a_config_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    told = "give --config FILE, --run DIR with --resume to go on with a run, or --fork RUN"
    assert capsys.readouterr().err == f"ejax.train: {told}\n"


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        make("trainer.sead=3", "trainer.num_envs=0", "trainer.device=cuda", "env.cfg.mas=2")
    assert len(caught.value.problems) == 4
    assert str(caught.value).startswith("config: 4 problems\n")


def test_a_key_is_told_in_the_users_spelling() -> None:
    with pytest.raises(ConfigError, match=r"\n  algorithm.cfg.learning_rate: got -1"):
        make(algorithm={"name": "ppo", "cfg": {"learning_rate": -1, "batch_size": 32}})
    with pytest.raises(ConfigError, match=r"\n  trainer.learning_env: no env 'X'"):
        make(trainer=trainer(learning_env="X"))
    with pytest.raises(ConfigError, match=r"\n  trainer.learning_env.name: no env 'X'"):
        make(trainer=trainer(learning_env={"name": "X"}))


def test_two_spellings_of_one_value_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer.learning_env: means the same as env, which is given too"):
        make(env="CartPoleRL")


def test_an_adaptive_schedule_excludes_a_scheduler() -> None:
    cfg = {"batch_size": 32, "schedule": "adaptive", "desired_kl": 0.01, "lr_scheduler": {"name": "linear"}}
    with pytest.raises(ConfigError, match="got 'adaptive' together with lr_scheduler 'linear'; keep one"):
        make(algorithm={"name": "ppo", "cfg": cfg})


def test_evaluation_needs_episodes() -> None:
    with pytest.raises(ConfigError, match=r"trainer.num_eval_episodes.*got 0 with enable_eval"):
        make("trainer.enable_eval=true", "trainer.num_eval_episodes=0")


@pytest.mark.parametrize("section", ["trainer", "policy", "algorithm"])
def test_a_missing_section_is_told(section: str) -> None:
    with pytest.raises(ConfigError, match=f"{section}: is missing"):
        parse_config({name: value for name, value in BASE.items() if name != section})


@pytest.mark.parametrize("section", ["trainer", "policy", "algorithm"])
def test_a_section_that_is_none_is_told(section: str) -> None:
    with pytest.raises(ConfigError, match=rf"{section}: got \[\]; must be a section with the keys"):
        parse_config({**BASE, section: []})


def test_a_missing_environment_names_the_ways_to_give_one() -> None:
    with pytest.raises(ConfigError, match=r"env: is missing; give trainer.gym_config, trainer.learning_env"):
        make(trainer=without("trainer", "learning_env"))


def test_a_missing_gym_config_names_both_places(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({**BASE, "trainer": {"gym_config": "no.json"}}))
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "a.json")
    assert str(tmp_path / "no.json") in str(caught.value)
    assert str(Path.cwd() / "no.json") in str(caught.value)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["trainer", "policy", "algorithm", "algorithm.cfg", "policy.actor", "env", "trainer.events"]),
    st.text("abcdefghij_", min_size=1),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    ),
)
def test_whatever_a_config_holds_it_loads_or_raises_config_error(section: str, key: str, value: Any) -> None:
    data = copy.deepcopy(BASE)
    *above, last = section.split(".")
    node = data
    for name in above:
        node = node[name]
    node[last] = {**node[last], key: value} if isinstance(node.get(last), dict) else value
    try:
        parse_config(data)
    except ConfigError as error:
        assert error.problems


# --- schema -----------------------------------------------------------------------------------------------


def test_the_schema_file_is_what_the_generator_makes() -> None:
    text = (ROOT / "ejax" / "config.schema.json").read_text(encoding="utf-8")
    assert text == schema_text(), "run: python -m ejax.config schema > ejax/config.schema.json"


def test_every_key_of_the_schema_says_what_it_is() -> None:
    schema = make_schema()
    named = {"": schema, **schema["$defs"]}
    keys = [(name, key, each) for name, node in named.items() for key, each in node.get("properties", {}).items()]
    assert len(keys) > 300
    assert [f"{name}.{key}" for name, key, each in keys if len(each.get("description", "")) < 8] == []


def test_descriptions_are_one_line_in_markdown() -> None:
    assert "``" not in schema_text()
    assert make_schema()["$defs"]["PPOConfig"]["properties"]["target_kl"]["description"] == (
        "Stop the update's remaining minibatches once their approximate KL exceeds 1.5 · target_kl."
    )


def test_the_schema_knows_every_spelling() -> None:
    properties = {name: set(each.get("properties", ())) for name, each in make_schema()["$defs"].items()}
    assert {"rollout_steps", "buffer_size", "gym_config", "learning_env", "events"} <= properties["TrainerConfig"]
    assert {"learning_rate", "optimizer", "lr_scheduler"} <= properties["PPOConfig"]
    assert {"hidden_sizes", "network_cfg"} <= properties["NetworkBlock"]
