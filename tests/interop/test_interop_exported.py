"""Exports and EmbodiChain's files as teachers: they act as the policies that they were made of."""

from pathlib import Path
from typing import Any

import chex
import jax
import pytest
from case_tables import refused

pytest.importorskip("torch")

from exports import copy_of, save_run
from memory_runs import make_run
from tiny import NETWORK, tiny

from ejax.config import parse_config
from ejax.play.saved_policy import restore_policy
from ejax.policies.calls import apply_policy, first_memory
from ejax.store.run_dir import open_run_directory
from ejax.training.build import build
from ejax.training.environments import build_env, sample_obs
from interop.checkpoints.exported import read_export
from interop.embodichain import export_pt
from interop.export import export_run


@pytest.fixture(scope="module", params=["gru", "history"])
def exported(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """``(run, export)`` of a policy with a memory."""
    folder = tmp_path_factory.mktemp(request.param)
    run = make_run(folder, request.param)
    export_run(run, folder / "exported", ["safetensors"])
    return run, folder / "exported"


@pytest.mark.slow
def test_an_export_remembers_and_acts_as_its_run_does(exported: tuple[Path, Path]) -> None:
    directory, config = open_run_directory(exported[0])
    env = build_env(config)
    policy, params = restore_policy(config, env, directory.find("latest", print))
    theirs, weights = read_export(exported[1], env)
    obs, answers = jax.random.normal(jax.random.key(1), sample_obs(env, 5).shape), []
    for each, its_params in ((policy, params), (theirs, weights)):
        memory = first_memory(each, 5)
        for number in range(3):
            distribution, _, memory = apply_policy(each, its_params, obs + number, memory)
        answers.append(distribution)
    chex.assert_trees_all_equal(*answers)


def student(teacher: Path, **cfg: Any) -> Any:
    raw = tiny()
    raw["algorithm"] = {"name": "distill", "cfg": {"teacher": str(teacher), "batch_size": 16, **cfg}}
    return raw


def test_an_export_for_other_observations_or_a_changed_one_is_refused(exported: tuple, tmp_path: Path) -> None:
    export = exported[1]
    build(parse_config(student(export)))
    raw = student(export)
    raw["env"] = {"id": "PlanarReachRL"}
    refused(lambda: build(parse_config(raw)), match=r"reads 'obs' \[14\]; the observation has obs")
    changed = copy_of(export, tmp_path / "changed")
    (changed / "policy.json").write_text((export / "policy.json").read_text().replace("-5.0", "-9.0"))
    refused(lambda: build(parse_config(student(changed))), match=r"changed since the export: policy\.json")


@pytest.mark.slow
def test_embodichains_file_is_a_teacher_of_the_networks_that_it_is_said_to_have(tmp_path: Path) -> None:
    raw = tiny(tmp_path)
    raw["policy"] |= {"actor_obs_normalization": False, "log_std_range": [-13.8, 13.8]}
    config = parse_config(raw)
    state = build(config).state
    save_run(config, tmp_path / "run", state)
    file = export_pt(tmp_path / "run", tmp_path / "teacher.pt")
    small = {"type": "mlp", "network_cfg": {"hidden_sizes": [4]}}
    other = student(file, teacher_policy=raw["policy"])
    other["policy"] |= {"actor": small, "critic": small}
    own = build(parse_config(other)).state.own
    chex.assert_trees_all_equal(own.params, state.train.params)
    other["algorithm"]["cfg"]["teacher_policy"] = {"actor": small, "critic": NETWORK}
    refused(lambda: build(parse_config(other)), match=r"algorithm\.cfg\.teacher: .*the policy needs")
