"""InstructedPlaceRL: its sentences, what an episode draws, what counts as done, and that pictures show its colours."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejax.envs.description import describe
from ejax.envs.mujoco.choice import how_to_install
from ejax.envs.tasks.grasp_task import HALF_EDGE, ROBOT_NUMBERS
from ejax.envs.tasks.instructed_place import (
    CUBE_DISTANCE,
    CUBES,
    GOAL,
    SCENE,
    ZONE_CENTRES,
    InstructedPlaceRL,
    InstructedPlaceState,
)
from ejax.envs.tasks.place_instructions import (
    BYTES,
    COLOURS,
    HELD_OUT_PAIRS,
    LENGTH,
    MEANING,
    WORDINGS,
    ZONES,
    pairs,
    table,
    wordings,
)
from ejax.envs.wrappers.action_chunk import ActionChunk
from ejax.envs.wrappers.randomized import RandomizedEnv
from ejax.envs.wrappers.rendered import RenderedEnv
from ejax.numerics.text import as_text
from ejax.types import CameraView

KEY = jax.random.key(0)
NUM_ROWS = 4096
KEYS = jax.random.split(KEY, NUM_ROWS)
ENV = InstructedPlaceRL(physics="mujoco")
STEP = jax.jit(jax.vmap(lambda state, action: ENV.step(state, action, KEY)))
NAMES = list(COLOURS)
CUBE = slice(8, 11), slice(15, 18)
"""Place of each cube in qpos."""


def draw(**options: Any) -> tuple[InstructedPlaceState, dict[str, np.ndarray]]:
    state, obs = jax.jit(jax.vmap(InstructedPlaceRL(physics="mujoco", **options).reset))(KEYS)
    return jax.tree.map(np.asarray, (state, obs))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def drawn() -> tuple[InstructedPlaceState, dict[str, np.ndarray]]:
    return draw()


def meant(state: InstructedPlaceState) -> list[tuple[str, str]]:
    """Return the colour and the zone of each row."""
    colour = np.take_along_axis(np.asarray(state.colours), np.asarray(state.target_cube)[:, None], 1)[:, 0]
    return [(NAMES[c], ZONES[z]) for c, z in zip(colour, np.asarray(state.target_zone), strict=True)]


def said(obs: dict[str, np.ndarray]) -> list[tuple[str, str]]:
    return [MEANING[as_text(data)] for data in obs["instruction"]]


def test_every_text_is_unique_and_fits() -> None:
    assert len(MEANING) == len(WORDINGS) * len(COLOURS) * len(ZONES) and BYTES.shape[-1] == LENGTH == 64
    assert all(len(text.encode()) <= 63 and text == text.lower() and text.isascii() for text in MEANING)
    assert {as_text(data) for data in BYTES.reshape(-1, LENGTH)} == set(MEANING)
    for text, pair in MEANING.items():
        assert [word for word in text.split() if word in {*COLOURS, *ZONES}] in (list(pair), list(pair)[::-1])


def test_what_is_kept_for_testing_is_not_asked_for_in_training() -> None:
    assert len(wordings("train")) >= 8 and len(wordings("held_out")) >= 3
    for of in (wordings, pairs):
        assert not set(of("train")) & set(of("held_out")) and set(of("train")) | set(of("held_out")) == set(of("all"))
    assert len(pairs("all")) == 12 and len(pairs("held_out")) == 3 == len(HELD_OUT_PAIRS)
    assert {colour for colour, _ in pairs("train")} == set(range(4)) and {zone for _, zone in pairs("train")} == {
        0,
        1,
        2,
    }


def test_a_wording_for_testing_has_one_or_two_words_that_training_lacks_at_most() -> None:
    known = {word for text in ENV.instructions for word in text.split()}
    new = [set(WORDINGS[i].format(colour="red", zone="left").split()) - known for i in wordings("held_out")]
    assert all(len(words) <= 2 for words in new) and any(new) and not all(new)


def test_the_instructions_are_those_of_training_whatever_is_drawn(drawn: Any) -> None:
    _, obs = drawn
    assert list(ENV.instructions) == sorted({as_text(data) for data in obs["instruction"]})
    others = ({"wordings": "held_out"}, {"pairs": "all"}, {"instruction": "shuffled"})
    assert {InstructedPlaceRL(**each).instructions for each in others} == {ENV.instructions}  # type: ignore[arg-type]


def test_wrappers_pass_the_instructions_on() -> None:
    noise = {"a": {"func": "add_action_noise", "mode": "reset", "params": {"noise": 0.1}}}
    wrapped = (
        RenderedEnv(ActionChunk(InstructedPlaceRL(), 2), renderer="raycast"),
        ActionChunk(ENV, 2),
        RandomizedEnv(ENV, noise),
    )
    assert [describe(env).instructions for env in wrapped] == 3 * [ENV.instructions]


def test_paraphrases_begin_with_the_wordings_of_training_and_keep_what_is_for_testing() -> None:
    drawn = table("paraphrases")
    np.testing.assert_array_equal(drawn[: len(wordings("train"))], table("train"))
    texts = {as_text(data) for data in drawn.reshape(-1, LENGTH)}
    assert not texts & {as_text(data) for data in table("held_out").reshape(-1, LENGTH)}
    assert len(texts) > 2000
    # each names its colour in one way or another, and no other one
    for c, colour in enumerate(COLOURS):
        others = "|".join(other for other in COLOURS if other != colour)
        assert not [text for data in drawn[:, c].reshape(-1, LENGTH) if re.search(others, text := as_text(data))]


def test_the_end_of_an_episode_names_what_was_lifted_and_where_it_stands() -> None:
    state = jax.jit(ENV.start)(jax.random.key(0))
    assert ENV.ending(state) == "nothing lifted"
    colour = list(COLOURS)[state.colours[1]]
    lifted = state.replace(was_lifted=jnp.array([False, True]))
    assert ENV.ending(lifted) == f"{colour} cube: no zone"
    there = state.physics.qpos.at[15:18].set(state.zones[2])
    open_fingers = there.at[6:8].set(ENV.start(jax.random.key(0)).physics.qpos[6:8])
    placed = lifted.replace(physics=state.physics.replace(qpos=open_fingers))
    assert ENV.ending(placed) == f"{colour} cube: right zone"


def test_an_episode_starts_with_two_cubes_apart_and_three_zones_that_are_free(drawn: Any) -> None:
    state, obs = drawn
    for space, part in ((ENV.observation_space[name], obs[name]) for name in ("goal", "instruction", "scene", "state")):
        assert part.dtype == space.dtype and part.shape == (NUM_ROWS, *space.shape)
    np.testing.assert_allclose(obs["state"][:, 8:], [[-0.65, -0.15, 0.25]] * NUM_ROWS, atol=1e-4)
    cubes = np.stack([state.physics.qpos[:, place] for place in CUBE], 1)
    apart = np.linalg.norm(cubes[:, 0] - cubes[:, 1], axis=1)
    assert CUBE_DISTANCE <= apart.min() < CUBE_DISTANCE + 0.005 and apart.max() > 0.4
    assert np.all(cubes[:, :, 2] == np.float32(HALF_EDGE)) and np.all(state.zones[:, :, 2] == np.float32(HALF_EDGE))
    off = np.abs(state.zones[:, :, :2] - np.array(ZONE_CENTRES))
    assert np.all(off < 0.02 + 1e-6) and np.all(off.max(0) > 0.019)
    assert state.zones[:, 0, 1].max() < state.zones[:, 1, 1].min() < -0.1  # −y is the left
    away = np.linalg.norm(cubes[:, :, None, :2] - state.zones[:, None, :, :2], axis=-1)
    assert away.min() > 0.055 + np.sqrt(2) * HALF_EDGE  # no corner is on a disc
    assert np.all(state.colours[:, 0] != state.colours[:, 1])


def test_the_scene_tells_where_things_are_and_what_is_meant(drawn: Any) -> None:
    state, obs = drawn
    assert len(SCENE) == 21 and [feature.name for feature in describe(ENV).observation["scene"]] == list(SCENE)
    assert [feature.unit for feature in describe(ENV).observation["scene"][13:]] == ["m", "m"] + ["1"] * 6
    assert [feature.name for feature in describe(ENV).observation["state"]] == list(ROBOT_NUMBERS) and len(
        ROBOT_NUMBERS
    ) == 11
    scene = dict(zip(SCENE, obs["scene"].T, strict=True))
    np.testing.assert_array_equal(scene["cube_2 y"], state.physics.qpos[:, 16])
    np.testing.assert_array_equal(scene["zone right x"], state.zones[:, 2, 0])
    goal, rows = dict(zip(GOAL, obs["goal"].T, strict=True)), np.arange(NUM_ROWS)
    np.testing.assert_array_equal(goal["target cube y"], obs["scene"][rows, 3 * state.target_cube + 1])
    np.testing.assert_array_equal(goal["target zone x"], state.zones[rows, state.target_zone, 0])
    np.testing.assert_array_equal(scene["cube_1 colour index"], state.colours[:, 0])
    np.testing.assert_array_equal(scene["target cube index"], state.target_cube)
    np.testing.assert_array_equal(scene["target zone index"], state.target_zone)
    assert not np.any(scene["cube_1 was lifted"])


def test_the_instruction_names_what_is_meant_in_all_wordings(drawn: Any) -> None:
    state, obs = drawn
    assert said(obs) == meant(state)
    counts = {pair: meant(state).count(pair) for pair in set(MEANING.values())}
    assert all((counts[pair] == 0) == (pair in HELD_OUT_PAIRS) for pair in counts)
    assert all(abs(count - NUM_ROWS / 9) < 100 for count in counts.values() if count)  # five standard deviations
    assert abs(np.mean(state.target_cube) - 0.5) < 0.04


def test_a_picture_of_training_has_other_colours_with_every_pair(drawn: Any) -> None:
    """The other cube's colour says nothing of what is meant, but that it is another one."""
    state, _ = drawn
    other = np.take_along_axis(state.colours, 1 - state.target_cube[:, None], 1)[:, 0]
    seen = {(pair, NAMES[colour]) for pair, colour in zip(meant(state), other, strict=True)}
    assert len(seen) == 9 * 3


