"""Cards to compile for: what XLA asks of one, and the rates that its bounds come from.

Sources: NVIDIA's data sheets and architecture white papers of the A100, H100, H200, B200, L40S and GeForce RTX 4090;
dense rates, and boost clocks. A link's rate is of one direction: NVLink, or PCIe where a card has no NVLink.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from ejax.runtime.plain_files import read_text
from ejax.schema.problems import ConfigError, Problem

_TEXT = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {threads_per_core}
  shared_memory_per_block: 49152 shared_memory_per_core: {shared_per_core} shared_memory_per_block_optin: {shared_most}
  core_count: {cores} fpus_per_core: {fpus} clock_rate_ghz: {clock_ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {bandwidth} l2_cache_size: {l2} device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""


@dataclass(frozen=True)
class Card:
    """One GPU. Rates per second; bytes."""

    name: str
    text: str
    """XLA's ``GpuTargetConfigProto``, as text."""
    memory: int
    bandwidth: float
    fp32: float
    """Multiplications and additions outside the tensor cores."""
    matrix: dict[str, float]
    """Products of the tensor cores by the type of the numbers; ``f32`` is TF32, which JAX takes by default."""
    link: float | None
    """To the other cards of its host; None: not known."""


def _card(
    name: str,
    *,
    gib: float,
    tb_s: float,
    cores: int,
    fpus: int,
    clock_ghz: float,
    l2_mib: int,
    capability: tuple[int, int],
    shared_kib: int,
    threads_per_core: int,
    tf32: float,
    link_gb_s: float,
) -> Card:
    """Args: tf32: dense TFLOP/s; bfloat16 and float16 have twice that on all of them."""
    text = _TEXT.format(
        name=name,
        threads_per_core=threads_per_core,
        shared_per_core=shared_kib * 1024,
        shared_most=(shared_kib - 1) * 1024,
        cores=cores,
        fpus=fpus,
        clock_ghz=clock_ghz,
        bandwidth=round(tb_s * 1e12),
        l2=l2_mib * 2**20,
        memory=round(gib * 2**30),
        major=capability[0],
        minor=capability[1],
    )
    fp32 = 2.0 * cores * fpus * clock_ghz * 1e9
    matrix = {"f32": tf32 * 1e12, "bf16": 2e12 * tf32, "f16": 2e12 * tf32}
    return Card(name, text, round(gib * 2**30), tb_s * 1e12, fp32, matrix, link_gb_s * 1e9)


CARDS: dict[str, Card] = {
    "h100": _card(
        "NVIDIA H100 80GB HBM3", gib=79.1, tb_s=3.35, cores=132, fpus=128, clock_ghz=1.98, l2_mib=50,
        capability=(9, 0), shared_kib=228, threads_per_core=2048, tf32=494.7, link_gb_s=450.0,
    ),
    "h200": _card(
        "NVIDIA H200 141GB HBM3e", gib=141.0, tb_s=4.8, cores=132, fpus=128, clock_ghz=1.98, l2_mib=50,
        capability=(9, 0), shared_kib=228, threads_per_core=2048, tf32=494.7, link_gb_s=450.0,
    ),
    "a100": _card(
        "NVIDIA A100-SXM4-80GB", gib=79.25, tb_s=2.039, cores=108, fpus=64, clock_ghz=1.41, l2_mib=40,
        capability=(8, 0), shared_kib=164, threads_per_core=2048, tf32=156.0, link_gb_s=300.0,
    ),
    "l40s": _card(
        "NVIDIA L40S", gib=44.5, tb_s=0.864, cores=142, fpus=128, clock_ghz=2.52, l2_mib=96,
        capability=(8, 9), shared_kib=100, threads_per_core=1536, tf32=183.0, link_gb_s=32.0,
    ),
    "rtx4090": _card(
        "NVIDIA GeForce RTX 4090", gib=23.6, tb_s=1.008, cores=128, fpus=128, clock_ghz=2.52, l2_mib=72,
        capability=(8, 9), shared_kib=100, threads_per_core=1536, tf32=82.6, link_gb_s=32.0,
    ),
    "b200": _card(
        "NVIDIA B200", gib=178.4, tb_s=7.67, cores=148, fpus=128, clock_ghz=1.965, l2_mib=126,
        capability=(10, 0), shared_kib=228, threads_per_core=2048, tf32=1125.0, link_gb_s=900.0,
    ),
}  # fmt: skip  # one number of a card beside the other
"""Memory is what the driver leaves to programs."""


def find_card(name: str) -> Card:
    """A card by its short name, or by a file with XLA's ``GpuTargetConfigProto`` as text.

    Raises:
        ConfigError: neither is there, or the file does not say what the bounds need.
    """
    if name in CARDS:
        return CARDS[name]
    path = Path(name)
    if not path.is_file():
        text = f"got '{name}'; allowed: {', '.join(CARDS)}, or a file with XLA's GpuTargetConfigProto as text"
        raise ConfigError([Problem("--target", text)], "ejax.preflight")
    return _read_card(path)


def _read_card(path: Path) -> Card:
    text = read_text(path)

    def number(field: str) -> float:
        found = re.search(rf"\b{field}: *([\d.]+)", text)
        if found is None:
            problem = Problem("--target", f"{path} has no {field}; give XLA's GpuTargetConfigProto as text")
            raise ConfigError([problem], "ejax.preflight")
        return float(found.group(1))

    named = re.search(r'device_description_str: *"([^"]*)"', text)
    fp32 = 2e9 * number("core_count") * number("fpus_per_core") * number("clock_rate_ghz")
    memory, bandwidth = int(number("device_memory_size")), number("memory_bandwidth")
    return Card(named.group(1) if named else path.stem, text, memory, bandwidth, fp32, {}, None)
