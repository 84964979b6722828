"""An expert for InstructedPlaceRL: ``ejax.experts.instructed_place:make_task``."""

from collections.abc import Mapping
from functools import partial

import numpy as np

from ejax.envs.tasks.instructed_place import SCENE, InstructedPlaceRL
from ejax.envs.tasks.place_instructions import ZONES
from ejax.experts.pick_place import CARE, PLAN, RANGES, SEGMENTS, begin_again, follow_plan
from ejax.experts.task import EnvRows, Expert, ScriptedTask
from ejax.numerics.text import as_text
from ejax.types import CameraView

CAMERA = CameraView(**PLAN["instructed_camera"])
_RANGES = {**RANGES, "carry_height": (0.12, 0.18, 1)}  # a held cube passes 2 cm above the other one, at least
_TARGET_CUBE, _TARGET_ZONE = SCENE.index("target cube index"), SCENE.index("target zone index")


class InstructedPlaceExpert(Expert):
    """The plan of ``PickPlaceExpert`` for the meant cube and zone of ``scene``, even under a wrong instruction."""

    make_env, segments, care = InstructedPlaceRL, SEGMENTS, CARE
    ranges = _RANGES

    def act(
        self, obs: Mapping[str, EnvRows], segment: EnvRows, variation: Mapping[str, EnvRows]
    ) -> tuple[EnvRows, EnvRows]:
        return follow_plan(obs["state"], *_meant(obs), segment, variation, self.env.action_scale)

    def return_to(self, obs: Mapping[str, EnvRows], segment: EnvRows) -> EnvRows:
        return begin_again(obs["state"], *_meant(obs), segment)

    def instruct(self, rng: np.random.Generator, obs: Mapping[str, EnvRows]) -> list[str]:
        del rng  # the environment has chosen the words
        return [as_text(each) for each in obs["instruction"]]


def _meant(obs: Mapping[str, EnvRows]) -> tuple[EnvRows, EnvRows]:
    """Find the cube and the zone [N, 3] that are meant."""
    scene, row = obs["scene"], np.arange(len(obs["scene"]))
    places = scene[:, : 3 * (2 + len(ZONES))].reshape(len(scene), -1, 3)
    target = scene[:, [_TARGET_CUBE, _TARGET_ZONE]].astype(int)
    cube, zone = places[row, target[:, 0]], places[row, 2 + target[:, 1]]
    return cube, zone


make_task = partial(ScriptedTask, InstructedPlaceExpert, camera=CAMERA)
