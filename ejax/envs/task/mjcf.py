"""A task's MJCF: where its file is, and where episodes start in it."""

import functools
import sys
from pathlib import Path

import mujoco
import numpy as np
from numpy.typing import NDArray

from ejax.envs.mujoco.engine import load_model
from ejax.envs.task.features import LENGTHS
from ejax.schema.registry import did_you_mean


@functools.lru_cache(maxsize=64)
def find_model(given: str, module: str) -> str:
    """MJCF as text as it is; of a file the absolute path, so that it is found from anywhere.

    Raises:
        ValueError: no model, or no such file.
    """
    if not given:
        raise ValueError("there is no model; write model = 'robot.xml', a file beside the class's, or MJCF as text")
    if given.lstrip().startswith("<"):
        return given
    file = getattr(sys.modules.get(module), "__file__", None)
    places = [*([Path(file).parent] if file else []), Path.cwd()]
    found = next((path for place in places if (path := place / given).is_file()), None)
    if found is None:
        near = sorted({path.name for place in places for path in place.glob("*.xml")})
        looked = " and in ".join(dict.fromkeys(map(str, places)))
        raise ValueError(f"no file {given} in {looked}{did_you_mean(given, near)}")
    return str(found.resolve())


@functools.lru_cache(maxsize=64)
def home_of(asset: str, keyframe: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """qpos [nq] and qvel [nv] to start from.

    Raises:
        ValueError: no such keyframe.
    """
    model = load_model(asset)
    names = [model.key(i).name for i in range(model.nkey)]
    if keyframe and keyframe not in names:
        there = f"there is {', '.join(map(repr, names))}" if names else "the model has none"
        raise ValueError(f"no keyframe '{keyframe}'; {there}{did_you_mean(keyframe, names)}")
    if not names:
        return model.qpos0.copy(), np.zeros(model.nv)
    wanted = keyframe or ("home" if "home" in names else names[0])
    at = names.index(wanted)
    return model.key_qpos[at].copy(), model.key_qvel[at].copy()


def start_noise_of(
    model: mujoco.MjModel, size: float
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """[nq] each: how far a number may be moved, and its bounds."""
    noise, low, high = (np.full(model.nq, x, np.float32) for x in (0.0, -np.inf, np.inf))
    for i in range(model.njnt):
        if int(model.jnt_type[i]) in LENGTHS:
            noise[model.jnt_qposadr[i]] = size
            if model.jnt_limited[i]:
                low[model.jnt_qposadr[i]], high[model.jnt_qposadr[i]] = model.jnt_range[i]
    return noise, low, high
