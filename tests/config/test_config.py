"""Spellings, defaults, gym configs, notices and the schema of a train config; errors: ``test_refused_configs``."""

import copy
import json
import math
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import yaml
from case_tables import cases, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from shipped import load_shipped
from small_configs import BASE, ROOT, gym, make, of, trainer

from ejax.algorithms.demonstrations import DemonstrationConfig
from ejax.algorithms.distill import DistillConfig
from ejax.algorithms.replay_buffer import ReplayConfig
from ejax.config import ConfigError, load_config, parse_config
from ejax.config.collector import CollectorConfig
from ejax.config.data import DataConfig
from ejax.config.embodichain.check import check
from ejax.config.models import CameraConfig, PolicyConfig, TrainerConfig
from ejax.config.run_config import NOTHING, idle_notes
from ejax.config.schema import make_schema, schema_text
from ejax.policies.vla.config import VLAConfig
from ejax.train import main

CONFIGS = sorted(p for p in (ROOT / "configs").rglob("*.*") if p.name != "gym_config.json" and p.is_file())
CART_POLE = ROOT / "tests" / "gym_configs" / "cart_pole.json"
ACTOR, CARTS = BASE["policy"]["actor"], "env=gymnax:CartPole-v1"
VIDEO = {"func": "record_camera_data_async"}
UNEVALUATED = {"enable_eval": False, "num_eval_episodes": 5, "seed": 1, "device": "cpu", "iterations": 250}


def ppo(**cfg: Any) -> dict[str, Any]:
    return {"algorithm": {"name": "ppo", "cfg": {"batch_size": 32, **cfg}}}


def policy(**keys: Any) -> dict[str, Any]:
    return {"policy": {**BASE["policy"], **keys}}


