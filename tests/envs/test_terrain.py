"""Fields of tiles: their heights, the height scan, and levels that go up and down."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
from case_tables import cases, refused

from ejax.envs.locomotion.terrain import Terrain, height_below
from ejax.envs.locomotion.velocity import VelocityRL
from ejax.envs.mujoco.engine import load_model
from ejax.rollout import reset, step

KEY = jax.random.key(0)
TILES = {"slope": [0.0, 0.4], "pit": [0.05, 0.1], "rough": [0.0, 0.1], "gaps": [0.2, 0.4], "stones": [0.2, 0.3]}
FIELD: dict[str, Any] = {"kind": "tiles", "tiles": TILES, "levels": 2, "tile": 4.0, "cell": 0.1}
ENV = VelocityRL(
    physics="mujoco", max_episode_steps=100, push=None, terrain={**FIELD, "level": [0, 1], "scan": [0.4, 0.2]}
)


def heights_of(kind: str, number: float, *places: float) -> list[float]:
    """Return the heights on the x axis of one tile of 8 m, from its middle."""
    field = Terrain(kind="tiles", tiles={kind: (number, number)}, levels=1, cell=0.1)
    return [float(x) for x in height_below(field, jnp.array([[place, 0.0] for place in places]))]


@cases(
    "kind number heights",
    # the platform ends at 1 m, the tile at 4 m
    ("slope", 0.4, {0.0: 1.2, 1.0: 1.2, 2.0: 0.8, -2.0: 0.8, 3.5: 0.2, 4.0: 0.0}),
    ("hollow", 0.4, {0.0: -1.2, 2.0: -0.8, 4.0: 0.0}),
    ("stairs", 0.1, {0.0: 1.0, 1.0: 1.0, 1.1: 0.9, 1.3: 0.9, 1.4: 0.8, 3.7: 0.1, 3.8: 0.0}),  # ten of 0.3 m
    ("pit", 0.1, {0.0: -1.0, 1.3: -0.9, 4.0: 0.0}),
    ("gaps", 0.4, {0.0: 0.0, 1.8: 0.0, 1.9: -0.5, 2.1: -0.5, 2.2: 0.0, 3.0: 0.0, 3.1: -0.5}),
    ("gaps", 0.26, {1.7: 0.0, 1.8: 0.0, 1.9: -0.5, 2.0: -0.5, 2.1: 0.0, 3.0: -0.5}),  # in whole cells: as 0.3
    ("stones", 0.3, {0.0: 0.0, 0.9: 0.0, 1.1: 0.0, 1.2: -0.5, 1.3: -0.5, 1.4: 0.0, 1.8: 0.0}),
    ("rough", 0.0, {0.0: 0.0, 2.0: 0.0}),
)
def test_a_tile_is_what_its_number_says(kind: str, number: float, heights: dict[float, float]) -> None:
    np.testing.assert_allclose(heights_of(kind, number, *heights), list(heights.values()), atol=1e-5)


def test_rough_tiles_are_within_their_height_and_flat_on_the_platform() -> None:
    heights = Terrain(kind="tiles", tiles={"rough": (0.1, 0.1)}, levels=1, cell=0.1).heights()
    assert 0.09 < heights.max() <= 0.1
    assert heights.min() == 0.0
    assert (heights[40:61, 40:61] == 0.0).all()
    assert (np.diff(heights[20, 20:80]) != 0.0).all()
    assert not heights[:11].any() and not heights[:, -11:].any()  # the border, and the tile's edge


@pytest.mark.parametrize("kind", ["gaps", "stones"])
@cases("deepening lowest", (True, [-0.03125, -0.125, -0.28125, -0.5]), (False, [-0.5] * 4))
def test_trenches_may_deepen_with_the_level(kind: str, deepening: bool, lowest: list[float]) -> None:
    field = Terrain(kind="tiles", tiles={kind: (0.3, 0.3)}, levels=4, cell=0.1, deepening=deepening)
    rows = np.split(field.heights()[10:-11], 4)  # without the border
    np.testing.assert_allclose([row.min() for row in rows], lowest)


@pytest.mark.parametrize(
    "terrain", [{**FIELD, "levels": 10}, {"kind": "rough", "half_size": 40.0}], ids=["tiles", "rough"]
)
def test_a_camera_sees_a_robot_on_a_large_field(terrain: dict[str, Any]) -> None:
    model = load_model(VelocityRL(terrain=terrain).asset)
    assert model.stat.extent * model.vis.map.znear < 0.1  # m, the nearest that is drawn; cameras are 1 m away or more


def test_mujoco_has_the_same_ground() -> None:
    model, field = load_model(ENV.asset), ENV.ground
    data, hit = mujoco.MjData(model), np.zeros(1, np.int32)
    data.qpos[:3] = 0.0, 0.0, 30.0
    mujoco.mj_forward(model, data)
    x, y = (np.random.default_rng(0).integers(-10 * half, 10 * half, 200) / 10.0 for half in map(int, field.size))
    below = height_below(field, jnp.stack([jnp.asarray(x), jnp.asarray(y)], axis=1))
    # a ray through an edge of two triangles may hit neither
    for i, height in enumerate(below):
        down = np.array([0.0, 0.0, -1.0])
        reached = mujoco.mj_ray(model, data, np.array([x[i] + 1e-5, y[i] + 2e-5, 9.0]), down, None, 1, -1, hit)
        assert 9.0 - reached == pytest.approx(float(height), abs=2e-4)


@cases(
    "level distance commanded after",
    (1, 4.1, 20.0, 2),  # beyond half a tile of 8 m, though not half as far as commanded
    (1, 4.0, 8.0, 1),
    (1, 3.9, 8.0, 0),
    (0, 0.1, 8.0, 0),
    (1, 0.0, 0.0, 1),  # commanded to stand
)
def test_a_level_moves_by_the_published_rule(level: int, distance: float, commanded: float, after: int) -> None:
    field = Terrain(kind="tiles", levels=4)
    given = jnp.array(level), jnp.array(distance), jnp.array(commanded)
    assert int(field.next_level(*given, KEY)) == after
    assert int(replace(field, promote=False).next_level(*given, KEY)) == level


def test_who_solves_the_last_level_begins_at_any() -> None:
    field = Terrain(kind="tiles", levels=4)
    solved = jax.vmap(lambda key: field.next_level(jnp.array(3), jnp.array(5.0), jnp.array(0.0), key))
    assert set(solved(jax.random.split(KEY, 64)).tolist()) == {0, 1, 2, 3}


@pytest.mark.slow
def test_rows_start_on_their_tiles_and_change_their_level_but_not_their_kind() -> None:
    carry = reset(ENV, KEY, 16)
    level, column = carry.state.progress.spot
    assert set(level.tolist()) == {0, 1}
    assert len(set(column.tolist())) > 2
    origin = np.stack([4.0 * column - 8.0, 4.0 * level - 2.0], axis=1)
    place = np.asarray(carry.state.physics.qpos[:, :3])
    assert abs(place[:, :2] - origin).max() <= 0.5
    height = place[:, 2] - height_below(ENV.ground, jnp.asarray(origin))
    assert ((height > ENV.task.robot.height) & (height < ENV.task.robot.height + 0.06)).all()

    # all have gone 2.1 m, and new episodes begin
    qpos = carry.state.physics.qpos.at[:, 0].set(origin[:, 0] + 2.1)
    ended = replace(carry.state, physics=replace(carry.state.physics, qpos=qpos))
    state, obs = jax.vmap(ENV.persist)(ended, carry.state, carry.obs)
    np.testing.assert_array_equal(state.progress.spot[1], column)
    np.testing.assert_array_equal(state.progress.spot[0][level == 0], 1)
    new = np.stack([4.0 * column - 8.0, 4.0 * state.progress.spot[0] - 2.0], axis=1)
    np.testing.assert_allclose(state.physics.qpos[:, :2] - new, place[:, :2] - origin, atol=1e-5)
    above = state.physics.qpos[:, 2] - height_below(ENV.ground, jnp.asarray(new))
    np.testing.assert_allclose(above, height, atol=1e-5)
    assert obs["policy"].shape == (16, 48 + 15)


@pytest.mark.slow
def test_the_scan_is_the_ground_about_the_robot_turned_with_it() -> None:
    state, _ = ENV.reset(KEY)
    # on the upper slope, 1.5 m from its middle, which is 0.4 m above its edge, and looking left
    middle, half = ENV.ground.origin(jnp.array(1), jnp.array(0)), np.sqrt(0.5)
    qpos = state.physics.qpos.at[:7].set(jnp.array([*(middle + jnp.array([1.5, 0.0])), 0.5, half, 0.0, 0.0, half]))
    state = replace(state, physics=replace(state.physics, qpos=qpos))
    world = jax.jit(ENV.observe_noisy)(ENV.world(state), KEY)
    seen = {name: np.asarray(x)[-15:].reshape(5, 3) for name, x in world.obs.items()}
    # x of a point is 1.5 − its place to the left; there the ground is 0.4·(2 − x)
    left = np.array([-0.2, 0.0, 0.2])
    expected = 0.5 - ENV.task.robot.height - 0.4 * (2.0 - (1.5 - left))
    np.testing.assert_allclose(seen["critic"], np.broadcast_to(expected, (5, 3)), atol=1e-4)
    noise = seen["policy"] - seen["critic"]
    assert 0.0 < abs(noise).max() <= 0.1
    names = [feature.name for feature in ENV.parts["critic"][-15:]]
    assert (names[0], names[-1]) == ("depth of the ground at (-0.4, -0.2)", "depth of the ground at (0.4, 0.2)")


@pytest.mark.slow
def test_a_robot_stands_on_every_kind_and_leaves_at_the_edge() -> None:
    carry = reset(ENV, KEY, 16)
    far = carry.state.physics.qpos[:2].at[0, 0].set(10.01).at[1, 1].set(-4.01)
    qpos = carry.state.physics.qpos.at[:2].set(far)
    carry = replace(carry, state=replace(carry.state, physics=replace(carry.state.physics, qpos=qpos)))
    left, crossed = [], []
    for i in range(16):  # by step 20 it has sunk onto its knees: drives that hold a pose alone do not carry it
        carry, timestep = step(ENV, carry, jnp.zeros((16, 12)), jax.random.key(i))
        left.append(timestep.truncated)
        crossed.append(timestep.info["success"])
        assert not timestep.terminated.any()
    np.testing.assert_array_equal(left[0], [True, True, *[False] * 14])
    np.testing.assert_array_equal(crossed[0], left[0])
    assert not crossed[-1].any()
    base = timestep.info["metrics"]["base_height"]
    assert ((base > 0.2) & (base < 0.3)).all()
    for name, each in zip(("level", "column"), carry.state.progress.spot, strict=True):
        np.testing.assert_array_equal(timestep.info["metrics"][f"terrain_{name}"], each)


@cases(
    "terrain text",
    ({"kind": "hills"}, "must be 'flat', 'rough' or 'tiles', got 'hills'"),
    ({**FIELD, "tiles": {"stair": [0, 1]}}, "terrain.tiles has no 'stair'; there is slope"),
    ({**FIELD, "tiles": {"stairs": [0.2, 0.1]}}, "terrain.tiles.stairs must be [lowest, highest]"),
    ({**FIELD, "tiles": {}}, "needs a kind of tiles"),
    ({**FIELD, "tiles": {"slope": [0.0, 0.4]}, "cell": 0.3}, "a multiple of cell 0.3"),
    ({**FIELD, "tile": 2.0}, "at least 4.0 m"),
    ({**FIELD, "level": [0, 2]}, "within 0 … 1"),
    ({**FIELD, "scan": [1.0]}, "half the length and half the width"),
    ({**FIELD, "scan": [1.0, "a"]}, "half the length and half the width"),
    ({**FIELD, "scan": 1.0}, "half the length and half the width, m, got 1.0"),
    ({**FIELD, "size": 3}, "terrain has no 'size'; there is kind, height"),
    ({**FIELD, "promote": "sometimes"}, "terrain.promote must be true or false, got 'sometimes'"),
    ({**FIELD, "deepening": 1}, "terrain.deepening must be true or false, got 1"),
    ({**FIELD, "levels": 2.5}, "terrain.levels must be a whole number, got 2.5"),
    ({**FIELD, "levels": True}, "terrain.levels must be a whole number, got True"),
    ({**FIELD, "seed": -1}, "terrain.seed must be 0 or more, got -1"),
    ({**FIELD, "level": [0.5, 1]}, "terrain.level must be two whole numbers"),
    ({**FIELD, "cell": "fine"}, "terrain.cell must be a number, got 'fine'"),
    ({**FIELD, "tiles": {"slope": ["a", "b"]}}, "terrain.tiles.slope must be two numbers"),
    ({**FIELD, "tiles": {"gaps": [0.1, 0.4]}}, "gaps must be at least two cells wide, 0.2 m"),
    ({**FIELD, "tiles": {"stones": [0.2, 0.4]}, "cell": 0.25}, "stones must be at least two cells wide, 0.5 m"),
    ({**FIELD, "tiles": {"gaps": [0.0, 0.4]}}, "or the ground is flat; got (0.0, 0.4)"),
    (
        {**FIELD, "tiles": {"pit": [0.1, 0.1]}, "cell": 0.2},
        "pit has steps of 0.3 m, which a cell of 0.2 shows as a slope",
    ),
    ids=str,
)
def test_ground_that_cannot_be_is_refused(terrain: dict[str, Any], text: str) -> None:
    error = refused(VelocityRL, terrain=terrain, match="VelocityRL")
    assert text in str(error)
