"""``schedule.json``: versions of the parameters that made each rollout, where they may be older than the newest."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from ejax.logs.json_records import FactsError, read_facts
from ejax.schema.plain_files import sha256
from ejax.schema.writing import move, replace_file

SCHEDULE = "schedule.json"


class _Schedule(BaseModel):
    versions: list[int | None]


def write_schedule(run: Path, first: int, versions: Sequence[int]) -> str:
    """Write the versions from rollout ``first`` on, after the earlier ones (lost: null); return the digest of all."""
    file = run / SCHEDULE
    earlier = _read_schedule(file)[:first] if first and file.exists() else []
    # a hole is kept as null: later versions stay at their places
    all_versions = [*earlier, *[None] * (first - len(earlier)), *versions]
    replace_file(file, json.dumps({"versions": all_versions}), run)
    return _schedule_digest(all_versions)


def check_schedule(run: Path, first: int, digest: str | None) -> list[str]:
    """Set ``schedule.json`` aside if it does not hold the versions of the rollouts before a resume; list its defects.
    ``digest``: of those ``first`` versions; None: unknown."""
    file = run / SCHEDULE
    try:
        versions = _read_schedule(file)[:first]
        # without a digest, of an old checkpoint, the number has to do
        if len(versions) == first and digest in (None, _schedule_digest(versions)) and not file.is_symlink():
            return []
        problem = f"{file} does not hold the versions of the {first} rollouts before this resume"
    except FactsError as error:
        problem = str(error)
    aside = file.with_name(f"schedule.damaged-{time.time_ns()}.json")
    if os.path.lexists(file):
        move(file, aside, run)
        problem += f" (as it was: {aside.name})"
    return [f"{problem}; theirs are null from now on, and this run's schedule cannot be played again"]


def _read_schedule(file: Path) -> list[int | None]:
    return read_facts(file, _Schedule)["versions"]


def _schedule_digest(versions: Sequence[int | None]) -> str:
    return sha256(json.dumps(list(versions)).encode())
