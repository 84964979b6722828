"""Policies that come with ejax: whole, small, as their certificates say, and found by name."""

from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from case_tables import refused

from ejax.config import load_config
from ejax.config.shipped import POLICIES, main, shipped_policies
from ejax.play.saved_policy import evaluate_run
from ejax.runtime.tree_text import named_leaves
from ejax.schema.plain_files import read_json
from ejax.store.arrays import read_arrays
from ejax.store.checkpoint import CheckpointError, load_checkpoint, load_policy_arrays, verify_checkpoint
from ejax.store.run_dir import create_run_directory, find_run, open_policy_run
from ejax.training.build import build
from ejax.training.warm_start import start_from_policy

TABLE = yaml.safe_load(Path(__file__).parents[2].joinpath("benchmarks", "shipped.yaml").read_text())
EPISODES = 50


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def sizes() -> dict[Path, tuple[int, int]]:
    files = [path for path in POLICIES.rglob("*") if path.is_file()]
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize("name", TABLE)
def test_each_is_whole_and_of_what_its_certificate_says(name: str) -> None:
    directory, config = open_policy_run(Path(name))  # compares the configs with their digests
    checkpoint = directory.find(None, pytest.fail)  # and the arrays with theirs
    meta, certificate = verify_checkpoint(checkpoint), read_json(directory.path / "certificate.json")
    made_from = {"overrides": [], **TABLE[name]}
    assert {key: certificate[key] for key in made_from} == made_from
    assert config.trainer.seed == certificate["seed"] and meta["global_step"] == certificate["env_steps"]
    assert certificate["evaluation_seed"] not in (config.trainer.seed, config.trainer.eval_seed)
    assert certificate["episodes"] == 1000 and len(certificate["commit"]) == 40
    assert all(each.startswith("train.params.") for each in read_arrays(checkpoint, None))
    assert all(np.isfinite(x).all() for x in load_policy_arrays(checkpoint).values())


def test_they_are_those_of_the_table_and_small() -> None:
    assert list(shipped_policies()) == sorted(TABLE)
    of_each = {name: sum(n for file, (n, _) in sizes().items() if name in file.parts) for name in TABLE}
    assert max(of_each.values()) <= 200_000 and sum(of_each.values()) <= 4_000_000, of_each


def test_one_reaches_its_certificate_again_and_the_package_is_only_read() -> None:
    before, certificate = sizes(), read_json(POLICIES / "point_mass" / "certificate.json")
    metrics = evaluate_run(
        Path("point_mass"), num_episodes=EPISODES, num_envs=EPISODES, seed=certificate["evaluation_seed"]
    )
    wanted = certificate["mode"]
    # 4 standard errors of the mean of so few episodes
    bound = 4 * wanted["std_of_returns"] / EPISODES**0.5
    assert metrics["eval/avg_reward"] == pytest.approx(wanted["eval/avg_reward"], abs=bound)
    assert metrics["eval/success_rate"] == pytest.approx(wanted["eval/success_rate"], abs=0.05)
    report = Path(str(metrics["report"]))
    assert report.is_file() and report.is_relative_to("outputs/point_mass/evaluations")
    assert sizes() == before


def test_what_is_in_the_working_folder_wins() -> None:
    assert find_run(Path("point_mass"), policy=True) == POLICIES / "point_mass"
    own = Path("point_mass_20260101_000000")
    create_run_directory(load_config("point_mass/ppo", device="cpu"), own)
    assert find_run(Path("point_mass"), policy=True) == own
    Path("point_mass").mkdir()
    refused(find_run, Path("point_mass"), policy=True, match=r"point_mass is not a run", error=FileNotFoundError)
    with pytest.raises(FileNotFoundError, match="no run of 'push_cube' in outputs"):
        find_run(Path("outputs/push_cube"), policy=True)


def test_an_unknown_name_lists_them() -> None:
    with pytest.raises(FileNotFoundError, match=r"push_cube, quadruped\. Did you mean 'push_cube'\?"):
        open_policy_run(Path("push_cub"))


def test_what_needs_the_training_says_what_to_do() -> None:
    with pytest.raises(FileNotFoundError, match=r"policy\.init_from=point_mass starts a new run"):
        find_run(Path("point_mass"))
    checkpoint = open_policy_run(Path("point_mass"))[0].find("latest", pytest.fail)
    refused(load_checkpoint, checkpoint, {}, match=r"policy\.init_from", error=CheckpointError)


def test_a_run_begins_with_one() -> None:
    config = load_config("point_mass/ppo", ["policy.init_from=point_mass"], device="cpu")
    state, (report, *_) = start_from_policy(build(config), config)
    checkpoint = open_policy_run(Path("point_mass"))[0].find("latest", pytest.fail)
    there = load_policy_arrays(checkpoint)
    here = named_leaves(jax.device_get(state.train.params))
    assert here.keys() == there.keys() and all(np.array_equal(here[name], there[name]) for name in here)
    assert f"after {verify_checkpoint(checkpoint)['global_step']} env steps" in report


def test_the_configs_that_they_come_from_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert all(lines[config].endswith(f" (trained: {name})") for name, config in shipped_policies().items())