@pytest.mark.slow
@pytest.mark.parametrize("split", ["held_out", "all"])
def test_the_splits_are_drawn_as_named(split: Any) -> None:
    state, obs = draw(wordings=split, pairs=split)
    asked = {(NAMES[colour], ZONES[zone]) for colour, zone in pairs(split)}
    assert set(meant(state)) == asked and said(obs) == meant(state)
    texts = {WORDINGS[i].format(colour=c, zone=z) for i in wordings(split) for c, z in asked}
    assert {as_text(data) for data in obs["instruction"]} <= texts
    assert len({as_text(data) for data in obs["instruction"]}) == len(texts)


@pytest.mark.slow
def test_a_shuffled_instruction_is_right_in_one_of_six_episodes(drawn: Any) -> None:
    state, obs = draw(instruction="shuffled")
    plain, _ = drawn
    for name in ("colours", "target_cube", "target_zone"):  # nothing else is drawn again
        np.testing.assert_array_equal(getattr(state, name), getattr(plain, name))
    right = np.mean([text == pair for text, pair in zip(said(obs), meant(state), strict=True)])
    assert abs(right - 1 / 6) < 0.025  # four standard deviations
    assert all(NAMES.index(c) in colours for (c, _), colours in zip(said(obs), state.colours, strict=True))
    shares = np.array([sum(zone == each for _, zone in said(obs)) for each in ZONES]) / NUM_ROWS
    np.testing.assert_allclose(shares, 1 / 3, atol=0.03)


