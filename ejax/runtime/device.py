"""Device, precision of matrix products, and cache of compiled programs."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias

import jax

from ejax.schema.messages import explain
from ejax.schema.writing import make_folder

MatmulPrecision: TypeAlias = Literal["float32", "tf32", "bf16"]
ON_CPU = "highest"
_ON_GPU: dict[MatmulPrecision, str] = {"float32": "float32", "tf32": "TF32_TF32_F32", "bf16": "BF16_BF16_F32"}
"""To JAX ``highest`` and ``float32`` are the same; where it reads the first, ``by_platform`` traces the form
for a CPU alone: to trace both, forms within forms among them, took twice the seconds.
What JAX does by default on a GPU is TF32: a relative error of 1e-3 in each product."""
_FUSION = "xla_gpu_enable_dynamic_slice_fusion"
WARP_FLAG = f"--{_FUSION}=false"
"""Keeps XLA from fusing a call of Warp with a slice, which loses a result: benchmarks/notes."""
_READ_FLAGS = "from jaxlib.xla_client import CompileOptions; CompileOptions()"


@contextmanager
def jax_option(name: str, value: object) -> Iterator[None]:
    """Set an option of JAX inside, for all threads: those of JAX's own context managers hold for one."""
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


def matmul_precision(precision: MatmulPrecision, device: str) -> AbstractContextManager[None]:
    """Have every program that is traced inside multiply float32 matrices like this, in all threads.

    ``tf32`` and ``bf16`` round the factors and add up in float32, on a GPU; all else, and a CPU, computes in float32.
    """
    # collectors trace in other threads
    return jax_option("jax_default_matmul_precision", _ON_GPU[precision] if device.startswith("cuda") else ON_CPU)


def _accepted(flag: str) -> bool:
    """Return whether this jaxlib knows a flag of XLA."""
    # an unknown flag ends the process that reads it: it must be another one
    environment = {**os.environ, "XLA_FLAGS": flag}
    return subprocess.run([sys.executable, "-c", _READ_FLAGS], env=environment, capture_output=True).returncode == 0


def device_problem(device: str) -> str:
    """Explain why JAX does not compute there, with its devices here; "" where it does."""
    platform, _, index = device.partition(":")
    given = os.environ.get("XLA_FLAGS", "")
    if platform == "cuda" and find_spec("warp") and WARP_FLAG.partition("=")[0] not in given and _accepted(WARP_FLAG):
        os.environ["XLA_FLAGS"] = f"{given} {WARP_FLAG}".strip()  # JAX starts below, with XLA's flags of that moment
    try:
        there = len(jax.local_devices(backend=platform))
    except RuntimeError:
        there = 0
    if (index or "0").isdecimal() and int(index or 0) < there:
        return ""
    here = ", ".join(f"{each.platform}:{each.id}" for each in jax.devices())
    return f"got '{device}', but the devices of jax here are {here}"


def prepare_jax(device: str) -> None:
    """Select the device (``cpu``, ``cuda`` or ``cuda:N``) and keep compiled programs between runs.

    Call it before JAX makes its first array: later, ``cpu`` cannot hide an accelerator any more. The programs go to
    ``$JAX_COMPILATION_CACHE_DIR``, or ``$XDG_CACHE_HOME/ejax/compiled``; nowhere, with a note, where that cannot be
    written. ValueError: JAX has no such device here.
    """
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:  # a start has dozens below JAX's one second
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    platform, _, index = device.partition(":")
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    if device != "cpu" and (problem := device_problem(device)):
        raise ValueError(f"device: {problem}; use cpu, or install jax for {platform}")
    if platform != "cpu":
        jax.config.update("jax_default_device", jax.local_devices(backend=platform)[int(index or 0)])
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]  # jax defines it at run time
        given = os.environ.get("XDG_CACHE_HOME", "")
        try:
            home = Path(given) if os.path.isabs(given) else Path.home().resolve(strict=True) / ".cache"
            folder = make_folder(home / "ejax" / "compiled")
            with tempfile.TemporaryFile(dir=folder):  # else JAX warns of each program
                jax.config.update("jax_compilation_cache_dir", str(folder))
        except (OSError, RuntimeError) as error:  # no home folder, or one that cannot be written
            text = "no compiled programs are kept for the next process; set JAX_COMPILATION_CACHE_DIR to a folder"
            print(f"ejax: {text}: {explain(error)}", file=sys.stderr)
