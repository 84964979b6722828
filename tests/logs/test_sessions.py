"""The beginning and the end of each program that trained a run."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny

from ejax.config import parse_config
from ejax.logs.metric_log import SESSIONS, read_sessions, write_session
from ejax.logs.metrics import MetricWriter


def _lines(logs: Path, *lines: object) -> None:
    (logs / SESSIONS).write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))


def writer(run_dir: Path, **options: Any) -> MetricWriter:
    return MetricWriter(run_dir, parse_config(tiny()), {}, rows=1, update=0, quiet=True, **options)


def test_a_writer_leaves_a_line_also_after_an_error(tmp_path: Path) -> None:
    with writer(tmp_path, is_new=True, started=time.monotonic() - 100.0):
        assert read_sessions(tmp_path / "logs") == []  # what is killed leaves none
    with pytest.raises(KeyboardInterrupt), writer(tmp_path, is_new=False, started=time.monotonic()):
        raise KeyboardInterrupt
    first, second = read_sessions(tmp_path / "logs")
    assert first.end - first.start > 99.0 and first.end <= second.start <= second.end <= time.time()


def test_a_writer_without_a_start_leaves_none(tmp_path: Path) -> None:
    writer(tmp_path, is_new=True).close()
    assert not (tmp_path / "logs" / SESSIONS).exists()


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    whole = {"start": 10.0, "end": 20.0}, {"start": 30.0, "end": 40.0}
    wrong = [{"start": 15.0, "end": 25.0}, {"start": 25.0, "end": 24.0}, {"start": "25", "end": 26.0}]
    wrong += ['{"start": 25, "end": NaN}', '{"start": 25, "end": 1e12}', "[" * 5000, "null", "", '{"start": 2']
    _lines(tmp_path, whole[0], *wrong, whole[1])
    (tmp_path / SESSIONS).write_bytes((tmp_path / SESSIONS).read_bytes() + b"\xff")
    assert [each.model_dump() for each in read_sessions(tmp_path)] == list(whole)


def test_what_is_no_file_is_neither_waited_for_nor_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SESSIONS)
    write_session(tmp_path, 1.0)
    assert read_sessions(tmp_path) == []
    (tmp_path / SESSIONS).unlink()
    (tmp_path / SESSIONS).symlink_to(tmp_path / "elsewhere")
    write_session(tmp_path, 1.0)
    assert not (tmp_path / "elsewhere").exists()
