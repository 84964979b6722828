import json
import pickle
import subprocess
import sys
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from case_tables import cases, refused
from helpers.small_configs import make

from ejax.algorithms import ppo
from ejax.algorithms.record import Algorithm, find_algorithm
from ejax.config import ConfigError, Problem
from ejax.envs.manager.embodied import EmbodiedEnv
from ejax.envs.tasks.mujoco_task import MuJoCoTask
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.policies import ActorCritic, ActorOnly
from ejax.policies.record import PolicyKind, find_policy
from ejax.schema import registry
from ejax.schema.episode_limits import with_limit
from ejax.schema.messages import did_you_mean
from ejax.schema.registry import ALGORITHMS, UnknownNameError, register_env, register_policy, resolve
from ejax.schema.trust import trust


@pytest.fixture(autouse=True)
def restored_tables(registered_names: None) -> None:
    """Forget after each test, as conftest does after each file."""


def test_names_are_case_insensitive() -> None:
    assert resolve("env", "pointmassrl") is PointMassRL


def test_a_place_is_imported_as_it_stands() -> None:
    trust("ejax.envs.tasks.point_mass:PointMassRL")
    assert resolve("env", "ejax.envs.tasks.point_mass:PointMassRL") is PointMassRL


def test_an_algorithm_is_its_record() -> None:
    assert resolve("algorithm", "PPO") is ppo.ALGORITHM
    assert {type(resolve("algorithm", name)) for name in ALGORITHMS} == {Algorithm}
    with pytest.raises(
        ValueError, match=r"'ejax\.returns:gae' is a .*, not an ejax\.algorithms\.record\.Algorithm: name"
    ):
        trust("ejax.returns:gae")
        find_algorithm("ejax.returns:gae")


def test_a_built_in_policy_is_its_record_and_another_class_gets_the_plainest() -> None:
    assert {type(resolve("policy", name)) for name in registry.POLICIES} == {PolicyKind}
    register_policy("plain", ActorOnly)
    assert find_policy("plain") == PolicyKind(make=ActorOnly, unread=find_policy("plain").unread)


def test_a_policy_of_ones_own_may_have_rules_of_its_own() -> None:
    def problems(section: Any) -> list[Problem]:
        return [Problem("policy.initial_log_std", "must be 1")] if section.initial_log_std != 1.0 else []

    register_policy("ruled", PolicyKind(make=ActorCritic, mlps=("actor", "critic"), problems=problems))
    assert make("policy.name=ruled", "policy.initial_log_std=1").policy.record.make is ActorCritic
    refused(make, "policy.name=ruled", match=r"policy\.initial_log_std: must be 1")
    with pytest.raises(ConfigError, match=r"policy\.critic.*is missing: ruled needs"):
        make("policy.name=ruled", "policy.initial_log_std=1", "policy.critic=null")


def test_a_family_passes_on_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zoo.py").write_text("def make(name, **cfg):\n    return name, cfg\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(registry.ENV_FAMILIES, "gymnax", "zoo:make")
    assert resolve("env", "gymnax:CartPole-v1")(max_steps=3) == ("CartPole-v1", {"max_steps": 3})


def test_register_as_a_call_and_as_a_decorator() -> None:
    assert register_env("A", PointMassRL) is PointMassRL

    @register_policy("mine")
    class Mine:
        pass

    assert resolve("env", "a") is PointMassRL
    assert resolve("policy", "MINE") is Mine


@partial(with_limit, num_steps=7)
@dataclass(frozen=True)
class Limited(PointMassRL):
    """A task with another limit."""

    def observe(self, world: Any) -> Any:
        return super().observe(world) + 1.0


def test_a_limit_becomes_the_default_of_the_episodes_length() -> None:
    assert (Limited.__name__, Limited().max_episode_steps, Limited(max_episode_steps=9).max_episode_steps) == (
        "Limited",
        7,
        9,
    )
    assert hash(Limited()) == hash(Limited()) and pickle.loads(pickle.dumps(Limited())) == Limited()
    assert [each.name for each in fields(Limited)] == [each.name for each in fields(PointMassRL)]
    assert PointMassRL().max_episode_steps == 100


