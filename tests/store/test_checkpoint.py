"""Checkpoints come back bit by bit, or say what is wrong with them."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from damages import DAMAGES, damage
from flax import struct
from kills import Killed, kill_at

from ejax.optim import OptimizerConfig, make_optimizer
from ejax.runtime.sharding import make_mesh, sharded
from ejax.store import arrays
from ejax.store.checkpoint import (
    CheckpointError,
    list_checkpoints,
    load_checkpoint,
    load_params,
    load_policy_arrays,
    recover_checkpoints,
    rewrite_meta,
    save_checkpoint,
    verify_checkpoint,
)
from ejax.store.digests import write_digests
from ejax.store.run_dir import RunDirectory
from ejax.types import TrainState


def make_state(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    params = {"params": {"w": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32), "b": jnp.array([jnp.nan, -0.0])}}
    opt_state = make_optimizer(OptimizerConfig()).init(params["params"])
    return {
        "train": TrainState(step=jnp.asarray(7, jnp.int32), params=params, opt_state=opt_state),
        "flag": jnp.ones(2) > 0,
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint that nobody changes."""
    return save_checkpoint(tmp_path_factory.mktemp("saved"), "a_step_64", make_state(), {"global_step": 64})


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Save a checkpoint to damage."""
    return save_checkpoint(tmp_path, "a_step_64", make_state(), {"global_step": 64})


def assert_holds(path: Path, seed: int) -> None:
    """Require the state of ``make_state(seed)``."""
    chex.assert_trees_all_equal(load_checkpoint(path, make_state(3))[0], make_state(seed))


def data_file(path: Path) -> Path:
    """Find the largest file of the checkpoint's arrays."""
    return max((file for file in (path / "state").rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def test_a_state_comes_back_bit_by_bit(saved: Path) -> None:
    state, meta = load_checkpoint(saved, make_state(seed=1))
    expected = make_state()
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape, np.asarray(a).tobytes()) == (b.dtype, b.shape, np.asarray(b).tobytes())
    assert meta == json.loads((saved / "meta.json").read_text())
    assert (meta["global_step"], meta["schema_version"]) == (64, 2)
    assert {"ejax", "jax", "flax", "optax"} <= set(meta["versions"])


def test_parameters_alone_can_be_loaded(saved: Path) -> None:
    params = make_state()["train"].params
    loaded = load_params(saved, jax.eval_shape(lambda: params))
    chex.assert_trees_all_equal(loaded, params)


def test_what_several_devices_saved_comes_back_on_one(tmp_path: Path) -> None:
    # asked for without a place, orbax wants the very devices that an array was saved from
    split = sharded(make_mesh(jax.devices()))
    state = {"envs": jax.device_put(jnp.arange(8.0), split), "step": jnp.int32(3)}
    path = save_checkpoint(tmp_path, "a_step_1", state, {"global_step": 1})
    loaded, _ = load_checkpoint(path, jax.eval_shape(lambda: jax.tree.map(jnp.zeros_like, state)))
    assert {len(x.devices()) for x in jax.tree.leaves(loaded)} == {1}
    np.testing.assert_array_equal(loaded["envs"], np.arange(8.0))


DTYPES = (
    *("bool", "int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32"),
    *("float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "bfloat16", "float16", "float32", "complex64"),
)
KEYS = ("threefry2x32", "rbg", "unsafe_rbg")


@pytest.mark.slow
def test_every_type_that_jax_has_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {name: jnp.asarray([0, 1, 1]).astype(name) for name in DTYPES}
    state |= {f"{name} alone": x[1] for name, x in state.items()} | {f"no {name}": x[:0] for name, x in state.items()}
    state |= {kind: jax.random.split(jax.random.key(3, impl=kind), 2) for kind in KEYS}
    state |= {f"{kind} alone": jax.random.key(4, impl=kind) for kind in KEYS}
    path = save_checkpoint(tmp_path, "a_step_1", {"train": {"params": state}}, {"global_step": 1})
    like = jax.eval_shape(lambda: {"train": {"params": state}})
    loaded, _ = load_checkpoint(path, like)
    for name, x in state.items():
        got = loaded["train"]["params"][name]
        assert (got.dtype, got.shape) == (x.dtype, x.shape), name
        if name.split()[0] in KEYS:
            got, x = jax.random.key_data(got), jax.random.key_data(x)
        assert np.asarray(got).tobytes() == np.asarray(x).tobytes(), name
    arrays = load_policy_arrays(path)
    np.testing.assert_array_equal(arrays["rbg"], jax.random.key_data(state["rbg"]))


@pytest.mark.parametrize("size", [0, 2])
def test_arrays_of_64_bits_of_an_environment_outside_jax_come_back_whole(size: int, tmp_path: Path) -> None:
    """JAX has none of them."""
    state = {name: np.full(size, 2**62 + 5, name) for name in ("int64", "uint64")}
    state |= {"float64": np.full(size, 1.0 + 1e-12), "other": np.ones(1, bool)}
    loaded, _ = load_checkpoint(save_checkpoint(tmp_path, "a_step_1", state, {"global_step": 1}), state)
    for name, x in state.items():
        assert (loaded[name].dtype, loaded[name].tobytes()) == (x.dtype, x.tobytes())


def test_a_key_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    key = jax.random.key(0)
    path = save_checkpoint(tmp_path, "a_step_1", {"key": key, "other": jnp.zeros(1)}, {"global_step": 1})
    for wanted, text in (
        (jax.random.key_data(key), r"key is key<fry>\[\], this run needs uint32\[2\]"),
        (jax.random.key(0, impl="rbg"), r"key is uint32\[2\], this run needs uint32\[4\]"),
    ):
        refused(load_checkpoint, path, {"key": wanted, "other": jnp.zeros(1)}, match=text, error=CheckpointError)
    path = save_checkpoint(tmp_path, "a_step_1", {"key": jax.random.key(0, impl="rbg")}, {"global_step": 1})
    with pytest.raises(CheckpointError, match=r"key is key<rbg>\[\], this run needs key<urbg>\[\]"):
        load_checkpoint(path, {"key": jax.random.key(0, impl="unsafe_rbg")})


def test_what_is_not_stored_as_it_was_given_gets_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storable = arrays._storable
    monkeypatch.setattr(arrays, "_storable", lambda x: storable(x.astype(jnp.int32) if x.dtype == bool else x))
    with pytest.raises(CheckpointError, match=r"was not stored correctly: flag is int32.*, this run needs bool"):
        save_checkpoint(tmp_path, "a_step_1", make_state(), {"global_step": 1})
    assert not (tmp_path / "a_step_1").exists()


@cases("folder", "a[1]", "[!x]", "a*b?", "a\\b", "gs:", "a b%20", "-ü日", "a\nb", "{a,b}'\"$HOME~#|")
def test_every_name_of_a_folder_works(folder: str, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / folder / "of a run", "a_step_64", make_state(), {"global_step": 64})
    assert_holds(path, seed=0)


def test_saving_again_replaces(own: Path) -> None:
    save_checkpoint(own.parent, own.name, make_state(seed=2), {"global_step": 64})
    assert_holds(own, seed=2)


def flip(path: Path) -> Path:
    """Change a bit of the arrays."""
    file = data_file(path)
    assert damage(file, "one bit")
    return file


@pytest.mark.parametrize("how", DAMAGES)
def test_damage_to_each_file_is_noticed_and_named(how: str, saved: Path, tmp_path: Path) -> None:
    """The list of digests included, where the name may be that of the first file that it lacks."""
    names = [file.relative_to(saved) for file in saved.rglob("*") if file.is_file()]
    for number, name in enumerate(names):
        copy = shutil.copytree(saved, tmp_path / str(number))
        if damage(copy / name, how):
            with pytest.raises(CheckpointError, match=r"is damaged|is incomplete") as caught:
                load_checkpoint(copy, make_state())
            assert str(name) in str(caught.value) or name.name == "SHA256"


@cases(
    "content text",
    ("", "meta.json is not JSON"),
    ("[" * 100_000, "meta.json cannot be read: it is nested deeper than 100 levels"),
    ("[]", "meta.json holds a list"),
    ('{"versions": {}}', "meta.json lacks the key 'schema_version'"),
    ('{"schema_version": "1", "versions": {}}', "meta.json has a wrong 'schema_version': .* got '1'"),
    ids=["empty", "deep", "list", "lacks", "text"],
)
def test_a_meta_of_another_form_is_refused_though_its_digest_agrees(content: str, text: str, own: Path) -> None:
    (own / "meta.json").write_text(content)
    write_digests(own)
    refused(verify_checkpoint, own, match=text, error=CheckpointError)


def test_an_emptied_state_is_refused_though_the_digests_agree(own: Path) -> None:
    for file in (own / "state").iterdir():
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    write_digests(own)
    refused(lambda: load_checkpoint(own, make_state()), match="state is empty", error=CheckpointError)
    (own / "state").rmdir()
    refused(lambda: load_checkpoint(own, make_state()), match="has no folder state", error=CheckpointError)


def test_arrays_that_cannot_be_read_are_refused_though_the_digests_agree(own: Path) -> None:
    damage(data_file(own), "cut in half")
    write_digests(own)
    refused(lambda: load_checkpoint(own, make_state()), match="is damaged: state cannot be read", error=CheckpointError)


def without_last_line(path: Path) -> None:
    listing = path / "SHA256"
    listing.write_text("".join(listing.read_text().splitlines(keepends=True)[:-1]))


@cases(
    "change text",
    (without_last_line, "SHA256 was changed"),  # the list's own digest
    (lambda path: (path / "SHA256").unlink(), "incomplete"),
    (shutil.rmtree, "does not exist"),
    (lambda path: rewrite_meta(path, {"schema_version": 99}), r"schema version 99.*reads 2"),
    ids=["cut short", "not finished", "not there", "another schema"],
)
def test_what_is_no_whole_checkpoint_is_refused(change: Callable[[Path], Any], text: str, own: Path) -> None:
    change(own)
    refused(verify_checkpoint, own, match=text, error=CheckpointError)


def other(change: Callable[..., Any]) -> Any:
    state = make_state()
    change(state["train"].params["params"])
    return state


@cases(
    "change text",
    (lambda p: p.update(w=jnp.zeros((3, 4))), r"train\.params\.params\.w is float32\[3, 2\].*needs float32\[3, 4\]"),
    (lambda p: p.update(w=jnp.zeros((3, 2), jnp.int32)), r"train\.params\.params\.w is float32.*needs int32"),
    (lambda p: p.update(extra=jnp.zeros(1)), r"lacks train\.params\.params\.extra"),
    (lambda p: p.pop("w"), r"has train\.params\.params\.w, which this run does not"),
)
def test_a_leaf_that_does_not_fit_is_named(saved: Path, change: Callable[..., Any], text: str) -> None:
    refused(lambda: load_checkpoint(saved, other(change)), match=text, error=CheckpointError)


def test_an_interrupted_save_leaves_nothing_to_find_and_the_next_save_clears_it(tmp_path: Path) -> None:
    (tmp_path / ".partial-a_step_9").mkdir()
    assert list_checkpoints(tmp_path, "a") == []
    save_checkpoint(tmp_path, "a_step_10", make_state(), {})
    assert [path.name for path in tmp_path.iterdir()] == ["a_step_10"]


def test_a_save_that_fails_keeps_the_checkpoint_before_it(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("ejax.store.checkpoint.sync", no_space)
    refused(lambda: save_checkpoint(own.parent, own.name, make_state(seed=1), {}), match="no space", error=OSError)
    monkeypatch.undo()
    assert_holds(own, seed=0)


@cases(
    "owner name count is_new recovered",
    (os, "replace", 1, False, False),  # before its meta is there
    (os, "replace", 2, False, False),  # before its digests are there
    (os, "replace", 3, False, False),  # before the old one is set aside
    (os, "replace", 4, True, True),  # before the new one is put in its place
    (shutil, "rmtree", 1, True, False),  # before the old one is removed
)
def test_a_kill_while_a_checkpoint_is_replaced_leaves_one(
    owner: Any, name: str, count: int, is_new: bool, recovered: bool, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_at(monkeypatch, owner, name, count)
    with pytest.raises(Killed):
        save_checkpoint(own.parent, own.name, make_state(seed=1), {"global_step": 64})
    monkeypatch.undo()
    assert recover_checkpoints(own.parent) == ([own] if recovered else [])
    assert_holds(own, seed=int(is_new))
    assert [path.name for path in own.parent.iterdir()] == [own.name]


def test_one_that_was_set_aside_and_has_no_successor_gets_its_name_back(own: Path) -> None:
    own.rename(own.with_name(f".replaced-{own.name}"))
    (own.parent / f".partial-{own.name}").mkdir()
    assert recover_checkpoints(own.parent) == [own]
    verify_checkpoint(own)


def test_a_complete_checkpoint_that_has_no_name_yet_is_recovered(own: Path) -> None:
    partial = own.with_name(f".partial-{own.name}")
    own.rename(partial)
    shutil.copytree(partial, own.with_name(".partial-a_step_128"))
    flip(own.with_name(".partial-a_step_128"))
    assert recover_checkpoints(own.parent) == [own]
    verify_checkpoint(own)
    assert [path.name for path in own.parent.iterdir()] == [own.name]


def test_a_leftover_that_is_a_file_blocks_nothing(own: Path) -> None:
    for name in (".partial-a_step_9", ".partial-", ".replaced-a_step_64", ".replaced-"):
        (own.parent / name).touch()
    save_checkpoint(own.parent, "a_step_128", make_state(), {})
    assert recover_checkpoints(own.parent) == []
    assert [path.name for path in list_checkpoints(own.parent, "a")] == ["a_step_128", "a_step_64"]


def test_the_meta_alone_can_be_replaced(own: Path) -> None:
    before = (own / "meta.json").read_text()
    rewrite_meta(own, {"global_step": 64, "best_eval_value": 0.5})
    assert verify_checkpoint(own)["best_eval_value"] == 0.5 and (own / "meta.json").read_text() != before
    assert_holds(own, seed=0)


def test_checkpoints_are_listed_by_number_and_name(tmp_path: Path) -> None:
    for name in ("a_step_9", "a_step_100", "a_best_step_50", "ab_step_1", "a_step_x", ".partial-a_step_500"):
        (tmp_path / name).mkdir()
    assert [path.name for path in list_checkpoints(tmp_path, "a")] == ["a_step_100", "a_step_9"]
    assert [path.name for path in list_checkpoints(tmp_path, "a_best")] == ["a_best_step_50"]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Make a run with checkpoints at 10 and 20."""
    run = RunDirectory(tmp_path, "a")
    for step in (10, 20):
        run.save(make_state(seed=step), {"global_step": step}, keep=5)
    return run


def test_the_newest_checkpoint_is_found_and_damaged_ones_are_reported(run: RunDirectory) -> None:
    assert run.find("latest", pytest.fail).name == "a_step_20"
    name = flip(run.checkpoints / "a_step_20").name
    reports: list[str] = []
    assert run.find("latest", reports.append).name == "a_step_10"
    assert len(reports) == 1 and "a_step_20 is damaged" in reports[0] and name in reports[0]
    flip(run.checkpoints / "a_step_10")
    for which, text in (("latest", "all 2 are damaged"), ("best", r"no best checkpoint.*none yet")):
        refused(run.find, which, lambda _: None, match=text, error=CheckpointError)


def test_only_the_newest_checkpoints_and_one_best_are_kept(run: RunDirectory) -> None:
    run.save(make_state(), {"global_step": 30}, keep=2)
    assert [path.name for path in run.periodic()] == ["a_step_30", "a_step_20"]
    for step in (10, 20):
        run.save_best(make_state(), {"global_step": step})
    assert [path.name for path in run.best()] == ["a_best_step_20"]
    assert run.find("best", pytest.fail).name == "a_best_step_20"


def test_leaves_whose_names_would_be_equal_come_back_each_in_its_place(tmp_path: Path) -> None:
    state = {"a.b": jnp.ones(()), "a": {"b": jnp.full(3, 2.0), "c": jnp.zeros(0)}, "x": {"d.e": jnp.full(3, 4.0)}}
    path = save_checkpoint(tmp_path, "a_step_1", state, {"global_step": 1})
    chex.assert_trees_all_equal(load_checkpoint(path, state)[0], state)
    assert sorted(arrays.read_arrays(path, None)) == ["a.b", "a\\.b", "x.d.e"], "all others are named as ever"


@struct.dataclass
class Run:
    """A state that counts its updates, as a run's and a population's do."""

    update: jax.Array


@cases(
    "meta named",
    ({}, None),
    ({"best_eval_step": 64, "last_evaluated": 2, "best_eval_value": 1.0}, None),
    ({"num_updates": 3}, "num_updates 3"),
    ({"num_updates": 0}, "num_updates 0"),
    ({"global_step": 0}, "global_step 0"),
    ({"global_step": 1}, "global_step 1"),
    ({"global_step": 65}, "global_step 65"),
    ({"best_eval_step": 65}, "best_eval_step 65"),
    ({"last_evaluated": 3}, "last_evaluated 3"),
    ({"global_step": -64}, "global_step"),
    ({"num_updates": -2}, "num_updates"),
)
def test_counts_of_a_meta_are_those_of_the_state(meta: dict[str, Any], named: str | None, tmp_path: Path) -> None:
    state = Run(jnp.int32(2))
    path = save_checkpoint(tmp_path, "a_step_64", state, {"global_step": 64, "num_updates": 2} | meta)
    if named is None:
        assert int(load_checkpoint(path, state)[0].update) == 2
    else:
        refused(load_checkpoint, path, state, match=rf"is damaged: .*meta.json.*{named}", error=CheckpointError)
