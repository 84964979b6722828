"""``logs/metrics.jsonl``: one line a write, which reaches the operating system before ``write`` returns.

A checkpoint holds the file's size and digest, so that a resumed run notices what has become of it. And
``logs/sessions.jsonl``: one line for each program that trained the run, when it is through with it, also by an error.
One that is killed leaves none.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from ejax.logs.json_records import check_facts
from ejax.schema.plain_files import parse_json, read_bytes
from ejax.schema.writing import append_file, append_whole, by_product, move, replace_file

_MAX_BYTES = 1 << 30
"""Bytes of a log that is read; 1000 lines have less than 1 MiB."""
_BEGINNING = b'{"step": '
"""The first bytes of each line that ``MetricLog`` writes."""
SESSIONS = "sessions.jsonl"
NOTES = "notes.log"
_MAX_SESSION_BYTES = 1 << 20
_Time = Annotated[float, Field(ge=0.0, lt=1e11)]


class Logged(BaseModel):
    """The extent of the file when a checkpoint was made."""

    bytes: NonNegativeInt
    sha256: str


class MetricRecord(BaseModel):
    """One line; its other keys are tags."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[float, Field(allow_inf_nan=False)] | None]
    step: Annotated[NonNegativeInt, Field(lt=2**63)]
    time: _Time = 0.0
    """Seconds since 1970."""


class Recorded(BaseModel):
    """One line of ``sessions.jsonl``: seconds since 1970."""

    start: _Time
    end: _Time


class MetricLog(AbstractContextManager["MetricLog"]):
    """The file, to be written on at its end. A context manager."""

    def __init__(self, path: Path) -> None:
        self._file = append_file(path, path.parents[1])
        before = read_bytes(path, _MAX_BYTES)  # the digest continues that of earlier calls
        self._bytes, self._digest = len(before), hashlib.sha256(before)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line; JSON has neither NaN nor infinity: they are ``null``."""
        record: dict[str, float | None] = {"step": step, "time": time.time()}
        record |= {tag: value if math.isfinite(value) else None for tag, value in metrics.items()}
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        append_whole(self._file, line)  # a kill loses no line that was written
        self._bytes += len(line)
        self._digest.update(line)

    def so_far(self) -> dict[str, Any]:
        """Sync the file to disk and return its extent, for a checkpoint's ``Logged``."""
        with by_product("the end of the log"):
            os.fsync(self._file.fileno())
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}

    def __exit__(self, *error: object) -> None:
        self._file.close()


def keep_up_to(
    path: Path, step: int, *, logged: Mapping[str, Any] | None = None, evaluates_again: bool = False
) -> list[str]:
    """Set the lines after ``step`` aside, and drop one that a kill cut short; report this, and any other damage.

    If anything else is wrong, the file as it was is set aside.

    Args:
        logged: the checkpoint's entry on the file; None: it has none.
        evaluates_again: drop the evaluation at ``step`` as well, since it is written a second time.
    """
    problems: list[str] = []
    if path.is_symlink() or (path.exists() and not path.is_file()):
        aside = move(path, _aside(path), path.parents[1])
        return [f"{path} was not a file; it is now {aside.name}, and the log begins here"]
    content = read_bytes(path, _MAX_BYTES) if path.exists() else b""
    found, wrong, _ = _scan(content)
    later = [line for line, record in found if record["step"] > step]
    lines = [
        line.rstrip(b"\r\n") + b"\n"
        for line, record in found
        if record["step"] <= step
        and not (evaluates_again and record["step"] == step and any(tag.startswith("eval/") for tag in record))
    ]
    if wrong:
        problems.append(f"{path} is damaged: {_places(wrong)} not written by ejax, and left out")
    elif logged and (changed := _change(content, logged)):
        problems.append(f"{path} {changed}")
    if problems and content:
        aside = _aside(path)
        replace_file(aside, content, path.parents[1])  # nothing is lost, also of what we cannot read
        problems[-1] += f" (as it was: {aside.name})"
    elif later:
        aside = _aside(path, "superseded")
        replace_file(aside, b"".join(later), path.parents[1])
        problems.append(f"{path}: the run continues from step {step}; its lines of later ones are in {aside.name} now")
    if content:
        replace_file(path, b"".join(lines), path.parents[1])
    return problems


def read_log(path: Path, *, logged: Mapping[str, Any] | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """Read the lines of a log, and list its defects; it is not changed.

    Args:
        logged: a checkpoint's entry on the file; None: it has none.
    """
    if not path.is_file():
        return [], [f"{path.name} is {'no file' if path.exists() else 'not there'}"]
    content = read_bytes(path, _MAX_BYTES)
    found, wrong, cut_short = _scan(content)
    problems = [f"{path.name}: its last line, {cut_short}, was cut short, and is left out"] if cut_short else []
    if wrong:
        problems.append(f"{path.name} is damaged: {_places(wrong)} not written by ejax, and left out")
    if logged and (changed := _change(content, logged)):
        problems.append(f"{path.name} {changed}")
    return [record for _, record in found], problems


def _scan(content: bytes) -> tuple[list[tuple[bytes, dict[str, Any]]], list[int], int | None]:
    """Return each line with its record, the numbers of foreign lines, and that of one that a kill cut short."""
    found, wrong, cut_short = [], [], None
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        try:
            found.append((line, check_facts(parse_json(line), MetricRecord)))
        except ValueError:
            if not line.endswith(b"\n") and line[: len(_BEGINNING)] == _BEGINNING[: len(line)]:
                cut_short = number  # the beginning of a line of ours: a kill came
            else:
                wrong.append(number)
    return found, wrong, cut_short


def _change(content: bytes, logged: Mapping[str, Any]) -> str | None:
    # later lines are of updates after the checkpoint
    if hashlib.sha256(content[: logged["bytes"]]).hexdigest() == logged["sha256"]:
        return None
    what = "was changed" if len(content) >= logged["bytes"] else "lacks lines that it had" if content else "is gone"
    return f"{what} since the checkpoint was made; its numbers may differ"


def _places(numbers: list[int]) -> str:
    first = ", ".join(str(number) for number in numbers[:5])
    return f"line {first} was" if len(numbers) == 1 else f"lines {first}{', …' if len(numbers) > 5 else ''} were"


def _aside(path: Path, why: str = "damaged") -> Path:
    return path.with_name(f"{path.stem}.{why}-{time.time_ns()}{path.suffix}")


def write_session(logs: Path, start: float) -> None:
    """Append a line for a session that ends now. A full disk does not hide why the run ends."""
    with suppress(OSError), append_file(logs / SESSIONS, logs.parent) as file:
        append_whole(file, json.dumps({"start": start, "end": time.time()}).encode() + b"\n")


def write_note(logs: Path, text: str) -> None:
    """Append a line of text, with the time. One that cannot be written costs nothing more."""
    with suppress(OSError), append_file(logs / NOTES, logs.parent) as file:
        append_whole(file, f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}\n".encode())


def read_sessions(logs: Path) -> list[Recorded]:
    """Read all sessions in their order, without lines that are damaged, or begin before the former one ends."""
    found: list[Recorded] = []
    with suppress(OSError):
        for line in read_bytes(logs / SESSIONS, _MAX_SESSION_BYTES).splitlines():
            with suppress(ValueError):
                each = Recorded.model_validate(parse_json(line), strict=True)
                if (found[-1].end if found else 0.0) <= each.start <= each.end:
                    found.append(each)
    return found
