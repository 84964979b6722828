"""Changes between a simulation and a robot, as events of ``trainer.events`` whose ranges are one value."""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from ejax.envs.mujoco.drawing import asset_of
from ejax.envs.mujoco.models import load_model
from ejax.envs.task.entities import ROBOT, drives_of_joints, free_bodies, robot_links

AS_IT_IS, TOGETHER = "as it is", "all of these"
SHIFTS = ("latency", "noise", "mass", "friction", "drives")
"""Options of the command line."""


def conditions(env: Any, shifts: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Name -> events: the environment as it is, with each shift, and with all where none has two values. ValueError:
    the environment has nothing to shift so."""
    made: dict[str, dict[str, Any]] = {AS_IT_IS: {}}
    for name, values in shifts.items():
        for value in values:
            made[f"{name} {value:g}"] = {
                f"transfer_{name}_{i}": {"func": func, "mode": "reset", "params": params}
                for i, (func, params) in enumerate(_events(env, name, value))
            }
    if len(made) > 2 and all(len(values) <= 1 for values in shifts.values()):
        made[TOGETHER] = {name: event for events in made.values() for name, event in events.items()}
    return made


def _events(env: Any, name: str, value: float) -> list[tuple[str, dict[str, Any]]]:
    ends, robot = [value, value], {"uid": ROBOT}
    if name == "latency":
        return [("delay_action", {"steps_range": ends})]
    if name == "noise":
        space = env.observation_space
        if not isinstance(space, gymnasium.spaces.Dict):
            return [("add_observation_noise", {"noise": value})]
        if nested := [part for part, x in space.items() if isinstance(x, gymnasium.spaces.Dict)]:
            raise ValueError(f"--noise: the observation's part {nested[0]} has parts of its own; leave out --noise")
        parts = [part for part, x in space.items() if np.issubdtype(x.dtype or object, np.floating)]
        return [("add_observation_noise", {"noise": value, "part": part}) for part in parts]
    if (asset := asset_of(env)) is None:
        raise ValueError(f"--{name}: {type(env).__name__} shows no MuJoCo model, whose physics could be shifted")
    if name == "drives":
        return [("randomize_drive_gains", {"entity_cfg": robot, "stiffness_range": ends, "damping_range": ends})]
    model = load_model(asset)
    links = robot_links(model, robot) if drives_of_joints(model) else []
    objects = [{"uid": uid} for uid, body in free_bodies(model).items() if body not in links]
    scaled = {f"{name}_range": ends, "operation": "scale"}
    made = [(f"randomize_rigid_object_{name}", {"entity_cfg": each, **scaled}) for each in objects]
    if name == "mass" and links:
        made.append(("randomize_articulation_mass", {"entity_cfg": robot, **scaled}))
    if name == "friction" and not objects:  # else what touches an object would be written twice
        made.append(("randomize_rigid_object_friction", {"entity_cfg": robot, **scaled}))
    return made
