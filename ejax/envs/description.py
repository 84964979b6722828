"""An environment's description of itself: names and units of its numbers, and how often a decision is made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import gymnasium

from ejax.types import Env, HostEnv, PyTree, RenderableEnv

WHOLE = "obs"
"""The path of an observation that is one array."""


class Feature(NamedTuple):
    """One number of an observation or an action."""

    name: str
    unit: str
    """SI; ``1``: none."""


@dataclass(frozen=True, kw_only=True)
class EnvDescription:
    """The names of an environment's numbers.

    Positions are in the frame of the robot's base, unless a name has another.
    """

    observation: Mapping[str, tuple[Feature, ...]] = field(default_factory=dict)
    """Dotted path of each array -> its numbers; ``WHOLE`` where the observation is one array. Empty: not known."""
    text: tuple[str, ...] = ()
    """Paths of the arrays that are text: its UTF-8 bytes, and zeros after it."""
    instructions: tuple[str, ...] = ()
    """Texts that those arrays may hold in training, sorted: a policy's vocabulary."""
    action: tuple[Feature, ...] | None = None
    """The numbers of one decision. None: not known."""
    control_period: float | None = None
    """s, between two decisions. None: not known, or the environment has no time."""
    actions_per_decision: int = 1
    clips_actions: bool = False
    """Actions beyond the bounds of the action space do what clipped ones do."""
    parameters: Mapping[str, object] | None = None
    """The arguments that the environment was made with, defaults included."""
    notes: tuple[str, ...] = ()
    """Lines that a run begins with, such as a setting of the model that the environment does without."""


@runtime_checkable
class DescribedEnv(Protocol):
    """An environment that describes itself."""

    @property
    def description(self) -> EnvDescription: ...


def describe(env: Env | HostEnv) -> EnvDescription:
    """Return the environment's own description, or as much as can be seen from outside."""
    if isinstance(env, DescribedEnv):
        return env.description
    return EnvDescription(
        control_period=env.control_period if isinstance(env, RenderableEnv) else None,
        clips_actions=bool(getattr(env, "clip_actions", False)) and isinstance(env.action_space, gymnasium.spaces.Box),
    )


def caption_of(env: object, state: PyTree) -> str:
    """Text for a picture of this state, such as an episode's instruction: ``env.caption(state)``; empty without one."""
    caption: Callable[[PyTree], str] | None = getattr(env, "caption", None)
    return "" if caption is None else caption(state)


def features(*groups: tuple[str, str, str]) -> tuple[Feature, ...]:
    """One feature for each letter of ``axes``: ``features(("position", "xy", "m"))`` is position x and position y."""
    return tuple(Feature(f"{name} {axis}", unit) for name, axes, unit in groups for axis in axes)
