"""DAgger on the data engine: who acts and who labels, rounds of a run that goes on, and what is refused."""

import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import point_expert
import pytest
from case_tables import cases, refused
from tiny import NETWORK

from ejax.config import parse_config
from ejax.data.lerobot.read import EpisodeReader
from ejax.experts.learner import SUCCESS, UPDATE, LearnerTask, Order
from ejax.experts.pick_place import begin_again
from ejax.run import train
from ejax.store.checkpoint import CheckpointError, load_checkpoint
from ejax.store.run_dir import RunDirectory
from ejax.training.build import build
from ejax.training.dagger import FOLDER, Rounds

NUM_ENVS = 3
PLACE = "point_expert:make_task"


def order(beta: float, chunk: int = 1, number: int = 0) -> Order:
    """Order a learner that counts its decisions, by hundredths, in the first number of each of ``chunk`` actions."""

    def decide(params: Any, fields: Any, memory: Any) -> Any:
        actions = jnp.zeros((NUM_ENVS, chunk, 2)) + params[0] * fields["obs/state"][:, None, :1]
        actions = actions.at[:, :, 1].set(0.01 * memory[0] + 0.001 * jnp.arange(chunk)[None])
        return actions.reshape(NUM_ENVS, -1), [memory[0] + 1.0]

    params, memory = [np.float32(0.5)], [np.zeros((NUM_ENVS, 1), np.float32)]
    fields = {"obs/state": jax.ShapeDtypeStruct((NUM_ENVS, 14), jnp.float32)}
    program = jax.export.export(jax.jit(decide), platforms=["cpu"])(params, fields, memory).serialize()
    return Order(number, 7, 5, beta, bytes(program), params, memory, chunk)


def made_by(ordered: Order, file: Path, attempts: int = 1) -> list[Any]:
    file.write_bytes(pickle.dumps(ordered))
    task = LearnerTask(PLACE, {"num_envs": NUM_ENVS, "noise": 0.0}, str(file))
    return [episode for _ in range(attempts) for episode in task.generate(0)]