def keys_of(notices: tuple[Any, ...]) -> list[str]:
    return [notice.key for notice in notices]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_every_shipped_config_loads_and_round_trips(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_shipped(path)
    assert parse_config(config.to_dict()) == config
    assert parse_config(json.loads(json.dumps(config.to_dict()))) == config


PATHS = [
    *[(TrainerConfig, "output_dir"), (CameraConfig, "save_path"), (PolicyConfig, "init_from"), (DataConfig, "folder")],
    *[(ReplayConfig, "folder"), (CollectorConfig, "replay_schedule"), (DemonstrationConfig, "folder")],
    *[(DistillConfig, "teacher"), (VLAConfig, "model_path")],
]
"""Every key of a config that is a path; ``trainer.gym_config`` and a model's file are looked for by others."""


@pytest.mark.parametrize(("section", "key"), PATHS, ids=lambda x: getattr(x, "__name__", x))
def test_a_path_of_a_config_is_expanded(section: Any, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    field = section.model_fields[key]
    adapter = TypeAdapter(Annotated[field.annotation, None, *field.metadata])
    for path in ("~/a", "$HOME/a", "${HOME}/a"):
        assert adapter.validate_python(path) == "/home/me/a"
    refused(adapter.validate_python, "$NOWHERE/a", word="$NOWHERE means nothing")


def test_no_path_of_a_config_keeps_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text(json.dumps(BASE))
    config = load_config("~/a.json", ["trainer.output_dir=~/runs"])
    assert config.trainer.output_dir == f"{tmp_path}/runs" and not any(x.key == "config" for x in config.notices)
    for override in ("trainer.output_dir", "policy.init_from", "trainer.gym_config"):
        refused(load_config, "$HOME/a.json", [f"{override}=$NOWHERE/a"], word="$NOWHERE means nothing")
    refused(load_config, "$NOWHERE/a.json", word="$NOWHERE means nothing")
    (tmp_path / "gym").mkdir()
    (tmp_path / "gym" / "cart_pole.json").write_text(CART_POLE.read_text())
    (tmp_path / "a.json").write_text(json.dumps({**BASE, "trainer": {"gym_config": "~/gym/cart_pole.json"}}))
    assert load_config("a.json").env.cfg
    with pytest.raises(SystemExit):
        main(["--run=~no_one/run"])


FIRST = {
    "trainer": {"env": {"id": "PointMassRL", "cfg": {"num_envs": 8}}, "rollout_steps": 16},
    "policy": {
        "name": "Actor_Critic",
        "actor": {"type": "mlp", "hidden_sizes": [8, 8], "activation": "relu"},
        "critic": {"type": "mlp", "hidden_sizes": [8, 8], "activation": "relu"},
    },
    "algorithm": {"name": "PPO", "cfg": {"learning_rate": "1e-4", "batch_size": 32}},
}
LATEST = {
    "trainer": {"learning_env": {"name": "pointmassrl"}, "num_envs": 8, "buffer_size": 16},
    **ppo(optimizer={"learning_rate": 0.0001}),
}


@cases(
    "given same",
    (FIRST, LATEST),
    ({"trainer": {"num_envs": 8, "buffer_size": 16}, "env": "PointMassRL"}, {}),
    ({"trainer": trainer(events=None)}, {}),
    ({"trainer": trainer(enable_eval=None, use_wandb=None, distributed=None)}, {}),
    (policy(actor_obs_normalization=None, obs_groups=None), {}),
    (policy(critic={"network_cfg": {**ACTOR["network_cfg"], "use_layernorm": None}}), {}),
    (policy(actor={"type": "MLP", "network_cfg": {**ACTOR["network_cfg"], "activation": "ReLU"}}), {}),
    (
        ppo(optimizer={"name": "AdamW"}, lr_scheduler={"name": "Linear"}),
        ppo(optimizer={"name": "adamw"}, lr_scheduler={"name": "linear"}),
    ),
    (ppo(optimizer=None, lr_scheduler=None), {}),
    (
        policy(initial_action_std=0.5, action_std_range=[0.1, 2.0]),
        policy(initial_log_std=math.log(0.5), log_std_range=[math.log(0.1), math.log(2.0)]),
    ),
    ({"trainer": trainer(iterations=1e3)}, {"trainer": trainer(iterations=1000)}),
    (
        {"trainer": trainer(iterations=np.int64(9), console=np.False_)},
        {"trainer": trainer(iterations=9, console=False)},
    ),
    (policy(actor={"hidden_sizes": np.array([4])}), policy(actor={"hidden_sizes": [4]})),
    ({"trainer": trainer(gym_config="nowhere.json")}, {}),
    ({"trainer": trainer(rollout_steps=16)}, {}),
    ({"trainer": trainer(rollout_steps=99)}, {}),
    (["trainer.rollout_steps=32"], ["trainer.buffer_size=32"]),
    (["algorithm.cfg.learning_rate=1e-3"], ["algorithm.cfg.optimizer.learning_rate=0.001"]),
    (["policy.actor.hidden_sizes=[4]"], ["policy.actor.network_cfg.hidden_sizes=[4]"]),
    (
        ["policy.name=actor_only", "policy.critic_obs_normalization=true"],
        {"policy": {"name": "actor_only", "actor": ACTOR}},
    ),
    (["env.cfg.success_bonus=1.0", "trainer.learning_env=PointMassRL"], {}),
)
def test_spellings_of_the_same_run(given: Any, same: Any) -> None:
    assert of(copy.deepcopy(given)) == of(same)
    assert hash(of(copy.deepcopy(given))) == hash(of(same))


def test_null_is_not_given_where_embodichain_reads_it_so() -> None:
    assert make(trainer=trainer(num_envs=None, events={"train": None, "eval": None})).trainer.num_envs == 64
    config = make(**policy(actor={"network_cfg": {"hidden_sizes": [8], "activation": None}}))
    assert config.policy.actor.network_cfg.activation == "none"


def test_the_text_none_is_announced_and_refused_with_compat_where_it_is_relu() -> None:
    actor = {"hidden_sizes": [8], "activation": "None", "last_activation": None}
    config = make(**policy(actor=actor))
    assert config.policy.actor.network_cfg.activation == "none"
    (notice,) = config.notices
    assert notice.key == "policy.actor.activation" and "it is ReLU in EmbodiChain, unlike null" in notice.text
    text = "which is ReLU in EmbodiChain"
    refused(make, key="policy.actor.activation", word=text, compat="embodichain-0.3", **policy(actor=actor))
    assert make(**policy(actor={**actor, "activation": None})).notices == ()
    key = "policy.critic.network_cfg.last_activation"
    refused(make, f"{key}=none", key=key, word="which is ReLU", compat="embodichain-seed")


def test_text_is_a_number_only_where_a_number_is_wanted(tmp_path: Path) -> None:
    """PyYAML, by which a program may have read its config, gives text for 3e-4."""
    keys = {"exp_name": "12e3", "output_dir": "1_000", "buffer_size": "1_024", "iterations": "2e0"}
    cfg = {"learning_rate": "3e-4", "optimizer": {"kwargs": {"eps": "1e-6"}}}
    config = make("env.cfg.success_bonus='5e-1'", trainer=trainer(**keys), **ppo(**cfg))
    assert (config.trainer.exp_name, config.trainer.output_dir) == ("12e3", "1_000")
    assert (config.trainer.buffer_size, config.trainer.iterations) == (1024, 2)
    optimizer = config.algorithm.cfg.optimizer
    assert (optimizer.learning_rate, dict(optimizer.kwargs)) == (3e-4, {"eps": 1e-6})
    assert config.env.cfg["success_bonus"] == 0.5
    (tmp_path / "a.json").write_text(json.dumps(config.to_dict()))
    assert load_config(tmp_path / "a.json") == config
    text = yaml.safe_dump(BASE).replace("batch_size: 32", "batch_size: 32\n    learning_rate: 1e-4")
    (tmp_path / "a.yaml").write_text(text)
    assert load_config(tmp_path / "a.yaml").algorithm.cfg.optimizer.learning_rate == 1e-4


def test_defaults_of_both_paths(tmp_path: Path, task: None) -> None:
    class_path = {"exp_name": "PointMassRL_ppo", "num_envs": 64, "buffer_size": 256, "num_eval_envs": 16}
    class_path |= {"eval_freq": 0, "save_freq": 0, "eval_seed": 10001}
    gym_path = {"exp_name": "generic_exp", "num_envs": 1, "buffer_size": 2048, "num_eval_envs": 4}
    gym_path |= {"eval_freq": 10000, "save_freq": 50000, "eval_seed": 10001}
    by_class, by_gym = make(trainer={"learning_env": "PointMassRL"}), gym(tmp_path, {"id": "TaskRL"})
    for config, defaults in ((by_class, class_path), (by_gym, gym_path)):
        found = config.trainer.model_dump()
        assert found | UNEVALUATED | defaults == found
    assert make("trainer.seed=7").trainer.eval_seed == 10007


def test_timesteps_count_whole_updates_and_iterations_of_the_command_line_win() -> None:
    assert make("trainer.total_timesteps=129").trainer.num_updates == 2
    config = make("trainer.iterations=5", trainer=trainer(total_timesteps=1280))
    assert (config.trainer.num_updates, config.trainer.total_timesteps) == (5, None)


@pytest.mark.parametrize("critic", [{}, {"critic": None}])
def test_a_critic_without_groups_reads_those_of_the_actor(critic: dict[str, None]) -> None:
    # what gymnax observes is known when it is built
    groups = make(CARTS, **policy(obs_groups={"actor": ["a", "b.c"], **critic})).policy.obs_groups
    assert groups.critic == groups.actor == ("a", "b.c")
    assert make(CARTS, "policy.obs_groups={actor: [a], critic: []}").policy.obs_groups.critic == ()
    config = make(CARTS, "policy.obs_groups.actor=[a]", "policy.name=actor_only")
    assert config.policy.obs_groups.critic == () and parse_config(config.to_dict()).notices == ()


def test_a_first_release_gym_config_fills_the_task(tmp_path: Path, task: None) -> None:
    env = {"num_envs": 8, "extensions": {"episode_length": 20, "action_scale": 0.1, "joint_limits": 0.5}}
    config = gym(tmp_path, {"id": "TaskRL", "env": env})
    assert config.trainer.num_envs == 8
    assert dict(config.env.cfg) == {"episode_length": 20, "action_scale": 0.1}
    assert keys_of(config.notices) == ["gym.json:env.extensions.joint_limits"]
    changed = load_config(tmp_path / "train.json", ["env.cfg.action_scale=0.5"])
    assert dict(changed.env.cfg) == {"episode_length": 20, "action_scale": 0.5}
    assert load_config(tmp_path / "train.json", ["trainer.learning_env=PointMassRL"]).env.id == "PointMassRL"
    data = {"id": "TaskRL", "max_episode_steps": 30, "num_envs": 2, "env": {"sim_steps_per_control": 2}}
    assert dict(gym(tmp_path, data).env.cfg) == {"episode_length": 30, "sim_steps_per_control": 2}
    assert gym(tmp_path, data, num_envs=4).trainer.num_envs == 4
    data = {"id": "TaskRL", "max_episodes": 5, "env": {"extensions": {}}, "robot": {"uid": "r"}, "sensor": []}
    assert set(keys_of(gym(tmp_path, data).notices)) == {"gym.json:max_episodes", "gym.json:robot"}


def test_num_envs_of_a_gym_config_does_not_go_unheard(tmp_path: Path) -> None:
    data = {"id": "CartPoleRL", "env": {"num_envs": 4}}
    assert not gym(tmp_path, data, num_envs=4).notices
    (notice,) = gym(tmp_path, data, num_envs=8).notices
    assert notice[:3] == ("gym.json:env.num_envs", "without effect", "no effect: trainer.num_envs is 8")


def test_a_gym_config_replaces_a_learning_env_on_the_command_line() -> None:
    assert make(f"trainer.gym_config={CART_POLE}").env.id == "EmbodiedEnv"


def placed(root: Path, train: str, gym_config: str, **files: dict[str, Any]) -> Path:
    """Write gym configs of ``TaskRL``, by their folder in ``root``, and return a train file that names one."""
    for folder, keys in files.items():
        file = root / folder.replace("__", "/") / "gym.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"id": "TaskRL", **keys}))
    (root / train).parent.mkdir(parents=True, exist_ok=True)
    (root / train).write_text(json.dumps({**BASE, "trainer": {"gym_config": gym_config}}))
    return root / train


def test_a_gym_config_is_found_next_to_the_train_file_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gym.json").write_text(json.dumps({"id": "TaskRL", "num_envs": 3}))
    train = placed(tmp_path, "here/train.json", "gym.json")
    assert load_config(train).trainer.num_envs == 3
    placed(tmp_path, "here/train.json", "gym.json", here={"num_envs": 5, "sensor": [1]})
    assert load_config(train).trainer.num_envs == 5
    # one that is typed is of the working directory
    assert load_config(train, ["trainer.gym_config=gym.json"]).trainer.num_envs == 3
    assert "gym.json:sensor" not in [note.key for note in check(train, ["trainer.gym_config=gym.json"])]
    assert "gym.json:sensor" in [note.key for note in check(train)]


def test_a_gym_config_named_from_its_repository_is_not_one_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: None
) -> None:
    """EmbodiChain reads the working directory's; a file of the same name in another checkout is another task."""
    files = {"theirs__configs": {"num_envs": 3}, "mine__configs": {"num_envs": 5}}
    train = placed(tmp_path, "theirs/configs/train.json", "configs/gym.json", **files)
    monkeypatch.chdir(tmp_path / "theirs")
    assert load_config(train).trainer.num_envs == 3 and load_config(train).notices == ()
    monkeypatch.chdir(tmp_path / "mine")
    config = load_config(train)
    theirs, mine = (tmp_path / place / "configs" / "gym.json" for place in ("theirs", "mine"))
    assert config.trainer.num_envs == 3
    assert [notice.text for notice in config.notices] == [f"read {theirs}, not {mine}, which differs"]
    os.truncate(mine, 1 << 40)  # the one that is not read may be anything
    assert [notice.text for notice in load_config(train).notices] == [f"read {theirs}, not {mine}, which differs"]


def test_a_gym_config_of_the_working_directory_with_a_copy_that_differs_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: None
) -> None:
    files = {"copies": {"num_envs": 3}, "root__configs": {"num_envs": 5}}
    train = placed(tmp_path, "copies/train.json", "configs/gym.json", **files)
    monkeypatch.chdir(tmp_path / "root")
    config = load_config(train)
    assert config.trainer.num_envs == 5
    read, other = tmp_path / "root" / "configs" / "gym.json", tmp_path / "copies" / "gym.json"
    assert [notice.text for notice in config.notices] == [f"read {read}, not {other}, which differs"]