def test_the_documents_decorator_registers_with_gymnasium_too() -> None:
    made = register_env("LimitedRL", max_episode_steps=3, override=True)(Limited)
    assert resolve("env", "LimitedRL") is made and issubclass(made, Limited)
    env = gymnasium.make("ejax/Limited-v0", mass=2.0)
    assert env.unwrapped.env == made(mass=2.0)  # type: ignore[attr-defined]
    env.reset(seed=0)
    assert [env.step(np.zeros(2))[3] for _ in range(3)] == [False, False, True]


def test_a_limit_of_an_embodied_env_is_the_gym_configs_default() -> None:
    gym_config = json.loads((Path(__file__).parents[1] / "gym_configs/cart_pole.json").read_text())
    del gym_config["max_episode_steps"]

    @register_env("MyTaskRL", max_episode_steps=100, override=True)
    class MyTaskEnv(EmbodiedEnv):
        pass

    configs = (gym_config, gym_config | {"max_episode_steps": 20})
    limits = [kind(config).max_episode_steps for kind in (EmbodiedEnv, MyTaskEnv) for config in configs]
    assert limits == [300, 20, 100, 20]


def test_a_limit_of_a_mujoco_task_and_of_a_function() -> None:
    class Arm(MuJoCoTask):
        model = "push_cube.xml"

    limited = register_env("Arm", Arm, max_episode_steps=30)
    assert [x.default for x in fields(limited) if x.name == "episode_length"] == [30] and issubclass(limited, Arm)
    assert [x.kw_only for x in fields(limited)] == [x.kw_only for x in fields(Arm)]
    assert register_env("made", lambda episode_length=3: episode_length, max_episode_steps=5)() == 5


@cases(
    "made limit message",
    (lambda mass=1.0: mass, 5, r"=5 would change nothing: <lambda> takes neither max_episode_steps nor ep"),
    ("ejax.envs.tasks.point_mass:PointMassRL", 5, r"needs the class of 'ejax\.envs.*', not its place"),
    (PointMassRL, 0, r"PointMassRL: max_episode_steps must be an integer >= 1, got 0"),
    (PointMassRL, 1.5, r"must be an integer >= 1, got 1\.5"),
)
def test_a_limit_that_would_change_nothing_is_refused(made: Any, limit: Any, message: str) -> None:
    refused(register_env, "Unlimited", made, max_episode_steps=limit, match=message)
    assert "Unlimited" not in registry.entries("env")


def test_a_registered_place_is_imported_when_resolved() -> None:
    register_env("Late", "ejax.envs.tasks.point_mass:PointMassRL")
    assert resolve("env", "late") is PointMassRL


def test_a_taken_name_is_refused_whatever_its_case() -> None:
    refused(register_env, "pointmassrl", PointMassRL, match=r"'PointMassRL' is registered already; pass override=True")


def test_override_replaces() -> None:
    register_env("pointmassrl", int, override=True)
    assert resolve("env", "PointMassRL") is int


def test_an_unknown_name_lists_the_names_and_the_nearest() -> None:
    names = r"CartPoleRL, EmbodiedEnv, InstructedPlaceRL, PickPlaceRL.*Did you mean 'PushCubeRL'\?"
    refused(resolve, "env", "PushCubRL", match=names, error=UnknownNameError)


@pytest.mark.parametrize("name", ["ddpg", "TD3"])
def test_an_off_policy_algorithm_that_is_missing_is_not_taken_for_another(name: str) -> None:
    text = rf"no algorithm '{name}'; there is .*ppo, sac, shac, .*ejax has sac, with td3's options"
    caught = refused(resolve, "algorithm", name, match=text, error=UnknownNameError)
    assert "Did you mean" not in str(caught)


def test_a_module_without_the_name_suggests_the_nearest() -> None:
    trust("ejax.envs.tasks.point_mass:PointMas")
    with pytest.raises(ImportError, match=r"has no 'PointMas'. Did you mean 'PointMassRL'\?"):
        resolve("env", "ejax.envs.tasks.point_mass:PointMas")


def test_nothing_near_suggests_nothing() -> None:
    assert did_you_mean("zzz", ["adam"]) == ""


def test_importing_the_registry_imports_no_entry() -> None:
    code = "import sys, ejax.schema.registry; print([m for m in sys.modules if m.startswith('ejax.envs')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
