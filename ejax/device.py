"""Where JAX computes, and where it keeps compiled programs."""

import os
from pathlib import Path

import jax


def prepare_jax(device: str) -> None:
    """Select the device (``cpu``, ``cuda`` or ``cuda:N``) and keep compiled programs between runs.

    Call it before JAX makes its first array: later, ``cpu`` cannot hide an accelerator any more. The programs go to
    ``$JAX_COMPILATION_CACHE_DIR``, or ``$XDG_CACHE_HOME/ejax/compiled``.
    """
    platform, _, index = device.partition(":")
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    else:
        jax.config.update("jax_default_device", jax.devices(platform)[int(index or 0)])
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]  # jax defines it at run time
        home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        jax.config.update("jax_compilation_cache_dir", str(home / "ejax" / "compiled"))
