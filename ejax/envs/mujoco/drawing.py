"""Pictures by MuJoCo's renderer, on the host: one configuration at a time, on a display or without one."""

import atexit
import copy
import functools
import importlib
import math
import os
import sys
import threading
from typing import Any, Protocol, cast, runtime_checkable

import jax
import mujoco
import numpy as np
from flax import struct
from numpy.typing import NDArray

from ejax.envs.mujoco.models import load_model
from ejax.types import Array, CameraView, PyTree


@struct.dataclass(kw_only=True)
class Appearance:
    """One state of a MuJoCo model, for whichever renderer draws it."""

    asset: str = struct.field(pytree_node=False)  # The model, as in ``Physics``
    qpos: Array  # [nq]
    mocap_pos: dict[str, Array] = struct.field(default_factory=dict)
    """Body name -> position [3], m, or pose [7] with a quaternion, of bodies that only mark something."""
    rgba: dict[str, Array] = struct.field(default_factory=dict)
    """Geom name -> colour [4] in 0 … 1, where it is not the model's. Alpha 0 hides the geom; another one below 1 counts
    only for geoms that the model has as transparent."""


@runtime_checkable
class AppearingEnv(Protocol):
    """An environment whose states have an appearance."""

    def appearance(self, state: PyTree) -> Appearance:
        """Return the look of one environment's state; pure."""
        ...


def has_appearance(env: Any) -> bool:
    """Return whether an environment is an ``AppearingEnv``: wrappers, which all have the method, ask the one inside."""
    while (inner := getattr(env, "inner", None)) is not None:
        env = inner
    return isinstance(env, AppearingEnv)


def asset_of(env: Any) -> str | None:
    """Find the model that an environment's states are drawn by; None: there is none."""
    if not has_appearance(env):
        return None
    # traced, not run: only the path of the MJCF is needed
    return cast(str, jax.eval_shape(lambda key: env.appearance(env.reset(key)[0]), jax.random.key(0)).asset)


def render(
    seen: Appearance, *, width: int = 640, height: int = 480, camera: CameraView | None = None
) -> NDArray[np.uint8]:
    """Draw one configuration, on a display or without one (EGL, or what MUJOCO_GL names): [height, width, 3] RGB.
    Without a camera ``own_camera``, else ``default_view``."""
    camera = camera or default_view(seen.asset)
    effects = camera is None or camera.effects
    model, data, renderer = _canvas(seen.asset, width, height, effects)
    model.geom_rgba[:] = load_model(seen.asset, visual=True).geom_rgba  # without the colours of the picture before
    apply_appearance(model, data, seen)
    mujoco.mj_kinematics(model, data)
    mujoco.mj_comPos(model, data)  # for cameras that go with a body
    mujoco.mj_camlight(model, data)
    if camera is not None:
        model.vis.global_.fovy = camera.fovy  # for a free camera; ``main`` has its own
    for _ in range(2):  # an endless floor is laid around the camera of the scene before
        renderer.update_scene(data, camera=own_camera(model) if camera is None else free_camera(camera))
    if camera is not None:
        for eye in renderer.scene.camera:
            _aim(eye, camera, width / height)
    for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
        renderer.scene.flags[flag] = effects
    return cast(NDArray[np.uint8], renderer.render())


def apply_appearance(model: mujoco.MjModel, data: mujoco.MjData, seen: Appearance) -> None:
    """Put joints and markers in their places, and colour the geoms."""
    data.qpos[:] = np.asarray(seen.qpos)
    for name, position in seen.mocap_pos.items():
        at, place = model.body(name).mocapid[0], np.asarray(position)
        data.mocap_pos[at] = place[:3]
        data.mocap_quat[at] = place[3:] if len(place) > 3 else model.body(name).quat
    for name, colour in seen.rgba.items():
        model.geom(name).rgba[:] = np.asarray(colour)


def default_view(asset: str) -> CameraView | None:
    """Return a view of the whole model, as MuJoCo's viewer starts with. None: the model has its own camera."""
    model = load_model(asset, visual=True)
    if own_camera(model) >= 0:
        return None
    camera = mujoco.MjvCamera()
    mujoco.mjv_defaultFreeCamera(model, camera)
    azimuth, elevation = math.radians(camera.azimuth), math.radians(camera.elevation)
    across = math.cos(elevation)
    forward = np.array([across * math.cos(azimuth), across * math.sin(azimuth), math.sin(elevation)])
    eye = triple(camera.lookat - camera.distance * forward)
    return CameraView(eye, triple(camera.lookat), float(model.vis.global_.fovy))


