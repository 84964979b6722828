"""Rows of replay buffers in checkpoints: each save writes what is new, and what comes back is the same bits."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused

from ejax.algorithms.replay_buffer import Replay, Steps, Transition, without_rows
from ejax.store import replay_rows
from ejax.store.checkpoint import (
    CheckpointError,
    load_checkpoint,
    rewrite_meta,
    save_arrays,
    save_checkpoint,
    verify_checkpoint,
)
from ejax.store.digests import write_digests
from ejax.store.run_dir import RunDirectory

CAPACITY, SEGMENT = 50, 8
META = {"global_step": 64}


def make_replay(added: list[int], capacity: int = CAPACITY, start: int = 0) -> Replay:
    """Make rings to which so many rows were added; a row's numbers are those of its transition."""
    rows, rings = np.zeros((len(added), capacity), np.int64), np.arange(len(added))[:, None]
    for ring, count in enumerate(added):
        for number in range(count):
            rows[ring, number % capacity] = start + 1 + number
    counts = np.asarray(added)
    pages = jnp.asarray(rows + 1000 * rings * (rows > 0), jnp.float32)
    obs = {"image": jnp.repeat(pages[..., None], 3, axis=-1).astype(jnp.uint8), "state": pages[..., None] / 3.0}
    nothing = jnp.zeros((len(added), 0, 4))
    tail = Steps(**dict.fromkeys(("obs", "action", "reward", "next_obs", "terminated", "done", "valid"), nothing))
    return Replay(
        rows=Transition(
            obs=obs, action=pages[..., None].astype(jnp.bfloat16), reward=pages, next_obs=obs, discount=2.0 * pages
        ),
        head=jnp.asarray(counts % capacity, jnp.int32),
        size=jnp.asarray(np.minimum(counts, capacity), jnp.int32),
        added=jnp.asarray(counts, jnp.uint32),
        tail=tail,
    )


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_rows, "SEGMENT_BYTES", 24 * SEGMENT)


def save(path: Path, replay: Any, previous: Path | None = None) -> Path:
    return save_checkpoint(path.parent, path.name, {"own": replay, "step": jnp.int32(3)}, META, previous=previous)


def assert_comes_back(path: Path, replay: Any) -> None:
    like = jax.eval_shape(lambda: {"own": replay, "step": jnp.int32(0)})
    state, _ = load_checkpoint(path, like)
    assert jax.tree.structure(state["own"]) == jax.tree.structure(replay)
    for x, y in zip(jax.tree.leaves(state["own"]), jax.tree.leaves(replay), strict=True):
        assert (x.dtype, x.shape, np.asarray(x).tobytes()) == (y.dtype, y.shape, np.asarray(y).tobytes())


def files(path: Path) -> dict[str, int]:
    """Return the number on disk of each file with rows."""
    return {file.name: file.stat().st_ino for file in (path / "replay").glob("*.rows")}


@pytest.mark.parametrize("added", [[0, 3], [17, 50], [50, 73], [100, 1234]])
def test_rows_come_back_bit_by_bit(added: list[int], tmp_path: Path) -> None:
    replay = make_replay(added)
    assert_comes_back(save(tmp_path / "a", replay), replay)


def test_members_of_a_population_come_back_bit_by_bit(tmp_path: Path) -> None:
    replay = jax.tree.map(lambda *x: jnp.stack(x), *(make_replay([3 * i, 20 * i], start=i) for i in range(4)))
    assert_comes_back(save(tmp_path / "a", replay), replay)


def test_rows_that_were_never_written_take_no_place(tmp_path: Path) -> None:
    path = save(tmp_path / "a", make_replay([11]))
    assert [file.stat().st_size for file in sorted((path / "replay").glob("*.rows"))] == [24 * 8, 24 * 3]
    assert not any("rows" in file.name for file in (path / "state").rglob("*"))


@pytest.mark.slow
def test_a_save_writes_the_segments_of_new_rows_and_links_all_others(tmp_path: Path) -> None:
    """Against a comparison of the rows themselves, over saves after any number of new rows."""
    rng, added, before, previous = np.random.default_rng(0), 0, None, None
    for number in range(40):
        added += int(rng.choice([0, 1, 5, 8, 23, 49, 50, 51, 120], p=[0.2] + [0.1] * 8))
        replay = make_replay([added, 2 * added])
        path = save(tmp_path / str(number), replay, previous)
        assert_comes_back(path, replay)
        if before is not None and previous is not None:
            old, new = files(previous), files(path)
            for ring in range(2):
                rows = [np.asarray(each.rows.reward[ring]) for each in (before, replay)]
                for start in range(0, CAPACITY, SEGMENT):
                    name = f"0_{ring}_{start // SEGMENT:06d}.rows"
                    same = np.array_equal(*(x[start : start + SEGMENT] for x in rows))
                    assert (name in new and new[name] == old.get(name)) == (same and name in new), (number, name)
        before, previous = replay, path


def test_counts_that_go_round_after_2_to_the_32_are_compared() -> None:
    last, ring = 2**32 - 5, {"head": 3, "size": CAPACITY}
    fields: Any = {"capacity": CAPACITY, "segment": SEGMENT, "fields": []}
    old = replay_rows.Buffer(rings=[replay_rows.Ring(added=last, **ring)], **fields)
    new = replay_rows.Buffer(rings=[replay_rows.Ring(added=4, **ring | {"head": 12})], **fields)
    assert [new.has_changed(old, 0, *each) for each in new.segments(0)] == [True, True, *[False] * 5]


