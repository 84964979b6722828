"""An expert for InstructedPlaceRL: ``ejax.experts.instructed_place:make_task``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ejax.envs.mujoco.pictures import Renderer
from ejax.envs.tasks.instructed_place import SCENE, InstructedPlaceRL
from ejax.envs.tasks.place_instructions import ZONES
from ejax.envs.text import as_text
from ejax.experts.pick_place import CARE, SEGMENTS, follow_plan, vary_plan
from ejax.experts.task import Rows, ScriptedTask
from ejax.types import CameraView

CAMERA = CameraView(eye=(-1.3, -0.15, 0.9), target=(-0.645, -0.15, 0.04), fovy=42.0, effects=False)
"""Across from the robot, so that the arm hides neither cubes nor zones; the left zone is on the right. Draws without
shadows, which are slow in software rendering."""

_CARRY_HEIGHT = 0.12
"""m, at least: a held cube passes 2 cm above the other one."""
_TARGET_CUBE, _TARGET_ZONE = SCENE.index("target cube index"), SCENE.index("target zone index")


@dataclass(frozen=True)
class InstructedPlaceExpert:
    """The plan of ``PickPlaceExpert`` for the cube and the zone that are meant, which it reads from ``scene``.

    So it does the right thing whatever the instruction says.

    Args:
        variety: see ``vary_plan``; 0 is one style, in which nothing depends on what cannot be seen.
    """

    env: InstructedPlaceRL
    variety: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.variety <= 1.0:
            raise ValueError(f"variety must be in [0, 1], got {self.variety}")

    @property
    def segments(self) -> tuple[str, ...]:
        return SEGMENTS

    @property
    def care(self) -> Rows:
        return CARE

    def vary(self, rng: np.random.Generator, num_envs: int) -> Mapping[str, Rows]:
        return vary_plan(rng, num_envs, lowest=_CARRY_HEIGHT, variety=self.variety)

    def act(self, obs: Mapping[str, Rows], segment: Rows, variation: Mapping[str, Rows]) -> tuple[Rows, Rows]:
        scene, row = obs["scene"], np.arange(len(segment))
        places = scene[:, : 3 * (2 + len(ZONES))].reshape(len(scene), -1, 3)
        target = scene[:, [_TARGET_CUBE, _TARGET_ZONE]].astype(int)
        cube, zone = places[row, target[:, 0]], places[row, 2 + target[:, 1]]
        return follow_plan(obs["state"], cube, zone, segment, variation, self.env.action_scale)

    def instruct(self, rng: np.random.Generator, obs: Mapping[str, Rows]) -> list[str]:
        del rng  # the environment has chosen the words
        return [as_text(each) for each in obs["instruction"]]


def make_task(
    env: Mapping[str, Any] | None = None,
    num_envs: int = 16,
    noise: float = 0.15,
    variety: float = 1.0,
    image_size: Sequence[int] | None = None,
    camera: CameraView | Mapping[str, Any] = CAMERA,
    renderer: Renderer = "mujoco",
    wrist: Mapping[str, Any] | None = None,
) -> ScriptedTask:
    """The task, for ``OnlineDataEngineCfg.task``.

    Args:
        env: fields of InstructedPlaceRL.
        variety: see ``InstructedPlaceExpert``.
        num_envs, noise, image_size, camera, renderer, wrist: see ``ScriptedTask``.
    """
    task = InstructedPlaceRL(**{"physics": "mujoco", **(env or {})})
    return ScriptedTask(
        task,
        InstructedPlaceExpert(task, variety),
        num_envs=num_envs,
        noise=noise,
        image_size=image_size,
        camera=camera,
        renderer=renderer,
        wrist=wrist,
    )
