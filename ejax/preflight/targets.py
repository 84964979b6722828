"""Cards to compile for: XLA's description of each, and the rates that its bounds come from.

Sources: NVIDIA's data sheets and white papers; dense rates, boost clocks, links of one direction (NVLink, else PCIe).
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from ejax.schema.plain_files import read_text
from ejax.schema.problems import ConfigError, Problem


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
    matrix: dict[str, float] = field(default_factory=dict)
    """Products of the tensor cores by the type of the numbers; ``f32`` is TF32, which JAX takes by default."""
    link: float | None = None
    """To the other cards of its host; None: not known."""


def _card(
    name: str,
    gib: float,
    tb_s: float,
    cores: int,
    fpus: int,
    clock_ghz: float,
    l2_mib: int,
    capability: tuple[int, int],
    shared_kib: int,
    threads: int,
    tf32: float,
    link_gb_s: float,
) -> Card:
    """Args: tf32: dense TFLOP/s; bfloat16 and float16 have twice that on all of them."""
    text = f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {threads}
  shared_memory_per_block: 49152 shared_memory_per_core: {shared_kib * 1024} \
shared_memory_per_block_optin: {(shared_kib - 1) * 1024}
  core_count: {cores} fpus_per_core: {fpus} clock_rate_ghz: {clock_ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {round(tb_s * 1e12)} l2_cache_size: {l2_mib * 2**20} device_memory_size: {round(gib * 2**30)}
  cuda_compute_capability {{ major: {capability[0]} minor: {capability[1]} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""
    fp32 = 2.0 * cores * fpus * clock_ghz * 1e9
    matrix = {"f32": tf32 * 1e12, "bf16": 2e12 * tf32, "f16": 2e12 * tf32}
    return Card(name, text, round(gib * 2**30), tb_s * 1e12, fp32, matrix, link_gb_s * 1e9)


CARDS = {
    # GiB that the driver leaves to programs, TB/s, cores, FPUs of a core, GHz, MiB of L2,
    # capability, KiB shared by a core, threads of a core, TF32 in TFLOP/s, GB/s of a link
    "h100": _card("NVIDIA H100 80GB HBM3", 79.1, 3.35, 132, 128, 1.98, 50, (9, 0), 228, 2048, 494.7, 450.0),
    "h200": _card("NVIDIA H200 141GB HBM3e", 141.0, 4.8, 132, 128, 1.98, 50, (9, 0), 228, 2048, 494.7, 450.0),
    "a100": _card("NVIDIA A100-SXM4-80GB", 79.25, 2.039, 108, 64, 1.41, 40, (8, 0), 164, 2048, 156.0, 300.0),
    "l40s": _card("NVIDIA L40S", 44.5, 0.864, 142, 128, 2.52, 96, (8, 9), 100, 1536, 183.0, 32.0),
    "rtx4090": _card("NVIDIA GeForce RTX 4090", 23.6, 1.008, 128, 128, 2.52, 72, (8, 9), 100, 1536, 82.6, 32.0),
    "b200": _card("NVIDIA B200", 178.4, 7.67, 148, 128, 1.965, 126, (10, 0), 228, 2048, 1125.0, 900.0),
}


def find_card(name: str) -> Card:
    """Find a card by its short name, or by a file with XLA's ``GpuTargetConfigProto`` as text.

    Raises:
        ConfigError: neither is there, or the file lacks a number that the bounds need.
    """
    if name in CARDS:
        return CARDS[name]
    path = Path(name)
    if not path.is_file():
        text = f"got '{name}'; allowed: {', '.join(CARDS)}, or a file with XLA's GpuTargetConfigProto as text"
        raise ConfigError([Problem("--target", text)], "ejax.preflight")
    text = read_text(path)

    def number(field: str) -> float:
        found = re.search(rf"\b{field}: *([\d.]+)", text)
        if found is None:
            problem = Problem("--target", f"{path} has no {field}; give XLA's GpuTargetConfigProto as text")
            raise ConfigError([problem], "ejax.preflight")
        return float(found[1])

    named = re.search(r'device_description_str: *"([^"]*)"', text)
    fp32 = 2e9 * number("core_count") * number("fpus_per_core") * number("clock_rate_ghz")
    memory, bandwidth = int(number("device_memory_size")), number("memory_bandwidth")
    return Card(named[1] if named else path.stem, text, memory, bandwidth, fp32)
