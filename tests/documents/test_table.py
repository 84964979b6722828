"""The table from the documents to ejax: names that exist, one state in each row, reasons where it deviates."""

import importlib
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "benchmarks/notes/embodichain_documents.md").read_text(encoding="utf-8")
ROWS = [row for row in re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", TEXT, re.M) if row[2] != "state"]


def test_each_row_has_a_state_and_a_deviation_has_a_reason() -> None:
    assert len(ROWS) > 100
    for there, _, state in ROWS:
        assert re.fullmatch(r"(works|renamed)([;:] .+)?|deviates: .{6,}", state), f"{there}: {state}"


def test_counts_are_those_of_the_tables() -> None:
    counts = Counter(re.split(r"[;:]", state)[0] for _, _, state in ROWS)
    for state, count in counts.items():
        assert re.search(rf"^\| {state} \| {count} \|$", TEXT, re.M), f"{state}: {count}"


def test_names_of_ejax_exist() -> None:
    for name in re.findall(r"\b(?:ejax|interop)\.[\w.]+\w", " ".join(here for _, here, _ in ROWS)):
        module, _, attribute = name.rpartition(".")
        place = ROOT / name.replace(".", "/")
        if (
            place.is_dir() or place.with_suffix(".py").is_file() or module.startswith("interop")
        ):  # the latter needs torch
            continue
        assert hasattr(importlib.import_module(module), attribute), name


def test_files_and_tests_exist() -> None:
    for name in re.findall(r"`((?:tests|configs)/[\w/.]+)`", TEXT):
        assert (ROOT / name).exists(), name
