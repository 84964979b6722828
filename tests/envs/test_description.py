"""Environments describe themselves: every number has a name and a unit, through chunks and pictures too."""

from dataclasses import asdict
from itertools import chain
from typing import Any

import pytest

from ejax.envs.description import WHOLE, EnvDescription, Feature, describe
from ejax.envs.locomotion.velocity import VelocityRL
from ejax.envs.tasks.cart_pole import CartPoleRL
from ejax.envs.tasks.instructed_place import InstructedPlaceRL
from ejax.envs.tasks.pick_place import PickPlaceRL
from ejax.envs.tasks.planar_reach import PlanarReachRL
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.envs.tasks.push_cube import PushCubeRL
from ejax.envs.wrappers.action_chunk import ActionChunk
from ejax.envs.wrappers.rendered import RenderedEnv
from ejax.schema.frozen import thaw
from ejax.schema.registry import ENVS, resolve

KINDS = (PointMassRL, PlanarReachRL, CartPoleRL, PushCubeRL, PickPlaceRL, InstructedPlaceRL, VelocityRL)


@pytest.mark.parametrize("env", [kind() for kind in KINDS], ids=lambda env: type(env).__name__)
def test_every_number_has_a_name_and_a_unit(env: Any) -> None:
    description = describe(env)
    assert description.action is not None
    parts = getattr(env.observation_space, "spaces", {WHOLE: env.observation_space})
    widths = {path: part.shape[0] for path, part in parts.items() if path not in description.text}
    assert {path: len(part) for path, part in description.observation.items()} == widths
    assert len(description.action) == env.action_space.shape[0]
    for part in description.observation.values():  # two groups of one observation may share a number
        named = [feature.name for feature in (*part, *description.action)]
        assert len(set(named)) == len(named)
    assert all(
        feature.unit for feature in (*chain.from_iterable(description.observation.values()), *description.action)
    )
    assert description.parameters == thaw(asdict(env))


def test_text_is_told_apart_from_numbers_through_chunks_too() -> None:
    description = describe(ActionChunk(InstructedPlaceRL(), 2))
    assert description.text == ("instruction",) and sorted(description.observation) == ["goal", "scene", "state"]


def test_every_registered_task_describes_itself() -> None:
    """Environments built from a gym config have no numbers of their own."""
    assert {resolve("env", name) for name in ENVS} - {*KINDS} == {resolve("env", "EmbodiedEnv")}


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
