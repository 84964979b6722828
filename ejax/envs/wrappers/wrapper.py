"""The base of environments around another one."""

from operator import attrgetter
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from ejax.envs.description import EnvDescription, caption_of, describe
from ejax.types import Array, CameraView, Key, PyTree, persist

if TYPE_CHECKING:  # it imports MuJoCo, which takes a second
    from ejax.envs.mujoco.drawing import Appearance


class EnvWrapper:
    """A pure environment around ``inner``. A wrapper gives ``inner`` and ``step``, and overrides what it changes.

    One with a state of its own has ``inner_state``, and carries the inner state over itself.
    """

    @property
    def inner(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} wraps nothing: give it inner")

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


def innermost(env: Any) -> Any:
    """Return the environment inside all wrappers."""
    while isinstance(env, EnvWrapper):
        env = env.inner
    return env
