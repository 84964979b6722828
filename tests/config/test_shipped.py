"""Configs that come with ejax: found by name from any folder, listed, copied."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from case_tables import refused

from ejax.config import load_config
from ejax.config.shipped import FOLDER, copy_config, find_config, main, shipped_names, summary_of


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["push_cube/ppo", "push_cube/ppo.yaml", "configs/push_cube/ppo.yaml"])
def test_a_config_is_found_from_any_folder(name: str) -> None:
    assert find_config(name) == FOLDER / "push_cube" / "ppo.yaml"
    config = load_config(name, ["trainer.seed=7"], device="cpu")
    assert (config.trainer.exp_name, config.trainer.seed) == ("push_cube_ppo", 7)
    assert str(FOLDER) in config.notices[0].text  # which file it was must not stay hidden


def test_a_file_of_that_name_wins() -> None:
    own = Path("configs/push_cube/ppo.yaml")
    own.parent.mkdir(parents=True)
    own.write_text((FOLDER / "push_cube" / "ppo.yaml").read_text().replace("push_cube_ppo", "mine"))
    assert find_config(own) == own
    config = load_config(own, device="cpu")
    assert config.trainer.exp_name == "mine" and not any(note.key == "config" for note in config.notices)


def test_a_mistyped_name_gets_the_nearest_and_a_missing_file_its_own_error() -> None:
    refused(load_config, "push_cube/pp", match="Did you mean 'push_cube/ppo'")
    refused(load_config, "mine.yaml", match="no such file")


def test_each_is_listed_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == shipped_names() and "push_cube/ppo" in shipped_names()
    assert all(summary_of(name) for name in shipped_names())


def test_a_copy_is_the_same_run_and_overwrites_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["copy", "push_cube/ppo", "mine.yaml"]) == 0
    assert load_config("mine.yaml", device="cpu") == load_config("push_cube/ppo", device="cpu")
    schema = Path("mine.yaml").read_text().splitlines()[0].partition("$schema=")[2]
    assert os.path.isabs(schema) and Path(schema).is_file()
    assert main(["copy", "push_cube/ppo", "mine.yaml"]) == 2
    assert "mine.yaml exists" in capsys.readouterr().err


def test_a_copy_of_embodichains_form_has_its_gym_config_beside_it() -> None:
    written = copy_config("agents/rl/push_cube/train_config.json")
    assert sorted(path.name for path in written) == ["gym_config.json", "train_config.json"]
    assert load_config("train_config.json", device="cpu").env.id == "PushCubeRL"


# PointMass keeps the goal by its bonus and gamma 0.99, the CPU's config by gamma 0.9; "c" is an engine for CPUs
DIFFERS = {"point_mass/ppo": {"success_bonus"}, "playground/reppo": {"impl"}}


def task_of(name: str) -> tuple[str, dict[str, Any]]:
    raw = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    env = raw.get("env") or raw["trainer"]["learning_env"]
    return env.get("id") or env["name"], {key: x for key, x in (env.get("cfg") or {}).items() if key != "physics"}


@pytest.mark.parametrize("name", [each for each in shipped_names() if re.search(r"_(24gb|8?x?h100)$", each)])
def test_a_config_for_gpus_trains_the_task_of_the_one_for_cpus(name: str) -> None:
    on_cpu = re.sub(r"(_flash_sac)?_(24gb|8?x?h100)$", "", name)
    (task, numbers), (other, others) = task_of(name), task_of(on_cpu)
    assert task == other
    differing = {key for key in numbers.keys() | others.keys() if numbers.get(key) != others.get(key)}
    assert differing == DIFFERS.get(on_cpu, set())
