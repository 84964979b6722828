"""An environment whose observation has a picture of itself, drawn on the host inside the jitted program."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium
import jax
import numpy as np
from flax.core import FrozenDict
from numpy.typing import NDArray

from ejax.envs.action_chunk import ActionChunk
from ejax.envs.description import WHOLE, EnvDescription, describe
from ejax.frozen import freeze, thaw
from ejax.registry import resolve
from ejax.types import Array, CameraView, Env, Key, PyTree, RenderableEnv, Timestep


@dataclass(frozen=True)
class RenderedEnv:
    """``{"image": uint8 [height, width, 3], "state": observation}`` of a pure environment that can be drawn.

    A picture depends on the state alone, so the callback is pure. All pictures are drawn by one thread, to which the
    OpenGL context belongs. With ``action_chunk`` there is one picture for each decision, not for each step.

    Args:
        env: its name.
        env_cfg: its arguments.
        camera_eye, camera_target: m. None: the environment's own camera.
        camera_fovy: degrees, of a camera that is placed.
        effects: shadows and smooth edges, of a camera that is placed; without them drawing is ten times faster.

    Raises:
        ValueError: an environment that cannot be drawn, whose observation is not a vector, or that was not
            trusted (``ejax.trust``).
    """

    env: str
    env_cfg: Any = field(default_factory=FrozenDict)
    action_chunk: int = 1
    width: int = 64
    height: int = 64
    camera_eye: tuple[float, float, float] | None = None
    camera_target: tuple[float, float, float] = (0.0, 0.0, 0.0)
    camera_fovy: float = 45.0
    effects: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "env_cfg", freeze(self.env_cfg))
        for name in ("camera_eye", "camera_target"):
            place = getattr(self, name)
            object.__setattr__(self, name, None if place is None else tuple(place))
        if self.width < 1 or self.height < 1:
            raise ValueError(f"RenderedEnv: width and height must be >= 1, got {self.width} and {self.height}")
        if not isinstance(self.drawn, RenderableEnv):
            raise ValueError(f"RenderedEnv: {self.env} cannot be drawn: it has no render(state, width=…, height=…)")
        if not isinstance(self.drawn.observation_space, gymnasium.spaces.Box):
            raise ValueError(f"RenderedEnv: the observation of {self.env} is not a vector")

    @property
    def observation_space(self) -> gymnasium.spaces.Dict:
        image = gymnasium.spaces.Box(0, 255, (self.height, self.width, 3), np.uint8)
        return gymnasium.spaces.Dict({"image": image, "state": self.drawn.observation_space})

    @property
    def action_space(self) -> gymnasium.Space[Any]:
        return self._stepped.action_space

    @property
    def max_episode_steps(self) -> int:
        return self._stepped.max_episode_steps

    @property
    def control_period(self) -> float:
        """Duration of one decision, s."""
        return self.drawn.control_period * self.action_chunk

    @property
    def description(self) -> EnvDescription:
        """The environment's, whose one array is ``state`` here."""
        inner = describe(self._stepped)
        return replace(
            inner,
            observation={"state" if path == WHOLE else path: each for path, each in inner.observation.items()},
        )

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        state, obs = self._stepped.reset(key)
        return state, self._observe(state, obs)

    def step(self, state: PyTree, action: Array, key: Key) -> tuple[PyTree, Timestep]:
        state, timestep = self._stepped.step(state, action, key)
        return state, replace(timestep, obs=self._observe(state, timestep.obs))

    def render(
        self, state: PyTree, width: int = 640, height: int = 480, camera: CameraView | None = None
    ) -> NDArray[np.uint8]:
        """Same as the environment's own."""
        return self.drawn.render(state, width, height, camera)

    @functools.cached_property
    def drawn(self) -> Any:
        """The environment inside."""
        return resolve("env", self.env)(**thaw(self.env_cfg))

    @functools.cached_property
    def _stepped(self) -> Env:
        return self.drawn if self.action_chunk == 1 else ActionChunk(self.drawn, self.action_chunk)

    def _observe(self, state: PyTree, obs: Array) -> dict[str, Array]:
        rank = jax.tree.leaves(state)[0].ndim  # of one environment: vmap is not seen here
        draw = functools.partial(self._draw, rank=rank)
        shape = jax.ShapeDtypeStruct((self.height, self.width, 3), np.uint8)
        return {"image": jax.pure_callback(draw, shape, state, vmap_method="broadcast_all"), "state": obs}

    def _draw(self, state: PyTree, *, rank: int) -> NDArray[np.uint8]:
        """Pictures of states with any number of batch axes."""
        state = jax.tree.map(np.asarray, state)
        first = jax.tree.leaves(state)[0]
        batch = first.shape[: first.ndim - rank]
        camera = None
        if self.camera_eye is not None:
            camera = CameraView(self.camera_eye, self.camera_target, self.camera_fovy, self.effects)

        def draw_all() -> NDArray[np.uint8]:
            pictures = np.empty((*batch, self.height, self.width, 3), np.uint8)
            for index in np.ndindex(*batch):
                one = jax.tree.map(lambda x, index=index: x[index], state)
                pictures[index] = self.drawn.render(one, self.width, self.height, camera)
            return pictures

        return _in_drawing_thread(draw_all)


def _in_drawing_thread(draw: Callable[[], NDArray[np.uint8]]) -> NDArray[np.uint8]:
    return _drawing_thread().submit(draw).result()


@functools.cache
def _drawing_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "ejax-draw")
