"""Parquet files of a dataset: opened once they are known to be whole, and named when they cannot be read."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ejax.data.lerobot.inside import shown
from ejax.data.lerobot.kept_files import KeptFiles


def read_parquet(files: KeptFiles, name: str, columns: Sequence[str] | None = None) -> pa.Table:
    """A whole file, or some columns of it.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is damaged, or lacks columns.
    """
    with open_parquet(files, name) as file:
        check_columns(files.folder / name, file.schema_arrow, columns or ())
        with named(files.folder / name):
            return file.read(columns=None if columns is None else list(columns), use_threads=False)


@contextmanager
def open_parquet(files: KeptFiles, name: str) -> Iterator[pq.ParquetFile]:
    """``KeptFiles.open`` as a ParquetFile; errors of later reads are the caller's to name.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is damaged.
    """
    with files.open(name) as opened:
        with named(files.folder / name):
            file = pq.ParquetFile(opened)
        with file:
            yield file


def check_columns(path: Path, schema: pa.Schema, needed: Sequence[str]) -> None:
    """Raise ValueError for columns that a file lacks, or has twice."""
    if wrong := [name for name in needed if len(schema.get_all_field_indices(name)) != 1]:
        raise ValueError(f"{path} lacks columns {', '.join(wrong)}; part of the dataset is missing or damaged")


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Turn what pyarrow and NumPy raise on a damaged file into a ValueError with its name."""
    try:
        yield
    except (pa.ArrowException, ValueError, TypeError, OSError, MemoryError, OverflowError) as error:
        raise ValueError(
            f"{path} cannot be read: {type(error).__name__}, {shown(str(error), 200)}. It is cut off or damaged; "
            f"restore it from a copy"
        ) from error
