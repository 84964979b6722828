"""Files that somebody names are regular ones of bounded size; nothing in ejax reads them otherwise."""

import ast
import errno
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

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
_OPENS = re.compile(
    r"(.*\.)?(fromfile|from_file|from_xml_path|genfromtxt|load_file|loadtxt|memmap|safe_open|ZipFile)|.*\.read_(bytes|text)"
    r"|(json|np|pickle|torch|torch\.\w+|yaml)\.(\w+_)?load|ET\.parse"
)
"""Calls that open a file to read it, by what is called; ``open`` has more to it."""
_READER = "the bounded reader itself"
_OWN = "what this process, or one that it started, has written"
_KERNEL = "a file of the kernel's, about a process"
_SHIPPED = "a file of ejax, or of an installed package"
_CHECKED = "refused before, by "
OTHERWISE = {
    ("ejax/data/buffer.py", "path.open"): f"{_OWN}: the shared memory",
    ("ejax/data/control.py", "os.open"): f"{_OWN}: for its lock alone",
    ("ejax/data/quota.py", "os.open"): f"{_OWN}: for its lock alone",
    ("ejax/data/supervisor.py", "(self.folder / LIFE).read_bytes"): _OWN,
    ("ejax/data/supervisor.py", "(self.folder / SPEC).read_bytes"): _OWN,
    ("ejax/data/worker.py", "Path(folder, ORDER).read_bytes"): _OWN,
    ("ejax/envs/locomotion/model.py", "mujoco.MjSpec.from_file"): f"{_CHECKED}check_model_files",
    ("ejax/envs/locomotion/model.py", "ET.parse"): _SHIPPED,
    ("ejax/envs/task/scene.py", "ET.parse"): _SHIPPED,
    ("ejax/config/embodichain/check.py", "Path(__file__).with_name('other_files.toml').read_text"): _SHIPPED,
    ("ejax/envs/task/robots.py", "(ASSETS / 'ur.toml').read_text"): _SHIPPED,
    ("ejax/envs/task/robots.py", "(ASSETS / file).read_text"): _SHIPPED,
    ("ejax/envs/mujoco/models.py", "mujoco.MjSpec.from_file"): f"{_CHECKED}check_model_files",
    ("ejax/schema/plain_files.py", "os.open"): _READER,
    ("ejax/schema/tables.py", "Path(module).with_suffix('.toml').read_text"): _SHIPPED,
    ("ejax/schema/writing.py", "os.open"): _READER,
    ("ejax/replay.py", "np.load"): "of what open_plain has opened",
    ("ejax/report/page.py", "Path(__file__).with_name(name).read_text"): _SHIPPED,
    ("ejax/training/profile.py", "jax.profiler.ProfileData.from_file"): _OWN,
    ("ejax/store/run_lock.py", "Path(f'/proc/{pid}/stat').read_text"): _KERNEL,
    ("ejax/policies/pretrained/weights.py", "safe_open"): f"{_CHECKED}check_plain",
    ("interop/artefacts/formats.py", "load_file"): f"{_CHECKED}check_plain",
    ("interop/artefacts/formats.py", "torch.export.load"): f"{_CHECKED}check_files, with --trust alone",
    ("interop/artefacts/formats.py", "torch.jit.load"): f"{_CHECKED}check_files, with --trust alone",
    ("interop/standalone_verify.py", "np.load"): f"{_CHECKED}check_plain",
    ("interop/plain_pt.py", "torch.load"): f"{_CHECKED}check_plain",
    ("interop/plain_pt.py", "zipfile.ZipFile"): f"{_CHECKED}check_plain",
    ("interop/standalone_verify.py", "os.open"): _READER,
}
"""Module and call, with the reason."""


