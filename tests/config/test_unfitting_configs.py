"""Configs of which each key is right, and which fit no environment, robot or task."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from small_configs import ROOT, gym, make

from ejax.algorithms.ppo import ALGORITHM as PPO
from ejax.algorithms.ppo import PPOConfig
from ejax.config import ConfigError, load_config
from ejax.config.embodichain.check import check
from ejax.config.run_config import NOTHING, idle_notes
from ejax.distributions import action_spec
from ejax.training.build import build
from ejax.training.policies import Spaces, make_policy

CART_POLE = ROOT / "tests" / "gym_configs" / "cart_pole.json"


def refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return caught.value


def keys_of(error: ConfigError) -> list[Any]:
    return [key for key, _ in error.problems]


def embodied(gym_config: dict[str, Any], *overrides: Any, **sections: Any) -> Any:
    return make(
        *overrides, trainer={"num_envs": 8}, env={"id": "EmbodiedEnv", "cfg": {"gym_config": gym_config}}, **sections
    )


def cart_pole() -> dict[str, Any]:
    return json.loads(CART_POLE.read_text())


def test_observation_groups_are_looked_up_before_anything_is_built() -> None:
    error = refused(make, "policy.obs_groups={actor: [robot]}")
    assert keys_of(error) == ["policy.obs_groups.actor", "policy.obs_groups.critic"]
    assert "one array without parts" in str(error)
    gym_config = cart_pole()
    assert embodied(gym_config, "policy.obs_groups={actor: [robot.qpos, robot]}")
    text = str(refused(embodied, gym_config, "policy.obs_groups={actor: [robot.qpo]}"))
    assert "there is robot, robot.qf, robot.qpos, robot.qvel" in text
    assert "Did you mean 'robot.qpos'?" in text


def test_observation_groups_of_an_environment_that_must_be_built_are_looked_up_there() -> None:
    config = make("policy.obs_groups={actor: [x]}", "env=gymnax:CartPole-v1")
    assert keys_of(refused(build, config)) == ["policy.obs_groups.actor", "policy.obs_groups.critic"]


@pytest.mark.parametrize("place", ["':x'", "..a:b", "'os:'", "os:path", "builtins:int", "no_such_module:Name"])
@pytest.mark.parametrize("key", ["env.id", "policy.name", "algorithm.name"])
def test_a_place_with_no_such_code_is_refused_by_its_key(key: str, place: str) -> None:
    (told,) = keys_of(refused(make, f"{key}={place}"))
    assert told in (f"{key} (override)", "algorithm.cfg")


@pytest.mark.parametrize(
    ("override", "key", "text"),
    [
        ("cfg.channels=[8, 16]", "cfg.channels", "must have more than 2 values"),
        ("cfg.channels=[8, 0, 16]", "cfg.channels", "must be greater than 0"),
        ("cfg.chanels=[8, 16, 16]", "cfg.chanels", "unknown key; allowed: channels, hidden_entries, images. Did you"),
        ("cfg.images=image", "cfg.images", "must be a valid tuple"),
        ("cfg.images=[]", "cfg.images", "names no picture; the observation has image"),
        ("cfg.images=[imag]", "cfg.images", "names 'imag'; the observation has image. Did you mean 'image'?"),
    ],
)
def test_options_that_a_policy_class_does_not_take_are_refused_before_it_is_built(
    override: str, key: str, text: str
) -> None:
    error = refused(load_config, ROOT / "configs" / "push_cube" / "bc_images.yaml", [f"policy.{override}"])
    assert keys_of(error) == [f"policy.{key} (override)"]
    assert text in str(error)


def test_pictures_of_an_environment_that_must_be_built_are_looked_up_there() -> None:
    config = make("policy={name: vision, actor: {network_cfg: {hidden_sizes: [8]}}}", "env=gymnax:CartPole-v1")
    assert keys_of(refused(build, config)) == ["policy.cfg.images"]


class Hinted:
    """A policy whose annotation only a type checker resolves."""

    def __init__(self, action_spec: "NoSuchType", size: int = 3) -> None: ...  # type: ignore[name-defined]  # noqa: F821


def test_a_class_whose_annotations_cannot_be_resolved_is_asked_for_its_names_alone() -> None:
    own = f"policy.name={__name__}:Hinted"
    assert make(own, "policy.cfg={size: 5}")
    assert "unknown key; allowed: size. Did you mean" in str(refused(make, own, "policy.cfg={sise: 5}"))


class OwnConfig(PPOConfig):
    curiosity: float = 0.5


OWN = replace(PPO, Config=OwnConfig)


def test_a_mistyped_option_of_an_own_algorithm_names_the_nearest_of_its_own() -> None:
    text = str(refused(make, f"algorithm={{name: '{__name__}:OWN', cfg: {{curiosty: 1.0}}}}"))
    assert "Did you mean 'curiosity'?" in text
    assert "gae_lambda" in text and "group_size" not in text


def test_an_extra_that_an_environment_inside_another_needs_is_an_error_of_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gymnax", None)
    file = ROOT / "configs" / "cart_pole" / "distill.yaml"
    assert "'gymnax' is not installed: pip install -e '.[gymnax]'" in str(refused(load_config, file))
    assert any("pip install" in note.text for note in check(file) if note.status == "unsupported")


@pytest.mark.parametrize("func", ["[1]", "{a: 1}", "5"])
@pytest.mark.parametrize("mode", ["", ", mode: reset"])
def test_a_function_of_an_event_must_be_text(func: str, mode: str) -> None:
    error = refused(make, f"trainer.events={{train: {{push: {{func: {func}{mode}}}}}}}")
    assert "trainer.events.train.push.func" in str(error) and "must be a valid string" in str(error)


def test_an_option_without_effect_leaves_the_sizes_of_an_update_to_the_algorithm() -> None:
    file = ROOT / "configs" / "push_cube" / "bc_images.yaml"
    config = load_config(file, ["trainer.action_adjoint_max_norm=1.0"])
    assert config.trainer.buffer_size == load_config(file).trainer.buffer_size


@pytest.mark.parametrize("limit", [4e18, -(2.0**40)])
def test_a_time_limit_that_no_counter_reaches_is_refused(limit: float) -> None:
    gym_config = {**cart_pole(), "max_episode_steps": limit}
    assert keys_of(refused(embodied, gym_config)) == ["env.cfg.gym_config.max_episode_steps"]


def test_squashed_actions_need_bounds() -> None:
    gym_config = cart_pole()
    gym_config["env"]["actions"] = {"velocity": {"func": "QvelTerm"}}
    assert embodied(gym_config)
    assert keys_of(refused(embodied, gym_config, "policy.squash_actions=true")) == ["policy.squash_actions (override)"]


def test_an_action_of_no_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one number"):
        action_spec(gymnasium.spaces.Box(-1.0, 1.0, (0,)))
    gym_config = cart_pole()
    gym_config["robot"]["control_parts"] = {"hand": []}
    gym_config["env"]["control_parts"] = ["hand"]
    assert "env.cfg.gym_config.robot.control_parts.hand" in keys_of(refused(embodied, gym_config))


@pytest.mark.parametrize(
    ("section", "value", "key"),
    [
        ("urdf_cfg", {"components": 5}, "robot.urdf_cfg.components"),
        ("solver_cfg", {"arm": {"tcp": [[1] * 4] * 3 + [[0, {}, 0, 1]]}}, "robot.solver_cfg.arm.tcp"),
        ("solver_cfg", {"arm": {"tcp": [[1] * 16]}}, "robot.solver_cfg.arm.tcp"),
        ("control_parts", {"arm": 3}, "robot.control_parts.arm"),
    ],
)
def test_a_robot_of_another_kind_is_refused_by_its_key(section: str, value: dict[str, Any], key: str) -> None:
    gym_config = cart_pole()
    gym_config["robot"][section] = value
    assert f"env.cfg.gym_config.{key}" in keys_of(refused(embodied, gym_config))


def test_num_envs_of_a_gym_config_does_not_go_unheard(tmp_path: Path) -> None:
    data = {"id": "CartPoleRL", "env": {"num_envs": 4}}
    assert not gym(tmp_path, data, num_envs=4).notices
    (notice,) = gym(tmp_path, data, num_envs=8).notices
    assert notice[:3] == ("gym.json:env.num_envs", "without effect", "no effect: trainer.num_envs is 8")


@pytest.mark.parametrize(
    ("task_cfg", "key"),
    [
        ({"env": {"id": "x"}}, "data.task_cfg.env.id"),
        ({"env": 3}, "data.task_cfg.env"),
        ({"env": {"reaching_weight": "x"}}, "data.task_cfg.env.reaching_weight"),
        ({"env": {"episode_length": 0}}, "data.task_cfg"),
        ({"noise": "x"}, "data.task_cfg.noise"),
        ({"noise": 2.0}, "data.task_cfg"),
        ({"image_size": [64]}, "data.task_cfg"),
    ],
)
def test_a_task_that_cannot_be_made_is_told_at_once(task_cfg: dict[str, Any], key: str) -> None:
    data = {"source": "engine", "task": "PushCubeExpert", "task_cfg": task_cfg}
    error = refused(make, trainer={}, env="PushCubeRL", algorithm={"name": "bc", "cfg": {}}, data=data)
    assert keys_of(error) == [key]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "trainer.enable_eval=true trainer.eval_freq=641",
            "trainer.eval_freq is 641.*640 env steps: only the end is eval",
        ),
        ("trainer.eval_freq=641", None),  # another note has it: it does not evaluate
        ("trainer.save_freq=641", "trainer.save_freq is 641.*only the end is saved"),
        ("trainer.save_frequency_updates=6", "save_frequency_updates is 6, and the run has 5 updates"),
        ("trainer.log_freq_updates=6", "only the last update is logged"),
        (
            "algorithm.cfg.critic_warmup_updates=5",
            "critic_warmup_updates is 5, .*: nothing is learned but by the critic",
        ),
        ("algorithm.cfg.optimizer.learning_rate=0", "learning_rate is 0: nothing is learned"),
        ("population={seeds: 2, exploit: {every: 6}}", "population.exploit.every is 6.*no member"),
        ("trainer.save_freq=640 trainer.log_freq_updates=5 algorithm.cfg.critic_warmup_updates=4", None),
    ],
)
def test_what_never_happens_in_so_short_a_run_is_said(override: str, said: str | None) -> None:
    config = make("trainer.iterations=5", *re.split(r" (?=\w+\.)", override) if "{" not in override else [override])
    notes = idle_notes(config, config.trainer.num_envs * config.trainer.buffer_size)
    assert len(notes) == (said is not None) and re.search(said or "", "".join(notes))


@pytest.mark.parametrize(("starts", "learns"), [(96, True), (97, False)])
def test_a_run_that_makes_no_gradient_step_says_so(starts: int, learns: bool) -> None:
    network = {"network_cfg": {"hidden_sizes": [8]}}
    squashed = {"name": "actor_q", "squash_actions": True, "actor": network, "critic": network}
    algorithm = {"name": "sac", "cfg": {"batch_size": 16, "learning_starts": starts}}
    config = make(
        "trainer.iterations=3", "trainer.num_envs=4", "trainer.buffer_size=8", policy=squashed, algorithm=algorithm
    )
    assert [NOTHING in text for text in idle_notes(config, 32)] == [True] * (not learns)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"observation.state": 1, "observation": {"state": 2}}, "'observation.state' reads like a part of"),
        ({1: 1, "1": 2}, "must be texts"),
        ({"": 1}, "must be texts that are not empty"),
    ],
)
def test_observations_whose_names_meet_are_refused_before_anything_is_trained(keys: Any, text: str) -> None:
    def space(part: Any) -> gymnasium.Space[Any]:
        if isinstance(part, int):
            return gymnasium.spaces.Box(-1.0, 1.0, (part,))
        return gymnasium.spaces.Dict({name: space(each) for name, each in part.items()})

    policy = make().policy
    error = refused(make_policy, policy, Spaces(space(keys), gymnasium.spaces.Box(-1.0, 1.0, (2,))))
    assert keys_of(error) == ["env"] and text in str(error)
