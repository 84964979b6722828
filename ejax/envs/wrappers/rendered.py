"""An environment whose observation has a picture of itself, drawn inside the jitted program."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.core import FrozenDict

from ejax.envs.description import WHOLE, EnvDescription, describe
from ejax.envs.mujoco.drawing import Appearance, AppearingEnv
from ejax.envs.mujoco.pictures import Renderer, check_renderer_name, picture_on_host
from ejax.envs.mujoco.raycast import draw
from ejax.envs.mujoco.scenery import Camera, half_angles, look_at
from ejax.envs.wrappers.action_chunk import ActionChunk
from ejax.envs.wrappers.randomized import RandomizedEnv
from ejax.envs.wrappers.visual_randomizers import Look, VisualFunctor, draw_look, read_randomizers
from ejax.envs.wrappers.wrapper import EnvWrapper, innermost
from ejax.schema.frozen import freeze_fields
from ejax.types import Array, CameraView, Key, PyTree, RenderableEnv, Timestep, persist

_LOOK = 0x100C  # folded into an episode's key: its look is drawn apart, so that the episode is the same without one
_PLAIN = Look()
BLANK = 127


@dataclass(frozen=True)
class WristCamera:
    """A camera that goes with the tool and keeps its direction. Needs ``raycast`` and ``tool_position(state)``, m."""

    offset: tuple[float, float, float] = (-0.14, 0.0, 0.12)
    """Its place from the tool's, in the world's axes, m."""
    target: tuple[float, float, float] = (0.0, 0.0, -0.04)
    """The point that it looks at, likewise."""
    fovy: float = 75.0
    width: int = 48
    height: int = 48


@struct.dataclass(kw_only=True)
class RenderedState:
    """One episode and its look."""

    env: PyTree
    look: Look


@dataclass(frozen=True)
class RenderedEnv(EnvWrapper):
    """Pictures as observations of a pure environment: ``{"image": uint8 [height, width, 3], "state": observation}``.

    The parts of an observation that is a dict stay next to ``image`` under their names.

    One picture per row is drawn at a reset and at a step, which is a decision where ``env`` is an ``ActionChunk``. A
    row that starts again is drawn once more: on a CPU in those steps only in which an episode ended, on a GPU in every
    step.

    Args:
        renderer: ``raycast`` needs an environment with ``appearance(state)``, whose model is made of primitives.
        camera_eye, camera_target: m. None: the environment's own camera.
        camera_fovy: degrees, of a camera that is placed.
        effects: shadows and smooth edges, of a camera that is placed; without them drawing is ten times faster.
        wrist: fields of ``WristCamera``: a second picture, ``wrist``. None: there is none.
        blank: nothing is drawn, all of each picture is grey: what a policy does that cannot look.
        randomizers: differences between episodes, see ``ejax.envs.wrappers.visual_randomizers``; ``raycast`` only.
    Raises ValueError: an environment that cannot be drawn so, or whose observation has an ``image`` or is neither
        vector nor dict.
    """

    env: Any
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

    above_events = True

    def __post_init__(self) -> None:
        freeze_fields(self, "camera_eye", "camera_target", "wrist", "randomizers")
        drawn = innermost(self.env)
        name = type(drawn).__name__
        if self.width < 1 or self.height < 1:
            raise ValueError(f"RenderedEnv: width and height must be >= 1, got {self.width} and {self.height}")
        if not isinstance(drawn, RenderableEnv):
            raise ValueError(f"RenderedEnv: {name} cannot be drawn: it has no render(state, width=…, height=…)")
        space = self.env.observation_space
        if not isinstance(space, (gymnasium.spaces.Box, gymnasium.spaces.Dict)):
            raise ValueError(f"RenderedEnv: the observation of {name} is neither a vector nor a dict")
        for part in self._sizes.keys() & _parts(space).keys():
            raise ValueError(f"RenderedEnv: the observation of {type(self.env).__name__} has an '{part}' already")
        if _draws_sizes(self.env):
            raise ValueError("RenderedEnv: pictures show the sizes of the MJCF; leave out randomize_rigid_object_scale")
        check_renderer(self.env, self.renderer, self._wrist)
        if self.renderer == "mujoco" and self.randomizers:
            text = f"randomizers ({', '.join(self.randomizers)}) need renderer: raycast"
            raise ValueError(f"RenderedEnv: {text}; mujoco draws all environments alike")
        if self.renderer == "raycast" and self.effects:
            raise ValueError("RenderedEnv: renderer: raycast draws no effects; use effects: false or renderer: mujoco")
        _ = self._randomizers  # which checks them

    @property
    def observation_space(self) -> gymnasium.spaces.Dict:
        pictures = {name: gymnasium.spaces.Box(0, 255, (*size, 3), np.uint8) for name, size in self._sizes.items()}
        return gymnasium.spaces.Dict({**pictures, **_parts(self.env.observation_space)})

    @property
    def actions_per_decision(self) -> int:
        return self.env.size if isinstance(self.env, ActionChunk) else 1

    @property
    def description(self) -> EnvDescription:
        """Return the environment's, whose one array is ``state`` here."""
        inner = describe(self.inner)
        named = {"state" if path == WHOLE else path: each for path, each in inner.observation.items()}
        return replace(inner, observation=named)

    def inner_state(self, state: PyTree) -> PyTree:
        return state.env if isinstance(state, RenderedState) else state

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        state, obs = self.env.reset(key)
        if self.randomizers:
            key_look, asset = jax.random.fold_in(key, _LOOK), self.env.appearance(state).asset
            look = draw_look(self._randomizers, key_look, asset, self.view, self.width, self.height)
            state = RenderedState(env=state, look=look)
        return state, {**self._pictures(state), **_parts(obs)}

    def persist(self, ended: PyTree, started: PyTree, obs: PyTree) -> tuple[PyTree, PyTree]:
        """Keep the pictures: nothing that is carried over can be seen."""
        space = self.env.observation_space
        parts = {name: obs[name] for name in _parts(space)}
        inner = parts if isinstance(space, gymnasium.spaces.Dict) else parts["state"]
        state, inner = persist(self.env, self.inner_state(ended), self.inner_state(started), inner)
        return _with_inner(started, state), {**obs, **_parts(inner)}

    def step(self, state: PyTree, action: Array, key: Key) -> tuple[PyTree, Timestep]:
        inner, timestep = self.env.step(self.inner_state(state), action, key)
        state = _with_inner(state, inner)
        return state, replace(timestep, obs={**self._pictures(state), **_parts(timestep.obs)})

    def trajectory(self, state: PyTree, action: Array, key: Key) -> PyTree:
        """Return the states after each action of a decision [actions_per_decision, ...], for videos."""
        inner = self.inner_state(state)
        if isinstance(self.env, ActionChunk):
            states = self.env.trajectory(inner, action, key)
        else:
            states = jax.tree.map(lambda x: x[None], self.env.step(inner, action, key)[0])
        if not isinstance(state, RenderedState):
            return states
        look = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (self.actions_per_decision, *x.shape)), state.look)
        return RenderedState(env=states, look=look)

    @functools.cached_property
    def view(self) -> CameraView | None:
        if self.camera_eye is None:
            return None
        return CameraView(self.camera_eye, self.camera_target, self.camera_fovy, self.effects)

    @functools.cached_property
    def _wrist(self) -> WristCamera | None:
        return None if self.wrist is None else WristCamera(**self.wrist)

    @functools.cached_property
    def _sizes(self) -> dict[str, tuple[int, int]]:
        wrist = self._wrist
        return {"image": (self.height, self.width)} | ({} if wrist is None else {"wrist": (wrist.height, wrist.width)})

    @functools.cached_property
    def _randomizers(self) -> list[VisualFunctor]:
        return read_randomizers(self.randomizers, self.view)

    def _pictures(self, state: PyTree) -> dict[str, Array]:
        if self.blank:
            return {name: jnp.full((*size, 3), BLANK, jnp.uint8) for name, size in self._sizes.items()}
        if self.renderer == "mujoco":
            draw = functools.partial(self.env.render, width=self.width, height=self.height, camera=self.view)
            return {"image": picture_on_host(draw, state, self.width, self.height)}
        # MuJoCo draws on the host and knows no looks; the ray caster is a part of the program
        inner, look = self.inner_state(state), state.look if isinstance(state, RenderedState) else _PLAIN
        pictures = {"image": draw_state(self.env, inner, self.width, self.height, self.view, look)}
        if self._wrist is not None:
            pictures["wrist"] = draw_wrist(self.env, inner, self._wrist, look)
        return pictures


