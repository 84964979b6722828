"""The online data engine for torch: ``ejax.data.OnlineDataset`` as an ``IterableDataset`` of TensorDicts.

EmbodiChain's class of this name, with its arguments and its two collate functions:

    item mode     DataLoader(OnlineDataset(engine, 64), batch_size=32, num_workers=4,
                             collate_fn=OnlineDataset.collate_fn)
    batch mode    DataLoader(OnlineDataset(engine, 64, batch_size=32), batch_size=None,
                             collate_fn=OnlineDataset.passthrough_collate_fn)

With a sampler of sizes, ``chunk_size_every=32`` in item mode makes items that a DataLoader of ``batch_size=32`` can
stack: each of its workers collates its own successive items, from its own random stream. Tensors are copies
that nothing else writes to.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict
from torch.utils.data import IterableDataset, get_worker_info

from ejax.data import ChunkSizeSampler, SamplingMode, SequenceSpecCfg
from ejax.data import OnlineDataset as NumpyDataset
from ejax.data.dataset import ChunkSource

TensorDictTransform: TypeAlias = Callable[[TensorDict], TensorDict]


class OnlineDataset(IterableDataset):
    """Chunks [C] (item mode) or [B, C] (batch mode) as TensorDicts, without end; see ``chunks_to_tensordict``.

    Args:
        transform: called last with each TensorDict; its result is yielded.
        engine and the rest: as for ``ejax.data.OnlineDataset``.

    Raises:
        ValueError, TypeError: a value outside its range.
    """

    def __init__(
        self,
        engine: ChunkSource,
        chunk_size: int | ChunkSizeSampler | None = None,
        batch_size: int | None = None,
        transform: TensorDictTransform | None = None,
        sampling_mode: SamplingMode = "episode",
        *,
        chunk_size_every: int | None = 1,
        sequence: SequenceSpecCfg | None = None,
        seed: int = 0,
    ) -> None:
        self._chunks = NumpyDataset(
            engine,
            chunk_size,
            batch_size,
            self._converted,
            sampling_mode,
            chunk_size_every=chunk_size_every,
            sequence=sequence,
            seed=seed,
        )
        self.transform = transform

    def __iter__(self) -> Iterator[TensorDict]:
        worker = get_worker_info()
        return self._chunks.iterate(None if worker is None else worker.id)

    def _converted(self, chunks: Mapping[str, Any]) -> TensorDict:
        made = chunks_to_tensordict(chunks)
        return made if self.transform is None else self.transform(made)

    @staticmethod
    def collate_fn(batch: list[TensorDict]) -> TensorDict:
        """Stack items [C, ...] as one TensorDict [B, C, ...]. Raises ValueError for items of several sizes."""
        sizes = sorted({len(item) for item in batch})
        if len(sizes) > 1:
            raise ValueError(
                f"items of {', '.join(map(str, sizes))} frames cannot be stacked: the sampler draws a size for each. "
                f"Pass OnlineDataset chunk_size_every={len(batch)}, the DataLoader's batch_size, for a size per batch, "
                f"or None for one per iterator; or let it draw batches: OnlineDataset(..., batch_size={len(batch)})"
            )
        return torch.stack(batch)

    @staticmethod
    def passthrough_collate_fn(batch: TensorDict) -> TensorDict:
        """Return a batch as it is: for ``DataLoader(..., batch_size=None)``."""
        return batch


def chunks_to_tensordict(chunks: Mapping[str, Any]) -> TensorDict:
    """Make the result of ``sample_batch``, or one item of it, a TensorDict that shares its memory.

    Every leaf of a TensorDict has its batch axes, so a field of an episode is repeated for each frame (by a stride of
    0, not by copies). Text becomes its UTF-8 bytes, uint8, padded with 0.
    """
    batch_size = chunks["valid"].shape
    frames = {name: _frames(item) for name, item in chunks.items() if name != "episode"}
    episode = _repeated(chunks["episode"], batch_size)
    return TensorDict({**frames, "episode": episode}, batch_size=batch_size)


def _frames(item: Any) -> Any:
    return {name: _frames(each) for name, each in item.items()} if isinstance(item, Mapping) else _tensor(item)


def _repeated(item: Any, batch_size: tuple[int, ...]) -> Any:
    """Leaves [..., ...] as [..., C, ...]."""
    if isinstance(item, Mapping):
        return {name: _repeated(each, batch_size) for name, each in item.items()}
    tensor, axis = _tensor(item), len(batch_size) - 1
    return tensor.unsqueeze(axis).expand(*batch_size, *tensor.shape[axis:])


def _tensor(array: Any) -> torch.Tensor:
    array = np.asarray(array)
    if array.dtype.kind == "U":
        array = np.char.encode(array, "utf-8")
    if array.dtype.kind == "S":
        array = np.frombuffer(array.tobytes(), np.uint8).reshape(*array.shape, array.dtype.itemsize).copy()
    return torch.from_numpy(array)
