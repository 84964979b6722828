"""An environment whose observation has a picture of itself, drawn inside the jitted program.

By MuJoCo on the host, behind a callback, or by ``ejax.envs.mujoco.raycast`` where the program runs.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.core import FrozenDict
from numpy.typing import NDArray

from ejax.envs.description import WHOLE, EnvDescription, describe
from ejax.envs.mujoco.appearance import Appearance, AppearingEnv
from ejax.envs.mujoco.pictures import Renderer, check_renderer_name, picture_on_host
from ejax.envs.mujoco.raycast import draw
from ejax.envs.mujoco.scenery import half_angles, look_at
from ejax.envs.wrappers.action_chunk import ActionChunk
from ejax.envs.wrappers.randomized import RandomizedEnv, with_events
from ejax.envs.wrappers.visual_randomizers import Look, Randomizers
from ejax.schema.frozen import freeze, thaw
from ejax.schema.registry import resolve
from ejax.types import Array, CameraView, Env, Key, PyTree, RenderableEnv, Timestep, carry_over

_LOOK = 0x100C
"""Folded into an episode's key: its look is drawn apart, so that the episode is the same without one."""
BLANK = 127
"""Every level of a picture that shows nothing."""


@dataclass(frozen=True)
class WristCamera:
    """A camera that goes with the tool and keeps its direction; of ``renderer: raycast``.

    Needs an environment with ``tool_position(state)`` [3], m.
    """

    offset: tuple[float, float, float] = (-0.14, 0.0, 0.12)
    """Its place from the tool's, in the world's axes, m."""
    target: tuple[float, float, float] = (0.0, 0.0, -0.04)
    """The point that it looks at, likewise."""
    fovy: float = 75.0
    width: int = 48
    height: int = 48


@struct.dataclass(kw_only=True)
class RenderedState:
    """One episode with a look of its own."""

    env: PyTree
    look: Look