@cases(
    "given keys text",
    *(
        ({"trainer": trainer(**{key: value})}, [f"trainer.{key}"], "")
        for key, value in (
            *[("headless", True), ("renderer", "hybrid"), ("enable_rt", True), ("gpu_id", 1)],
            *[("import_modules", ["os"]), ("torch_deterministic", True), ("filter_dataset_saving", True)],
            ("gym_config", "nowhere.json"),
        )
    ),
    (["trainer.eval_freq=2"], ["trainer.eval_freq (override)"], "does not evaluate"),
    ({"trainer": trainer(rollout_steps=16)}, [], ""),
    (
        {"trainer": trainer(rollout_steps=99, eval_freq=2)},
        ["trainer.rollout_steps", "trainer.eval_freq"],
        "no effect: trainer.buffer_size, which is given too, is 16",
    ),
    (
        {"trainer": {"learning_env": "PointMassRL", "rollout_steps": 256, "eval_freq": 2}},
        ["trainer.eval_freq"],
        "rollout_steps did",
    ),
    (
        {"trainer": trainer(events={"train": {"video": {**VIDEO, "is_global": True}}})},
        ["trainer.events.train.video.is_global"],
        "",
    ),
    (
        {"trainer": trainer(events={"train": {"video": {**VIDEO, "params": {"name": "main", "fps": 20}}}})},
        ["trainer.events.train.video.params.fps"],
        "",
    ),
    ({"trainer": trainer(events={"eval": {"video": VIDEO}})}, ["trainer.events.eval.video"], "records nothing"),
    (
        ["policy.name=actor_only", "policy.obs_groups.critic=[obs]", "policy.critic_obs_normalization=true"],
        ["policy.critic", "policy.critic_obs_normalization (override)", "policy.obs_groups.critic (override)"],
        "actor_only has no critic",
    ),
)
def test_what_has_no_effect_or_another_is_announced(given: Any, keys: list[str], text: str) -> None:
    notices = of(given).notices
    assert keys_of(notices) == keys and text in "".join(notice.text for notice in notices)


