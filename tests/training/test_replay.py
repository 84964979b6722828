"""Replay buffers in a run: written where they are, kept over a resume, and shared by devices."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from damages import same, what_is_left
from tiny import EVALUATED, STEPS, tiny_sac

from ejax.collectors.replay_buffer import replays_in
from ejax.config import parse_config
from ejax.run import train
from ejax.training.build import build

MODES: dict[str, Any] = {
    "device": {},
    "host": {"collector": {"mode": "host"}},
    "async": {"collector": {"mode": "async", "max_staleness": 0}},
}


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


@pytest.mark.parametrize("mode", MODES)
def test_after_a_resume_the_ratio_of_updates_to_steps_goes_on_and_the_buffer_is_the_same_bits(
    mode: str, tmp_path: Path
) -> None:
    """No burst of updates that makes up for steps of before, and no step forgotten."""
    raw = tiny_sac(**EVALUATED | {"eval_freq": 2 * STEPS}, save_frequency_updates=2, iterations=4, **MODES[mode])
    whole = train(parse_config(raw), run_dir=tmp_path / "whole")
    train(parse_config(raw | {"trainer": raw["trainer"] | {"iterations": 2}}), run_dir=tmp_path / "run")
    resumed = train(parse_config(raw), resume="latest", run_dir=tmp_path / "run")
    assert same(*(what_is_left(tmp_path / name, "tiny") for name in ("run", "whole")), log=True)
    sizes = [row["train/replay_size"] for row in (*whole.train_history, *resumed.train_history)]
    assert sizes == [STEPS, 2 * STEPS, 80, 80, 80, 80]
    losses = [np.isfinite(row.get("train/critic_loss", np.nan)) for row in resumed.train_history]
    assert losses == [True] * 2


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