@pytest.mark.parametrize("chunk", [1, 3])
def test_the_learner_acts_and_the_expert_labels(chunk: int, tmp_path: Path) -> None:
    for episode in made_by(order(0.0, chunk), tmp_path / "order"):
        obs, step = episode.frames["obs/state"], np.arange(len(episode.frames["rewards"]))
        np.testing.assert_allclose(episode.frames["expert_actions"], point_expert.towards(obs), atol=1e-6)
        begun = obs[step - step % chunk, 0]  # a decision is by what was seen where it began
        expected = np.stack([0.5 * begun, 0.01 * (step // chunk) + 0.001 * (step % chunk)], axis=1)
        np.testing.assert_allclose(episode.frames["actions"], expected, atol=1e-6)
        assert episode.fields[UPDATE] == 7 and episode.fields[SUCCESS] is False and episode.success


@pytest.mark.parametrize(("beta", "least", "most"), [(1.0, 1.0, 1.0), (0.5, 0.2, 0.8)])
def test_with_the_probability_beta_a_step_is_the_experts(
    beta: float, least: float, most: float, tmp_path: Path
) -> None:
    frames = [each.frames for each in made_by(order(beta), tmp_path / "order")]
    same = np.concatenate([(each["actions"] == each["expert_actions"]).all(axis=1) for each in frames])
    assert least <= same.mean() <= most


def test_what_a_round_makes_follows_from_its_order(tmp_path: Path) -> None:
    first, again, other = (made_by(order(0.5, number=number), tmp_path / "order", attempts=2) for number in (0, 0, 1))
    chex.assert_trees_all_equal(*([each.frames for each in made] for made in (first, again)))
    starts = {each.frames["obs/state"][0].tobytes() for each in [*first, *other]}
    assert len(starts) == 4 * NUM_ENVS  # neither attempts nor rounds begin alike


def test_a_task_without_an_expert_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"needs an expert of ejax\.experts, got demonstrated_points:Points"):
        LearnerTask("demonstrated_points:Points", {}, str(tmp_path))


@cases(
    "segment tool_to_cube cube_to_goal expected",
    (0, 0.5, 0.3, 0),
    *((1, 0.02, 0.3, 1), (1, 0.04, 0.3, 0)),
    *((3, 0.01, 0.3, 3), (3, 0.03, 0.3, 0)),
    *((5, 0.01, 0.02, 5), (5, 0.01, 0.04, 4)),
    *((6, 0.2, 0.01, 6), (6, 0.2, 0.3, 0)),
)
def test_the_plan_goes_back_where_a_learner_has_lost_the_cube(
    segment: int, tool_to_cube: float, cube_to_goal: float, expected: int
) -> None:
    robot, cube, goal = np.zeros((1, 11)), np.zeros((1, 3)), np.zeros((1, 3))
    cube[:, 0], goal[:, 0] = tool_to_cube, tool_to_cube + cube_to_goal
    assert begin_again(robot, cube, goal, np.array([segment])).tolist() == [expected]


def tree(iterations: int = 6, dagger: Any = None, engine: Any = None, **data: Any) -> dict[str, Any]:
    options = {"task": PLACE, "task_cfg": {"num_envs": 2, "noise": 0.0}, "buffer_size": 4, "max_episode_steps": 20}
    section = {"source": "engine", "engine": {**options, **(engine or {})}, "obs_field": "obs/state"}
    section |= {"action_field": "expert_actions", "dagger": {"every": 2, "beta_decay": 0.5, **(dagger or {})}, **data}
    return {
        "env": {"id": "PointMassRL", "cfg": {"max_episode_steps": 11}},
        "trainer": {"exp_name": "tiny", "console": False, "iterations": iterations, "save_frequency_updates": 1},
        "policy": {"name": "actor_critic", "actor": NETWORK, "critic": NETWORK, "actor_obs_normalization": True},
        "algorithm": {"name": "bc", "cfg": {"batch_size": 16, "updates_per_step": 2}},
        "data": section,
    }


def left_by(run: Path, config: Any) -> tuple[list[Any], list[Any]]:
    """Return the last checkpoint's arrays, and the frames and versions of all episodes."""
    state = load_checkpoint(RunDirectory(run, "tiny").periodic()[0], build(parse_config(config)).state)[0]
    reader = EpisodeReader(run / FOLDER)
    return jax.tree.leaves(state), [(each.frames, each.fields) for each in map(reader.__getitem__, range(len(reader)))]


def facts(row: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in row.items() if name.startswith("data/") and name != "data/wait_s"}


@pytest.mark.slow
def test_a_run_makes_rounds_and_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    history = train(parse_config(tree()), run_dir=whole).train_history
    assert [row["data/round"] for row in history] == [0, 0, 1, 1, 2, 2]
    assert [row["data/beta"] for row in history] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    expected = left_by(whole, tree())
    assert [int(fields[UPDATE]) for _, fields in expected[1]] == [0] * 4 + [2] * 4 + [4] * 4
    assert history[-1]["data/queries"] == sum(len(frames["rewards"]) for frames, _ in expected[1])
    # stopped in the middle of a round's updates, and where a round is due
    for iterations in (3, 4):
        train(parse_config(tree(iterations)), run_dir=part, resume="latest" if part.exists() else None)
    # the kill came after the round's first episodes: they are there before the checkpoint that knows them
    shutil.rmtree(part / FOLDER)
    shutil.copytree(whole / FOLDER, part / FOLDER)
    resumed = train(parse_config(tree()), run_dir=part, resume="latest").train_history
    assert [facts(row) for row in resumed] == [facts(row) for row in history[4:]]
    chex.assert_trees_all_equal(left_by(part, tree()), expected)

    # another run's episodes are neither drawn from nor written over
    fresh, parts = tmp_path / "fresh", build(parse_config(tree()))
    shutil.copytree(whole / FOLDER, fresh / FOLDER)
    data: Any = parse_config(tree(seed=3)).data
    refused = pytest.raises(CheckpointError, match=r"episode 0 of .* is not the one that this run makes")
    with Rounds(data, parts.policy, jnp.zeros((1, 14)), 1, fresh) as rounds, refused:
        rounds.collect(0, parts.state.train.params, 0)


@cases(
    "options text",
    ({"action_field": "actions"}, r"data.action_field: got 'actions'.*expert_actions"),
    ({"source": "recorded", "folder": "episodes", "engine": None}, "data.dagger: needs source: engine"),
    ({"engine": {"refill_threshold": 7}}, "data.engine.refill_threshold: is for a stream without rounds"),
    ({"engine": {"buffer_size": 5}}, r"data.engine.buffer_size: got 5 episodes of a round, of which 2"),
    ({"folder": "episodes"}, "data.folder: got 'episodes', but source 'engine' does not read it"),
    ({"dagger": {"beta_decay": 1.5}}, "data.dagger.beta_decay"),
)
def test_what_does_not_fit_is_refused_by_its_key(options: dict[str, Any], text: str) -> None:
    raw = tree(**{name: value for name, value in options.items() if value is not None})
    if "engine" in options and options["engine"] is None:
        del raw["data"]["engine"]
    error = refused(parse_config, raw)
    assert re.search(text, str(error), re.DOTALL)


def test_several_devices_are_refused() -> None:
    raw = tree()
    raw["trainer"]["distributed"] = True
    refused(lambda: build(parse_config(raw)), match=r"data\.dagger trains on one device")
