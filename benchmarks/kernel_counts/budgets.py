"""Counts that a change must not make worse, in a committed file, for each release of jax that they were measured with.

{"entries": [{config, overrides, target, gpus, hosts, "counts": {release of jax: {name: number}}}]}
"""

import sys
from pathlib import Path
from typing import Any

import jax
from pydantic import BaseModel

from ejax.envs.mujoco.choice import how_to_install
from ejax.logs.json_records import read_facts
from ejax.schema.plain_files import to_json
from ejax.schema.problems import ConfigError, Problem
from ejax.schema.writing import replace_file

from .run import count_kernels

_COUNTED = ("kernels", "launches", "library_calls", "host_trips", "callbacks", "collectives", "collective_bytes")
_UNITS = ("update", "env step", "physics step", "minibatch")


class _Entry(BaseModel):
    config: str
    overrides: list[str]
    target: str
    gpus: int
    hosts: int
    counts: dict[str, dict[str, int]] = {}


class _Budgets(BaseModel):
    entries: list[_Entry]


def budget_of(found: dict[str, Any]) -> dict[str, int]:
    """Return the counts that are guarded, flat: ``train/env step/kernels`` and the like. Zeros are left out."""
    counts: dict[str, int] = {}
    for name, program in found["programs"].items():
        for unit, each in program["units"].items():
            if unit in _UNITS:
                counts |= {f"{name}/{unit}/{what}": each[what] for what in _COUNTED if each[what]}
        if program["launches"] is not None:
            counts[f"{name}/launches"] = program["launches"]
        counts[f"{name}/loops of unknown length"] = sum(loop["trips"] is None for loop in program["loops"])
        if program["stored_bytes_per_env_step"]:
            counts[f"{name}/stored bytes per env step"] = round(program["stored_bytes_per_env_step"])
    return counts


def worse(counts: dict[str, int], budget: dict[str, int]) -> list[str]:
    """List the counts that got worse, with both numbers; one that the budget lacks counts as 0."""
    return [
        f"{name}: {count:,}, the budget is {budget.get(name, 0):,}"
        for name, count in counts.items()
        if count > budget.get(name, 0)
    ]


def measure(entry: dict[str, Any]) -> dict[str, int]:
    return budget_of(count_kernels(**{name: value for name, value in entry.items() if name != "counts"}))


def check(path: Path, config: str | None = None) -> list[str]:
    """List counts above their budgets for the jax that is here, of all entries or of those of one config.

    Entries for a physics engine that is not installed are left out, and named on stderr.

    Raises:
        ConfigError: counts of other releases of jax alone, or none for this config. FactsError: no file of budgets.
    """
    entries, release = _entries(read_facts(path, _Budgets), config, path), jax.__version__
    for entry in entries:
        if release not in (counts := entry.get("counts", {})):
            known = ", ".join(counts) or "none"
            text = f"{_title(entry)}: counts for jax {known}, but here is {release}; --rewrite-budgets {path} adds them"
            raise ConfigError([Problem("jax", text)], str(path))
    return [f"{_title(each)}: {text}" for each in entries for text in worse(measure(each), each["counts"][release])]


def rewrite(path: Path, config: str | None = None) -> None:
    """Measure the entries again, and write what was found; arguments and errors as ``check``."""
    budgets = read_facts(path, _Budgets)
    for entry in _entries(budgets, config, path):
        # counts are XLA's: they hold for one release
        entry["counts"] = {**entry.get("counts", {}), jax.__version__: measure(entry)}
    replace_file(path, to_json(budgets, indent=1) + "\n")


def _entries(budgets: dict[str, Any], config: str | None, path: Path) -> list[dict[str, Any]]:
    found = [entry for entry in budgets["entries"] if config in (None, entry["config"])]
    if not found:
        known = ", ".join(sorted({entry["config"] for entry in budgets["entries"]}))
        raise ConfigError([Problem("--config", f"got '{config}'; there are budgets for {known}")], str(path))
    installed = [entry for entry in found if all(map(_is_installed, entry["overrides"]))]
    for entry in (entry for entry in found if entry not in installed):
        print(f"ejax preflight: {_title(entry)} is left out: its engine is not installed", file=sys.stderr)
    return installed


def _is_installed(override: str) -> bool:
    name, _, value = override.partition("=")
    return name != "env.cfg.physics" or how_to_install(value) is None  # type: ignore[arg-type]  # any text is accepted


def _title(entry: dict[str, Any]) -> str:
    return " ".join([entry["config"], *entry["overrides"], f"on {entry['hosts']} x {entry['gpus']} {entry['target']}"])