@dataclass(frozen=True)
class RenderedEnv:
    """``{"image": uint8 [height, width, 3], "state": observation}`` of a pure environment that can be drawn.

    The parts of an observation that is a dict stay beside ``image`` under their own names.

    What is drawn when: one picture per row at a reset and at a step, which with ``action_chunk`` is a decision of
    several; ``obs`` and ``final_obs`` of ``ejax.rollout.step`` are that picture. A row that starts anew is drawn once
    more: on a CPU the first pictures of all rows are, in those steps only in which an episode ended; on a GPU in every
    step, as all of a reset is.

    ``mujoco`` draws all pictures in one thread, ``raycast`` calls back to nobody.

    Args:
        env: its name.
        env_cfg: its arguments.
        renderer: ``raycast`` needs an environment with ``appearance(state)``, whose model is made of primitives.
        camera_eye, camera_target: m. None: the environment's own camera.
        camera_fovy: degrees, of a camera that is placed.
        effects: shadows and smooth edges, of a camera that is placed; without them drawing is ten times faster.
        wrist: fields of ``WristCamera``: a second picture, ``wrist``. None: there is none.
        blank: nothing is drawn, all of each picture is grey: what a policy does that cannot look.
        randomizers: differences between episodes, see ``ejax.envs.wrappers.visual_randomizers``; ``raycast`` only.
        events: of physics, sensors and delays, see ``ejax.envs.wrappers.randomized``.

    Raises:
        ValueError: an environment that cannot be drawn, or so; whose observation is neither a vector nor a dict, or has
            an ``image``; or that was not trusted (``ejax.schema.trust``).
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
    renderer: Renderer = "mujoco"
    blank: bool = False
    wrist: Any = None
    randomizers: Any = field(default_factory=FrozenDict)
    events: Any = field(default_factory=FrozenDict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "env_cfg", freeze(self.env_cfg))
        object.__setattr__(self, "randomizers", freeze(self.randomizers))
        object.__setattr__(self, "events", freeze(self.events))
        object.__setattr__(self, "wrist", None if self.wrist is None else freeze(self.wrist))
        for name in ("camera_eye", "camera_target"):
            place = getattr(self, name)
            object.__setattr__(self, name, None if place is None else tuple(place))
        if self.width < 1 or self.height < 1:
            raise ValueError(f"RenderedEnv: width and height must be >= 1, got {self.width} and {self.height}")
        if not isinstance(self.drawn, RenderableEnv):
            raise ValueError(f"RenderedEnv: {self.env} cannot be drawn: it has no render(state, width=…, height=…)")
        space = self.drawn.observation_space
        if not isinstance(space, (gymnasium.spaces.Box, gymnasium.spaces.Dict)):
            raise ValueError(f"RenderedEnv: the observation of {self.env} is neither a vector nor a dict")
        for name in ("image", *(() if self.wrist is None else ("wrist",))):
            if isinstance(space, gymnasium.spaces.Dict) and name in space.spaces:
                raise ValueError(f"RenderedEnv: the observation of {self.env} has an '{name}' of its own already")
        self._check_renderer()

    @property
    def observation_space(self) -> gymnasium.spaces.Dict:
        pictures = {"image": gymnasium.spaces.Box(0, 255, (self.height, self.width, 3), np.uint8)}
        if self._wrist is not None:
            pictures["wrist"] = gymnasium.spaces.Box(0, 255, (self._wrist.height, self._wrist.width, 3), np.uint8)
        return gymnasium.spaces.Dict({**pictures, **_parts(self.drawn.observation_space)})

    @property
    def action_space(self) -> gymnasium.Space[Any]:
        return self._stepped.action_space

    @property
    def actions_per_decision(self) -> int:
        return self.action_chunk

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
        if self.randomizers:
            look = self._randomizers.draw(jax.random.fold_in(key, _LOOK), self.drawn.appearance(state).asset)
            state = RenderedState(env=state, look=look)
        return state, self._observe(state, obs)

    def carry_over(self, ended: PyTree, started: PyTree, obs: PyTree) -> tuple[PyTree, PyTree]:
        """The pictures stay: nothing that is carried over can be seen."""
        dict_inside = isinstance(self.drawn.observation_space, gymnasium.spaces.Dict)
        parts = {name: obs[name] for name in _parts(self.drawn.observation_space)}
        inner = parts if dict_inside else parts["state"]
        state, inner = carry_over(self._stepped, _inner(ended), _inner(started), inner)
        if isinstance(started, RenderedState):
            state = replace(started, env=state)
        return state, {**obs, **_parts(inner)}

    def step(self, state: PyTree, action: Array, key: Key) -> tuple[PyTree, Timestep]:
        if isinstance(state, RenderedState):
            after, timestep = self._stepped.step(state.env, action, key)
            state = replace(state, env=after)
        else:
            state, timestep = self._stepped.step(state, action, key)
        return state, replace(timestep, obs=self._observe(state, timestep.obs))

    def trajectory(self, state: PyTree, action: Array, key: Key) -> PyTree:
        """The states after each action of a decision [action_chunk, ...], for videos."""
        inner = _inner(state)
        if isinstance(self._stepped, ActionChunk):
            states = self._stepped.trajectory(inner, action, key)
        else:
            states = jax.tree.map(lambda x: x[None], self._stepped.step(inner, action, key)[0])
        if not isinstance(state, RenderedState):
            return states
        look = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (self.action_chunk, *x.shape)), state.look)
        return RenderedState(env=states, look=look)

    def caption(self, state: PyTree) -> str:
        """What a video says of the episode, such as its instruction; nothing for most environments."""
        caption = getattr(self.drawn, "caption", None)
        return "" if caption is None else caption(_inner(state))

    def render(
        self, state: PyTree, width: int = 640, height: int = 480, camera: CameraView | None = None
    ) -> NDArray[np.uint8]:
        """Same as the environment's own."""
        return self.drawn.render(_inner(state), width, height, camera)

    def appearance(self, state: PyTree) -> Appearance:
        """Same as the environment's own."""
        return self.drawn.appearance(_inner(state))

    @functools.cached_property
    def drawn(self) -> Any:
        """The environment inside."""
        env = with_events(resolve("env", self.env)(**thaw(self.env_cfg)), self.events)
        if isinstance(env, RandomizedEnv) and "geom_size" in env.read.parameters:
            raise ValueError(
                "RenderedEnv: pictures show the sizes of the MJCF; randomize_rigid_object_scale needs another"
            )
        return env

    @functools.cached_property
    def _stepped(self) -> Env:
        return self.drawn if self.action_chunk == 1 else ActionChunk(self.drawn, self.action_chunk)

    @functools.cached_property
    def _view(self) -> CameraView | None:
        if self.camera_eye is None:
            return None
        return CameraView(self.camera_eye, self.camera_target, self.camera_fovy, self.effects)

    @functools.cached_property
    def _wrist(self) -> WristCamera | None:
        return None if self.wrist is None else WristCamera(**self.wrist)

    @functools.cached_property
    def _randomizers(self) -> Randomizers:
        return Randomizers(self.randomizers, self._view, self.width, self.height)

    def _check_renderer(self) -> None:
        check_renderer(self.drawn, self.renderer)
        check_wrist(self.drawn, self.renderer, self._wrist)
        if self.renderer == "mujoco":
            if self.randomizers:
                raise ValueError(
                    f"RenderedEnv: randomizers ({', '.join(self.randomizers)}) need renderer: raycast; "
                    "mujoco draws all environments alike"
                )
            return
        if self.effects:
            raise ValueError("RenderedEnv: renderer: raycast draws no effects; use effects: false or renderer: mujoco")
        if self.randomizers:
            Randomizers(self.randomizers, self._view, self.width, self.height)

    def _observe(self, state: PyTree, obs: PyTree) -> dict[str, Array]:
        pictures = {"image": self._picture(state)}
        if self._wrist is not None:
            pictures["wrist"] = self._wrist_picture(self._wrist, state)
        return {**pictures, **_parts(obs)}

    def _wrist_picture(self, wrist: WristCamera, state: PyTree) -> Array:
        if self.blank:
            return jnp.full((wrist.height, wrist.width, 3), BLANK, jnp.uint8)
        if not isinstance(state, RenderedState):
            return draw_wrist(self.drawn, state, wrist)
        return draw_wrist(self.drawn, state.env, wrist, state.look)

    def _picture(self, state: PyTree) -> Array:
        if self.blank:
            return jnp.full((self.height, self.width, 3), BLANK, jnp.uint8)
        if self.renderer == "raycast":
            return self._cast(state)
        return picture_on_host(self._draw, state, self.width, self.height)

    def _cast(self, state: PyTree) -> Array:
        if not isinstance(state, RenderedState):
            return draw_state(self.drawn, state, self.width, self.height, self._view)
        seen, look = self.drawn.appearance(state.env), state.look
        return draw(
            replace(seen, rgba={**seen.rgba, **look.rgba}),
            width=self.width,
            height=self.height,
            camera=self._view if look.camera is None else look.camera,
            lights=look.lights,
        )

    def _draw(self, state: PyTree) -> NDArray[np.uint8]:
        return self.drawn.render(state, self.width, self.height, self._view)