def test_what_is_announced_takes_effect() -> None:
    assert make(trainer={"learning_env": "PointMassRL", "rollout_steps": 256, "eval_freq": 2}).trainer.enable_eval
    assert not make(trainer=trainer(rollout_steps=99, eval_freq=2)).trainer.enable_eval
    video = {**VIDEO, "is_global": True, "params": {"name": "main", "fps": 20}}
    (camera,) = make(trainer=trainer(events={"train": {"video": video}})).trainer.cameras
    assert camera.name == "main"


def test_vla_collects_in_the_background_and_counts_its_buffer_over_all_environments() -> None:
    config = make(trainer=trainer(model_type="vla", num_envs=8, buffer_size=512))
    assert (config.trainer.collector.mode, config.trainer.buffer_size) == ("async", 64)
    notices = {notice.key: notice.text for notice in config.notices}
    assert notices["trainer.buffer_size"].startswith("512 transitions of all envs, as model_type vla counts: 64 steps")
    assert notices["trainer.model_type"] == "vla: trainer.collector.mode is async"
    assert parse_config(config.to_dict()) == config
    in_turn = make(trainer=trainer(model_type="vla", num_envs=8, buffer_size=512, collector={"mode": "host"}))
    assert in_turn.trainer.collector.mode == "host"
    standard = make(trainer=trainer(model_type="standard", num_envs=8, buffer_size=512))
    assert (standard.trainer.collector.mode, standard.trainer.buffer_size, standard.notices) == ("auto", 512, ())


