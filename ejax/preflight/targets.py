"""Cards to compile for: XLA's description of each, and the rates that its bounds come from (``targets.toml``)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Template
from typing import Any

from ejax.schema.plain_files import read_text
from ejax.schema.problems import ConfigError, Problem
from ejax.schema.tables import tables_beside


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


def find_card(name: str) -> Card:
    """Find a card by its short name, or by a file with XLA's ``GpuTargetConfigProto`` as text.

    Raises ConfigError: neither is there, or the file lacks a number that the bounds need.
    """
    if name in CARDS:
        return CARDS[name]
    if not (path := Path(name)).is_file():
        allowed = f"{', '.join(CARDS)}, or a file with XLA's GpuTargetConfigProto as text"
        raise refusal("--target", f"got '{name}'; allowed: {allowed}")
    return _read_card(read_text(path), path)


def _read_card(text: str, path: Path) -> Card:
    def number(field: str) -> float:
        found = re.search(rf"\b{field}: *([\d.]+)", text)
        if found is None:
            raise refusal("--target", f"{path} has no {field}; pass XLA's GpuTargetConfigProto as text")
        return float(found[1])

    named = re.search(r'device_description_str: *"([^"]*)"', text)
    fp32 = 2e9 * number("core_count") * number("fpus_per_core") * number("clock_rate_ghz")  # one multiply-add a cycle
    memory, bandwidth = int(number("device_memory_size")), number("memory_bandwidth")
    return Card(named[1] if named else path.stem, text, memory, bandwidth, fp32)


def refusal(option: str, text: str) -> ConfigError:
    """Make the error of what is wrong with an option of the command, not with a config."""
    return ConfigError([Problem(option, text)], "ejax preflight")


def _card(row: Mapping[str, Any]) -> Card:
    kib = row["shared_kib"]
    sizes = {"memory": round(row["gib"] * 2**30), "bandwidth": round(row["tb_s"] * 1e12), "l2": row["l2_mib"] * 2**20}
    # CUDA keeps 1 KiB of each block's share for itself
    text = Template(TABLE["xla"]).substitute(row, **sizes, shared=kib * 1024, shared_of_block=(kib - 1) * 1024)
    tf32 = row["tf32"] * 1e12
    # the tensor cores of all these cards are twice as fast in 16 bits
    matrix = {"f32": tf32, "bf16": 2.0 * tf32, "f16": 2.0 * tf32}
    return replace(_read_card(text, Path(__file__)), matrix=matrix, link=row["link_gb_s"] * 1e9)


TABLE = tables_beside(__file__)
CARDS = {name: _card(row) for name, row in TABLE["cards"].items()}
