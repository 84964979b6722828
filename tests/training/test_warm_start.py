"""``policy.init_from``: what a new run takes over from another's policy, and what it does not."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import chex
import jax
import pytest
from case_tables import cases, refused
from tiny import GRPO, STEPS, tiny

from ejax.config import ConfigError, RunConfig, parse_config
from ejax.config.embodichain.check import check
from ejax.evaluation import evaluate, summarize
from ejax.play.saved_policy import evaluate_run
from ejax.run import train
from ejax.schema import registry
from ejax.store.checkpoint import CheckpointError, load_checkpoint
from ejax.store.run_dir import RunDirectory
from ejax.train import main
from ejax.training.build import build
from ejax.training.warm_start import start_from_policy
from interop import embodichain


def config_with(algorithm: dict | None = None, network: dict | None = None, **policy: Any) -> RunConfig:
    raw = tiny(iterations=3, seed=5)
    if algorithm:
        raw["algorithm"] = algorithm
    if network:
        raw["policy"] |= {"actor": network, "critic": network}
    raw["policy"] |= policy
    return parse_config(raw)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run of three updates."""
    return train(config_with(), run_dir=tmp_path_factory.mktemp("trained") / "run").run_dir


def newest(run: Path) -> Path:
    return RunDirectory(run, "tiny").periodic()[0]


def train_state(run: Path) -> Any:
    return load_checkpoint(newest(run), build(config_with()).state)[0].train


@pytest.mark.slow
@pytest.mark.parametrize("of_run", [True, False])
def test_parameters_and_statistics_are_taken_over_and_nothing_else(trained: Path, of_run: bool) -> None:
    config = config_with(init_from=str(trained if of_run else newest(trained)))
    parts = build(config)
    fresh = parts.state
    state, reports = start_from_policy(parts, config)
    source = train_state(trained)
    chex.assert_trees_all_equal(state.train.params, source.params)
    assert float(source.params["normalizer"]["actor_obs_normalizer"]["count"]) == 3 * STEPS
    chex.assert_trees_all_equal(state.train.opt_state, fresh.train.opt_state)
    assert (int(state.update), int(state.train.step), state.train.reference) == (0, 0, None)
    assert reports == [f"the policy is that of {newest(trained)}, after {3 * STEPS} env steps"]
    with pytest.raises(AssertionError):
        chex.assert_trees_all_equal(fresh.train.params, source.params)  # else this test would show nothing


@pytest.mark.slow
def test_at_update_0_the_policy_evaluates_as_the_checkpoint_does(trained: Path) -> None:
    theirs = evaluate_run(trained, checkpoint="latest", num_episodes=2, num_envs=2, seed=3)
    config = config_with(init_from=str(trained))
    parts = build(config)
    state, _ = start_from_policy(parts, config)

    def mean_return(params: Any) -> float:
        episodes = evaluate(parts.policy, parts.env, params, jax.random.key(3), num_envs=2, num_episodes=2)
        return float(summarize(episodes)["eval/avg_reward"])

    assert mean_return(state.train.params) == theirs["eval/avg_reward"] != mean_return(parts.state.train.params)


@pytest.mark.slow
def test_a_run_starts_from_it_and_the_reference_is_that_policy(trained: Path, tmp_path: Path) -> None:
    config = config_with(GRPO, init_from=str(trained))
    result = train(config, run_dir=tmp_path / "run")
    state, meta = load_checkpoint(newest(result.run_dir), build(config).state)
    source = train_state(trained)
    assert meta["num_updates"] == 3
    chex.assert_trees_all_equal(state.train.reference, source.params)
    moved = jax.tree.map(lambda a, b: float(abs(a - b).max()), state.train.params["params"], source.params["params"])
    assert 0.0 < max(jax.tree.leaves(moved)) < 0.1  # three small steps away from it, not from a random policy


@pytest.mark.slow
def test_the_target_critic_of_shac_is_that_policys_too(trained: Path) -> None:
    shac = {"name": "shac", "cfg": {"segment_length": 4, "critic_epochs": 1, "num_mini_batches": 1}}
    config = config_with(shac, init_from=str(trained))
    state, _ = start_from_policy(build(config), config)
    source = train_state(trained)
    chex.assert_trees_all_equal(state.train.params, source.params)
    chex.assert_trees_all_equal(state.train.target, source.params)
    assert state.train.reference is None


