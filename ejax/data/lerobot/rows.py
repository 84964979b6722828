"""The rows of ``meta/episodes``: the place of each episode's frames, and its other metadata.

Their numbers become parts of paths and bounds of loops, so their columns are checked before any of them is used.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ejax.data.lerobot.format import Column
from ejax.data.lerobot.inside import shown
from ejax.data.lerobot.kept_files import KeptFiles
from ejax.data.lerobot.metadata import MAX_COUNT
from ejax.data.lerobot.parquet import check_columns, named, open_parquet
from ejax.data.task import Origin

FOLDER = "meta/episodes"
_WHOLE = ("episode_index", "length", "data/chunk_index", "data/file_index")
_SEGMENTS = ("ejax/segment_ids", "ejax/segment_lengths")
_OURS = ("ejax/written_at", *(f"ejax/{name}" for name in Origin._fields))


def load_rows(files: KeptFiles, count: int, columns: Sequence[Column], fields: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of ``meta/episodes`` without statistics, in order.

    Args:
        count: of episodes, from ``info.json``. Later ones are being written.
        fields: paths of the episode's own fields.

    Raises:
        ValueError: columns or episodes are missing, or hold impossible values.
    """
    videos = [f"videos/{column.feature}" for column in columns if column.kind == "video"]
    whole = [*_WHOLE, *(f"{video}/{name}" for video in videos for name in ("chunk_index", "file_index"))]
    real = [f"{video}/from_timestamp" for video in videos]
    needed = [*whole, *real, "tasks", *(f"ejax/episode/{path}" for path in fields)]
    rows: list[dict[str, Any]] = []
    for name in row_files(files):
        path = files.folder / name
        if len(rows) >= count and not path.exists():
            break  # an append has listed it, and not put it in place yet
        with open_parquet(files, name) as file:
            check_columns(path, file.schema_arrow, needed)
            there = [n for n in file.schema_arrow.names if n in needed or n.startswith("ejax/")]
            with named(path):
                table = file.read(columns=there, use_threads=False)
                _check(table, whole, real)
                made = table.to_pylist()
                for row in made:
                    _check_row(row)
        rows += made
    rows = sorted(rows, key=lambda row: row["episode_index"])[:count]
    if [row["episode_index"] for row in rows] != list(range(count)):
        raise ValueError(
            f"{files.folder} has {len(rows)} episodes in {FOLDER}, its info.json says {count}; they must be 0 to "
            f"{count - 1}, each once. Part of the files is missing"
        )
    return rows


def row_files(files: KeptFiles) -> list[str]:
    """The names of the files of ``meta/episodes`` that the folder has, or must have, in order."""
    found = {path.relative_to(files.folder).as_posix() for path in (files.folder / FOLDER).glob("*/*.parquet")}
    return sorted(found | {name for name in files.digests or () if name.startswith(f"{FOLDER}/")})


def _check(table: pa.Table, whole: Sequence[str], real: Sequence[str]) -> None:
    """Raise ValueError for columns of another kind, or numbers that are missing or negative."""
    for name in (*whole, *real, *(name for name in _OURS if name in table.column_names)):
        values = table[name]
        if not (pa.types.is_integer(values.type) or (name not in whole and pa.types.is_floating(values.type))):
            raise ValueError(f"column {name} is {values.type}, and must be numbers")
        if values.null_count:
            raise ValueError(f"column {name} has rows without a number")
        bounds = pc.min_max(values).as_py().values() if len(values) and name not in _OURS else ()
        if not all(0 <= bound < MAX_COUNT for bound in bounds):
            raise ValueError(f"column {name} has numbers that are negative, too large or not finite")
    for name in ("tasks", *_SEGMENTS):
        if name in table.column_names and not pa.types.is_list(table[name].type):
            raise ValueError(f"column {name} is {table[name].type}, and must be lists")


def _check_row(row: Mapping[str, Any]) -> None:
    ids, lengths = (row.get(name) for name in _SEGMENTS)
    segments = ids is None and lengths is None
    if ids is not None and lengths is not None and len(ids) == len(lengths) and None not in (*ids, *lengths):
        segments = min(lengths, default=0) > 0 and min(ids) >= 0 and sum(lengths) == row["length"]
    if not segments or row["length"] < 1:
        raise ValueError(
            f"episode {row['episode_index']} has {row['length']} frames, and segments of {shown(lengths)} frames"
        )
