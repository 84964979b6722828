"""Which physics engine computes: decided once, when an environment or a run is built, and passed on from there.

on          auto means
CPU         mujoco
CUDA        warp if it is installed and the task reads no contact sensors, else mjx
the rest    mjx
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Literal, NamedTuple, TypeAlias

import jax

Engine: TypeAlias = Literal["auto", "mujoco", "mjx", "warp"]

_NEEDS = {"mujoco": {}, "mjx": {"mujoco-mjx": "mjx"}, "warp": {"mujoco-mjx": "warp", "warp-lang": "warp"}}
"""Packages of each engine beyond ejax's own, and the extra that brings them."""


_UNSENSED = "Warp's contact sensors read 0 throughout a training on an H100 (docs/gpu.md)"


class Choice(NamedTuple):
    """An engine, and why it was chosen."""

    engine: Engine
    why: str


def choose_engine(engine: Engine, platform: str | None = None, *, sensing: bool = False) -> Choice:
    """What ``auto`` means; any other engine is the answer itself.

    Args:
        platform: ``cpu``, ``cuda``, ``rocm`` or ``tpu``. None: where JAX computes now, which this may start.
        sensing: the task reads contact sensors.

    Raises:
        ValueError: Warp on a GPU, for a task that reads contact sensors.
    """
    if engine not in ("auto", "warp") or (engine == "warp" and not sensing):
        return Choice(engine, "as the config says")
    platform = platform or _platform()
    if engine == "warp":
        if platform == "cuda":
            raise ValueError(f"got 'warp', but {_UNSENSED}; give mjx")
        return Choice(engine, "as the config says")
    if platform == "cpu":
        return Choice("mujoco", "JAX computes on the CPU")
    if platform != "cuda":
        return Choice("mjx", f"JAX computes on {platform}, where Warp does not run")
    if sensing:
        return Choice("mjx", f"JAX computes on CUDA, where {_UNSENSED}")
    if how := how_to_install("warp"):
        return Choice("mjx", f"JAX computes on CUDA, and Warp is not installed: {how}")
    return Choice("warp", f"JAX computes on CUDA, and warp-lang {_installed('warp-lang')} is installed")


def how_to_install(engine: Engine) -> str | None:
    """The command that brings what an engine lacks here; None: nothing."""
    lacking = [extra for package, extra in _NEEDS.get(engine, {}).items() if _installed(package) is None]
    return f"pip install -e '.[{lacking[0]}]' in ejax's folder" if lacking else None


def _installed(package: str) -> str | None:
    """Its version; None: it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _platform() -> str:
    """Of the device that holds what is computed next: ``cpu``, ``cuda``, ``rocm`` or ``tpu``."""
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]  # jax defines it at run time
    device = jax.devices(chosen)[0] if isinstance(chosen, str) else chosen or jax.devices()[0]
    if device.platform != "gpu":
        return str(device.platform)
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