def check_renderer(env: Any, renderer: Renderer, wrist: WristCamera | None) -> None:
    """Raise ValueError for a renderer that is not there or cannot draw the environment, with a camera at its tool."""
    check_renderer_name(renderer)
    drawn = innermost(env)
    name = type(drawn).__name__
    if renderer == "raycast" and not isinstance(drawn, AppearingEnv):
        raise ValueError(f"renderer: raycast: {name} has no appearance(state). Use renderer: mujoco")
    if wrist is not None and renderer != "raycast":
        raise ValueError("wrist: a camera at the tool is drawn by renderer: raycast only")
    if wrist is not None and not hasattr(drawn, "tool_position"):
        raise ValueError(f"wrist: {name} has no tool_position(state)")
    if wrist is not None and min(wrist.width, wrist.height) < 1:
        raise ValueError(f"wrist: width and height must be >= 1, got {wrist.width} and {wrist.height}")


@functools.partial(jax.jit, static_argnums=(0, 2, 3, 4))
def draw_state(
    env: Any, state: PyTree, width: int, height: int, camera: CameraView | None, look: Look = _PLAIN
) -> Array:
    """Draw a state as ``renderer: raycast`` does: [height, width, 3] uint8."""
    return _draw_look(env.appearance(state), look, width, height, look.camera, camera)


