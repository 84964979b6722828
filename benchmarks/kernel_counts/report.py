"""Results of a count, as data with a schema version, and as tables."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ejax.preflight.targets import Card

from .bounds import assumptions, bounds
from .cost import Cost
from .launches import PROGRAM
from .loops import ENV_STEP, MINIBATCH, PHYSICS_STEP, UPDATE, Loop, count
from .programs import Compiled

SCHEMA_VERSION = 2
UNITS = (UPDATE, ENV_STEP, f"{ENV_STEP}, backward", PHYSICS_STEP, MINIBATCH)
NOT_KNOWN = (
    "seconds: the estimates are not forecasts",
    "trips of loops of unknown length (updates of a dispatch, MJX's solver, evaluations)",
    "kernels inside library calls (cuSOLVER, cuBLAS, cuDNN, Warp): each counts as one",
    "what a kernel within a CUDA graph costs beside one that is launched alone",
    "what autotuning on the card would choose instead: other tiles, library calls for products, other fusions",
    "memory that the allocator loses between buffers, and what CUDA, NCCL and libraries take for themselves",
)


@dataclass(frozen=True)
class Settings:
    config: str
    overrides: tuple[str, ...]
    target: str
    gpus: int
    hosts: int
    num_envs: int
    """On each GPU."""
    num_steps: int
    notes: tuple[str, ...] = ()
    """Values that the config leaves open and the target decides."""

    @property
    def num_devices(self) -> int:
        return self.gpus * self.hosts


def describe(
    settings: Settings,
    card: Card,
    programs: Sequence[Compiled],
    seconds: dict[str, float],
) -> dict[str, Any]:
    """Describe everything as JSON can hold it."""
    return {
        "schema_version": SCHEMA_VERSION,
        **asdict(settings),
        "card": {name: value for name, value in asdict(card).items() if name != "text"},
        "programs": {each.name: _program(each, settings, card) for each in programs},
        "assumptions": assumptions(card, hosts=settings.hosts),
        "not_known": list(NOT_KNOWN),
        "seconds": {name: round(number, 1) for name, number in seconds.items()},
    }


def _program(compiled: Compiled, settings: Settings, card: Card) -> dict[str, Any]:
    program = count(compiled.module)
    found = {name: loop for name in UNITS if (loop := program.find(name)) is not None}
    whole = found.get(UPDATE, program)
    if compiled.name == "learn":  # one update a call: there is no loop over updates
        found = {UPDATE: whole, **found}
    units = {name: _unit(loop, compiled, card, settings) for name, loop in found.items()}
    rows = None if compiled.name == "evaluate" else settings.num_envs * settings.num_devices * settings.num_steps
    return {
        "memory": asdict(compiled.memory) | {"fraction_of_card": compiled.memory.peak / card.memory},
        "launches": None if compiled.launches is None else math.ceil(compiled.launches[PROGRAM]),
        "units": units,
        "loops": [_loop(each) for each in program.walk() if each is not program],
        "collectives": [
            {"kind": each.kind, "bytes": each.num_bytes, "devices": each.group_size, "in": each.where, "times": times}
            for each, times in sorted(whole.trip.collectives.items(), key=lambda item: (item[0].where, item[0].kind))
        ],
        "library_calls": dict(sorted(whole.trip.library_calls.items())),
        "stored_bytes_per_env_step": _stored(program, settings) if compiled.name == "train" else None,
        "env_steps_per_update": rows,
        "library_products": compiled.library_products,
        "seconds": round(compiled.seconds, 1),
    }


def _unit(loop: Loop, compiled: Compiled, card: Card, settings: Settings) -> dict[str, Any]:
    limits = bounds(loop.trip, card, hosts=settings.hosts)
    launches = None if compiled.launches is None else math.ceil(compiled.launches[loop.instruction])
    counts = {"launches": launches, **_counts(loop.trip)}
    return {"trips": loop.trips, **counts, "bounds_s": {**asdict(limits), "limiting": limits.limiting}}


def _counts(cost: Cost) -> dict[str, Any]:
    return {
        "kernels": math.ceil(cost.kernels),
        "host_trips": math.ceil(cost.host_trips),
        "callbacks": math.ceil(cost.callbacks),
        "library_calls": math.ceil(sum(cost.library_calls.values())),
        "collectives": math.ceil(cost.num_collectives),
        "collective_bytes": math.ceil(sum(each.num_bytes * times for each, times in cost.collectives.items())),
        "bytes": math.ceil(cost.num_bytes),
        "dot_flops": {name: math.ceil(flops) for name, flops in sorted(cost.dot_flops.items())},
        "element_ops": math.ceil(cost.element_ops),
    }


def _loop(loop: Loop) -> dict[str, Any]:
    counts = _counts(loop.trip)
    return {"path": loop.path, "trips": loop.trips} | {
        name: counts[name] for name in ("kernels", "host_trips", "collectives")
    }


def _stored(program: Loop, settings: Settings) -> float | None:
    """Count the bytes that the loop over env steps keeps of each: arrays of its carry with a row for each step."""
    steps = program.find(ENV_STEP)
    if steps is None or steps.trips is None:
        return None
    # what a scan collects has its steps as the first axis
    kept = sum(shape.num_bytes for shape in steps.shapes if shape.dims[:1] == (steps.trips,))
    return kept / (steps.trips * settings.num_envs)


def show(found: dict[str, Any], console: Console) -> None:
    where = f"{found['hosts']} x {found['gpus']}" if found["hosts"] > 1 else str(found["gpus"])
    console.print(
        f"{found['config']}: {where} x {found['card']['name']}, {found['num_envs']} environments on each, "
        f"compiled in {found['seconds']['wall']:.0f} s ({found['seconds']['cpu']:.0f} s of CPU time)"
    )
    for text in found["notes"]:
        console.print(text)
    for name, program in found["programs"].items():
        _show_program(name, program, console)
    for title, key in (("Assumed", "assumptions"), ("Not known", "not_known")):
        console.print(f"\n{title}:")
        for text in found[key]:
            console.print(f"- {text}")


def _show_program(name: str, program: dict[str, Any], console: Console) -> None:
    memory = program["memory"]
    parts = ", ".join(f"{part} {_size(memory[part])}" for part in ("arguments", "outputs", "temporaries", "peak"))
    console.print(f"\n{name}: memory of each GPU: {parts} ({memory['fraction_of_card']:.2%} of the card)")
    if program["stored_bytes_per_env_step"]:
        console.print(f"the rollout keeps {program['stored_bytes_per_env_step']:,.0f} bytes of each env step")
    if program["launches"] is not None:
        of = "kernels and CUDA graphs, a loop of unknown length with one trip"
        console.print(f"launches of a call: {program['launches']:,} ({of})")
    table = Table(box=None, pad_edge=False, header_style="dim")
    counts = ("kernels", "launches", "library calls", "host trips", "callbacks", "collectives")
    for column in ("per", "trips", *counts, "bytes", "product FLOPs", "other ops", "estimate", "limited by"):
        table.add_column(column, justify="left" if column in ("per", "limited by") else "right", no_wrap=True)
    for unit, each in program["units"].items():
        limits = each["bounds_s"]
        table.add_row(
            *(unit, "unknown" if each["trips"] is None else f"{each['trips']:,}"),
            *("" if (number := each[name.replace(" ", "_")]) is None else f"{number:,}" for name in counts),
            *(_size(each["bytes"]), _scaled(sum(each["dot_flops"].values())), _scaled(each["element_ops"])),
            *(_time(limits[limits["limiting"]]), limits["limiting"]),
        )
    console.print(table)
    if unknown := [each for each in program["loops"] if each["trips"] is None and not each["path"].endswith(UPDATE)]:
        console.print(
            "loops of unknown length: " + "; ".join(f"{x['path']} ({x['kernels']} kernels a trip)" for x in unknown)
        )
    for each in program["collectives"]:
        place = each["in"] or "outside of loops"
        console.print(f"{each['times']:g} x {each['kind']} of {_size(each['bytes'])} an update, in: {place}")
    if program["library_products"]:
        console.print(
            "XLA's first tiles do not fit some product: all products are cuBLAS's here, as one may be on a card"
        )
    if program["library_calls"]:
        calls = ", ".join(f"{count:g} x {target}" for target, count in program["library_calls"].items())
        console.print(f"library calls, each counted as one kernel: {calls}")


def _size(num_bytes: float) -> str:
    return "{:.4g} {}".format(*_in_units(num_bytes, 1024, ("B", "kiB", "MiB", "GiB")))


def _scaled(number: float) -> str:
    return "{:.3g}{}".format(*_in_units(number, 1000, ("", " k", " M", " G", " T")))


def _in_units(number: float, factor: int, units: Sequence[str]) -> tuple[float, str]:
    if number < factor or len(units) == 1:
        return number, units[0]
    return _in_units(number / factor, factor, units[1:])


def _time(seconds: float) -> str:
    unit, factor = ("µs", 1e6) if seconds < 1e-3 else ("ms", 1e3) if seconds < 1 else ("s", 1.0)
    return f"{seconds * factor:.3g} {unit}"