def opened(tree: ast.AST) -> Iterator[str]:
    """List the calls of a module that read a file, as they stand there."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in ("open", "io.open", "os.open") or (called.endswith(".open") and _is_mode(node.args)):
            modes = [ast.unparse(each) for each in (*node.args, *(pair.value for pair in node.keywords))]
            if not any(re.fullmatch(r"'[wxa][bt]?'|.*O_(WRONLY|DIRECTORY).*", mode) for mode in modes):
                yield called
        elif _OPENS.fullmatch(called):
            yield called


def _is_mode(args: list[ast.expr]) -> bool:
    """Separate ``path.open("rb")`` from methods of that name which take a key or a file."""
    return not args or (
        isinstance(args[0], ast.Constant) and re.fullmatch(r"[rwxabt+]{1,3}", str(args[0].value)) is not None
    )


def test_nothing_in_ejax_or_interop_reads_files_otherwise() -> None:
    """``OTHERWISE`` has each exception, with its reason."""
    found = set()
    for folder in ("ejax", "interop"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= {(str(path.relative_to(ROOT)), call) for call in opened(ast.parse(path.read_text()))}
    assert found == set(OTHERWISE)


@pytest.mark.parametrize(
    ("code", "reads"),
    [
        *((code, True) for code in ("open(x)", "open(x, 'rb')", "p.open()", "p.open('r+b')", "Path(x).read_text()")),
        *((code, True) for code in ("np.load(x)", "json.load(f)", "yaml.safe_load(f)", "torch.jit.load(x)")),
        *((code, False) for code in ("open(x, 'wb')", "p.open('ab')", "section.open('env')", "files.open(name)")),
        *((code, False) for code in ("read_text(x)", "json.loads(x)", "os.open(x, os.O_WRONLY)", "p.open(mode='w')")),
    ],
)  # fmt: skip
def test_ways_of_reading_are_known(code: str, reads: bool) -> None:
    assert bool(list(opened(ast.parse(code)))) == reads


@pytest.mark.parametrize("read", [open_plain, check_plain, read_bytes, read_text, read_json])
def test_what_is_no_regular_file_is_refused_at_once(read: Callable[[Path], Any], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    began = time.monotonic()
    with pytest.raises(OSError, match="is a named pipe, no regular file"):
        read(tmp_path / "pipe")
    with pytest.raises(OSError, match="is a device, no regular file"):
        read(Path("/dev/zero"))
    with pytest.raises(IsADirectoryError):
        read(tmp_path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none")
    with pytest.raises(OSError, match="null"):
        read(Path("a\0b"))
    assert time.monotonic() - began < 30


def test_interop_refuses_the_same(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for read in (interop_files.check_plain, interop_files.read_bytes):
        for odd in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
            with pytest.raises(ValueError, match="regular file"):
                read(odd)
    (tmp_path / "a").write_bytes(b"12345")
    assert interop_files.read_bytes(tmp_path / "a", 5) == b"12345"
    with pytest.raises(ValueError, match="has 5 bytes; at most 4 are read"):
        interop_files.read_bytes(tmp_path / "a", 4)
    assert interop_files.parse_json("[" * 100 + "]" * 100)
    for deep in ("[" * 100_000, "[" * 101 + "]" * 101, '{"a":' * 101 + "1" + "}" * 101):
        with pytest.raises(ValueError, match="is nested deeper than 100 levels"):
            interop_files.parse_json(deep)


def test_the_size_of_a_file_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bytes(tmp_path / "a", 5) == b"12345"
    with pytest.raises(OSError, match="has 5 bytes; at most 4 are read"):
        read_bytes(tmp_path / "a", 4)
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="at most 67108864 are read"):
        read_text(tmp_path / "sparse")


def test_json_is_bounded_in_depth_and_digits() -> None:
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert parse_json("9" * MAX_DIGITS) == int("9" * MAX_DIGITS)
    assert parse_json('{"a": [1, 2.5, null, true]}') == {"a": [1, 2.5, None, True]}
    for deep in ("[" * 100_000, "[" * 101 + "]" * 101, '{"a":' * 101 + "1" + "}" * 101):
        with pytest.raises(ValueError, match="is nested deeper than 100 levels"):
            parse_json(deep)
    for digits in (101, 5000):
        with pytest.raises(ValueError, match=f"an integer of {digits} digits; allowed are 100"):
            parse_json("9" * digits)


def test_a_link_is_not_appended_to_and_a_pipe_not_waited_for(tmp_path: Path) -> None:
    (other := tmp_path / "other").write_text("kept")
    (link := tmp_path / "metrics.jsonl").symlink_to(other)
    os.mkfifo(pipe := tmp_path / "pipe")
    for path, number in ((link, errno.ELOOP), (pipe, errno.EINVAL)):
        with pytest.raises(OSError) as caught:
            MetricLog(path)
        assert caught.value.errno == number and str(path) in str(caught.value)
    write_session(tmp_path, 1.0)
    assert other.read_text() == "kept" and (tmp_path / SESSIONS).is_file()


def test_json_is_strict_and_infinities_come_back() -> None:
    value = {"NaN, Infinity": [math.inf, -math.inf, 1e-3], 'a "quoted" -Infinity\\': {"x": math.nan}}
    text = to_json(value)
    strict = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    first, second = value
    assert strict == {first: value[first], second: {"x": None}}
    assert json.loads(to_json(value, "null"))[first] == [None, None, 1e-3]


PLAIN_JSON = {
    "ejax/config/__main__.py": "counts",
    "ejax/config/load.py": "read back at once",
    "ejax/config/models.py": "read back at once",
    "ejax/config/run_config.py": "read back at once",
    "ejax/data/lerobot/recording.py": "a note of names",
    "ejax/logs/metric_log.py": "times of a clock",
    "ejax/policies/mlp.py": "read back at once",
    "ejax/policies/vla/config.py": "read back at once",
    "ejax/policies/vla/words.py": "words",
    "ejax/report/cells.py": "a text to be shown",
    "ejax/runtime/processes.py": "texts between processes",
    "ejax/schema/plain_files.py": "to_json itself",
    "ejax/store/replay_rows.py": "counts",
    "ejax/store/resume_rules.py": "texts of an error",
    "ejax/store/run_lock.py": "an owner",
    "ejax/store/schedule_file.py": "counts",
    "ejax/train.py": "a name",
    "ejax/training/build.py": "a text of an error",
    "ejax/training/callbacks.py": "a state, as a text where it has a NaN",
    "ejax/training/host_parts.py": "a text of an error",
    "ejax/training/start.py": "read back at once",
    "ejax/training/teachers.py": "texts of a report",
    "ejax/training/warm_start.py": "texts of a report",
    "interop/artefacts/leapp_bundle.py": "shapes",
    "interop/serving/server.py": "counts, and a contract of strict JSON",
    "interop/standalone_verify.py": "a text of an error",
}
"""Files that call ``json.dumps`` without ``allow_nan=False`` -> why no NaN gets into a file of JSON."""


def test_every_other_json_is_written_strictly() -> None:
    found = set()
    for folder in ("ejax", "interop"):
        for path in (ROOT / folder).rglob("*.py"):
            calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
            dumps = [call for call in calls if ast.unparse(call.func) in ("json.dumps", "json.dump")]
            if any("allow_nan" not in {each.arg for each in call.keywords} for call in dumps):
                found.add(str(path.relative_to(ROOT)))
    assert found == set(PLAIN_JSON)