@functools.partial(jax.jit, static_argnums=(0, 2))
def draw_wrist(env: Any, state: PyTree, wrist: WristCamera, look: Look = _PLAIN) -> Array:
    """Draw the picture of a camera at the tool: [height, width, 3] uint8."""
    tool, seen = env.tool_position(state), env.appearance(state)
    angles = half_angles(wrist.fovy, None, wrist.width / wrist.height)
    eye, target = tool + jnp.asarray(wrist.offset), tool + jnp.asarray(wrist.target)
    camera = look_at(eye, target, jnp.array([0.0, 0.0, 1.0]), angles, (0.5, 0.5))
    return _draw_look(seen, look, wrist.width, wrist.height, camera)


def _draw_look(
    seen: Appearance, look: Look, width: int, height: int, camera: Camera | None, view: CameraView | None = None
) -> Array:
    seen = replace(seen, rgba={**seen.rgba, **look.rgba})
    return draw(seen, width=width, height=height, view=view, camera=camera, lights=look.lights)


def _draws_sizes(env: Any) -> bool:
    """Return whether events change the sizes of geoms, which pictures do not show."""
    while isinstance(env, EnvWrapper):
        if isinstance(env, RandomizedEnv) and "geom_size" in env.read.parameters:
            return True
        env = env.inner
    return False


def _parts(obs: Any) -> dict[str, Any]:
    if isinstance(obs, gymnasium.spaces.Dict):
        return dict(obs.spaces)
    return dict(obs) if isinstance(obs, Mapping) else {"state": obs}


def _with_inner(state: PyTree, inner: PyTree) -> PyTree:
    return replace(state, env=inner) if isinstance(state, RenderedState) else inner
