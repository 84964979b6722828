"""The one order of a step of ejax's own tasks, and all that follows from the names of a task's numbers.

A task is a frozen dataclass whose fields are its config; its state is a dataclass of its own, arrays only.
"""

from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin, get_type_hints

import gymnasium
import jax.numpy as jnp
import numpy as np

from ejax.envs.description import WHOLE, EnvDescription, Feature
from ejax.numerics.finite import all_finite
from ejax.types import Array, Key, PyTree, Timestep


class Step(NamedTuple):
    """One control step, as a task's rewards see it."""

    before: Any
    """The state that it began at."""
    action: Array
    state: Any
    obs: PyTree
    """The observation of ``state``. Use it for what it holds: computed again, the last bits of it may be others."""
    success: Array
    """bool"""


class StateTask:
    """A task on a state of its own, with ``episode_step``: control steps done, int32.

    A step: ``limited`` action → ``advance`` → of the state then ``succeeds``, ``rewards``, ``leaves``, ``observe``.
    Terminated: success. Truncated: after ``max_episode_steps``, where the state ``leaves`` the task, or when something
    in it is not finite, which is no success either. The reward is the sum of its terms, in their order.
    """

    observed: ClassVar[tuple[Feature, ...]] = ()
    """The numbers of an observation that is one vector."""
    acted: ClassVar[tuple[Feature, ...]] = ()
    """The numbers of an action."""
    text: ClassVar[Mapping[str, int]] = MappingProxyType({})
    """Part of the observation that is text -> its bytes, zeros after it included."""
    clips_actions: ClassVar[bool] = False
    """Actions are clipped to ±1."""
    action_bound: ClassVar[str] = ""
    """The field that actions are within ± of. Empty: they are within ±1."""
    positive: ClassVar[tuple[str, ...]] = ()
    """Fields that must be above 0."""
    episode_length: int
    success_threshold: float
    """Two fields that a task need not have: see ``max_episode_steps``, ``succeeds``."""

    def __post_init__(self) -> None:
        kind = type(self).__name__
        for name in self.positive:
            if not getattr(self, name) > 0:
                raise ValueError(f"{kind}: {name} must be > 0, got {getattr(self, name)}")
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal and getattr(self, name) not in (allowed := get_args(hint)):
                listed = " or ".join(filter(None, [", ".join(map(repr, allowed[:-1])), repr(allowed[-1])]))
                raise ValueError(f"{kind}: {name} must be {listed}, got {getattr(self, name)!r}")

    def start(self, key: Key) -> Any:
        """The state that an episode starts at."""
        raise NotImplementedError

    def observe(self, state: Any) -> PyTree:
        raise NotImplementedError

    def advance(self, state: Any, action: Array) -> Any:
        """The state one control step later."""
        raise NotImplementedError

    def succeeds(self, state: Any) -> Array:
        """bool: the task is done. Default: its distance is below ``success_threshold``."""
        return self.distance(state) < self.success_threshold

    def rewards(self, step: Step) -> dict[str, Array]:
        """The terms of the reward, weighted. Default: none, of a task that gives its ``reward`` whole."""
        del step
        return {}

    def reward(self, step: Step) -> Array | None:
        """The reward, where it is not the sum of its terms. None: it is."""
        del step
        return None

    def distance(self, state: Any) -> Array:
        """How far the task is from done, in its own unit."""
        raise NotImplementedError

    def metrics(self, state: Any) -> dict[str, Array]:
        """Scalars by name, logged as ``metrics/<name>``. Default: the distance."""
        return {"distance_to_goal": self.distance(state)}

    def leaves(self, state: Any) -> Array | bool:
        """bool: the episode is over without a success. Default: never."""
        del state
        return False

    def limited(self, action: Array) -> Array:
        """The action that is done."""
        return jnp.clip(action, -1.0, 1.0) if self.clips_actions else action

    @property
    def max_episode_steps(self) -> int:
        """Control steps; of a task whose config names it ``episode_length``."""
        return self.episode_length

    @property
    def parts(self) -> Mapping[str, tuple[Feature, ...]]:
        """The numbers of each part of an observation."""
        return {WHOLE: self.observed}

    @property
    def description(self) -> EnvDescription:
        fields = asdict(self)  # type: ignore[call-overload]  # every task is a dataclass
        return EnvDescription(
            observation=self.parts,
            text=tuple(self.text),
            action=self.acted,
            clips_actions=self.clips_actions,
            parameters=fields,
        )

    @property
    def observation_space(self) -> gymnasium.Space[Any]:
        boxes: dict[str, gymnasium.Space[Any]] = {
            path: gymnasium.spaces.Box(-np.inf, np.inf, (len(each),), np.float32) for path, each in self.parts.items()
        }
        boxes |= {path: gymnasium.spaces.Box(0, 255, (length,), np.uint8) for path, length in self.text.items()}
        return boxes[WHOLE] if WHOLE in boxes else gymnasium.spaces.Dict(boxes)

    @property
    def action_space(self) -> gymnasium.spaces.Box:
        bound = getattr(self, self.action_bound) if self.action_bound else 1.0
        return gymnasium.spaces.Box(-bound, bound, (len(self.acted),), np.float32)

    def reset(self, key: Key) -> tuple[Any, PyTree]:
        state = self.start(key)
        return state, self.observe(state)

    def step(self, state: Any, action: Array, key: Key) -> tuple[Any, Timestep]:
        del key  # nothing is random but the start
        if action.shape != (shape := (len(self.acted),)):
            raise ValueError(f"{type(self).__name__}.step takes an action of shape {shape}, got {action.shape}")
        action = self.limited(action)
        after = self.advance(state, action)
        return after, self.timestep(state, action, after)

    def timestep(self, before: Any, action: Array, state: Any) -> Timestep:
        """The answer to an action that led from ``before`` to ``state``."""
        obs = self.observe(state)
        finite = all_finite(state)
        success = self.succeeds(state) & finite
        step = Step(before, action, state, obs, success)
        rewards, reward = self.rewards(step), self.reward(step)
        return Timestep(
            obs=obs,
            reward=sum(rewards.values(), jnp.zeros(())) if reward is None else reward,
            terminated=success,
            truncated=(state.episode_step >= self.max_episode_steps) | self.leaves(state) | ~finite,
            info={"success": success, "metrics": self.metrics(state), "rewards": rewards},
        )


def clip_with_gradient(action: Array) -> Array:
    """Clip to ±1. Unlike ``jnp.clip`` it does not halve the gradient on the bounds, where clipped actions lie."""
    return jnp.where(jnp.abs(action) > 1.0, jnp.sign(action), action)
