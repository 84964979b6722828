"""Several devices: the same parameters on each, the numbers of one device, and runs that can go on."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from whole_runs import assert_refused

from ejax.config import ConfigError, parse_config
from ejax.run import train
from ejax.runtime.sharding import make_mesh, sharded, sharded_somewhere
from ejax.training.build import build
from ejax.training.start import rescale_for_devices
from interop.export import export_run

NUM_DEVICES = 4  # the CPU is four devices in these tests
PPO = {
    "trainer": {"learning_env": "PointMassRL", "num_envs": 4, "buffer_size": 8, "iterations": 3},
    "policy": {
        "name": "actor_critic",
        "actor": {"type": "mlp", "hidden_sizes": [16]},
        "critic": {"type": "mlp", "hidden_sizes": [16]},
        "actor_obs_normalization": True,
    },
    "algorithm": {"name": "ppo", "cfg": {"batch_size": 16, "n_epochs": 2, "optimizer": {"learning_rate": 0.01}}},
}
GRPO = {
    "trainer": {"learning_env": "PointMassRL", "num_envs": 4, "buffer_size": 8, "iterations": 3},
    "policy": {"name": "actor_only", "actor": {"type": "mlp", "hidden_sizes": [16]}},
    "algorithm": {"name": "grpo", "cfg": {"batch_size": 16, "n_epochs": 2, "group_size": 2}},
}
APG = {
    "trainer": {"learning_env": "PointMassRL", "num_envs": 4, "iterations": 3},
    "policy": {"name": "actor_only", "actor": {"type": "mlp", "hidden_sizes": [16]}},
    "algorithm": {"name": "apg", "cfg": {"update_horizon": 8, "segment_length": 4}},
}
ADAPTIVE = ["algorithm.cfg.schedule=adaptive", "algorithm.cfg.desired_kl=0.01"]
LINEAR = ["algorithm.cfg.lr_scheduler.name=linear", "algorithm.cfg.lr_scheduler.kwargs.end_factor=0.1"]


def updates(raw: dict[str, Any], overrides: Iterable[str], count: int = 3) -> Any:
    """Return the state and the metrics after ``count`` updates."""
    parts = build(parse_config(raw, overrides))
    with parts.stepper as stepper:
        state = stepper.start(parts.state)
        return stepper.advance(state, count, lambda: False)


def together(raw: dict[str, Any]) -> list[Any]:
    """Return the settings of one device that has the environments, the minibatches and the strata of all."""
    several = [f"trainer.num_envs={NUM_DEVICES * raw['trainer']['num_envs']}"]
    if "batch_size" in raw["algorithm"]["cfg"]:
        several.append(f"algorithm.cfg.batch_size={NUM_DEVICES * raw['algorithm']['cfg']['batch_size']}")
        several.append(f"algorithm.cfg.minibatch_strata={NUM_DEVICES}")
    return several


@pytest.mark.slow
@pytest.mark.parametrize(
    ("raw", "options"),
    [(PPO, []), (PPO, ADAPTIVE), (PPO, LINEAR), (PPO, ["algorithm.cfg.num_mini_batches=3"]), (GRPO, []), (APG, [])],
    ids=["ppo", "adaptive", "linear", "uneven", "grpo", "apg"],
)
def test_several_devices_compute_what_one_does(raw: dict[str, dict[str, Any]], options: list[str]) -> None:
    state, metrics = updates(raw, ["trainer.distributed=true", *options])
    expected, expected_metrics = updates(raw, [*together(raw), *options])
    for leaf, other in zip(jax.tree.leaves(state.train), jax.tree.leaves(expected.train), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=2e-4, atol=2e-5)
    for name, value in expected_metrics.items():
        if name.startswith("time/"):
            continue
        np.testing.assert_allclose(metrics[name][:3], value[:3], rtol=2e-3, atol=2e-4, err_msg=name)
    assert int(state.episodes.num_episodes) == int(expected.episodes.num_episodes)


WIDE = ["trainer.distributed=true", "policy.actor.network_cfg.hidden_sizes=[128,128]"]


@pytest.fixture(scope="module")
def whole() -> tuple[Any, Any]:
    return updates(PPO, WIDE)


@pytest.mark.slow
def test_environments_are_split_and_parameters_are_the_same_on_each_device(whole: tuple[Any, Any]) -> None:
    state, _ = whole
    for leaf in jax.tree.leaves(state.envs):
        assert [shard.data.shape[0] for shard in leaf.addressable_shards] == [4] * NUM_DEVICES
        assert len({shard.index[0].start for shard in leaf.addressable_shards}) == NUM_DEVICES
    for leaf in jax.tree.leaves(state.train):
        first, *others = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(others) == NUM_DEVICES - 1
        for other in others:
            np.testing.assert_array_equal(first, other)


@pytest.mark.slow
@pytest.mark.parametrize(("given", "share"), [("true", NUM_DEVICES), ("2", 2)])
def test_devices_that_share_the_parameters_compute_what_those_that_have_them_all_do(
    given: str, share: int, whole: tuple[Any, Any]
) -> None:
    (shared, metrics), (whole, expected) = updates(PPO, [*WIDE, f"trainer.shard_parameters={given}"]), whole
    kernel = shared.train.params["params"]["actor"]["linear_1"]["kernel"]
    assert [shard.data.size for shard in kernel.addressable_shards] == [128 * 128 // share] * NUM_DEVICES
    assert len({str(shard.index) for shard in kernel.addressable_shards}) == share  # the other copies are the same
    for moment in (x for x in jax.tree.leaves(shared.train.opt_state) if x.shape == (128, 128)):
        assert moment.addressable_shards[0].data.size == 128 * 128 // share
    for leaf in jax.tree.leaves(shared.envs):
        assert len({shard.index[0].start for shard in leaf.addressable_shards}) == NUM_DEVICES
    for leaf, other in zip(jax.tree.leaves(shared.train), jax.tree.leaves(whole.train), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(metrics["train/loss"][:3], expected["train/loss"][:3], rtol=2e-3)


def test_neighbours_share_a_copy_of_what_is_worth_a_message_and_rows_are_everywhere() -> None:
    mesh = make_mesh(jax.devices(), share=2)
    assert mesh.axis_names == ("env", "fsdp") and dict(mesh.shape) == {"env": 2, "fsdp": 2}
    assert [device.id for device in mesh.devices[0]] == [device.id for device in jax.devices()[:2]]
    assert sharded_somewhere(mesh, (128, 256)).spec == jax.P(None, "fsdp")
    assert sharded_somewhere(mesh, (257, 128)).spec == jax.P(None, "fsdp")
    assert sharded_somewhere(mesh, (127, 257)).spec == sharded_somewhere(mesh, (16, 16)).spec == jax.P()
    rows = jax.device_put(np.arange(8), sharded(mesh))
    assert [np.asarray(shard.data).tolist() for shard in rows.addressable_shards] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert dict(make_mesh(jax.devices(), share=4).shape) == {"env": 1, "fsdp": 4}


@pytest.mark.slow
@pytest.mark.parametrize("raw", [PPO, GRPO], ids=["ppo", "grpo"])
@pytest.mark.parametrize("shared", ["false", "2"])
def test_the_program_splits_the_work(raw: dict[str, dict[str, Any]], shared: str) -> None:
    width = ["policy.actor.network_cfg.hidden_sizes=[19]", "algorithm.cfg.batch_size=6"]
    parts = build(parse_config(raw, ["trainer.distributed=true", f"trainer.shard_parameters={shared}", *width]))
    parts.stepper.start(parts.state)
    text = parts.stepper._compiled.as_text()
    assert "f32[4,19]" in text and "f32[6,19]" in text  # collection in 4 envs, minibatches of 6 rows, on each device
    assert not any(f"[{all_rows},19]" in text for all_rows in (16, 24, 128))


@pytest.mark.slow
def test_a_distributed_run_counts_all_steps_and_goes_on(tmp_path: Path) -> None:
    overrides = ["trainer.distributed=true", f"trainer.output_dir={tmp_path}", "trainer.console=false"]
    config = parse_config(PPO, [*overrides, "trainer.exp_name=all"])
    whole = train(config)
    assert whole.global_step == 3 * 8 * 4 * NUM_DEVICES
    cut = parse_config(PPO, [*overrides, "trainer.exp_name=cut", "trainer.save_frequency_updates=1"])
    first = train(cut)
    after_two = sorted((first.run_dir / "checkpoints").glob("*_step_256"))
    result = train(cut, resume=str(after_two[0]), run_dir=first.run_dir)
    chex.assert_trees_all_equal(result.params, whole.params)


@pytest.mark.slow
@pytest.mark.parametrize("raw", [PPO, GRPO], ids=["ppo", "grpo"])
def test_a_run_goes_on_with_another_number_of_devices(tmp_path: Path, raw: dict[str, Any]) -> None:
    overrides = ["trainer.distributed=true", f"trainer.output_dir={tmp_path}", "trainer.enable_eval=false"]
    config = parse_config(raw, [*overrides, "trainer.exp_name=shared", "trainer.save_frequency_updates=1"])
    four = train(config)
    (first,) = (four.run_dir / "checkpoints").glob("*_step_128")
    alone = train(parse_config(config.to_dict(), ["trainer.distributed=false"]), resume=str(first))
    assert (alone.global_step, alone.run_dir) == (four.global_step, four.run_dir)
    chex.assert_trees_all_close(alone.params, four.params, rtol=2e-4, atol=2e-5)
    # and back: what the checkpoint says counts, not what the run was begun with
    again = train(config, resume=str(alone.latest_checkpoint_path))
    assert (again.num_updates, again.global_step) == (four.num_updates, four.global_step)


@pytest.mark.parametrize(
    ("was", "now", "text"),
    [
        (1, 3, r"1 x 4 environments, of which 3 devices would leave 1"),
        (1, 4, r"1 x 2 rows, which 4 devices cannot share"),
    ],
)
def test_devices_that_cannot_share_a_run_are_refused(tmp_path: Path, was: int, now: int, text: str) -> None:
    config = parse_config(PPO, ["algorithm.cfg.batch_size=2"])
    (tmp_path / "meta.json").write_text(
        json.dumps(
            {"schema_version": 2, "versions": {}, "global_step": 0, "num_devices": was, "config": config.to_dict()}
        )
    )
    with pytest.raises(ConfigError, match=text):
        rescale_for_devices(config, tmp_path, now)


ALL, HOSTED = "trainer.distributed=true", "trainer.collector.mode=host"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "key", "word"),
    [
        ([ALL, HOSTED, "trainer.collector.learner_devices=[cpu:0]"], "trainer.collector.learner_devices", "leave"),
        ([ALL, HOSTED, "trainer.shard_parameters=true"], "trainer.shard_parameters", "outside the program"),
        ([ALL, HOSTED, "trainer.collector.num_groups=3"], "trainer.collector.num_groups", "16 environments of 4"),
        (["trainer.shard_parameters=true"], "trainer.shard_parameters", "needs trainer.distributed: true"),
        ([ALL, "trainer.shard_parameters=3"], "trainer.shard_parameters", "the 4 devices; allowed: true, 2"),
        ([ALL, "trainer.shard_parameters=1"], "trainer.shard_parameters", "got 1"),
    ],
)
def test_what_cannot_be_distributed_is_refused(given: list[str], key: str, word: str) -> None:
    assert_refused(PPO, given, key, word)


@pytest.mark.slow
def test_a_policy_whose_parameters_are_shared_is_exported(tmp_path: Path) -> None:
    overrides = [*WIDE, "trainer.shard_parameters=2", f"trainer.output_dir={tmp_path}", "trainer.console=false"]
    result = train(parse_config(PPO, overrides))
    export_run(result.run_dir, tmp_path / "out", ["safetensors"])  # which certifies what it wrote
    file = tmp_path / "out" / "policy.safetensors"
    kernel = np.asarray(result.params["params"]["actor"]["linear_1"]["kernel"])
    assert any(x.shape == kernel.T.shape and (x == kernel.T).all() for x in load_file(file).values())
