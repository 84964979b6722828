"""Refusals of what a task's methods and its model may not be."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import mujoco

from ejax.envs.task.features import actuator_name
from ejax.schema.registry import did_you_mean
from ejax.types import Array


def check_actuators(kind: str, model: mujoco.MjModel, num_actions: int, own_control: bool) -> None:
    """Raises ValueError: actuators that actions cannot be scaled to. ``num_actions`` 0: they are the actuators'."""
    if not model.nu:
        raise ValueError(f"{kind}: the model has no actuators; give its MJCF an <actuator> section")
    if own_control:
        return
    if num_actions not in (0, model.nu):
        raise ValueError(
            f"{kind}: {num_actions} actions for {model.nu} actuators; give control(self, world, action), which "
            "makes of the one what the other take"
        )
    for i in range(model.nu):
        if not model.actuator_ctrllimited[i]:
            raise ValueError(
                f"{kind}: actuator {actuator_name(model, i)!r} has no ctrlrange, which actions of ±1 are scaled to; "
                "write one into the MJCF, or give control(self, world, action)"
            )


def as_truth(what: str, given: Any) -> Array:
    """The answer of a term that ends episodes. Raises ValueError: it is neither true nor false."""
    x = jnp.asarray(given)
    if x.shape or x.dtype != bool:
        raise ValueError(
            f"{what} must be true or false, got {x.dtype}{list(x.shape)}; compare numbers, "
            "and make one of several by .any() or .all()"
        )
    return x


def check_terms(kind: str, terms: Mapping[str, Array], weights: Mapping[str, float]) -> None:
    """Raises ValueError: no terms, one that is no scalar, or a weight of none."""
    if not terms:
        raise ValueError(f"{kind}.rewards gave no terms")
    if odd := [f"{name} {x.shape}" for name, x in terms.items() if x.shape]:
        raise ValueError(f"{kind}.rewards: every term must be a scalar, got {', '.join(odd)}")
    for name in weights:
        if name not in terms:
            raise ValueError(
                f"{kind}: weights names no term '{name}'; there is {', '.join(terms)}{did_you_mean(name, terms)}"
            )