@pytest.mark.slow
def test_another_instruction_is_for_a_cube_that_lies_on_the_table(drawn: Any) -> None:
    state, obs = draw(ask_others=True)
    for one, other in zip(
        jax.tree.leaves(drawn[1]), jax.tree.leaves({name: obs[name] for name in drawn[1]}), strict=True
    ):
        np.testing.assert_array_equal(one, other)  # nothing else is drawn again
    asked = [MEANING[as_text(data)] for data in obs["other_instruction"]]
    assert not set(asked) & set(HELD_OUT_PAIRS)
    cube = np.array([list(row).index(NAMES.index(c)) for row, (c, _) in zip(state.colours, asked, strict=True)])
    zone, rows = np.array([ZONES.index(z) for _, z in asked]), np.arange(NUM_ROWS)
    cubes = obs["scene"][:, :6].reshape(-1, 2, 3)
    goal = np.concatenate([cubes[rows, cube], state.zones[rows, zone]], axis=-1)
    np.testing.assert_array_equal(obs["other_goal"], goal)
    assert abs(np.mean(cube == state.target_cube) - 0.5) < 0.04  # regardless of what is meant

    env = InstructedPlaceRL(physics="mujoco", ask_others=True)
    lifted = replace(env.reset(KEY)[0], was_lifted=jnp.ones(2, bool))
    assert lifted.other is not None
    held = env.step(lifted, jnp.zeros(env.action_space.shape), KEY)[1].obs
    there = 1 - int(lifted.other.first)
    assert as_text(np.asarray(held["other_instruction"])) == as_text(np.asarray(lifted.other.instructions[there]))


