"""Rows of a replay buffer on the host, or in files: the bits of those on the device, kept, placed and refused."""

import gc
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from damages import same, what_is_left
from tiny import tiny_sac

from ejax.algorithms.host_rows import HostRows
from ejax.algorithms.replay_buffer import ReplayConfig, add_and_take, add_rollout, init_replay, sample_rows, take_rows
from ejax.config import ConfigError, parse_config
from ejax.run import train
from ejax.store.checkpoint import CheckpointError
from ejax.store.replay_rows import load_rows, save_rows
from ejax.store.resume_rules import check_same_run, with_changes
from ejax.training import parts as run_parts
from ejax.training.build import build
from ejax.training.parts import place_rows
from ejax.training.steppers import DeviceStepper
from ejax.types import Rollout


def stored(storage: str, folder: Path | None = None, **trainer: Any) -> dict[str, Any]:
    replay = {"capacity": 80, "n_step": 2, "storage": storage} | ({"folder": str(folder)} if folder else {})
    return tiny_sac(sac={"replay": replay}, save_frequency_updates=1, iterations=4, **trainer)


@pytest.mark.slow  # three programs of a training
def test_a_run_that_changes_its_storage_at_each_resume_has_the_bits_of_one_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = DeviceStepper.trace

    def optimized(self: DeviceStepper[Any], state: Any, key: Any) -> Any:
        # as without the flags of the tests, by which XLA adds up in an order that depends on the rest of the program
        compile_it = trace(self, state, key).lower().compile
        lowered = SimpleNamespace(compile=lambda: compile_it({"xla_cpu_use_fusion_emitters": True}))
        return SimpleNamespace(lower=lambda: lowered)

    monkeypatch.setattr(DeviceStepper, "trace", optimized)
    train(parse_config(stored("device")), run_dir=tmp_path / "whole")
    train(parse_config(stored("host"), ["trainer.iterations=2"]), run_dir=tmp_path / "run")
    for storage, updates in (("shared", 3), ("device", 4)):
        config = parse_config(stored(storage), [f"trainer.iterations={updates}"])
        train(config, resume="latest", run_dir=tmp_path / "run")
    assert same(*(what_is_left(tmp_path / name, "tiny") for name in ("run", "whole")), log=True)
    changes = json.loads((tmp_path / "run" / "configs" / "changes.json").read_text())["changes"]
    assert [change["changed"]["algorithm.cfg.replay.storage"][1] for change in changes] == ["shared", "device"]


def test_a_resume_takes_the_storage_of_its_own_config_also_on_other_devices() -> None:
    saved = parse_config(stored("device"), ["algorithm.cfg.replay.strata=4"])
    now = parse_config(stored("shared", Path("/dev/shm")))
    refused(check_same_run, now, saved, match=r"replay\.strata is 4 in the run and null now$", error=CheckpointError)
    cfg: Any = with_changes(saved.algorithm.cfg, now.algorithm.cfg)
    assert (cfg.replay.storage, cfg.replay.folder, cfg.replay.strata) == ("shared", "/dev/shm", 4)


def pictures(seed: int, shape: tuple[int, int] = (6, 4)) -> Rollout:
    rng, zeros = np.random.default_rng(seed), jnp.zeros(shape)
    obs = [
        {"image": jnp.asarray(rng.integers(0, 256, (*shape, 3, 3)), jnp.uint8), "state": jnp.asarray(rng.random(shape))}
        for _ in range(2)
    ]
    flags = {name: jnp.asarray(rng.random(shape) < 0.2) for name in ("terminated", "truncated", "valid")}
    return Rollout(
        obs=obs[0],
        action=jnp.asarray(rng.normal(size=(*shape, 2)), jnp.bfloat16),
        reward=jnp.asarray(rng.random(shape)),
        next_obs=obs[1],
        log_prob=zeros,
        value=zeros,
        next_value=zeros,
        **flags | {"valid": ~flags["valid"]},
    )


def rings(storage: str, folder: Path) -> Any:
    """Make an empty ring for ``pictures``, and what holds its memory."""
    first = jax.tree.map(lambda x: x[0], pictures(0))
    config = ReplayConfig(capacity=31, n_step=2, storage=storage, folder=str(folder))
    return place_rows(init_replay(config, first.obs, first.action), folder)


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["host", "shared"])
def test_each_call_takes_the_rows_of_the_ring_after_it_in_their_own_types(storage: str, tmp_path: Path) -> None:
    device, (host, memories) = rings("device", tmp_path)[0], rings(storage, tmp_path)
    keys = jax.random.split(jax.random.key(0), 3)
    for seed in range(4):
        device = jax.jit(add_rollout)(device, pictures(seed), gamma=0.9)
        host, taken, rows = jax.jit(add_and_take, static_argnames="draw")(host, pictures(seed), draws(keys), gamma=0.9)
        for i in range(3):
            minibatches = take_rows(taken, rows[i]), take_rows(device, sample_rows(device, keys[i], 8))
            jax.tree.map(np.testing.assert_array_equal, *minibatches)
    jax.tree.map(np.testing.assert_array_equal, host.rows.pages(), jax.tree.leaves(device.rows))
    assert taken.rows.obs["image"].dtype == np.uint8 and taken.rows.action.dtype == jnp.bfloat16
    assert len(memories) == 1


