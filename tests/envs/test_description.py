"""Environments describe themselves: every number has a name and a unit, through chunks and pictures too."""

import pytest

from ejax.envs.description import WHOLE, EnvDescription, Feature, describe
from ejax.envs.locomotion.velocity import VelocityRL
from ejax.envs.tasks.cart_pole import CartPoleRL
from ejax.envs.tasks.instructed_place import InstructedPlaceRL
from ejax.envs.tasks.pick_place import PickPlaceRL
from ejax.envs.tasks.planar_reach import PlanarReachRL
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.envs.tasks.push import PushCube
from ejax.envs.tasks.push_cube import PushCubeRL
from ejax.envs.wrappers.action_chunk import ActionChunk
from ejax.envs.wrappers.rendered import RenderedEnv

KINDS = (PointMassRL, PlanarReachRL, CartPoleRL, PushCube, PushCubeRL, PickPlaceRL, InstructedPlaceRL, VelocityRL)


def test_text_is_told_apart_from_numbers_through_chunks_too() -> None:
    description = describe(ActionChunk(InstructedPlaceRL(), 2))
    assert description.text == ("instruction",) and sorted(description.observation) == ["goal", "scene", "state"]


def test_a_decision_of_a_chunk_has_the_numbers_of_its_actions() -> None:
    description = describe(ActionChunk(PointMassRL(dt=0.02), 3))
    assert description.action is not None
    assert description.action[3] == Feature("force y / force_scale, action 2 of 3", "N")
    assert (description.control_period, description.actions_per_decision) == (pytest.approx(0.06), 3)


def test_what_is_drawn_is_described_under_its_name() -> None:
    description = describe(RenderedEnv(ActionChunk(CartPoleRL(), 2)))
    assert description.observation == {"state": describe(CartPoleRL()).observation[WHOLE]}
    assert description.control_period == pytest.approx(2 * CartPoleRL().control_period)


def test_nothing_is_made_up_for_an_environment_that_says_nothing() -> None:
    assert describe(object()) == EnvDescription()  # type: ignore[arg-type]  # stands for any environment
