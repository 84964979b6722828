"""``parity.json``, the certificate of an export: its schema, and whether its lists are those of the folder.

It is a file like the others and proves nothing by itself: anyone who changes an artefact can change it too. Its own
SHA-256, which export and verify print, is to be compared with the maker's. The errors in it decide nothing. No torch.
"""

import hashlib
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from interop.artefacts.formats import FORMATS
from interop.artefacts.parity import ParityError
from interop.plain_files import open_plain, parse_json, read_bytes
from interop.twin.vla_spec import TEXTS, TOKENIZER

SCHEMA_VERSION = 1
FILE = "parity.json"
_ALWAYS = ("policy.json", "contract.json", "observations.npz")
_SOMETIMES = ("episode.json", TOKENIZER, TEXTS)
_AGAIN = "make the export again: python -m interop.export RUN --to DIR"


def read_certificate(directory: Path) -> dict[str, Any]:
    """Read ``parity.json``, of the schema that this interop writes.

    Raises:
        FileNotFoundError: ``directory`` has none. ValueError: of another schema; the text names key and value.
    """
    file = directory / FILE
    try:
        report = parse_json(read_bytes(file))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({repr(error)[:200]}); {_AGAIN}") from error
    for problem in _problems(report):
        raise ValueError(f"{file}: {problem}; {_AGAIN}")
    return report


def check_files(directory: Path, report: Mapping[str, Any]) -> None:
    """Compare the folder with the lists of ``parity.json``, and every listed file with its SHA-256.

    Raises:
        ParityError: naming every file that is missing, changed, or in the folder but not listed.
    """
    artefacts = {FORMATS[name].file for name in report["artefacts"]}
    digests = report["sha256"]
    present = {name for name in _SOMETIMES if (directory / name).exists()}
    needed = sorted({*_ALWAYS, *artefacts, *present} - digests.keys())
    unlisted = sorted({path.name for path in directory.glob("policy.*")} - {*_ALWAYS, *artefacts})
    # is_file first: a pipe is not read
    changed = [x for x, digest in digests.items() if not (directory / x).is_file() or sha256(directory / x) != digest]
    problems = [
        *([f"missing or changed since the export: {', '.join(changed)}"] if changed else []),
        *([f"{FILE} has no SHA-256 of {', '.join(needed)}"] if needed else []),
        *([f"{FILE} does not list {', '.join(unlisted)} under artefacts"] if unlisted else []),
    ]
    if problems:
        raise ParityError(
            f"{'; '.join(problems)}. The folder was changed, or an older ejax made it: remove what is not of the "
            f"export, or {_AGAIN}"
        )


def sha256(path: Path) -> str:
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _problems(report: Any) -> Iterator[str]:
    if not isinstance(report, dict):
        yield f"must be a mapping, got a {type(report).__name__}"
        return
    for key, (wanted, holds) in _KEYS.items():
        if key not in report or not holds(report[key]):
            given = textwrap.shorten(json.dumps(report[key]), 120) if key in report else "nothing"
            yield f"'{key}' must be {wanted}, got {given}"


def _mapping_of(holds: Callable[[str, Any], bool]) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, dict) and len(x) > 0 and all(holds(name, value) for name, value in x.items())


def _is_artefact(name: str, facts: Any) -> bool:
    return name in FORMATS and isinstance(facts, dict) and facts.get("file") == FORMATS[name].file


def _is_digest(name: str, digest: Any) -> bool:
    """Return True if this is the digest of a file directly in the folder."""
    plain = Path(name).name == name and name not in ("", ".", "..") and "\0" not in name
    return plain and isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest) is not None


_KEYS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "schema_version": (str(SCHEMA_VERSION), lambda x: type(x) is int and x == SCHEMA_VERSION),
    "checkpoint": ("text", lambda x: isinstance(x, str)),
    "global_step": ("an integer", lambda x: type(x) is int),
    "clipping": ("text", lambda x: isinstance(x, str)),
    "rows": ("a mapping of cases to their number of rows", _mapping_of(lambda _, n: type(n) is int and n > 0)),
    "largest_allowed": ("a mapping of cases", _mapping_of(lambda _, largest: isinstance(largest, dict))),
    "versions": ("a mapping of libraries", _mapping_of(lambda _, version: isinstance(version, str))),
    "artefacts": (
        f"a mapping that is not empty, of {', '.join(FORMATS)}, each with its 'file'",
        _mapping_of(_is_artefact),
    ),
    "sha256": ("a mapping that is not empty, of the folder's files to 64 hexadecimal digits", _mapping_of(_is_digest)),
}
