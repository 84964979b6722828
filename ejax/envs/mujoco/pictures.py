"""Pictures inside a jitted program: by MuJoCo on the host, behind a callback, or by the ray caster where it runs."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeAlias, get_args

import jax
import numpy as np
from numpy.typing import NDArray

from ejax.envs.mujoco.drawing import Appearance
from ejax.envs.mujoco.engine import render
from ejax.envs.mujoco.raycast import draw
from ejax.envs.mujoco.scenery import Camera, as_view
from ejax.types import Array, CameraView, PyTree

Renderer: TypeAlias = Literal["mujoco", "raycast"]


def check_renderer_name(renderer: str) -> None:
    if renderer not in get_args(Renderer):
        raise ValueError(f"renderer must be 'mujoco' or 'raycast', got {renderer!r}")


def picture(
    seen: Appearance, renderer: Renderer, camera: CameraView | Camera | None, *, width: int, height: int
) -> Array:
    """Draw [height, width, 3] uint8, seen by a constant view or by a pinhole whose numbers may be traced."""
    moving, fixed = (camera, None) if isinstance(camera, Camera) else (None, camera)
    if renderer == "raycast":
        return draw(seen, width=width, height=height, view=fixed, camera=moving)

    def draw_one(given: tuple[Appearance, Camera | None]) -> NDArray[np.uint8]:
        view = fixed if given[1] is None else as_view(given[1])
        return render(given[0], width=width, height=height, camera=view)

    return picture_on_host(draw_one, (seen, moving), width, height)


def picture_on_host(draw_one: Callable[[PyTree], NDArray[np.uint8]], state: PyTree, width: int, height: int) -> Array:
    """Draw one state, or as many as there are rows under ``vmap``: [height, width, 3].

    All are drawn in one thread, to which the OpenGL context belongs. A picture depends on the state alone.
    """
    rank = jax.tree.leaves(state)[0].ndim  # of one environment: vmap is not seen here

    def draw_all(states: PyTree) -> NDArray[np.uint8]:
        states = jax.tree.map(np.asarray, states)
        first = jax.tree.leaves(states)[0]
        batch = first.shape[: first.ndim - rank]
        rows = [jax.tree.map(lambda x, index=index: x[index], states) for index in np.ndindex(*batch)]
        pictures = list(_drawing_thread().map(draw_one, rows))
        return np.asarray(pictures, np.uint8).reshape(*batch, height, width, 3)

    shape = jax.ShapeDtypeStruct((height, width, 3), np.uint8)
    return jax.pure_callback(draw_all, shape, state, vmap_method="broadcast_all")


@functools.cache
def _drawing_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "ejax-draw")
