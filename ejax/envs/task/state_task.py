"""Tasks on a state of their own: spaces, description and step follow from the names of a task's numbers and its hooks.

A task is a frozen dataclass whose fields are its config; its state is a dataclass of its own, arrays only.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import gymnasium
import jax.numpy as jnp
import numpy as np

from ejax.envs.description import WHOLE, EnvDescription, Feature
from ejax.envs.task.step import Outcome, StepParts, step_terms
from ejax.types import Array, Key, PyTree, Timestep


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A state and what led there: the ``World`` of a task whose own code knows where its numbers are."""

    state: Any
    action: Any = None
    """As it was done; None at the step's beginning."""
    before: Any = None
    """The snapshot before the step; None at its beginning."""
    obs: PyTree = None
    """The observation of ``state``. Use it for what it holds: computed again, the last bits of it may be others."""
    info: Mapping[str, Array] = field(default_factory=dict)
    """``success`` and ``fail`` of this step, where rewards are computed."""


class StateTask:
    """A task on a state of its own, with ``episode_step``: control steps done, int32.

    A step, in the order of ``ejax.envs.task.step``: ``limited`` action → ``advance`` → ``observe`` → ``succeeds``,
    ``leaves``, ``metrics`` → ``rewards``. Terminated: success. Truncated: after ``max_episode_steps``, where the state
    ``leaves`` the task, or when something in it is not finite, which is no success either.
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
        # a config gives strings: nothing else checks what a Literal allows
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
        """The state one control step later; ``episode_step`` is counted by ``step``."""
        raise NotImplementedError

    def succeeds(self, state: Any) -> Array:
        """bool: the task is done. Default: its distance is below ``success_threshold``."""
        return self.distance(state) < self.success_threshold

    def rewards(self, snapshot: Snapshot) -> dict[str, Array]:
        """The terms of the reward, weighted. Default: none, for a task that gives its ``reward`` whole."""
        del snapshot
        return {}

    def reward(self, snapshot: Snapshot, rewards: dict[str, Array]) -> Array:
        """The reward. Default: the sum of its terms."""
        del snapshot
        return sum(rewards.values(), jnp.zeros(()))

    def distance(self, state: Any) -> Array:
        """The distance from done, in the task's own unit."""
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
        parts = StepParts(
            world=lambda state: Snapshot(state=state),
            act=self._act,
            follow=lambda snapshot, before, key: snapshot,  # nothing is random but the start
            observe=lambda snapshot, key: self.observe(snapshot.state),
            outcome=self._outcome,
            reward=self._reward,
            max_episode_steps=self.max_episode_steps,
            action_shape=(len(self.acted),),
        )
        return step_terms(type(self).__name__, parts, state, action, key)

    def _act(self, snapshot: Snapshot, action: Array) -> Snapshot:
        # rewards see the action that was done, not the one that was given
        action = self.limited(action)
        return Snapshot(state=self.advance(snapshot.state, action), action=action)

    def _outcome(self, snapshot: Snapshot) -> Outcome:
        state = snapshot.state
        return Outcome(
            success=self.succeeds(state),
            fail=jnp.zeros((), bool),
            truncated=jnp.asarray(self.leaves(state)),
            metrics=self.metrics(state),
        )

    def _reward(self, snapshot: Snapshot, before: Snapshot, outcome: Outcome) -> tuple[Array, dict[str, Array]]:
        del before, outcome  # the snapshot has both
        rewards = self.rewards(snapshot)
        return self.reward(snapshot, rewards), rewards


def clip_with_gradient(action: Array) -> Array:
    """Clip to ±1. Unlike ``jnp.clip`` it does not halve the gradient on the bounds, where clipped actions lie."""
    return jnp.where(jnp.abs(action) > 1.0, jnp.sign(action), action)
