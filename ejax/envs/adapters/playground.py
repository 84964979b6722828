"""MuJoCo Playground environments: ``playground:CartpoleBalance``. They have Brax's interface."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from ejax.envs.adapters.brax import BraxEnv, adapt
from ejax.envs.adapters.library import check_name, import_library


def make(name: str, *, max_episode_steps: int | None = None, impl: str = "jax", **overrides: Any) -> BraxEnv:
    """A MuJoCo Playground environment.

    Args:
        max_episode_steps: time limit. None: the environment's ``episode_length``, in steps of its ``action_repeat``.
        impl: MJX implementation. ``jax`` runs on every device and is differentiable. Playground's default, ``warp``, is
            refused: its contact arrays belong to the whole batch, so that rows cannot be reset alone.
        overrides: entries of the environment's config, nested or dotted: ``{"ctrl_dt": 0.02}``.

    Raises:
        ModuleNotFoundError: Playground is not installed.
        FileNotFoundError: the environment needs robot models that are not on this machine.
        ValueError: an unknown name, an entry that the config does not have or in another type, ``impl`` of ``warp``.
    """
    if impl == "warp":
        raise ValueError("impl 'warp' does not let single environments of a batch be reset; use 'jax'")
    library = import_library("mujoco_playground", "playground")
    registry = library.registry
    check_name("playground", name, registry.ALL_ENVS)
    if name not in library.dm_control_suite.ALL_ENVS:
        _check_models(name)
    config = registry.get_default_config(name)
    options = dict(_flatten(overrides)) | ({"impl": impl} if "impl" in config else {})
    allowed = dict(_flatten(config.to_dict()))
    if unknown := sorted(set(options) - set(allowed)):
        raise ValueError(f"playground:{name} has no config entry {', '.join(unknown)}; it has {', '.join(allowed)}")
    config.update_from_flattened_dict(options)
    with jax.ensure_compile_time_eval():  # constants, even if called while a program is traced
        env = registry.load(name, config=config)
    repeat = config.get("action_repeat", 1)
    if max_episode_steps is None:
        max_episode_steps = math.ceil(config.episode_length / repeat)
    return adapt(
        f"playground:{name}",
        env,
        max_episode_steps=max_episode_steps,
        action_repeat=repeat,
        options=options,
    )


def _check_models(name: str) -> None:
    """Playground would call ``git clone`` here, which without a network fails late, or waits."""
    place = import_library("mujoco_playground._src.mjx_env", "playground").MENAGERIE_PATH
    if not place.exists():
        raise FileNotFoundError(
            f"playground:{name} needs the robot models of mujoco_menagerie in {place}. ejax downloads nothing: with a "
            "network, fetch them once by python -c 'from mujoco_playground._src import mjx_env; "
            "mjx_env.ensure_menagerie_exists()'. Environments of the DM Control Suite need none"
        )


def _flatten(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in nested.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
