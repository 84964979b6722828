"""Fields of demonstrations, by path, as the observations and actions of an environment."""

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import gymnasium
import numpy as np

from ejax.algorithms.demonstrations import DemonstrationConfig
from ejax.config import ConfigError, Problem
from ejax.config.data import DataConfig
from ejax.data.task import FRAME_FIELDS, LOSS_MASK, flatten
from ejax.numerics.text import as_bytes
from ejax.schema.paths import find
from ejax.schema.registry import import_entry
from ejax.types import PyTree

Fields = Mapping[str, Any]
"""Arrays [R, C, ...] of R windows, nested as their paths are."""
_READERS = {
    "windows": "ejax.data.lerobot.recorded:RecordedEpisodes",
    "episodes": "ejax.data.lerobot.read:EpisodeReader",
}
"""They need the extra ``data``."""


def open_kept(kind: str, folder: str, section: str, **options: Any) -> Any:
    """Open a folder of kept episodes by the entry ``kind`` of ``_READERS``. ConfigError: it cannot be read."""
    try:
        return import_entry(_READERS, kind)(folder, **options)
    except ImportError as error:
        text = f"needs pyarrow: pip install -e '.[data]' in ejax's folder ({error})"
        raise ConfigError([Problem(f"{section}.folder", text)]) from error
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError([Problem(f"{section}.folder", str(error))]) from error


def read_observation(fields: Fields, expected: PyTree, paths: DataConfig | DemonstrationConfig, section: str) -> PyTree:
    """Read the parts that an environment's observation has, leaves [R, C, ...].

    Args:
        expected: observations, leaves [1, ...].
        section: the section of the config that has ``paths``.

    Raises:
        ConfigError: fields that are not there, or of another shape.
    """
    key = f"{section}.obs_field"
    if not paths.obs_parts:
        return _like(expected, read_field(fields, paths.obs_field, key), paths.obs_field, key)
    if not isinstance(expected, Mapping) or paths.obs_parts.keys() - expected.keys():
        text = f"names {', '.join(paths.obs_parts)}, but the environment's observation has {_parts(expected)}"
        raise ConfigError([Problem(f"{section}.obs_parts", text)])
    places = {name: str(paths.obs_parts.get(name, f"{paths.obs_field}/{name}")) for name in expected}
    found = {name: read_field(fields, place, f"{section}.obs_parts.{name}") for name, place in places.items()}
    return {
        name: _like(expected[name], _in_frames(found[name], fields, expected[name]), place, key)
        for name, place in places.items()
    }


def _in_frames(found: Any, fields: Fields, expected: PyTree) -> Any:
    """Repeat an episode's text, such as LeRobot's task (``episode/instruction``), as bytes in its frames."""
    if isinstance(found, Mapping) or found.dtype.kind != "U" or isinstance(expected, Mapping):
        return found
    rows = np.stack([as_bytes(str(text), expected.shape[-1]) for text in found])
    return np.repeat(rows[:, None], fields["valid"].shape[1], axis=1)


def read_array(fields: Fields, path: str, key: str, remedy: str = "") -> Any:
    """Find the one array at ``path``; ConfigError: ``key`` names none, with a remedy where there is nothing."""
    found = read_field(fields, path, key, remedy)
    if isinstance(found, Mapping):
        text = f"'{path}' has the fields {', '.join(flatten(found))}; name one of them"
        raise ConfigError([Problem(key, text)])
    return found


def read_field(fields: Fields, path: str, key: str, remedy: str = "") -> Any:
    """Find what is at ``path``: an array, or a mapping of parts; ConfigError: ``key`` names nothing."""
    try:
        return find(fields, path, "/")
    except KeyError:
        own = {name: x for name, x in fields.items() if name not in ("episode", LOSS_MASK, *FRAME_FIELDS)}
        text = f"the demonstrations have no field '{path}'; there is {', '.join(flatten(own))}"
        raise ConfigError([Problem(key, text + remedy)]) from None


def check_bounds(action: Any, space: Any, key: str, slack: float = 1e-3) -> None:
    """Raise ConfigError for actions [..., A] beyond a Box, or K of them together, by more than ``slack`` ranges."""
    low, high = (np.ravel(bound)[: action.shape[-1]] for bound in (space.low, space.high))
    beyond = slack * (high - low)
    if ((action < low - beyond) | (action > high + beyond)).any():
        text = f"the demonstrated actions are of {action.min():.4g} to {action.max():.4g}, beyond the bounds of the"
        text = f"{text} environment's, {low.min():.4g} to {high.max():.4g}; record them in its units"
        raise ConfigError([Problem(key, text)])


def real_numbers(array: Any, valid: Any = None) -> Any:
    """Convert real numbers to float32; images and choices stay as they are."""
    return array.astype("float32") if array.dtype.kind == "f" else array


def policy_numbers(space: Any, action_chunk: int, actions: Any, valid: Any = True) -> Any:
    """Return the numbers by which a policy acts so [R, C, ...]: choices from 0 on, a Box's as float32.

    ``space`` is of one decision, which has ``action_chunk`` actions; ``valid`` [R, C]: frames that are not padding.
    ConfigError: actions of another width, beyond the bounds, or a choice that the environment does not have.
    """
    if isinstance(space, gymnasium.spaces.Box):
        width = math.prod(space.shape)
        if actions.shape[2:] != (width // action_chunk,):
            text = f"the demonstrated actions are {list(actions.shape[2:])}, but the policy decides on {width} numbers"
            remedy = f"which are {action_chunk} actions (env.cfg.action_chunk)"
            raise ConfigError([Problem("data.action_field", f"{text}, {remedy}")])
        if actions.dtype.kind in "fiu":
            # other units, not what a policy without bounds had recorded before it was clipped
            check_bounds(actions[valid], space, "data.action_field", slack=1.0)
        return actions.astype("float32") if actions.dtype.kind in "fiu" else actions
    counts = space.n if isinstance(space, gymnasium.spaces.Discrete) else space.nvec
    if actions.shape[2:] != counts.shape:
        return actions  # the policy itself refuses it
    numbers = actions - space.start
    if ((numbers < 0) | (numbers >= counts))[valid].any():
        text = f"the demonstrated actions are of {actions.min()} to {actions.max()}; the environment takes {space}"
        raise ConfigError([Problem("data.action_field", text)])
    return numbers.reshape(*numbers.shape[:2], *([] if counts.ndim == 0 else [-1]))


def _like(expected: PyTree, given: Any, path: str, key: str) -> PyTree:
    """Take the parts of ``given`` that an observation has, their shapes checked."""
    nested = isinstance(expected, Mapping)
    if nested and isinstance(given, Mapping):
        with suppress(KeyError):
            return {name: _like(x, find(given, str(name), "/"), f"{path}/{name}", key) for name, x in expected.items()}
    if nested or isinstance(given, Mapping):
        text = f"'{path}' has {_parts(given)}; the environment's observation has {_parts(expected)}"
        raise ConfigError([Problem(key, f"{text}: name what fits")])
    if given.shape[2:] != expected.shape[1:]:
        text = f"'{path}' is {list(given.shape[2:])}, the environment's observation {list(expected.shape[1:])}"
        raise ConfigError([Problem(key, text)])
    return real_numbers(given)


def _parts(tree: Any) -> str:
    return f"the parts {', '.join(sorted(tree))}" if isinstance(tree, Mapping) else "no parts"
