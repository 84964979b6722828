"""Changes of a row's physics: parameters of the model, written from the MJCF's values, and pushes."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax.numpy as jnp
import mujoco
import numpy as np
from numpy.typing import NDArray

from ejax.envs.mujoco.engine import PhysicsState
from ejax.envs.mujoco.parameters import parameter
from ejax.schema.problems import KeyReport
from ejax.types import Array, Key

NewEntries: TypeAlias = Callable[[Key, Array | None], dict[str, Array]]
"""Parameter -> its new entries, from the key and the level of a curriculum."""


@dataclass(frozen=True)
class Change:
    """One event's effect on a row's physics: ``apply(physics, key, level)``; ``level`` None: no curriculum."""

    apply: Callable[[PhysicsState, Key, Array | None], PhysicsState]
    writes: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    """Parameter -> its entries that are written. None of a push, which changes velocities."""


def write_parameters(model: mujoco.MjModel, values: NewEntries, **rows: Any) -> Change:
    """Change parameters. ``rows``: parameter -> the index of its entries that ``values`` gives."""
    # what is written is known without a draw: overlaps are refused, and startup's entries kept, by these
    masks = {name: np.zeros(parameter(model, name).shape, bool) for name in rows}
    for name, row in rows.items():
        masks[name][row] = True

    def apply(physics: PhysicsState, key: Key, level: Array | None) -> PhysicsState:
        drawn = values(key, level)
        written = {name: physics.parameters[name].at[rows[name]].set(drawn[name]) for name in rows}
        return replace(physics, parameters={**physics.parameters, **written})

    return Change(apply, masks)


def refuse_overlaps(changes: Iterable[tuple[str, Change]], report: KeyReport) -> None:
    """Refuse two events that write the same: each starts from the MJCF's value, so the later would undo the other."""
    for (key, one), (other_key, other) in itertools.combinations(changes, 2):
        for name in sorted(one.writes.keys() & other.writes.keys()):
            if (one.writes[name] & other.writes[name]).any():
                report.refuse(other_key, f"writes the same {name} as {key}; keep one of them")


def base(model: mujoco.MjModel, changes: Sequence[Change]) -> dict[str, NDArray[np.float32]]:
    """Collect the MJCF's value of every parameter that one of the changes writes."""
    names = sorted({name for change in changes for name in change.writes})
    return {name: parameter(model, name).astype(np.float32) for name in names}  # float32, as a state's arrays are


def keep_written(change: Change, ended: PhysicsState, started: PhysicsState) -> PhysicsState:
    """Return a new episode's state with what the change wrote in an earlier one."""
    kept = {
        name: jnp.where(mask, ended.parameters[name], started.parameters[name]) for name, mask in change.writes.items()
    }
    return replace(started, parameters={**started.parameters, **kept})
