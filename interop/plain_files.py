"""Read an export's files: regular ones of bounded size only; as ``ejax.schema.plain_files``, without ``ejax``."""

from pathlib import Path
from zipfile import ZipFile

from interop.standalone_verify import MAX_ARTEFACT, check_plain, parse_json, read_bytes

__all__ = ["MAX_ARTEFACT", "check_plain", "check_unpacked", "parse_json", "read_bytes", "read_text"]


def check_unpacked(archive: ZipFile) -> None:
    """Refuse an archive that is too large once it is unpacked.

    Raises:
        ValueError: the archive is larger than an artefact may be, once it is unpacked.
    """
    if (size := sum(part.file_size for part in archive.infolist())) > MAX_ARTEFACT:
        raise ValueError(f"unpacked it has {size} bytes; at most {MAX_ARTEFACT} are read")


def read_text(path: Path) -> str:
    """Read a regular file of UTF-8.

    Raises:
        FileNotFoundError, ValueError: as ``check_plain``; ValueError also where it is no UTF-8.
    """
    return read_bytes(path).decode("utf-8")