def draws(keys: Any) -> Any:
    return lambda ring: jax.vmap(lambda key: sample_rows(ring, key, 8))(keys)


@pytest.mark.slow
def test_other_processes_can_read_the_files_while_the_run_has_them(tmp_path: Path) -> None:
    ring, memories = rings("shared", tmp_path / "rows")
    ring, *_ = add_and_take(ring, pictures(0), draws(jax.random.split(jax.random.key(0), 1)), gamma=0.9)
    (folder,) = (tmp_path / "rows").iterdir()
    seen = np.load(folder / "obs.image.npy", mmap_mode="r")
    assert seen.dtype == np.uint8 and np.array_equal(seen, ring.rows.pages()[0][0])
    assert memories
    again, others = rings("shared", tmp_path / "rows")
    del memories
    gc.collect()
    assert len(list(folder.iterdir())) == 7, "the files are the second run's"
    del others, again
    gc.collect()
    assert not folder.exists()


def test_a_state_from_before_the_last_update_has_no_rows_to_save(tmp_path: Path) -> None:
    before, memories = rings("host", tmp_path)
    keys = jax.random.split(jax.random.key(0), 1)
    after, *_ = add_and_take(before, pictures(0), draws(keys), gamma=0.9)
    save_rows(tmp_path / "a", [after], None)
    with pytest.raises(RuntimeError, match="a later update wrote over them; load them from a checkpoint"):
        save_rows(tmp_path / "b", [before], None)
    fresh, others = rings("host", tmp_path)
    (rows,) = load_rows(tmp_path / "a", [fresh], [after])
    jax.tree.map(np.testing.assert_array_equal, rows.pages(), after.rows.pages())
    del memories, others
    gc.collect()
    refused(rows.pages, match="that held them are gone", error=RuntimeError)


@cases(
    "overrides text",
    (["trainer.distributed=true"], "with trainer.distributed; use 'device', or leave out trainer.distributed"),
    (['trainer.collector={mode: host, learner_devices: ["cpu:0", "cpu:1"]}'], "with trainer.collector.learner_dev"),
    (["population={seeds: 2}"], "with population; use 'device', or leave out population"),
    (["algorithm.cfg.replay.strata=2"], "with replay.strata 2; use 'device', or leave out"),
)
def test_a_program_that_is_shared_is_refused(overrides: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=rf"replay\.storage: got 'host', one ring for one device, {text}"):
        parse_config(stored("host"), overrides)


def test_a_start_names_the_place_of_the_rows_and_refuses_more_than_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        "replay buffer: 80 transitions x 128 B = 0 MiB in the memory of the host"
        in build(parse_config(stored("host"))).notes
    )
    (note,) = build(parse_config(stored("shared", tmp_path / "rows")), run=tmp_path / "a").notes
    assert f"MiB in files in {tmp_path}/rows/a_" in note
    monkeypatch.setattr(run_parts, "free_bytes", lambda device: 10_000)
    with pytest.raises(
        ConfigError, match=r"80: .* make 10240 bytes, and 10000 are free in the memory of the host; .* 78"
    ):
        build(parse_config(stored("host")))
    monkeypatch.setattr(run_parts.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10_000}))
    with pytest.raises(ConfigError, match=r"capacity: got 80: .* 10000 are free in files in .*/replay; .* fits is 78"):
        build(parse_config(stored("shared")), run=tmp_path / "b")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"replay\.folder: got '.*file': .*; choose a writable folder with enough"):
        build(parse_config(stored("shared", tmp_path / "file")))


def test_files_of_rows_lie_in_their_folder_each_under_its_name(tmp_path: Path) -> None:
    shapes = {"obs": {"a/b": 0, "a": {"b": 0}, "../x": 0, "a.b": 0, "q_1": 0}, "action": 0}
    forms = tuple(jax.ShapeDtypeStruct((1, 4, 2), jnp.float32) for _ in jax.tree.leaves(shapes))
    rows = HostRows(token=jnp.zeros(2), forms=forms, structure=jax.tree.structure(shapes), folder="replay")
    files = rows.files(tmp_path)
    assert len({*files}) == len(forms) and {file.parent for file in files} == {tmp_path / "replay"}
    assert {"action.npy", "obs.q_1.npy"} <= {file.name for file in files}