@cases(
    "overrides text",
    (["trainer.enable_eval=true", "trainer.eval_freq=641"], "trainer.eval_freq is 641"),
    (["trainer.eval_freq=641"], None),  # another note has it: it does not evaluate
    (["trainer.save_freq=641"], "trainer.save_freq is 641"),
    (["trainer.save_frequency_updates=6"], "save_frequency_updates is 6, and the run has 5 updates"),
    (["trainer.log_freq_updates=6"], "only the last update is logged"),
    (["algorithm.cfg.critic_warmup_updates=5"], "nothing is learned except by the critic"),
    (["algorithm.cfg.optimizer.learning_rate=0"], "learning_rate is 0: nothing is learned"),
    (["population={seeds: 2, exploit: {every: 6}}"], "population.exploit.every is 6"),
    (["trainer.save_freq=640", "trainer.log_freq_updates=5", "algorithm.cfg.critic_warmup_updates=4"], None),
)
def test_what_never_happens_in_so_short_a_run_is_announced(overrides: list[str], text: str | None) -> None:
    config = make("trainer.iterations=5", *overrides)
    notes = idle_notes(config, config.trainer.num_envs * config.trainer.buffer_size)
    assert len(notes) == (text is not None) and (text or "") in "".join(notes)


@pytest.mark.parametrize(("starts", "learns"), [(96, True), (97, False)])
def test_a_run_that_makes_no_gradient_step_says_so(starts: int, learns: bool) -> None:
    network = {"network_cfg": {"hidden_sizes": [8]}}
    squashed = {"name": "actor_q", "squash_actions": True, "actor": network, "critic": network}
    algorithm = {"name": "sac", "cfg": {"batch_size": 16, "learning_starts": starts}}
    sizes = ["trainer.iterations=3", "trainer.num_envs=4", "trainer.buffer_size=8"]
    config = make(*sizes, policy=squashed, algorithm=algorithm)
    assert [NOTHING in text for text in idle_notes(config, 32)] == [True] * (not learns)


