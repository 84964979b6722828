"""The expert of InstructedPlaceRL: it obeys the sentence, and its demonstrations carry it and its bytes."""

import os
from pathlib import Path

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest

from ejax.data.lerobot.read import EpisodeReader
from ejax.data.lerobot.write import EpisodeWriter
from ejax.data.record import record
from ejax.data.task import flatten
from ejax.envs.tasks.instructed_place import SCENE
from ejax.envs.tasks.place_instructions import COLOURS, MEANING, ZONES
from ejax.experts.instructed_place import make_task
from ejax.experts.task import Attempts, ScriptedTask
from ejax.numerics.text import as_text
from ejax.schema.registry import place_of_task

SEED = 7
NUM_ENVS = 64
TARGET_CUBE, TARGET_ZONE = SCENE.index("target cube index"), SCENE.index("target zone index")


@pytest.fixture(scope="module")
def task() -> ScriptedTask:
    return make_task(num_envs=NUM_ENVS)


@pytest.fixture(scope="module")
def attempts(task: ScriptedTask) -> Attempts:
    return task.attempt(SEED)


@pytest.mark.slow
def test_the_cube_and_the_zone_that_are_named_come_together(attempts: Attempts) -> None:
    """The last step before the success; the other cube has hardly moved."""
    for row in np.flatnonzero(attempts.success):
        first, last = (attempts.obs["scene"][t, row] for t in (0, attempts.length[row] - 1))
        colour, zone = MEANING[attempts.instruction[row]]
        cube = list(first[15:17]).index(list(COLOURS).index(colour))
        there = last[6 + 3 * ZONES.index(zone) :][:2]
        assert np.linalg.norm(last[3 * cube :][:2] - there) < 0.03
        other = 3 * (1 - cube)
        assert np.linalg.norm(last[other:][:3] - first[other:][:3]) < 0.01


@pytest.mark.slow
def test_the_expert_goes_by_the_scene_and_not_by_the_words(task: ScriptedTask, attempts: Attempts) -> None:
    expert, obs = task._expert, jax.tree.map(lambda x: x[0], attempts.obs)
    variation, start = expert.vary(np.random.default_rng(0), NUM_ENVS), np.zeros(NUM_ENVS, np.int64)
    action, _ = expert.act(obs, start, variation)
    other_words = {**obs, "instruction": np.roll(obs["instruction"], 1, axis=0)}
    np.testing.assert_array_equal(expert.act(other_words, start, variation)[0], action)
    scene = obs["scene"].copy()
    scene[:, TARGET_CUBE] = 1 - scene[:, TARGET_CUBE]
    assert np.all(np.any(expert.act({**obs, "scene": scene}, start, variation)[0] != action, axis=1))


@pytest.mark.slow
def test_kept_episodes_have_the_sentence_as_task_and_its_bytes_in_every_frame(
    task: ScriptedTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    with EpisodeWriter(tmp_path / "kept", task.spec(), fps=25) as writer:
        record(task, writer, 5)
    reader = EpisodeReader(tmp_path / "kept")
    tasks = pq.read_table(tmp_path / "kept/meta/tasks.parquet")["task"].to_pylist()
    assert len(reader) == 5 and len(tasks) > 2 and set(tasks) <= set(MEANING)
    for index in range(len(reader)):
        episode, text = reader[index], reader.instruction(index)
        told = flatten(episode.frames)["obs/instruction"]
        assert told.dtype == np.uint8 and {as_text(frame) for frame in told} == {text}
        assert episode.fields["instruction"] == text.encode()
    assert {reader.instruction(index) for index in range(len(reader))} == set(tasks)


def test_it_is_registered() -> None:
    assert place_of_task("InstructedPlaceExpert") == "ejax.experts.instructed_place:make_task"