@pytest.mark.slow
def test_what_a_row_draws_depends_on_its_own_key_only(drawn: Any) -> None:
    some = jnp.array([5, 3, 3, 1000])
    again = jax.jit(jax.vmap(ENV.reset))(KEYS[some])
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(drawn), strict=True):
        np.testing.assert_array_equal(one, other[some])


def standing(*, cube: int, zone: int, lifted: bool = True, speed: float = 0.0, travel: float = 0.0) -> Any:
    """Cube 0 and zone 1 are meant; that cube stands in that zone."""
    state, _ = ENV.reset(KEY)
    place = state.zones[zone] + jnp.array([0.02, 0.0, 0.0])
    qpos = state.physics.qpos.at[CUBE[cube]].set(place).at[6:8].set(travel)
    qvel = state.physics.qvel.at[8 + 6 * cube].set(speed)
    return replace(
        state,
        physics=replace(state.physics, qpos=qpos, qvel=qvel),
        target_cube=jnp.int32(0),
        target_zone=jnp.int32(1),
        was_lifted=jnp.arange(2) == (cube if lifted else -1),
    )


CASES: dict[str, tuple[Any, tuple[bool, float, float]]] = {
    "done": ({"cube": 0, "zone": 1}, (True, 0.0, 0.0)),
    "pushed, not lifted": ({"cube": 0, "zone": 1, "lifted": False}, (False, 0.0, 0.0)),
    "moving": ({"cube": 0, "zone": 1, "speed": 1.0}, (False, 0.0, 0.0)),
    "held": ({"cube": 0, "zone": 1, "travel": 0.016}, (False, 0.0, 0.0)),
    "in another zone": ({"cube": 0, "zone": 2}, (False, 0.0, 1.0)),
    "the other cube": ({"cube": 1, "zone": 1}, (False, 1.0, 0.0)),
    "the other cube in another zone": ({"cube": 1, "zone": 0}, (False, 1.0, 1.0)),
}
"""A state; success, wrong_cube_lifted and wrong_zone."""


@pytest.mark.slow
def test_success_is_the_cube_that_is_meant_in_the_zone_that_is_meant_and_failures_are_told_apart() -> None:
    states = jax.tree.map(lambda *x: jnp.stack(x), *(standing(**case) for case, _ in CASES.values()))
    grip = jnp.array([1.0 if "travel" in case else -1.0 for case, _ in CASES.values()])
    after, timestep = STEP(states, jnp.zeros((len(CASES), 4)).at[:, 3].set(grip))
    metrics = timestep.info["metrics"]
    rows = zip(timestep.terminated, metrics["wrong_cube_lifted"], metrics["wrong_zone"], strict=True)
    assert dict(zip(CASES, [tuple(x.item() for x in row) for row in rows], strict=True)) == {
        name: expected for name, (_, expected) in CASES.items()
    }
    np.testing.assert_array_equal(timestep.info["success"], timestep.terminated)
    np.testing.assert_array_equal(timestep.reward, timestep.terminated.astype(np.float32))  # and nothing else
    cube, goal = after.physics.qpos[:, CUBE[0]], after.zones[:, 1]
    expected = np.linalg.norm((cube - goal)[:, :2], axis=1)
    np.testing.assert_allclose(metrics["distance_to_goal"], expected, rtol=1e-5)
    np.testing.assert_array_equal(timestep.obs["instruction"], states.instruction)  # for the whole episode