def test_imports_named_by_a_config_do_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "boom.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    make(trainer=trainer(import_modules=["boom"]))
    assert "boom" not in sys.modules


@pytest.mark.usefixtures("nothing_trusted")
def test_a_file_alone_does_not_start_foreign_code(tmp_path: Path) -> None:
    place = "ejax.envs.tasks.point_mass:PointMassRL"
    (tmp_path / "a.json").write_text(json.dumps({**BASE, "trainer": trainer(learning_env=place)}))
    text = f"; if you know it, add --trust {place} to the command line"
    refused(load_config, tmp_path / "a.json", key="trainer.learning_env", word=text)
    assert load_config(tmp_path / "a.json", [f"env.id={place}"]).env.id == place


def test_an_override_of_a_section_replaces_it() -> None:
    assert make("trainer.learning_env={name: PointMassRL, cfg: {success_bonus: 1.0}}").env.cfg["success_bonus"] == 1.0


def test_an_output_folder_that_cannot_be_made_is_refused_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ejax.training.command.prepare_jax", lambda device: None)  # it sets up the process for good
    (tmp_path / "file").write_text("")
    config = ROOT / "configs" / "point_mass" / "ppo.yaml"
    assert main(["--config", str(config), f"trainer.output_dir={tmp_path / 'file' / 'outputs'}"]) == 2
    text = f"trainer.output_dir: got {tmp_path / 'file' / 'outputs'}, which is a file or lies below one"
    assert text in capsys.readouterr().err


def test_a_command_without_a_config_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("ejax train: pass --config FILE, --run DIR with --resume")


@cases(
    "algorithm overrides",
    *((name, ["algorithm.cfg.max_grad_norm=.inf"]) for name in ("ppo", "grpo", "apg")),
    ("shac", ["algorithm.cfg.max_grad_norm=.inf", "trainer.buffer_size=32"]),
    ("grpo", ["algorithm.cfg.reset_every_rollout=false"]),
    ("grpo", ["algorithm.cfg.shared_start=false"]),
    ("apg", ["algorithm.cfg.update_horizon=32", "trainer.buffer_size=7"]),
    ("ppo", ["trainer.exp_name=2024-01-01", "env.cfg.max_episode_steps=7"]),
    ("ppo", ["policy.obs_groups={actor: []}", "algorithm.cfg.minimum_learning_rate=1.0e-3"]),
    ("ppo", ["trainer.output_dir=é🤖", "trainer.total_timesteps=1.0e+15", "trainer.num_envs=100000"]),
    ("ppo", ["trainer.total_timesteps=10000000000", "trainer.save_freq=10000000000", "trainer.seed=4294967295"]),
)
def test_what_is_accepted_reads_back_as_the_same(algorithm: str, overrides: list[str]) -> None:
    sections = {"algorithm": {"name": algorithm, "cfg": {}}} if algorithm != "ppo" else {}
    config = make("trainer.num_envs=8", *overrides, **sections)
    again = parse_config(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert hash(again) == hash(config)


def test_options_without_effect_leave_the_sizes_of_an_update_to_the_algorithm() -> None:
    file = ROOT / "configs" / "push_cube" / "bc_images.yaml"
    config = load_config(file, ["trainer.action_adjoint_max_norm=1.0"])
    assert config.trainer.buffer_size == load_config(file).trainer.buffer_size
    data = {"source": "engine", "task": "PushCubeExpert"}
    config = make(trainer={}, env="PushCubeRL", algorithm={"name": "bc", "cfg": {"device": None}}, data=data)
    assert parse_config(config.to_dict()) == config
    config = make("trainer.num_envs=7", trainer={}, env="PushCubeRL", algorithm={"name": "bc", "cfg": {}}, data=data)
    assert "trainer.num_envs (override)" in keys_of(config.notices)


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


def test_the_schema_file_is_what_the_generator_makes() -> None:
    text = (ROOT / "ejax" / "config.schema.json").read_text(encoding="utf-8")
    assert text == schema_text(), "run: ejax config schema > ejax/config.schema.json"


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