def own_camera(model: mujoco.MjModel) -> int:
    """Find the camera of a model's pictures: ``main``, or ejax's own, which a film may move. -1: neither."""
    main, ours = (mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, name) for name in ("main", "ejax overview"))
    return int(main if main >= 0 else ours)


def triple(vector: NDArray[Any]) -> tuple[float, float, float]:
    x, y, z = map(float, vector)
    return x, y, z


def free_camera(view: CameraView) -> mujoco.MjvCamera:
    """Return MuJoCo's camera of a view; its picture's size at unit distance is the model's."""
    camera = mujoco.MjvCamera()
    camera.type = mujoco.mjtCamera.mjCAMERA_FREE
    forward = np.subtract(view.target, view.eye)
    camera.lookat[:] = view.target
    camera.distance = float(np.linalg.norm(forward))
    camera.azimuth = math.degrees(math.atan2(forward[1], forward[0]))
    camera.elevation = math.degrees(math.atan2(forward[2], math.hypot(forward[0], forward[1])))
    return camera


def _aim(eye: mujoco.MjvGLCamera, view: CameraView, aspect: float) -> None:
    forward = np.subtract(view.target, view.eye) / np.linalg.norm(np.subtract(view.target, view.eye))
    up = np.asarray(view.up) - np.dot(view.up, forward) * forward
    if np.linalg.norm(up) > 1e-6:  # else the free camera's own
        eye.up[:] = up / np.linalg.norm(up)
    eye.frustum_far = max(eye.frustum_far, 2.0 * np.linalg.norm(np.subtract(view.target, view.eye)))
    half_height = eye.frustum_near * math.tan(math.radians(view.fovy) / 2.0)
    half_width = half_height * aspect
    if view.fovx is not None:
        half_width = eye.frustum_near * math.tan(math.radians(view.fovx) / 2.0)
    x, y = view.center
    eye.frustum_width, eye.frustum_center = half_width, half_width * (1.0 - 2.0 * x)
    eye.frustum_top, eye.frustum_bottom = 2.0 * half_height * y, -2.0 * half_height * (1.0 - y)


_canvases = threading.local()
"""The last four that a thread drew on, ``kept``, made, used and freed by that thread alone. A context freed by another
thread is not current there: objects of that thread's own context would be deleted."""


def _canvas(asset: str, width: int, height: int, effects: bool) -> tuple[Any, mujoco.MjData, mujoco.Renderer]:
    key, kept = (asset, width, height, effects), vars(_canvases).setdefault("kept", {})
    if key not in kept:
        if len(kept) == 4:
            oldest = kept.pop(next(iter(kept)))[2]
            oldest.render()  # its context is current then: MuJoCo 3 would delete the objects of another
            oldest.close()
        choose_opengl()
        model = copy.copy(load_model(asset, visual=True))
        whole = model.vis.global_  # of the window's size: a picture may be larger
        whole.offwidth, whole.offheight = max(whole.offwidth, width), max(whole.offheight, height)
        if not effects:
            model.vis.quality.offsamples = 0
        kept[key] = model, mujoco.MjData(model), mujoco.Renderer(model, height=height, width=width)
        if len(kept) == 1 and threading.current_thread() is threading.main_thread():
            atexit.register(kept.clear)  # before EGL ends, for which MuJoCo has registered by now
    kept[key] = kept.pop(key)  # the last one used
    return kept[key]


@functools.cache
def choose_opengl() -> None:
    """Choose EGL if there is no display. MuJoCo chooses when it is imported, and then counts on a display."""
    if sys.platform != "linux" or "MUJOCO_GL" in os.environ or os.environ.get("DISPLAY"):
        return
    os.environ["MUJOCO_GL"] = "egl"
    chooser = mujoco.Renderer.__init__.__globals__["gl_context"]  # the module, wherever a release keeps it
    importlib.reload(chooser)