@pytest.mark.slow
def test_weights_shape_the_reward_of_the_cube_that_is_meant() -> None:
    env = InstructedPlaceRL(physics="mujoco", reaching_weight=1.0, lifting_weight=2.0, placing_weight=3.0)
    state = standing(cube=0, zone=2)
    state = replace(state, was_lifted=jnp.array([False, True]))  # the other one was: it earns nothing
    tool = np.asarray(env.observe(env.world(state))["state"])[8:]
    state = replace(state, physics=replace(state.physics, qpos=state.physics.qpos.at[CUBE[0]].set(tool)))

    def potential(state: Any) -> float:
        obs = jax.tree.map(np.asarray, env.observe(env.world(state)))
        cube, goal, lifted = obs["scene"][:3], obs["scene"][9:12], obs["scene"][19]
        reached = 1.0 - np.tanh(5.0 * np.linalg.norm(obs["state"][8:] - cube))
        placed = lifted * (1.0 - np.tanh(5.0 * np.linalg.norm(cube - goal)))
        return float(reached + 2.0 * (1.0 if lifted else np.clip((cube[2] - HALF_EDGE) / 0.05, 0, 1)) + 3.0 * placed)

    after, timestep = jax.jit(env.step)(state, jnp.zeros(4), KEY)
    assert bool(after.was_lifted[0]) and not timestep.terminated
    np.testing.assert_allclose(timestep.reward, potential(after) - potential(state), atol=1e-5)
    assert abs(float(timestep.reward)) > 0.05


@pytest.mark.slow
def test_a_picture_has_the_colours_of_its_episode_and_of_no_other() -> None:
    above = CameraView(eye=(-0.57, -0.16, 1.0), target=(-0.57, -0.15, 0.0), fovy=40.0, effects=False)
    first, _ = ENV.reset(KEY)
    first = replace(first, physics=replace(first.physics, qpos=first.physics.qpos.at[0].set(1.5)))  # arm aside
    state = replace(first, colours=jnp.array([0, 1]))
    pictures = [ENV.render(replace(state, colours=jnp.array(each)), 48, 48, above) for each in ([0, 1], [1, 0], [0, 1])]
    np.testing.assert_array_equal(pictures[0], pictures[2])
    colours = [picture.reshape(-1, 3).astype(int) for picture in pictures]
    redder = [each[:, 0] > each[:, 2] + 60 for each in colours]
    bluer = [each[:, 2] > each[:, 0] + 60 for each in colours]
    assert all(mask.sum() > 4 for mask in (*redder, *bluer))
    assert redder[0][bluer[1]].mean() > 0.9  # they have changed places
    look = ENV.appearance(state)
    assert sorted(look.rgba) == sorted(CUBES) and look.asset == ENV.simulation.asset
    np.testing.assert_allclose(look.rgba["cube_1"], COLOURS["red"])
    np.testing.assert_array_equal(look.mocap_pos["target right"], state.zones[2])


@pytest.mark.slow
def test_mjx_follows_the_c_engine_where_cubes_touch() -> None:
    """Upright cubes that have settled, one moving against the other; a minute of compilation."""
    if how := how_to_install("mjx"):
        pytest.skip(f"mjx is not installed: {how}")
    state = ENV.reset(KEY)[0]
    physics = state.physics
    control = ENV.control(ENV.world(state), jnp.array([0.0, 0.0, 0.0, -1.0]))
    for _ in range(5):
        physics = ENV.simulation.step(physics, control)
    other = physics.qpos[CUBE[0]] + jnp.array([0.053, 0.01, 0.0])
    qpos = physics.qpos.at[CUBE[1]].set(other).at[11:15].set(jnp.eye(4)[0]).at[18:22].set(jnp.eye(4)[0])
    before = replace(physics, qpos=qpos, qvel=physics.qvel.at[14].set(-0.5))
    for _ in range(4):
        expected = ENV.simulation.step(before, control)
        after = jax.jit(replace(ENV.simulation, engine="mjx").step)(before, control)
        np.testing.assert_allclose(after.qpos, expected.qpos, atol=1e-3)
        before = expected
    assert float(expected.qpos[8]) < float(qpos[8]) - 0.001  # it was pushed
