"""The bases of environments around another one: ``EnvWrapper``, and ``ObservationWrapper`` for another observation."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import jax
from flax import struct
from numpy.typing import NDArray

from ejax.envs.description import EnvDescription, caption_of, describe
from ejax.schema.paths import named
from ejax.types import Array, CameraView, Key, PersistentEnv, PyTree, Timestep, persist

if TYPE_CHECKING:  # it imports MuJoCo, which takes a second
    from ejax.envs.mujoco.drawing import Appearance


class EnvWrapper:
    """A pure environment around ``env``. A wrapper overrides what it changes: most often ``step``.

    One with another state has ``inner_state``, and carries the inner state over itself (``persist``). For another
    observation derive from ``ObservationWrapper``. A config names wrappers in ``env.wrappers``; their first argument
    is the environment inside.
    """

    env: Any
    above_events: ClassVar[bool] = False
    """Events of ``trainer.events`` happen to the environment inside this wrapper, not to what it makes of it."""

    @property
    def inner(self) -> Any:
        return self.env

    @property
    def carries_over(self) -> bool:
        """Return whether anything outlasts an episode, so that ``persist`` has something to do."""
        return type(self).persist is not EnvWrapper.persist or carries_over(self.inner)

    def inner_state(self, state: PyTree) -> PyTree:
        """Return the inner environment's part of the state; by default all of it."""
        return state

    observation_space = property(attrgetter("inner.observation_space"))
    action_space = property(attrgetter("inner.action_space"))
    max_episode_steps = property(attrgetter("inner.max_episode_steps"))
    control_period = property(attrgetter("inner.control_period"))
    """Duration of one step, s; of an environment that can be drawn."""

    @property
    def long_reset(self) -> bool:
        return getattr(self.inner, "long_reset", False)

    @property
    def description(self) -> EnvDescription:
        return describe(self.inner)

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        return self.inner.reset(key)

    def persist(self, ended: PyTree, started: PyTree, obs: PyTree) -> tuple[PyTree, PyTree]:
        if not carries_over(self.inner):
            return started, obs
        # the environment inside would take this wrapper's observation and state for its own
        forgotten = type(self).persist is EnvWrapper.persist and type(self).reset is not EnvWrapper.reset
        if forgotten:
            text = "overrides reset, and the environment inside keeps something from episode to episode"
            raise TypeError(f"{type(self).__name__} {text}: override persist too, or derive from ObservationWrapper")
        return persist(self.inner, ended, started, obs)

    def render(
        self, state: PyTree, width: int = 640, height: int = 480, camera: CameraView | None = None
    ) -> NDArray[Any]:
        return self.inner.render(self.inner_state(state), width, height, camera)

    def appearance(self, state: PyTree) -> "Appearance":
        return self.inner.appearance(self.inner_state(state))

    def tool_position(self, state: PyTree) -> Array:
        return self.inner.tool_position(self.inner_state(state))

    def caption(self, state: PyTree) -> str:
        """Return a video's text, empty where the inner environment has none."""
        return caption_of(self.inner, self.inner_state(state))

    def ending(self, state: PyTree) -> str:
        return self.inner.ending(self.inner_state(state))


@struct.dataclass(kw_only=True)
class ObservedState:
    """The state inside an ``ObservationWrapper``, with the observation that ``persist`` inside needs."""

    env: PyTree
    obs: PyTree


@dataclass(frozen=True)
class ObservationWrapper(EnvWrapper):
    """An environment with another observation: a subclass gives ``observe``, and ``observation_space`` if it changes.

    ::

        @dataclass(frozen=True)
        class Scaled(ObservationWrapper):
            factor: float = 0.1

            def observe(self, state, obs):
                return self.factor * obs

    ``original``: the observation inside, of a wrapper whose observation still holds it; others keep it in their state
    if something outlasts an episode, since ``persist`` inside needs it.
    """

    env: Any

    def observe(self, state: PyTree, obs: PyTree) -> PyTree:
        """Return the observation of a state of ``env``, of which ``obs`` is its own. Pure."""
        raise NotImplementedError(f"{type(self).__name__} observes nothing: define observe(state, obs)")

    original: ClassVar[Any] = None

    @property
    def carries_over(self) -> bool:
        return carries_over(self.inner)

    @property
    def description(self) -> EnvDescription:
        """Return the inner one's, without the names of numbers, which may be others here."""
        inner, there = describe(self.inner), named(self.observation_space)
        return replace(inner, observation={}, text=tuple(path for path in inner.text if path in there))

    def inner_state(self, state: PyTree) -> PyTree:
        return state.env if self._keeps_obs else state

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        return self._observed(*self.inner.reset(key))

    def persist(self, ended: PyTree, started: PyTree, obs: PyTree) -> tuple[PyTree, PyTree]:
        if not self.carries_over:
            return started, obs
        true_obs = started.obs if self._keeps_obs else self.original(obs)
        inner = persist(self.inner, self.inner_state(ended), self.inner_state(started), true_obs)
        return self._observed(*inner)

    def step(self, state: PyTree, action: Array, key: Key) -> tuple[PyTree, Timestep]:
        inner, timestep = self.inner.step(self.inner_state(state), action, key)
        state, obs = self._observed(inner, timestep.obs)
        return state, replace(timestep, obs=obs)

    @property
    def _keeps_obs(self) -> bool:
        return self.carries_over and self.original is None

    def _observed(self, inner: PyTree, obs: PyTree) -> tuple[PyTree, PyTree]:
        return ObservedState(env=inner, obs=obs) if self._keeps_obs else inner, self.observe(inner, obs)


def carries_over(env: Any) -> bool:
    """Return whether anything outlasts an episode of an environment."""
    # a task says so itself where it depends on its config
    return bool(getattr(env, "carries_over", isinstance(env, PersistentEnv)))


def innermost(env: Any) -> Any:
    """Return the environment inside all wrappers."""
    while isinstance(env, EnvWrapper):
        env = env.inner
    return env


def parts_of(state: PyTree, kind: type) -> list[Any]:
    """List the parts of a state that are of ``kind``, however deep wrappers have put them."""
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kind))
    return [each for each in leaves if isinstance(each, kind)]


def replace_parts(state: PyTree, kind: type, change: Callable[[Any], Any]) -> PyTree:
    return jax.tree.map(lambda x: change(x) if isinstance(x, kind) else x, state, is_leaf=lambda x: isinstance(x, kind))
