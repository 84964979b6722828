"""Files as text: what YAML and JSON mean, and what stands for too much."""

import json
import math
import os
import time
from pathlib import Path

import pytest
import yaml
from case_tables import cases, refusals, refused
from small_configs import BASE, make
from test_refused_configs import BOMB

from ejax.config import load_config
from ejax.config.embodichain.check import check
from ejax.config.files import UnreadableError, read_json_text, read_yaml
from ejax.schema.values import MAX_DEPTH

MERGE_BOMB = "[&a {k: 1}, " + ", ".join(
    f"&{b} {{<<: [{','.join([f'*{a}'] * 9)}]}}" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


def test_json_and_yaml_give_the_same_config(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(BASE))
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(BASE))
    (tmp_path / "a.YML").write_text(yaml.safe_dump(BASE))
    assert load_config(tmp_path / "a.json") == load_config(tmp_path / "a.yaml") == load_config(tmp_path / "a.YML")


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_files_of_windows_are_read(encoding: str, ends: str, tmp_path: Path) -> None:
    for name, text in (("a.json", json.dumps(BASE, indent=1)), ("a.yaml", yaml.safe_dump(BASE))):
        (tmp_path / name).write_bytes(text.replace("\n", ends).encode(encoding))
        assert load_config(tmp_path / name) == make()
        (tmp_path / name).write_bytes(text.encode("utf-16"))
        assert "save it as UTF-8" in str(refused(load_config, tmp_path / name, word="UTF-16"))


@refusals(
    ("!!int abc", "3", "got 'abc', which is not a !!int"),
    ("!!int ''", "3", "got '', which is not a !!int"),
    ("!!float abc", "3", "got 'abc', which is not a !!float"),
    ("!!bool abc", "3", "got 'abc', which is not a !!bool"),
    ("!!map x", "3", "expected a mapping node, but found scalar"),
    ("!!str [1]", "3", "expected a scalar node, but found sequence"),
    ("!!timestamp 2024-01-01", "3", "the tag !!timestamp is not allowed; allowed: !!str"),
    ("!!python/name:os.system ''", "3", "the tag !!python/name:os.system is not allowed"),
    ("&a [*a]", "3", "an alias lies inside its own anchor"),
    ("&a {b: {c: *a}}", "3", "an alias lies inside its own anchor"),
    ("*nowhere", "3", "found undefined alias 'nowhere'"),
    ("[" * 3000, "3", "nested deeper than 50"),
    ("9" * 5000, "3", "characters) … 999"),
    ("{? [1] : 2}", "3", "a key must be text"),
    ("{<<: 1}", "3", "<< takes an anchored mapping"),
    ("&a {b: {<<: *a}}", "3", "<< takes an anchored mapping"),
    ('"\\UFFFFFFFF"', "3", "an escape stands for no character"),
    ("a\x07b", "3", r"the character '\x07' is not allowed"),
    # what is known only when all is read has a key instead of a line
    (BOMB + "]", "", "has more than 10000 keys and values"),
    (f"{{text: &t {'x' * 5000}, list: [{'*t, ' * 300}]}}", "", "or as much text"),
    ("[" * 60 + "]" * 60, "", "nested deeper than 50"),
    ("0x" + "f" * 5000, "", "an integer of more than 100 digits"),
    ("0o" + "7" * 5000, "", "an integer of more than 100 digits"),
)
def test_yaml_that_means_nothing_or_too_much_is_refused_soon(tmp_path: Path, given: str, key: str, word: str) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(f"trainer:\n  num_envs: 8\n  seed: {given}\n")
    started = time.process_time()
    error = refused(load_config, file, word=word)
    assert time.process_time() - started < 5.0
    assert str(error).startswith(f"{file}:{key}: 1 problem" if key else f"{file}: 1 problem")
    refused(check, file)


@refusals(
    ('"a', "3", "Invalid control character"),
    ("9" * 5000, "", "an integer of more than 100 digits"),
    ("9" * 500, "", "an integer of more than 100 digits"),
    ("[" * 100_000, "", "nested deeper than 50"),
    ('{"a":' * 100 + "1" + "}" * 100, "", "nested deeper than 50"),
    (json.dumps([0] * 20_000), "", "has more than 10000 keys and values"),
)
def test_json_that_means_nothing_or_too_much_is_refused(tmp_path: Path, given: str, key: str, word: str) -> None:
    file = tmp_path / "train.json"
    file.write_text(f'{{"trainer": {{\n"num_envs": 8,\n"seed": {given}\n}}}}')
    error = refused(load_config, file, word=word)
    assert str(error).startswith(f"{file}:{key}: 1 problem" if key else f"{file}: 1 problem")


@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
def test_a_file_of_10_mb_is_not_parsed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"trainer": "' + "x" * 10_000_000 + '"}')
    started = time.process_time()
    refused(load_config, tmp_path / name, word="at most")
    assert time.process_time() - started < 2.0


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    refused(load_config, tmp_path / "pipe.yaml", word="not a regular file")


@cases(
    "text value",
    *[("010", 10), ("-08", -8), ("0o10", 8), ("1e3", 1000.0), ("1E-3", 0.001), (".5", 0.5), ("5.", 5.0)],
    *[("1.10", 1.1), ("True", True), ("~", None), ("NULL", None), ("-.Inf", -math.inf)],
    *((text, text) for text in ("1:30", "1_000", "0b1", "1e", "inf", "yes", "Off", "1.10.0", "2024-01-01")),
    *((f"{quote}{text}{quote}", text) for quote in "'\"" for text in ("12e3", "0042", "null", "true", "1.10", "")),
)
def test_scalars_are_read_as_yaml_1_2_reads_them(text: str, value: object) -> None:
    assert (read_yaml(text), type(read_yaml(text))) == (value, type(value))


def test_yaml_gives_what_json_can_hold() -> None:
    text = "{a: 2024-01-01, 1: x, on: y, b: &b [1, 2], c: *b, d: {<<: {e: 1, f: 2}, e: 3}, g: =, h: 0x10, i: 1_0}"
    read = read_yaml(text)
    assert json.loads(json.dumps(read)) == read
    assert read["a"] == "2024-01-01"
    assert (read["1"], read["on"], read["g"], read["h"], read["i"]) == ("x", "y", "=", 16, "1_0")
    assert read["d"] == {"e": 3, "f": 2}
    assert read["b"] == read["c"] == [1, 2]
    assert read["b"] is not read["c"]  # changing one section changes no other


def test_of_several_merged_mappings_the_first_wins_and_each_key_counts_once() -> None:
    assert read_yaml("{<<: [{a: 1}, {a: 2, b: 2}], c: 3}") == {"a": 1, "b": 2, "c": 3}
    assert read_yaml(MERGE_BOMB + "]")[-1] == {"k": 1}


def test_nesting_is_counted_through_aliases() -> None:
    opened, closed = "[" * 20, "]" * 20
    with pytest.raises(UnreadableError, match="nested deeper"):
        read_yaml(f"[&a {opened}1{closed}, &b {opened}*a{closed}, &c {opened}*b{closed}]")
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert read_yaml(deep) == read_json_text(deep)
