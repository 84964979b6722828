"""``logs/sessions.jsonl``: when each program that trained the run began and ended.

A line is written when the program is through with the run, also by an error. One that is killed leaves none.
"""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from ejax.schema.plain_files import append_plain, parse_json, read_bytes

SESSIONS = "sessions.jsonl"
_MAX_BYTES = 1 << 20
_Time = Annotated[float, Field(ge=0.0, lt=1e11)]


class Recorded(BaseModel):
    """One line: seconds since 1970."""

    start: _Time
    end: _Time


def write_session(logs: Path, start: float) -> None:
    """Append a line for a session that ends now. A full disk does not hide why the run ends."""
    with suppress(OSError), append_plain(logs / SESSIONS) as file:
        file.write(json.dumps({"start": start, "end": time.time()}).encode() + b"\n")


def read_sessions(logs: Path) -> list[Recorded]:
    """Read all sessions in their order, without lines that are damaged, or begin before the former one ends."""
    found: list[Recorded] = []
    with suppress(OSError):
        for line in read_bytes(logs / SESSIONS, _MAX_BYTES).splitlines():
            with suppress(ValueError):
                each = Recorded.model_validate(parse_json(line), strict=True)
                if (found[-1].end if found else 0.0) <= each.start <= each.end:
                    found.append(each)
    return found
