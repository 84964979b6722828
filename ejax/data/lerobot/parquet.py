"""Parquet files of a dataset, opened once they are known to be whole, and named when they cannot be read.

Columns of ``meta/episodes`` become parts of paths and bounds of loops, so they are checked before any use.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ejax.data.lerobot.files import KeptFiles, shown
from ejax.data.lerobot.format import Column
from ejax.data.lerobot.metadata import MAX_COUNT
from ejax.data.task import Origin
from ejax.schema.plain_files import is_side_file

EPISODES = "meta/episodes"
_WHOLE = ("episode_index", "length", "data/chunk_index", "data/file_index")
_SEGMENTS = ("ejax/segment_ids", "ejax/segment_lengths")
_OURS = {
    "ejax/written_at": pa.float64(),
    **{f"ejax/{name}": pa.int64() for name in Origin._fields},
    **dict.fromkeys(_SEGMENTS, pa.list_(pa.int64())),
}


def read_parquet(
    files: KeptFiles, name: str, columns: Sequence[str] | None = None, also: tuple[str, ...] = ()
) -> pa.Table:
    """Read a whole file, or ``columns`` of it and those that begin with one of ``also``. Raises FileNotFoundError;
    ValueError if it is damaged, or lacks columns."""
    path = files.folder / name
    with open_parquet(files, name) as file:
        needed, schema = columns or (), file.schema_arrow
        if wrong := [column for column in needed if len(schema.get_all_field_indices(column)) != 1]:
            raise ValueError(f"{path} lacks columns {', '.join(wrong)}; part of the dataset is missing or damaged")
        chosen = [column for column in schema.names if column in needed or column.startswith(also)]
        with named(path):
            # threads of pyarrow's and a later fork do not go together
            return file.read(columns=None if columns is None else chosen, use_threads=False)


@contextmanager
def open_parquet(files: KeptFiles, name: str) -> Iterator[pq.ParquetFile]:
    """Open a file as a ParquetFile, with the errors of ``KeptFiles.open``; later errors are the caller's to name."""
    with files.open(name) as opened:
        with named(files.folder / name):
            file = pq.ParquetFile(opened)
        with file:
            yield file


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Turn the errors of pyarrow and NumPy on a damaged file into a ValueError with its name."""
    try:
        yield
    except (pa.ArrowException, ValueError, TypeError, OSError, MemoryError, OverflowError) as error:
        raise ValueError(
            f"{path} cannot be read: {type(error).__name__}, {shown(str(error), 200)}. It is cut off or damaged; "
            f"restore it from a copy"
        ) from error


def load_rows(
    files: KeptFiles, count: int, columns: Sequence[Column], fields: Sequence[str], *, stats: bool = False
) -> list[dict[str, Any]]:
    """Load the first ``count`` rows of ``meta/episodes``, in order; later ones are being written. With ``stats`` all
    columns. Raises ValueError for columns, ``fields`` or episodes that are missing, or hold impossible values."""
    videos = [f"videos/{column.feature}" for column in columns if column.kind == "video"]
    whole = [*_WHOLE, *(f"{video}/{name}" for video in videos for name in ("chunk_index", "file_index"))]
    numbers = {**dict.fromkeys(whole, pa.int64()), **{f"{video}/from_timestamp": pa.float64() for video in videos}}
    needed = [*numbers, "tasks", *(f"ejax/episode/{path}" for path in fields)]
    rows: list[dict[str, Any]] = []
    for name in row_files(files):
        path = files.folder / name
        if len(rows) >= count and not path.exists():
            break  # an append has listed it, and not put it in place yet
        table = read_parquet(files, name, needed, also=("",) if stats else ("ejax/",))
        with named(path):
            made = _checked(table, numbers).to_pylist()
            for row in made:
                _check_row(row)
        rows += made
    rows = sorted(rows, key=lambda row: row["episode_index"])[:count]
    if [row["episode_index"] for row in rows] != list(range(count)):
        raise ValueError(
            f"{files.folder} has {len(rows)} episodes in {EPISODES}, its info.json has {count}; they must be 0 to "
            f"{count - 1}, each once. Part of the files is missing"
        )
    return rows


def row_files(files: KeptFiles) -> list[str]:
    """List the files of ``meta/episodes`` that the folder has, or must have, in order."""
    there = (path for path in (files.folder / EPISODES).glob("*/*.parquet") if not is_side_file(path.name))
    found = {path.relative_to(files.folder).as_posix() for path in there}
    # a file that was removed is in the list, and its absence must be noticed
    return sorted(found | {name for name in files.digests or () if name.startswith(f"{EPISODES}/")})


def _checked(table: pa.Table, numbers: Mapping[str, pa.DataType]) -> pa.Table:
    """Cast columns to their types. Raise ValueError for other kinds, and ``numbers`` that are missing or negative."""
    types = {**numbers, "tasks": pa.list_(pa.string()), **_OURS}
    for place, name in enumerate(table.column_names):
        if name not in types:
            continue
        if pa.types.is_string(table[name].type):  # which a cast would parse
            raise ValueError(f"column {name} is text, and must be {types[name]}")
        values = table[name].cast(types[name])
        if name not in ("tasks", *_SEGMENTS) and values.null_count:
            raise ValueError(f"column {name} has rows without a number")
        bounds = pc.min_max(values).as_py().values() if len(values) and name in numbers else ()
        if not all(0 <= bound < MAX_COUNT for bound in bounds):
            raise ValueError(f"column {name} has numbers that are negative, too large or not finite")
        table = table.set_column(place, name, values)
    return table


def _check_row(row: Mapping[str, Any]) -> None:
    ids, lengths = (row.get(name) for name in _SEGMENTS)
    fits = ids is None and lengths is None
    if ids is not None and lengths is not None and len(ids) == len(lengths) and None not in (*ids, *lengths):
        fits = min(lengths, default=0) > 0 and min(ids) >= 0 and sum(lengths) == row["length"]
    if not fits or row["length"] < 1:
        raise ValueError(
            f"episode {row['episode_index']} has {row['length']} frames, and segments of {shown(lengths)} frames"
        )
