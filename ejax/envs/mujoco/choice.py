"""The physics engines, and which one computes: decided once, when an environment or a run is built.

on          auto means
CPU         mujoco
CUDA        warp if it is installed, else mjx
the rest    mjx
"""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, NamedTuple, TypeAlias, cast

import jax

Engine: TypeAlias = Literal["auto", "mujoco", "mjx", "warp"]  # ``auto``, or a key of ``ENGINES``


@dataclass(frozen=True, kw_only=True)
class EngineRecord:
    """Facts about an engine, known before it is imported; its module in ``engines`` has ``step``."""

    title: str
    chosen_on: tuple[str, ...] = ()  # Platforms where ``auto`` means it. Empty: wherever it means no other.
    on_host: bool = False  # It steps on the host, on any platform of JAX
    packages: tuple[str, ...] = ()
    """Packages beyond ejax's own, which the extra of the engine's name brings; its own comes last."""


ENGINES: dict[str, EngineRecord] = {
    "mujoco": EngineRecord(title="the C engine", chosen_on=("cpu",), on_host=True),
    "mjx": EngineRecord(title="MJX", packages=("mujoco-mjx",)),
    "warp": EngineRecord(title="Warp", chosen_on=("cuda",), packages=("warp-lang", "mujoco-warp")),
}
"""A new engine is a file and a row. Exactly one has no ``chosen_on``: ``auto`` means it where no other fits."""


class Choice(NamedTuple):
    """An engine, and why it was chosen."""

    engine: Engine
    why: str


def check_physics(engine: Engine, num_substeps: int) -> None:
    """Raise ValueError for an engine that there is not, or no physics step; starts neither JAX nor the engine."""
    if engine != "auto" and engine not in ENGINES:
        *others, last = map(repr, ENGINES)
        raise ValueError(f"physics must be 'auto', {', '.join(others)} or {last}, got {engine!r}")
    if num_substeps < 1:
        raise ValueError(f"the number of physics steps per control step must be >= 1, got {num_substeps}")


def choose_engine(engine: Engine, platform: str | None = None) -> Choice:
    """Settle what ``auto`` means; any other engine is the answer itself.

    Args:
        platform: ``cpu``, ``cuda``, ``rocm`` or ``tpu``. None: where JAX computes now, which this may start.
    """
    if engine != "auto":
        return Choice(engine, "as the config says")
    platform = platform or _platform()
    title = {"cpu": "the CPU", "cuda": "CUDA"}.get(platform, platform)
    where, objection = f"JAX computes on {title}", ""
    preferred = {name: record for name, record in ENGINES.items() if record.chosen_on}
    for name, record in preferred.items():
        if platform not in record.chosen_on:
            objection = f"where {record.title} does not run"
        elif how := how_to_install(cast(Engine, name)):
            objection = f"and {record.title} is not installed: {how}"
        else:
            # the last package is the engine's own: its version is the one to know
            own = [f", and {each} {_installed(each)} is installed" for each in record.packages]
            return Choice(cast(Engine, name), where + (own[-1] if own else ""))
    (rest,) = ENGINES.keys() - preferred.keys()
    return Choice(cast(Engine, rest), f"{where}, {objection}")


def how_to_install(engine: Engine) -> str | None:
    """Return the command that brings what an engine lacks here; None: nothing."""
    packages = ENGINES[engine].packages if engine in ENGINES else ()
    lacks = any(_installed(package) is None for package in packages)
    return f"pip install -e '.[{engine}]' in ejax's folder" if lacks else None


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _platform() -> str:
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]  # jax defines it at run time
    device = jax.devices(chosen)[0] if isinstance(chosen, str) else chosen or jax.devices()[0]
    if device.platform != "gpu":
        return str(device.platform)
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
