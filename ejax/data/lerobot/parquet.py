"""Parquet files of a dataset, and what names them when they cannot be read. Their pages have checksums.

Columns of ``meta/episodes`` become parts of paths and bounds of loops, so they are checked before any use.
"""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ejax.data.lerobot.files import open_inside
from ejax.data.lerobot.format import Column
from ejax.data.lerobot.metadata import MAX_COUNT
from ejax.data.task import Origin
from ejax.schema.messages import short_repr
from ejax.schema.plain_files import is_side_file

EPISODES = "meta/episodes"
_WHOLE = ("episode_index", "length", "data/chunk_index", "data/file_index")
_SEGMENTS = ("ejax/segment_ids", "ejax/segment_lengths")
_OURS = {
    "ejax/written_at": pa.float64(),
    **{f"ejax/{name}": pa.int64() for name in Origin._fields},
    **dict.fromkeys(_SEGMENTS, pa.list_(pa.int64())),
}


def parquet_file(schema: pa.Schema, groups: Iterable[pa.Table]) -> bytes:
    """Encode tables as the row groups of a Parquet file."""
    file = io.BytesIO()
    with pq.ParquetWriter(file, schema, write_page_checksum=True) as writer:
        for group in groups:
            # a group per episode: one can be left out without decoding it
            writer.write_table(group, row_group_size=len(group))
    return file.getvalue()


@contextmanager
def open_parquet(folder: Path, name: str) -> Iterator[pq.ParquetFile]:
    """Open a file as a ParquetFile. Errors of the block on a damaged file become a ValueError with its name."""
    with (
        open_inside(folder, name) as opened,
        naming_errors(folder / name),
        pq.ParquetFile(opened, page_checksum_verification=True) as file,
    ):
        yield file


@contextmanager
def naming_errors(path: Path) -> Iterator[None]:
    """Turn the errors of pyarrow and NumPy on a damaged file into a ValueError with its name."""
    try:
        yield
    except (pa.ArrowException, ValueError, TypeError, OSError, MemoryError, OverflowError) as error:
        raise ValueError(
            f"{path} cannot be read: {type(error).__name__}, {short_repr(str(error))}. It is cut off or damaged; "
            f"restore it from a copy"
        ) from error


def load_episode_rows(
    folder: Path, count: int, columns: Sequence[Column], fields: Sequence[str], *, stats: bool = False
) -> list[dict[str, Any]]:
    """Load the first ``count`` rows of ``meta/episodes``, in order; later ones are being written. With ``stats`` all
    columns. Raises ValueError for columns, ``fields`` or episodes that are missing, or hold impossible values."""
    videos = [f"videos/{column.feature}" for column in columns if column.kind == "video"]
    whole = [*_WHOLE, *(f"{video}/{name}" for video in videos for name in ("chunk_index", "file_index"))]
    numbers = {**dict.fromkeys(whole, pa.int64()), **{f"{video}/from_timestamp": pa.float64() for video in videos}}
    needed = [*numbers, "tasks", *(f"ejax/episode/{path}" for path in fields)]
    rows: list[dict[str, Any]] = []
    for name in row_files(folder):
        with open_parquet(folder, name) as file:
            schema = file.schema_arrow
            if wrong := [column for column in needed if len(schema.get_all_field_indices(column)) != 1]:
                raise ValueError(f"it lacks columns {', '.join(wrong)}")
            chosen = [column for column in schema.names if stats or column in needed or column.startswith("ejax/")]
            # threads of pyarrow's and a later fork do not go together
            made = _checked(file.read(columns=chosen, use_threads=False), numbers).to_pylist()
            for row in made:
                _check_row(row)
        rows += made
    rows = sorted(rows, key=lambda row: row["episode_index"])[:count]
    if [row["episode_index"] for row in rows] != list(range(count)):
        raise ValueError(
            f"{folder} has {len(rows)} episodes in {EPISODES}, its info.json has {count}; they must be 0 to "
            f"{count - 1}, each once. Part of the files is missing"
        )
    return rows


def row_files(folder: Path) -> list[str]:
    """List the files of ``meta/episodes`` in order."""
    there = (path for path in (folder / EPISODES).glob("*/*.parquet") if not is_side_file(path.name))
    return sorted(path.relative_to(folder).as_posix() for path in there)


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
            f"episode {row['episode_index']} has {row['length']} frames, and segments of {short_repr(lengths)} frames"
        )
