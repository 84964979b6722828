"""Arrays of several processes: spread over all devices, copied to those of one process, or exchanged between them."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding
from numpy.typing import NDArray

from ejax.runtime.processes import count
from ejax.runtime.sharding import make_mesh, replicated
from ejax.types import PyTree


def spread(tree: PyTree, places: PyTree) -> PyTree:
    """Arrays that every process has whole, as arrays of all devices: each puts what its own devices hold.

    Args:
        places: a ``Sharding`` for each leaf.
    """

    def place(x: Any, sharding: Sharding) -> Any:
        if _is_key(x):
            data = np.asarray(jax.random.key_data(x))
            return jax.random.wrap_key_data(_make(data, sharding), impl=jax.random.key_impl(x))
        return _make(np.asarray(x), sharding)

    return jax.tree.map(place, tree, places) if count() > 1 else jax.device_put(tree, places)


def _make(x: Any, sharding: Sharding) -> jax.Array:
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def own_copy(tree: PyTree, device: jax.Device) -> PyTree:
    """Arrays that are the same on every device, on this process's ``device`` alone."""

    def own(x: jax.Array) -> jax.Array:
        if x.is_fully_replicated:
            for shard in x.addressable_shards:
                if shard.device == device:
                    return shard.data
        return x if x.is_fully_addressable else x.addressable_data(0)

    return jax.device_put(jax.tree.map(own, tree), device)


def at_hand(tree: PyTree) -> PyTree:
    """Arrays that are the same on every device, on those of this process alone: it may compute with them by itself."""

    if count() == 1:
        return tree
    here = replicated(make_mesh([shard.device for shard in jax.tree.leaves(tree)[0].addressable_shards]))

    def own(x: jax.Array) -> jax.Array:
        return jax.make_array_from_single_device_arrays(x.shape, here, [shard.data for shard in x.addressable_shards])

    return jax.tree.map(own, tree)


def exchange(tree: PyTree) -> list[PyTree]:
    """What each process gives, in their order, as NumPy's arrays; the same shapes in each. All of them call it.

    As bytes, since JAX has no numbers of 64 bits. Keys come as arrays of all devices.
    """
    leaves, structure = jax.tree.flatten(tree)
    mine = [np.asarray(jax.random.key_data(x) if _is_key(x) else x) for x in leaves]
    packed = np.frombuffer(b"".join(x.tobytes() for x in mine), np.uint8)
    everywhere = replicated(make_mesh(jax.devices()))

    def unpack(packed: NDArray[np.uint8]) -> PyTree:
        parts = np.split(packed, np.cumsum([x.nbytes for x in mine])[:-1])
        arrays = [part.view(x.dtype).reshape(x.shape) for part, x in zip(parts, mine, strict=True)]
        return jax.tree.unflatten(structure, [as_given(x, array) for x, array in zip(leaves, arrays, strict=True)])

    def as_given(x: Any, array: NDArray[Any]) -> Any:
        if not _is_key(x):
            return array
        return jax.random.wrap_key_data(_make(array, everywhere), impl=jax.random.key_impl(x))

    return [unpack(each) for each in multihost_utils.process_allgather(packed)]


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
