"""Digests: the list must be what would be written now, to the last byte."""

from collections.abc import Callable
from pathlib import Path

import pytest
from case_tables import cases, refused

from ejax.store.digests import DamagedError, check_digests, write_digests


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "whole"
    (path / "deep").mkdir(parents=True)
    (path / "a").write_text("1")
    (path / "deep" / "b").write_text("2")
    write_digests(path)
    return path


def listing(folder: Path, change: Callable[[list[str]], list[str]]) -> None:
    file = folder / "SHA256"
    file.write_text("".join(change(file.read_text().splitlines(keepends=True))))


def test_a_whole_folder_passes_and_is_only_read(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    check_digests(folder)
    assert sorted(folder.rglob("*")) == before


@cases(
    "damage text",
    (lambda f: (f / "a").write_text("2"), "a was changed"),
    (lambda f: (f / "a").unlink(), "a is missing"),
    (lambda f: (f / "deep" / "c").write_text(""), "deep/c is not in SHA256"),
    (lambda f: (f / "SHA256").write_text(""), "a is not in SHA256"),
    (lambda f: listing(f, lambda lines: lines[1:]), "a is not in SHA256"),
    (lambda f: listing(f, lambda lines: lines[:-1]), "SHA256 was changed"),
    (lambda f: listing(f, lambda lines: [lines[0], *lines]), "SHA256 was changed"),
    (lambda f: listing(f, lambda lines: [lines[1], lines[0], lines[2]]), "SHA256 was changed"),
    (lambda f: listing(f, lambda lines: [*lines, "\n"]), "SHA256 was changed"),
    (lambda f: listing(f, lambda lines: [x.upper() for x in lines]), "A is missing"),
    (lambda f: (f / "SHA256").write_bytes(b"\xff"), "it is not text"),
)
def test_each_difference_is_named(damage: Callable[[Path], object], text: str, folder: Path) -> None:
    damage(folder)
    refused(check_digests, folder, match=text, error=DamagedError)


def test_a_file_and_its_line_that_are_gone_together_are_missed(folder: Path) -> None:
    """The list has a digest of its own."""
    (folder / "a").unlink()
    listing(folder, lambda lines: lines[1:])
    refused(check_digests, folder, match="SHA256 was changed", error=DamagedError)


def test_a_list_names_no_file_from_elsewhere(folder: Path) -> None:
    (folder.parent / "elsewhere").write_text("1")
    listing(folder, lambda lines: [lines[0].replace("  a", "  ../elsewhere"), *lines[1:]])
    (folder / "a").unlink()
    refused(check_digests, folder, match=r"\.\./elsewhere is missing", error=DamagedError)


@pytest.mark.parametrize("name", ["a", "deep"])
def test_a_symbolic_link_is_refused_whatever_it_leads_to(name: str, folder: Path) -> None:
    (folder / name).rename(folder.parent / "elsewhere")
    (folder / name).symlink_to(folder.parent / "elsewhere")
    refused(check_digests, folder, match=f"{name} is a symbolic link", error=DamagedError)