def test_links_keep_their_digests_and_a_damage_that_two_checkpoints_share_is_named(tmp_path: Path) -> None:
    first = save(tmp_path / "a", make_replay([40]))
    (first / "replay/0_0_000001.rows").write_bytes(b"damaged")
    second = save(tmp_path / "b", make_replay([41]), first)
    for path in (first, second):
        with pytest.raises(CheckpointError, match=r"is damaged: replay/0_0_000001\.rows was changed"):
            verify_checkpoint(path)


def resealed(path: Path, file: str, edit: Any) -> Path:
    """Change a checkpoint's file of facts, under new digests, as anyone can."""
    facts = json.loads((path / file).read_text())
    edit(facts)
    (path / file).write_text(json.dumps(facts))
    write_digests(path)
    return path


@cases(
    "counts",
    {"head": 41},
    {"size": 39},
    {"added": 41},
    {"head": 50, "size": 50, "added": 50},
    {"head": 0, "size": 0, "added": 0},
    {"size": 10**6},
    {"head": 10**6},
    {"added": 2**40},
    {"head": -1},
    {"size": -3},
    ids=str,
)
def test_counts_that_are_not_the_states_are_refused(counts: dict[str, int], tmp_path: Path) -> None:
    replay = make_replay([40, 40])
    path = save(tmp_path / "a", replay)
    assert_comes_back(path, replay)
    resealed(path, "replay/index.json", lambda index: index["buffers"][0]["rings"][1].update(counts))
    with pytest.raises(CheckpointError, match=rf"index.json.*{next(iter(counts))}"):
        load_checkpoint(path, {"own": replay, "step": jnp.int32(0)})


@pytest.mark.parametrize("counts", [(50, 50, 50), (-1, 50, 50), (40, 51, 51), (3, 40, 40)])
def test_counts_that_no_ring_can_have_are_refused_also_in_the_state(counts: Any, tmp_path: Path) -> None:
    counted = {
        name: jnp.full(1, x, jnp.uint32 if name == "added" else jnp.int32)
        for name, x in zip(("head", "size", "added"), counts, strict=True)
    }
    path = save(tmp_path / "a", make_replay([40]))
    forged = make_replay([40]).replace(**counted)  # type: ignore[attr-defined]  # flax adds it
    shutil.rmtree(path / "state")
    save_arrays(path / "state", {"own": without_rows(forged), "step": jnp.int32(3)})
    names = ("head", "size", "added")
    resealed(path, "replay/index.json", lambda x: x["buffers"][0]["rings"][0].update(zip(names, counts, strict=True)))
    with pytest.raises(CheckpointError, match=r"index.json.*head"):
        load_checkpoint(path, {"own": make_replay([40]), "step": jnp.int32(0)})


def test_a_missing_segment_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "a", make_replay([40]))
    (path / "replay/0_0_000002.rows").unlink()
    with pytest.raises(CheckpointError, match=r"is damaged: replay/0_0_000002\.rows is missing"):
        load_checkpoint(path, {"own": make_replay([0]), "step": jnp.int32(0)})


@cases(
    "like text",
    (make_replay([0], capacity=70), r"a replay buffer of capacity 50, this run needs 70"),
    (make_replay([0, 0]), r"own\.head is int32\[1\], this run needs int32\[2\]"),
    (
        make_replay([0]).replace(rows=make_replay([0]).rows.replace(action=jnp.zeros((1, 50, 2)))),
        r"action bfloat16\[1\].* this run needs .*action float32\[2\]",
    ),
    ids=["capacity", "rings", "form"],
)
def test_a_buffer_of_another_form_is_refused_with_both(like: Replay, text: str, tmp_path: Path) -> None:
    path = save(tmp_path / "a", make_replay([40]))
    refused(load_checkpoint, path, {"own": like, "step": jnp.int32(0)}, match=text, error=CheckpointError)


def test_without_links_there_are_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    first = save(tmp_path / "a", make_replay([40]))
    second = save(tmp_path / "b", make_replay([41]), first)
    assert not set(files(first).values()) & set(files(second).values())
    rewrite_meta(second, META)
    assert_comes_back(second, make_replay([41]))


@pytest.mark.parametrize("gone", ["", "replay", "replay/index.json", "replay/0_0_000001.rows"])
def test_what_is_gone_from_the_checkpoint_before_is_written_again(gone: str, tmp_path: Path) -> None:
    first = save(tmp_path / "a", make_replay([40]))
    shutil.rmtree(first / gone) if (first / gone).is_dir() else (first / gone).unlink()
    assert_comes_back(save(tmp_path / "b", make_replay([41]), first), make_replay([41]))


def test_latest_and_best_share_their_rows_and_outlive_the_checkpoints_before(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, "a")
    for step in (10, 20, 30):
        state = {"own": make_replay([2 * step]), "step": jnp.int32(step)}
        latest = directory.save(state, {"global_step": step}, keep=1)
        best = directory.save_best(state, {"global_step": step})
        rewrite_meta(latest, {"global_step": step})
        assert files(latest) == files(best) and len(files(best)) == -(-min(2 * step, CAPACITY) // SEGMENT)
        for path in (latest, best):
            assert_comes_back(path, state["own"])
    assert len(directory.saved()) == 2
