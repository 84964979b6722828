"""Rows of replay buffers in a checkpoint: files of a few MiB each, of which a save writes those that are new.

``replay/index.json``: the fields of a row, and the counts of each ring. ``replay/<buffer>_<ring>_<segment>.rows``: the
rows of a part of a ring, one after the other, with their fields packed; rows that were never written are left out. A
segment that did not change since the run's checkpoint before this one is a hard link to the file there.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, NonNegativeInt, PositiveInt

from ejax.algorithms.host_rows import HostRows
from ejax.algorithms.replay_buffer import Replay, Transition
from ejax.logs.json_records import FactsError, read_facts
from ejax.runtime.sharding import is_main_process
from ejax.runtime.tree_text import named_leaves
from ejax.schema.plain_files import HUGE, open_plain
from ejax.schema.writing import link_file, make_folder, new_file, replace_file
from ejax.store.arrays import REPLAY, CheckpointError

_INDEX = "index.json"
SEGMENT_BYTES = 4 << 20


class Ring(BaseModel):
    """Counts of a ring, as ``Replay`` has them."""

    head: NonNegativeInt
    size: NonNegativeInt
    added: NonNegativeInt


class Field(BaseModel):
    name: str
    dtype: str
    shape: list[NonNegativeInt]


class Buffer(BaseModel):
    """Form and counts of a replay buffer."""

    capacity: PositiveInt
    """Rows of each ring."""
    segment: PositiveInt
    """Rows of a file."""
    fields: list[Field]
    rings: list[Ring]

    @property
    def record(self) -> np.dtype[Any]:
        return np.dtype([(each.name, jnp.dtype(each.dtype), tuple(each.shape)) for each in self.fields])

    @property
    def form(self) -> dict[str, Any]:
        """Return the facts that two buffers of the same arrays agree in."""
        fields = ", ".join(f"{each.name} {each.dtype}{each.shape}" for each in self.fields)
        return {"capacity": self.capacity, "rings": len(self.rings), "fields": fields}

    def segments(self, ring: int) -> Iterator[tuple[int, int]]:
        """Yield the first row of each segment that has any, and their number."""
        size = min(self.rings[ring].size, self.capacity)
        for start in range(0, size, self.segment):
            yield start, min(self.segment, size - start)

    def has_changed(self, before: "Buffer", ring: int, start: int, count: int) -> bool:
        """Return whether rows were written since ``before``, a state of the same buffer."""
        new, old, capacity = self.rings[ring], before.rings[ring], self.capacity
        added = (new.added - old.added) % 2**32
        if added >= capacity or (old.head + added) % capacity != new.head:
            return True
        if before.form != self.form or (start, count) not in before.segments(ring):
            return True
        first, end = old.head, old.head + added  # of the rows that were written, which may go round
        return added > 0 and any(first < start + count + lap and start + lap < end for lap in (0, capacity))


class _Index(BaseModel):
    buffers: list[Buffer]


def save_rows(folder: Path, replays: Sequence[Replay], previous: Path | None) -> None:
    """Write this process's rows of replay buffers into the folder of a checkpoint that is made. ``previous``: a
    checkpoint of the same buffers in an earlier state. None: there is none."""
    folder = folder / REPLAY
    make_folder(folder)
    old: list[Buffer] = []
    with suppress(CheckpointError):  # nothing to link then
        old = [] if previous is None else _read_index(previous)
    buffers = [_describe(replay) for replay in replays]
    for i, (replay, buffer) in enumerate(zip(replays, buffers, strict=True)):
        before = old[i] if i < len(old) and len(old[i].rings) == len(buffer.rings) else None
        for ring, pages, place in _own_rings(replay):
            for start, count in buffer.segments(ring):
                name = _name(i, ring, start // buffer.segment)
                if previous is not None and before and not buffer.has_changed(before, ring, start, count):
                    with suppress(OSError):  # gone: written again
                        link_file(previous / REPLAY / name, folder / name)
                        continue
                with new_file(folder / name) as file:
                    file.write(_read(pages, place, buffer, start, count).view(np.uint8).data)
    if is_main_process():
        replace_file(folder / _INDEX, json.dumps({"buffers": [buffer.model_dump() for buffer in buffers]}))


def load_rows(path: Path, like: Sequence[Replay], saved: Sequence[Replay]) -> list[Transition | HostRows]:
    """Read the rows of a checkpoint's replay buffers, of the forms of ``like``, and to where its rows are.

    ``saved``: the buffers as the checkpoint's state has them, without rows.

    Raises CheckpointError: of other forms or counts, or a file has another length than the index says.
    """
    found = _read_index(path)
    if len(found) != len(like):
        raise CheckpointError(f"checkpoint {path} has {len(found)} replay buffers, this run needs {len(like)}")
    for buffer, replay in zip(found, saved, strict=True):
        there, rows = [(ring.head, ring.size, ring.added) for ring in buffer.rings], buffer.capacity
        counts = (np.asarray(x).reshape(-1).tolist() for x in (replay.head, replay.size, replay.added))
        here = list(zip(*counts, strict=True))
        # demonstrations are all there, from row 0 on
        whole = (head < rows and size in (rows, head if added else size) for head, size, added in there)
        if there != here or not all(whole) or any(size > rows for _, size, _ in there):
            text = f"{REPLAY}/{_INDEX} has head, size and added {there[:3]}, its state {here[:3]}"
            raise CheckpointError(f"checkpoint {path} is damaged: {text}, for rings of {rows} rows")
    return [_load(path, i, buffer, replay) for i, (buffer, replay) in enumerate(zip(found, like, strict=True))]


def _load(path: Path, number: int, buffer: Buffer, like: Replay) -> Transition | HostRows:
    wanted = _forms(like)
    if (there := buffer.form) != (here := wanted.form):
        differ = [name for name in here if there[name] != here[name]]
        text = "; ".join(f"{name} {there[name]}, this run needs {here[name]}" for name in differ)
        raise CheckpointError(f"checkpoint {path} has a replay buffer of {text}. Use the config it was made with.")
    if isinstance(like.rows, HostRows):
        pages = like.rows.pages()
    else:
        shape = (len(buffer.rings), buffer.capacity)
        pages = [np.zeros((*shape, *each.shape), jnp.dtype(each.dtype)) for each in buffer.fields]
    for ring in range(len(buffer.rings)):
        for start, count in buffer.segments(ring):
            file = path / REPLAY / _name(number, ring, start // buffer.segment)
            with open_plain(file, HUGE) as source:
                content = source.read()
            if len(content) != count * buffer.record.itemsize:
                text = f"has {len(content)} bytes instead of {count * buffer.record.itemsize}"
                raise CheckpointError(f"checkpoint {path} is damaged: {file.relative_to(path)} {text}")
            rows = np.frombuffer(content, buffer.record)
            for page, field in zip(pages, buffer.fields, strict=True):
                page[ring, start : start + count] = rows[field.name]
    if isinstance(like.rows, HostRows):
        return like.rows
    leaves, structure = jax.tree.flatten(like.rows)
    # copies: an array that NumPy has as well cannot be overwritten by a program
    read = [jnp.array(pages.pop(0).reshape(leaf.shape), copy=True) for leaf in leaves]
    return jax.tree.unflatten(structure, read)


def _read_index(path: Path) -> list[Buffer]:
    try:
        return _Index.model_validate(read_facts(path / REPLAY / _INDEX, _Index)).buffers
    except FactsError as error:
        raise CheckpointError(f"checkpoint {path} has no rows of a replay buffer: {error}") from None


def _describe(replay: Replay) -> Buffer:
    counts = (np.asarray(x).reshape(-1).tolist() for x in (replay.head, replay.size, replay.added))
    rings = [Ring(head=head, size=size, added=added) for head, size, added in zip(*counts, strict=True)]
    return _forms(replay).model_copy(update={"rings": rings})


def _forms(replay: Replay) -> Buffer:
    """Return the form of a buffer, its counts left at 0."""
    num_axes = replay.head.ndim
    fields = [
        Field(name=name, dtype=x.dtype.name, shape=list(x.shape[num_axes + 1 :]))
        for name, x in named_leaves(replay.shapes).items()
    ]
    capacity, rings = replay.shapes.discount.shape[num_axes], replay.head.size
    form = Buffer(capacity=capacity, segment=1, fields=fields, rings=[Ring(head=0, size=0, added=0)] * rings)
    return form.model_copy(update={"segment": max(1, SEGMENT_BYTES // form.record.itemsize)})


def _own_rings(replay: Replay) -> Iterator[tuple[int, Sequence[Any], int]]:
    """Yield the rings that this process writes, each with arrays of its fields, and its place in them."""
    if isinstance(replay.rows, HostRows):
        yield 0, replay.rows.pages(), 0
        return
    leaves = jax.tree.leaves(replay.rows)
    for shards in zip(*(x.addressable_shards for x in leaves), strict=True):
        if shards[0].replica_id == 0:
            pages = [
                shard.data.reshape(-1, *leaf.shape[replay.head.ndim :])
                for shard, leaf in zip(shards, leaves, strict=True)
            ]
            first = (shards[0].index[0].start or 0) * (replay.head.size // replay.head.shape[0])
            for i in range(pages[0].shape[0]):
                yield first + i, pages, i


def _read(pages: Sequence[Any], ring: int, buffer: Buffer, start: int, count: int) -> NDArray[Any]:
    packed = np.empty(count, buffer.record)
    if isinstance(pages[0], jax.Array):
        pages = _cut(pages, ring, start, count=min(buffer.segment, buffer.capacity - start))
    else:
        pages = [page[ring, start : start + count] for page in pages]
    for field, page in zip(buffer.fields, pages, strict=True):
        packed[field.name] = np.asarray(page)[:count]
    return packed


@partial(jax.jit, static_argnames="count")  # on the device, so that no more than these rows leave it
def _cut(pages: Sequence[jax.Array], ring: int, start: int, *, count: int) -> list[jax.Array]:
    return [jax.lax.dynamic_slice_in_dim(page[ring], start, count) for page in pages]


def _name(buffer: int, ring: int, segment: int) -> str:
    return f"{buffer}_{ring}_{segment:06d}.rows"