def check_renderer(env: Any, renderer: Renderer) -> Renderer:
    """
    Raises:
        ValueError: no such renderer, or the environment cannot be drawn by it.
    """
    check_renderer_name(renderer)
    if renderer == "raycast" and not isinstance(env, AppearingEnv):
        raise ValueError(f"renderer: raycast: {type(env).__name__} has no appearance(state). Use renderer: mujoco")
    return renderer


def check_wrist(env: Any, renderer: Renderer, wrist: WristCamera | None) -> WristCamera | None:
    """
    Raises:
        ValueError: a camera at a tool that is not there, or that is not drawn by the ray caster.
    """
    if wrist is None:
        return None
    if renderer != "raycast":
        raise ValueError("wrist: a camera at the tool is drawn by renderer: raycast only")
    if not hasattr(env, "tool_position"):
        raise ValueError(f"wrist: {type(env).__name__} has no tool_position(state)")
    if wrist.width < 1 or wrist.height < 1:
        raise ValueError(f"wrist: width and height must be >= 1, got {wrist.width} and {wrist.height}")
    return wrist


@functools.partial(jax.jit, static_argnums=(0, 2, 3, 4))
def draw_state(env: Any, state: PyTree, width: int, height: int, camera: CameraView | None) -> Array:
    """One environment's state as ``renderer: raycast`` draws it: [height, width, 3] uint8."""
    return draw(env.appearance(state), width=width, height=height, camera=camera)


@functools.partial(jax.jit, static_argnums=(0, 2))
def draw_wrist(env: Any, state: PyTree, wrist: WristCamera, look: Look | None = None) -> Array:
    """What a camera at the tool sees: [height, width, 3] uint8."""
    tool, seen = env.tool_position(state), env.appearance(state)
    angles = half_angles(math.radians(wrist.fovy), None, wrist.width / wrist.height)
    eye, target = tool + jnp.asarray(wrist.offset), tool + jnp.asarray(wrist.target)
    camera = look_at(eye, target, jnp.array([0.0, 0.0, 1.0]), angles, (0.5, 0.5))
    if look is not None:
        seen = replace(seen, rgba={**seen.rgba, **look.rgba})
    lights = None if look is None else look.lights
    return draw(seen, width=wrist.width, height=wrist.height, camera=camera, lights=lights)


def _parts(obs: Any) -> dict[str, Any]:
    """An observation, or its space, by name."""
    if isinstance(obs, gymnasium.spaces.Dict):
        return dict(obs.spaces)
    return dict(obs) if isinstance(obs, Mapping) else {"state": obs}


def _inner(state: PyTree) -> PyTree:
    """The state of the environment inside."""
    return state.env if isinstance(state, RenderedState) else state
