"""Lineage in population-based training, ``exploits.jsonl``: who continued from whom, and with which values."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, NonNegativeInt, ValidationError

from ejax.schema.messages import number
from ejax.schema.plain_files import read_bytes
from ejax.schema.writing import append_file, append_whole

EXPLOITS = "exploits.jsonl"


class Exploited(BaseModel):
    """One line: after ``update`` a member continues from another's parameters."""

    step: NonNegativeInt
    update: NonNegativeInt
    member: NonNegativeInt
    parent: NonNegativeInt
    values: dict[str, float]


def read_exploits(population: Path) -> list[Exploited]:
    """Read all of a population, oldest first, without lines that are damaged."""
    file, found = population / EXPLOITS, []
    for line in read_bytes(file).decode(errors="replace").splitlines() if file.exists() else ():
        with suppress(ValidationError):  # a kill may have cut a line short
            found.append(Exploited.model_validate_json(line))
    return sorted(found, key=lambda each: each.update)


def write_exploit(population: Path, exploited: Exploited) -> None:
    with append_file(population / EXPLOITS, population) as file:
        append_whole(file, f"{exploited.model_dump_json()}\n".encode())


def values_at(exploits: Sequence[Exploited], member: int, step: float, first: Mapping[str, Any]) -> dict[str, Any]:
    """Return a member's values after ``step``; ``first``: those that it began with."""
    own = [each.values for each in exploits if each.member == member and each.step <= step]
    return {key: (own[-1] if own else first).get(key, value) for key, value in first.items()}


def lineage(exploits: Sequence[Exploited], member: int, step: float = math.inf) -> str:
    """Whose parameters a member's are after ``step``, latest first: ``3 ← 5 at update 40 ← 2 at update 20``."""
    text, now, before = str(member), member, math.inf
    for each in reversed(exploits):  # from the present back: a parent's own copy counts if it came earlier
        if each.member == now and each.update < before and each.step <= step:
            text += f" ← {each.parent} at update {each.update}"
            now, before = each.parent, each.update
    return text


def value_texts(
    exploits: Sequence[Exploited], member: int, best_step: int | None, first: Mapping[str, Any]
) -> dict[str, str]:
    """Each value of a member as it is now, and as it was, where that is not the same."""
    now = values_at(exploits, member, math.inf, first)
    at_best = now if best_step is None else values_at(exploits, member, best_step, first)
    texts = {}
    for key, value in now.items():
        parts = [_text(value)]
        parts += [f"{_text(at_best[key])} at its best"] * (at_best[key] != value)
        parts += [f"{_text(first[key])} at first"] * (first[key] != value)
        texts[key] = parts[0] if len(parts) == 1 else f"{parts[0]} now, {', '.join(parts[1:])}"
    return texts


def _text(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)
