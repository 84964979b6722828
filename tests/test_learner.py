"""Training by names in one line, for those who come from Stable-Baselines3."""

import re
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from case_tables import cases, refused

import ejax
from ejax.envs.tasks.point_mass import PointMassRL

PAGE = Path(__file__).parents[1] / "docs" / "coming_from" / "sb3.md"
SMALL: dict[str, Any] = {"num_envs": 4, "buffer_size": 8, "batch_size": 16, "n_epochs": 1, "console": False}


def test_a_name_makes_a_learner_and_a_config_an_algorithm_with_its_state() -> None:
    made = ejax.PPO("actor_critic", "PointMassRL", env_kwargs={"max_episode_steps": 7}, gamma=0.9, seed=3, **SMALL)
    assert isinstance(made, ejax.Learner)
    config = made.config
    assert config.env.cfg["max_episode_steps"] == 7 and config.trainer.seed == 3
    assert config.to_dict()["algorithm"]["cfg"]["gamma"] == 0.9
    assert config.policy.actor is not None and config.policy.actor.network_cfg.hidden_sizes == (64, 64)
    policy = ejax.build_policy(config.to_dict()["policy"], PointMassRL())
    assert isinstance(ejax.PPO(None, policy), ejax.BaseAlgorithm)
    assert ejax.SAC("actor_q", PointMassRL(), num_envs=np.int64(4)).config.algorithm.name == "sac"
    vector = gymnasium.make_vec("Pendulum-v1", num_envs=2)
    assert ejax.PPO("actor_critic", vector, batch_size=np.int64(4)).config.trainer.num_envs == 2


@cases(
    "env options text",
    ("PointMassRL", {"num_env": 4}, "Did you mean 'num_envs'?"),
    ("PointMassRL", {"lerning_rate": 1e-3}, "Did you mean 'learning_rate'?"),
    ("PointMasRL", {}, "Did you mean 'PointMassRL'?"),
    (PointMassRL(), {"env_kwargs": {"max_episode_steps": 7}}, "given by its id; leave them out"),
    (PointMassRL, {}, "pass an environment, not its class"),
    (None, {}, "env: got None; pass an environment"),
)
def test_what_cannot_be_honoured_is_refused(env: Any, options: dict[str, Any], text: str) -> None:
    refused(ejax.PPO, "actor_critic", env, **options, match=re.escape(text))


def test_a_policy_that_has_learned_nothing_does_not_act() -> None:
    model = ejax.PPO("actor_critic", PointMassRL(), **SMALL)
    refused(model.act, np.zeros(14, np.float32), match="nothing has been learned yet")
    for steps in ("64", None, True, [64]):
        refused(model.learn, steps, match="total_timesteps: got .*; must be a whole number of environment steps")


@pytest.mark.slow
def test_what_is_saved_acts_and_goes_on_as_what_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = ejax.PPO("actor_critic", PointMassRL(), learning_rate=1e-2, **SMALL).learn(64)
    obs = np.linspace(-1.0, 1.0, 14, dtype=np.float32)
    before = model.act(obs)
    loaded = ejax.PPO.load(model.save("kept"))
    np.testing.assert_array_equal(loaded.act(obs), before)
    model.learn(64)
    assert model.result is not None and model.result.global_step == 128
    assert (model.act(obs) != before).any()
    np.testing.assert_array_equal(loaded.learn(64).act(obs), model.act(obs))


@pytest.mark.slow
def test_a_vector_environment_of_several_rows_is_loaded_for_its_spaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mode = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
    vector = gymnasium.make_vec("Pendulum-v1", num_envs=4, vectorization_mode="sync", vector_kwargs=mode)
    model = ejax.PPO("actor_critic", vector, **SMALL | {"num_envs": 4}).learn(64)
    action = model.act(np.zeros((3, 3), np.float32))
    loaded = ejax.PPO.load(model.save("kept"))
    np.testing.assert_array_equal(loaded.act(np.zeros((3, 3), np.float32)), action)
    assert loaded.learn(64).result.finished  # in one made by its id


@cases(
    "options id cfg",
    ({}, "gymnasium:Pendulum-v1", {}),
    ({"g": 9.0, "max_episode_steps": 50}, "gymnasium:Pendulum-v1", {"g": 9.0, "max_episode_steps": 50}),
    ({"wrappers": [gymnasium.wrappers.ClipAction], "vectorization_mode": "sync"}, "SyncVectorEnv", {}),
    ({"g": object(), "vectorization_mode": "sync"}, "SyncVectorEnv", {}),
)
def test_a_vector_environment_is_named_where_other_processes_can_make_it(
    options: dict[str, Any], id: str, cfg: dict[str, Any]
) -> None:
    made = ejax.PPO("actor_critic", gymnasium.make_vec("Pendulum-v1", num_envs=2, **options), batch_size=4)
    assert (made.config.env.id, dict(made.config.env.cfg)) == (id, cfg)


@pytest.mark.slow
@pytest.mark.parametrize("column", ["Stable-Baselines3", "ejax"])
def test_each_column_of_the_page_runs(column: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if column == "Stable-Baselines3":
        pytest.importorskip("stable_baselines3")
    table = PAGE.read_text().partition("| Stable-Baselines3 | ejax |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = [re.findall(r"`([^`]*)`", row) for row in table.splitlines()]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"obs": np.zeros(3, np.float32)}
    for row in rows:
        exec(row[column == "ejax"], names)
    assert len(rows) == 7 and np.shape(names["action"]) == (1,)
