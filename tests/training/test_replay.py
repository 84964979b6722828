"""Replay buffers in a run: written where they are, kept over a resume, and shared by devices."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from case_tables import cases, refusals, refused
from damages import same, what_is_left
from kills import Killed, kill_at
from several_processes import two_processes
from tiny import EVALUATED, NUM_ENVS, STEPS, tiny_sac

from ejax.algorithms.replay_buffer import replays_in
from ejax.config import parse_config
from ejax.population.loop import train_population
from ejax.run import train
from ejax.store import checkpoint, replay_rows
from ejax.training import parts as run_parts
from ejax.training.build import build

MODES: dict[str, Any] = {
    "device": {},
    "host": {"collector": {"mode": "host"}},
    "async": {"collector": {"mode": "async", "max_staleness": 0}},
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_an_update_writes_into_the_replay_buffer_of_the_state_before_it(mode: str) -> None:
    parts = build(parse_config(tiny_sac(**MODES[mode])))
    with parts.stepper as stepper:
        state = stepper.start(parts.state)
        before = state.own.replay.rows
        places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(before)]
        state, _ = stepper.advance(state, 1, lambda: False)
        jax.block_until_ready(state.update)
        assert all(x.is_deleted() for x in jax.tree.leaves(before))
        assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.own.replay.rows)] == places
        assert not any(x.is_deleted() for x in jax.tree.leaves(state))


@pytest.mark.slow_cases("evaluated", "async")  # seconds to compile
@pytest.mark.parametrize("case", ["device", "host evaluated", "async", "async evaluated"])
def test_after_a_resume_the_ratio_of_updates_to_steps_goes_on_and_the_buffer_is_the_same_bits(
    case: str, tmp_path: Path
) -> None:
    """No burst of updates that makes up for steps of before, and no step forgotten."""
    mode = case.split()[0]
    evaluated = EVALUATED | {"eval_freq": 2 * STEPS} if "evaluated" in case else {}
    raw = tiny_sac(**evaluated, save_frequency_updates=2, iterations=4, **MODES[mode])
    whole = train(parse_config(raw), run_dir=tmp_path / "whole")
    train(parse_config(raw | {"trainer": raw["trainer"] | {"iterations": 2}}), run_dir=tmp_path / "run")
    resumed = train(parse_config(raw), resume="latest", run_dir=tmp_path / "run")
    assert same(*(what_is_left(tmp_path / name, "tiny") for name in ("run", "whole")), log=True)
    sizes = [row["train/replay_size"] for row in (*whole.train_history, *resumed.train_history)]
    assert sizes == [STEPS, 2 * STEPS, 80, 80, 80, 80]
    losses = [np.isfinite(row.get("train/critic_loss", np.nan)) for row in resumed.train_history]
    assert losses == [True] * 2


@pytest.mark.slow
def test_two_updates_of_one_dispatch_have_the_bits_of_two_dispatches() -> None:
    left = []
    for counts in ((4,), (1, 3)):
        parts = build(parse_config(tiny_sac()))
        with parts.stepper as stepper:
            state = stepper.start(parts.state)
            for count in counts:
                state, _ = stepper.advance(state, count, lambda: False)
        left.append(state)
    assert len(replays_in(left[0])) == 1
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(_numbers, left[0]), jax.tree.map(_numbers, left[1]))


def _numbers(x: Any) -> Any:
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x


ALONE = {"num_envs": 4 * NUM_ENVS}


def sharing(**changes: Any) -> dict[str, Any]:
    """Make the config of a training that devices share, with four strata."""
    replay = {"capacity": 4 * 80, "n_step": 2, "strata": 4}
    return tiny_sac(sac={"learning_starts": 160, "replay": replay}, updates_per_dispatch=1, **changes)


def updates(raw: dict[str, Any], count: int = 4) -> Any:
    parts = build(parse_config(raw))
    with parts.stepper as stepper:
        state = stepper.start(parts.state)
        for _ in range(count):
            state, _ = stepper.advance(state, 1, lambda: False)
    return state


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["device", "host"])
def test_several_devices_compute_what_one_does_with_their_strata(mode: str) -> None:
    shared, alone = updates(sharing(distributed=True, **MODES[mode])), updates(sharing(**ALONE, **MODES[mode]))
    for name in ("head", "size", "added"):
        np.testing.assert_array_equal(getattr(shared.own.replay, name), getattr(alone.own.replay, name))
    for x, y in zip(*(jax.tree.leaves((each.own.replay.rows, each.train)) for each in (shared, alone)), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)
    for x in jax.tree.leaves((shared.own.replay.rows, shared.own.replay.tail)):
        assert [shard.data.shape[0] for shard in x.addressable_shards] == [1] * 4


@pytest.mark.slow
def test_devices_send_no_rows_of_a_replay_buffer() -> None:
    parts = build(parse_config(sharing(distributed=True)))
    parts.stepper.start(parts.state)
    lines = str(parts.stepper.program).splitlines()
    sent = [line for line in lines if re.search(r" (all-gather|all-to-all|collective-permute)\S*\(", line)]
    assert not [line for line in sent if re.search(r"\[(\d+,)*(80|320)[,\]]", line)]


@pytest.mark.slow
def test_a_run_of_another_number_of_devices_goes_on_with_its_strata(tmp_path: Path) -> None:
    raw = sharing(output_dir=tmp_path, save_frequency_updates=2, iterations=4)
    raw["algorithm"]["cfg"]["replay"].pop("strata")
    four = train(parse_config(raw, ["trainer.distributed=true"]))
    (first,) = (four.run_dir / "checkpoints").glob(f"*_step_{2 * 4 * STEPS}")
    one = train(parse_config(raw), resume=str(first))
    chex.assert_trees_all_close(one.params, four.params, rtol=2e-4, atol=2e-5)
    (first,) = (one.run_dir / "checkpoints").glob("superseded_*")
    again = train(
        parse_config(raw, ["trainer.distributed=true", "trainer.iterations=6"]), resume="latest", run_dir=one.run_dir
    )
    assert again.num_updates == 6


REPLAY = "algorithm.cfg.replay"


@refusals(
    ({"sac": {"replay": {"capacity": 80, "strata": 3}}}, f"{REPLAY}.strata", "the environments of all devices 4"),
    ({"sac": {"replay": {"capacity": 240, "strata": 3}}, "num_envs": 3}, f"{REPLAY}.strata", "batch_size 8"),
    ({"sac": {"replay": {"capacity": 80, "strata": 2}}, "distributed": True}, f"{REPLAY}.strata", "4 devices"),
    ({"sac": {"replay": {"capacity": 2 * 10**9}}}, f"{REPLAY}.capacity", "the largest that fits"),
)
def test_a_replay_buffer_that_cannot_be_is_refused_before_it_is_made(given: Any, key: str, word: str) -> None:
    refused(lambda: build(parse_config(tiny_sac(**given))), key=key, word=word)


def test_a_start_shows_the_bytes_of_the_replay_buffer() -> None:
    parts = build(parse_config(tiny_sac(sac={"replay": {"capacity": 100_000}})))
    assert "replay buffer: 100,000 transitions x 128 B = 12 MiB on the device" in parts.notes


def test_a_replay_buffer_that_does_not_fit_is_refused_with_the_largest_that_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_parts, "free_bytes", lambda device: 10_000)
    beside = tiny_sac(sac={"demonstrations": {"num_transitions": 20, "task": "PushCubeExpert"}})
    for raw, size, most in ((tiny_sac(), 10240, 78), (beside, 12800, 58)):
        error = refused(build, parse_config(raw), key=f"{REPLAY}.capacity", word=f"128 bytes make {size} bytes")
        assert str(error).endswith(f"fits is {most}")
    build(parse_config(tiny_sac(sac={"replay": {"capacity": 78}})))


@pytest.mark.slow
def test_new_episodes_after_a_resume_leave_no_transition_that_crosses_them() -> None:
    """Environments that cannot be saved: the steps before have no transitions of steps after."""
    parts = build(parse_config(tiny_sac(sac={"replay": {"capacity": 80, "n_step": 3}}, **MODES["host"])))
    with parts.stepper as stepper:
        state, _ = stepper.advance(stepper.start(parts.state), 1, lambda: False)
        assert np.asarray(state.own.replay.tail.valid).all()
        state = stepper.start(state.replace(envs=()))
        assert not np.asarray(state.own.replay.tail.valid).any()
        assert int(state.own.replay.size[0]) == STEPS - 2 * NUM_ENVS


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("whole")
    return cache(lambda storage: train(parse_config(saving(storage)), run_dir=folder / storage).run_dir)


def saving(storage: str) -> dict[str, Any]:
    return tiny_sac(sac={"replay": {"capacity": 80, "storage": storage}}, save_frequency_updates=1, iterations=4)


@pytest.mark.slow
@cases(
    "owner name count storage",
    (checkpoint, "without_rows", 2, "device"),  # the rows are there, and nothing else
    (replay_rows, "link_file", 5, "device"),  # in the middle of the rows
    (replay_rows, "link_file", 5, "host"),
    (checkpoint, "_complete", 3, "device"),  # all is written, and not yet in place
)
def test_a_kill_while_rows_are_saved_changes_nothing(
    owner: Any,
    name: str,
    count: int,
    storage: str,
    whole: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay_rows, "SEGMENT_BYTES", 1024)  # eight rows
    kill_at(monkeypatch, owner, name, count)
    with pytest.raises(Killed):
        train(parse_config(saving(storage)), run_dir=tmp_path / "run")
    monkeypatch.undo()
    train(parse_config(saving(storage)), resume="latest", run_dir=tmp_path / "run")
    left = [what_is_left(each, "tiny") for each in (tmp_path / "run", whole(storage))]
    for each in left:  # the same rows in files of another length
        names = sorted(name for name in each["arrays"] if name.endswith(".rows"))
        each["arrays"] = {**each["arrays"], "rows": np.concatenate([each["arrays"].pop(name) for name in names])}
        del each["arrays"]["index.json"]
    assert same(*left, log=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["device", "host"])
def test_each_of_two_processes_saves_its_rings_and_goes_on_with_them(mode: str, tmp_path: Path) -> None:
    collector = {"collector": {"mode": "host", "num_groups": 2}} if mode == "host" else {}
    raw = tiny_sac(save_frequency_updates=2, iterations=4, **collector)
    two_processes(tmp_path, raw, "--run", str(tmp_path / "whole"))
    short = raw | {"trainer": raw["trainer"] | {"iterations": 2}}
    two_processes(tmp_path, short, "--run", str(tmp_path / "run"))
    two_processes(tmp_path, raw, "--run", str(tmp_path / "run"), "--resume", "latest")
    left = []
    for name in ("run", "whole"):
        newest = tmp_path / name / "checkpoints" / f"tiny_step_{2 * 4 * STEPS}"
        rows = {file.name: file.read_bytes() for file in (newest / "replay").iterdir()}
        assert {"0_0_000000.rows", "0_1_000000.rows"} < rows.keys()
        left.append((rows, {name: x.tobytes() for name, x in checkpoint.load_policy_arrays(newest).items()}))
    assert left[0] == left[1]


@pytest.mark.slow
def test_members_of_a_population_and_a_fork_go_on_with_their_buffers(tmp_path: Path) -> None:
    raw = tiny_sac(save_frequency_updates=2, iterations=4)
    short = raw | {"trainer": raw["trainer"] | {"iterations": 2}}
    seeds = {"population": {"seeds": 2}}
    train_population(parse_config(raw | seeds), run_dir=tmp_path / "all")
    train_population(parse_config(short | seeds), run_dir=tmp_path / "part")
    train_population(parse_config(raw | seeds), run_dir=tmp_path / "part", resume="latest")
    assert same(*(what_is_left(tmp_path / name, "tiny") for name in ("part", "all")))
    first = train(parse_config(short), run_dir=tmp_path / "first")
    train(parse_config(raw), run_dir=tmp_path / "whole")
    train(parse_config(raw), run_dir=tmp_path / "fork", fork=first.latest_checkpoint_path)
    assert same(*(what_is_left(tmp_path / name, "tiny") for name in ("fork", "whole")))
