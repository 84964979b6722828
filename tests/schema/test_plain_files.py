"""Files that somebody names are regular ones of bounded size; nothing in ejax reads them otherwise."""

import errno
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from case_tables import refused

from ejax.logs.metric_log import SESSIONS, MetricLog, write_session
from ejax.schema.plain_files import (
    MAX_DEPTH,
    MAX_DIGITS,
    check_plain,
    open_plain,
    parse_json,
    read_bytes,
    read_json,
    read_text,
    to_json,
)
from interop import standalone_verify as interop_files

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("read", [open_plain, check_plain, read_bytes, read_text, read_json])
def test_what_is_no_regular_file_is_refused_at_once(read: Callable[[Path], Any], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    began = time.monotonic()
    refused(read, tmp_path / "pipe", match="is a named pipe, not a regular file", error=OSError)
    refused(read, Path("/dev/zero"), match="is a device, not a regular file", error=OSError)
    refused(read, tmp_path, error=IsADirectoryError)
    refused(read, tmp_path / "none", error=FileNotFoundError)
    refused(read, Path("a\0b"), match="null", error=OSError)
    assert time.monotonic() - began < 30


def test_interop_refuses_the_same(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for read in (interop_files.check_plain, interop_files.read_bytes):
        for odd in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
            refused(read, odd, match="regular file")
    (tmp_path / "a").write_bytes(b"12345")
    assert interop_files.read_bytes(tmp_path / "a", 5) == b"12345"
    refused(interop_files.read_bytes, tmp_path / "a", 4, match="has 5 bytes; at most 4 are read")
    assert interop_files.parse_json("[" * 100 + "]" * 100)
    for deep in ("[" * 100_000, "[" * 101 + "]" * 101, '{"a":' * 101 + "1" + "}" * 101):
        refused(interop_files.parse_json, deep, match="is nested deeper than 100 levels")


def test_the_size_of_a_file_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bytes(tmp_path / "a", 5) == b"12345"
    refused(read_bytes, tmp_path / "a", 4, match="has 5 bytes; at most 4 are read", error=OSError)
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    refused(read_text, tmp_path / "sparse", match="at most 67108864 are read", error=OSError)


def test_json_is_bounded_in_depth_and_digits() -> None:
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert parse_json("9" * MAX_DIGITS) == int("9" * MAX_DIGITS)
    assert parse_json('{"a": [1, 2.5, null, true]}') == {"a": [1, 2.5, None, True]}
    for deep in ("[" * 100_000, "[" * 101 + "]" * 101, '{"a":' * 101 + "1" + "}" * 101):
        refused(parse_json, deep, match="is nested deeper than 100 levels")
    for digits in (101, 5000):
        refused(parse_json, "9" * digits, match=f"an integer of {digits} digits; allowed are 100")


def test_a_link_is_not_appended_to_and_a_pipe_not_waited_for(tmp_path: Path) -> None:
    (other := tmp_path / "other").write_text("kept")
    (link := tmp_path / "metrics.jsonl").symlink_to(other)
    os.mkfifo(pipe := tmp_path / "pipe")
    for path, number in ((link, errno.ELOOP), (pipe, errno.EINVAL)):
        caught = refused(MetricLog, path, error=OSError)
        assert caught.errno == number and str(path) in str(caught)
    write_session(tmp_path, 1.0)
    assert other.read_text() == "kept" and (tmp_path / SESSIONS).is_file()


def test_json_is_strict_and_infinities_come_back() -> None:
    value = {"NaN, Infinity": [math.inf, -math.inf, 1e-3], 'a "quoted" -Infinity\\': {"x": math.nan}}
    text = to_json(value)
    strict = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    first, second = value
    assert strict == {first: value[first], second: {"x": None}}
    assert json.loads(to_json(value, "null"))[first] == [None, None, 1e-3]