def test_a_resumed_run_does_not_need_it_any_more(trained: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(trained, source)
    config = config_with(init_from=str(source))
    train(config, run_dir=tmp_path / "run")
    shutil.rmtree(source)
    longer = config.model_copy(update={"trainer": config.trainer.model_copy(update={"iterations": 4})})
    assert train(longer, run_dir=tmp_path / "run", resume="latest").num_updates == 4


def test_other_shapes_are_refused_one_by_one(trained: Path, tmp_path: Path) -> None:
    wider = {"type": "mlp", "network_cfg": {"hidden_sizes": [16], "activation": "tanh"}}
    config = config_with(network=wider, init_from=str(trained), actor_obs_normalization=False)
    text = str(refused(train, config, run_dir=tmp_path / "run"))
    assert "policy.init_from" in text
    assert "has train.params.normalizer.actor_obs_normalizer.mean, which this run does not" in text
    assert text.count("float32[16], this run") == 0
    assert text.count("is float32[8], this run needs float32[16]") == 2  # the hidden biases of actor and critic
    assert text.count("is float32[14, 8], this run needs float32[14, 16]") == 2
    assert text.count("is float32[8, ") == 2  # the output layers
    assert "The networks and normalizers under policy must be those of the checkpoint." in text


def test_what_changes_the_meaning_of_equal_shapes_is_told(trained: Path) -> None:
    relu = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "relu"}}
    config = config_with(network=relu, init_from=str(trained), initial_log_std=-1.0, log_std_range=[-4.0, 2.0])
    _, reports = start_from_policy(build(config), config)
    assert reports[1:] == [
        'policy.actor.network_cfg.activation was "tanh" there and is "relu" here',
        'policy.critic.network_cfg.activation was "tanh" there and is "relu" here',
        "policy.log_std_range was [-5.0, 2.0] there and is [-4.0, 2.0] here",
    ]


def test_a_run_may_be_named_without_its_time(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "tiny_20260101_120000")
    config = config_with(init_from=str(tmp_path / "tiny"))
    chex.assert_trees_all_equal(start_from_policy(build(config), config)[0].train.params, train_state(trained).params)


@pytest.mark.parametrize("damage", [True, False])
def test_a_missing_or_damaged_checkpoint_is_refused(trained: Path, tmp_path: Path, damage: bool) -> None:
    source = tmp_path / "checkpoint"
    if damage:
        shutil.copytree(newest(trained), source)
        (source / "meta.json").write_text("{}")
    config = config_with(init_from=str(source))
    refused(lambda: start_from_policy(build(config), config), match=r"policy\.init_from.*(is damaged|no run)")


def test_embodichains_file_without_what_reads_it_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(registry.CHECKPOINT_READERS, ".pt", "no_such_module:read")
    remedy = r"best\.pt is read by interop: pip install -e '\.\[torch\]' .*no_such_module"
    with pytest.raises(ConfigError, match=rf"policy\.init_from.*{remedy}"):
        train(config_with(init_from="best.pt"), run_dir=tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/notes.txt").touch()
    refused(lambda: train(config_with(), resume="best.pt", run_dir=tmp_path / "b"), match=remedy, error=CheckpointError)
    assert [path.name for path in tmp_path.rglob("*")] == ["b", "notes.txt"]  # both folders can be given again


@cases("command", ["to-pt", "RUN", "--out", "a.pt"], ["from-pt", "a.pt", "--config", "c", "--run", "b"])
def test_converting_without_torch_names_the_remedy(
    command: list[str],
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = tmp_path / "train.json"
    config.write_text(json.dumps(config_with().to_dict()))
    places = {"RUN": str(trained), "a.pt": str(tmp_path / "a.pt"), "c": str(config), "b": str(tmp_path / "b")}
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises
    for name in ("interop.checkpoints.file", "interop.checkpoints.state"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert embodichain.main([places.get(word, word) for word in command]) == 2
    assert capsys.readouterr().err.endswith("torch's: pip install -e '.[torch]' in ejax's folder\n")
    assert not (tmp_path / "b").exists()


@pytest.mark.slow
def test_the_key_is_used(tmp_path: Path) -> None:
    file = tmp_path / "train.json"
    file.write_text(json.dumps(config_with(init_from="outputs/first").to_dict()))
    notes = {note.key: note.status for note in check(file)}
    assert notes["policy.init_from"] == "used"


def test_one_command_trains_what_the_run_starts_from_and_then_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text(json.dumps(tiny(tmp_path, exp_name="before", iterations=2)))
    second.write_text(json.dumps(tiny(tmp_path, exp_name="after", iterations=1)))
    assert main([str(second), "--first", str(first)]) == 0
    (run,) = tmp_path.glob(f"before_*/checkpoints/before_step_{2 * STEPS}")
    (after,) = tmp_path.glob("after_*/configs/resolved.json")
    assert json.loads(after.read_text())["policy"]["init_from"] == str(run)
    for words in (["--resume", "latest"], ["policy.init_from=elsewhere"], ["trainer.distributed=true"]):
        assert main([str(second), "--first", str(first), *words]) == 2
        assert "--first" in capsys.readouterr().err
    assert len([*tmp_path.glob("before_*")]) == 1  # what is refused trains nothing
