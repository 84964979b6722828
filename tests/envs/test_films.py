"""The camera of a film shows all that moves, and markers, in all states, unless the model or the config places it."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejax.config.models import CameraConfig
from ejax.envs.mujoco.drawing import Appearance, asset_of
from ejax.envs.mujoco.scenery import film_view, place_camera
from ejax.envs.tasks.cart_pole import CartPoleRL
from ejax.envs.tasks.push_cube import PushCubeRL
from ejax.envs.wrappers.wrapper import EnvWrapper
from ejax.training import recorder
from ejax.types import CameraView

KEY = jax.random.key(0)
MODEL = """<mujoco><worldbody><geom type="plane" size="1 1 .1"/>{}
  <body name="goal" mocap="true" pos="0 0 1"><geom size="0.05"/></body>
  <body name="drone" pos="0 0 1"><freejoint/><geom type="box" size=".1 .1 .03"/></body></worldbody></mujoco>"""
ASPECT = 4.0 / 3.0


@dataclass(frozen=True)
class Flight:
    """An environment whose states are the places of a drone and its goal."""

    camera: str = ""

    def appearance(self, state: Any) -> Appearance:
        qpos = jnp.concatenate([state["drone"], jnp.array([1.0, 0.0, 0.0, 0.0])])
        return Appearance(asset=MODEL.format(self.camera), qpos=qpos, mocap_pos={"goal": state["goal"]})


def flight(*drone: tuple[float, float, float], goal: tuple[float, float, float] = (0.0, 0.0, 1.0)) -> dict[str, Any]:
    return {"drone": np.array(drone, np.float32), "goal": np.tile(np.float32(goal), (len(drone), 1))}


def is_seen(asset: str, view: CameraView | None, place: Any) -> bool:
    """Is the place in the picture, above its caption, which has a tenth of the height?"""
    camera = place_camera(asset, view, ASPECT)
    x, y, depth = np.linalg.inv(np.asarray(camera.frame, np.float64)) @ (np.asarray(place) - np.asarray(camera.eye))
    return bool(depth > 0.0 and abs(x) < depth and -0.8 * depth < y < depth)


@pytest.mark.parametrize(
    "states",
    [
        flight((0.0, 0.0, 1.0), (20.0, 5.0, 9.0)),
        flight((0.0, 0.0, 1.0), goal=(-3.0, 1.0, 0.5)),
        flight((np.nan,) * 3, (30.0, 0.0, 1.0)),
    ],
    ids=["it flies away", "a goal aside", "a broken state"],
)
def test_what_moves_and_markers_are_seen_in_all_states(states: dict[str, Any]) -> None:
    view = film_view(Flight(), states, ASPECT)
    asset = MODEL.format("")
    for place in [*states["drone"], *states["goal"]]:
        assert np.isnan(place).any() or is_seen(asset, view, place)
        assert np.isnan(place).any() or is_seen(asset, None, place) == (not place[:2].any())


def test_what_is_seen_already_is_seen_from_where_it_was() -> None:
    assert film_view(Flight(), flight((0.0, 0.0, 1.0)), ASPECT) is None


def test_a_models_own_camera_stays() -> None:
    for mode in ("fixed", "targetbody"):
        env = Flight(f'<camera name="main" pos="0 -1 0" mode="{mode}" target="drone"/>')
        assert film_view(env, flight((30.0, 0.0, 1.0)), ASPECT) is None


def test_a_camera_of_another_name_is_not_taken() -> None:
    env = Flight('<camera name="overview" pos="0 -1 0"/>')
    assert film_view(env, flight((0.0, 0.0, 1.0)), ASPECT) is None
    assert film_view(env, flight((30.0, 0.0, 1.0)), ASPECT) == film_view(Flight(), flight((30.0, 0.0, 1.0)), ASPECT)


@dataclass(frozen=True)
class Wrapper(EnvWrapper):
    env: Any


class Misspelt(Flight):
    def appearance(self, state: Any) -> Appearance:
        return super().apearance(state)  # type: ignore[misc]


def test_what_draws_itself_is_left_alone_and_an_error_in_an_appearance_is_raised() -> None:
    for env in (object(), Wrapper(object())):
        assert film_view(env, {}, ASPECT) is None and asset_of(env) is None
    for env in (Misspelt(), Wrapper(Misspelt())):
        with pytest.raises(AttributeError, match="apearance"):
            film_view(env, flight((0.0, 0.0, 1.0)), ASPECT)


@pytest.mark.parametrize("goal", [(-0.9, -0.6, 0.05), (-1.6, 0.9, 0.05)])
def test_the_goal_of_push_cube_is_in_its_videos(goal: tuple[float, float, float]) -> None:
    env = PushCubeRL(goal_position=goal)
    states = jax.tree.map(lambda x: x[None], env.reset(KEY)[0])
    rim = np.array(goal) + 0.1 * np.array([[1, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0]])
    view = film_view(env, states, ASPECT)
    assert all(is_seen(env.asset, view, place) for place in rim)
    assert not all(is_seen(env.asset, None, place) for place in rim)  # a policy that sees has its pictures as before


def test_a_cart_that_drives_away_is_in_its_videos() -> None:
    env = CartPoleRL()
    state = env.reset(KEY)[0]
    far = replace(state, physics=replace(state.physics, qpos=jnp.array([6.0, 0.0])))
    view = film_view(env, jax.tree.map(lambda *x: jnp.stack(x), state, far), ASPECT)
    assert is_seen(env.asset, view, (0.0, 6.0, 0.5)) and not is_seen(env.asset, None, (0.0, 6.0, 0.5))


class Filmed(PushCubeRL):
    """It keeps the cameras that it is drawn by."""

    views: Any = []  # noqa: RUF012  # of all

    def render(self, state: Any, width: int = 640, height: int = 480, camera: CameraView | None = None) -> Any:
        self.views.append(camera)
        return np.zeros((height, width, 3), np.uint8)


@pytest.mark.parametrize(
    ("camera", "moves"),
    [(None, True), (CameraConfig(), True), (CameraConfig(target=(0.0, 0.0, 0.2)), False)],
    ids=["none", "not placed", "placed"],
)
def test_a_camera_that_the_config_places_stays_there(camera: CameraConfig | None, moves: bool) -> None:
    env, view = Filmed(), None if camera is None else camera.view
    state = env.reset(KEY)[0]
    goals = np.array([[-4.0, -4.0, 0.05], [4.0, 6.0, 0.05]], np.float32)
    states = jax.tree.map(lambda x: jnp.stack([x, x])[None], state)
    env.views.clear()
    list(recorder.draw_episodes(env, replace(states, goal=goals[None]), jnp.ones((1, 2), bool), (640, 480), view))
    for row, goal in zip(env.views, goals, strict=True):  # each by itself
        assert (row != view) == moves
        assert is_seen(env.asset, row, goal) == moves
        # how it sees stays: the field of view, and no shadows
        assert view is None or row[2:] == view[2:]
