"""XLA's GPU compiler without a GPU: its presence, its release, and the devices to compile for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

import jax
from jax.experimental import topologies

from ejax.preflight.targets import Card
from ejax.runtime.host_call import FOR_ABSENT_DEVICES
from ejax.schema.problems import ConfigError, Problem

_PACKAGES = (("jax-cuda12-plugin", "jax-cuda12-pjrt"), ("jax-cuda13-plugin", "jax-cuda13-pjrt"))


def compiler_problem() -> str | None:
    """Give the reason why nothing can be compiled for a GPU here, with the remedy; None: there is none."""
    wanted = jax.__version__
    for packages in _PACKAGES:
        found = {name: _version(name) for name in packages}
        if not all(found.values()):
            continue
        # JAX does not use a plugin of another release
        if set(found.values()) == {wanted}:
            return None
        have = ", ".join(f"{name} {number}" for name, number in found.items())
        return f"{have} do not fit jax {wanted}; {_remedy(wanted)}"
    return f"compiling for a GPU needs XLA's GPU compiler, which is not installed; {_remedy(wanted)}"


def absent_devices(card: Card, *, gpus: int, hosts: int) -> Sequence[jax.Device]:
    """Describe the devices of machines that are not here; needs the compiler. ConfigError: it refuses the card."""
    jax.devices()  # loads the plugin
    try:
        topology = topologies.get_topology_desc(platform="cuda", topology=f"1x{hosts}x{gpus}", target_config=card.text)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise ConfigError([Problem("--target", f"XLA refuses {card.name}: {error}")], "ejax.preflight") from error
    return topology.devices


@contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Keep JAX from writing what it compiles for absent devices into its cache, which it cannot read again, and have no
    device asked for a call of the host."""
    kept: bool = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]  # jax defines it at run time
    jax.config.update("jax_enable_compilation_cache", False)
    token = FOR_ABSENT_DEVICES.set(True)
    try:
        yield
    finally:
        FOR_ABSENT_DEVICES.reset(token)
        jax.config.update("jax_enable_compilation_cache", kept)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _remedy(wanted: str) -> str:
    return (
        "pip install -e '.[preflight]' in ejax's folder, which also brings the jax that it fits, or "
        f"pip install jax-cuda12-plugin=={wanted} jax-cuda12-pjrt=={wanted}"
    )
