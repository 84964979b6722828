"""Several devices, one program: environments are sharded over them, and parameters if configured; the rest is on each.

The mesh has one axis, ``env``; where devices share a copy of the parameters it has two, and a copy lies along the
second one, ``fsdp``. Environments are sharded over both.

Nothing is averaged by hand: XLA computes each part of the program of one device where its environments are, and adds
the parts up. Results are those of one device, apart from the order of sums. ``constrain_split`` acts inside
``jax.set_mesh(make_mesh(devices))``; without a mesh it does nothing.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from ejax.types import PyTree

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_AXIS = "env"
_SHARE = "fsdp"
_MEMBERS = "member"
_WORTH_SHARDING = 2**14  # elements of an array that is worth a separate message


def make_mesh(devices: Sequence[jax.Device], axis: str = _AXIS, *, share: int = 1) -> Mesh:
    """Make the mesh of devices, of which each ``share`` neighbours have one copy of what ``sharded_somewhere`` places.

    ``share`` divides the devices; 1 is for those that have all of it.
    """
    num_devices = len(devices)
    sizes = {axis: num_devices} if share == 1 else {axis: num_devices // share, _SHARE: share}
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=list(devices), axis_types=types)


def num_shards() -> int:
    """Count the devices that share a program, inside it."""
    mesh = _mesh()
    return 1 if mesh is None else mesh.size


def shares_parameters() -> bool:
    """Return, inside a program, whether parameters are sharded over devices."""
    mesh = _mesh()
    return mesh is not None and _SHARE in mesh.axis_names


def sharded(mesh: Mesh, axis: int = 0) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, mesh.axis_names))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def shapes_on(shardings: Sharding | Any | None, tree: T) -> T:
    """Return the shapes of arrays, and where they lie, to lower a program for.

    ``shardings``: one for all, or a tree of them. None: wherever the program's other arrays lie.
    """
    if shardings is None:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    if isinstance(shardings, Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, shardings)


def join_shards(parts: Sequence[T], place: NamedSharding, axis: int) -> T:
    """Join trees that each lie on one of this process's devices, in order, along an axis that ``place`` shards."""

    def one(*shards: jax.Array) -> jax.Array:
        shape = list(shards[0].shape)
        shape[axis] *= place.mesh.size
        return jax.make_array_from_single_device_arrays(tuple(shape), place, list(shards))

    return cast(T, jax.tree.map(one, *parts))


def sharded_somewhere(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Shard the longest axis that the devices of one copy divide; small arrays, and others, are whole on each."""
    along = mesh.axis_names[-1]
    divisible = [axis for axis, length in enumerate(shape) if length % mesh.shape[along] == 0]
    if not divisible or math.prod(shape) < _WORTH_SHARDING:
        return replicated(mesh)
    return NamedSharding(mesh, PartitionSpec(*[None] * max(divisible, key=lambda axis: shape[axis]), along))


def constrain_split(tree: T) -> T:
    """Keep, inside a program, the first axis of every array sharded over the devices, where they divide it."""
    mesh = _mesh()
    if mesh is None:
        return tree

    def place(x: Any) -> Any:
        divisible = x.ndim > 0 and x.shape[0] % mesh.size == 0
        return jax.lax.with_sharding_constraint(x, PartitionSpec(mesh.axis_names)) if divisible else x

    return jax.tree.map(place, tree)


def by_device(function: F, num_rows: int) -> F:
    """Run a function of arrays [N, ...] on each device's rows separately, where the devices divide N; inside a program.

    A reduction over rows inside, such as whether a solver's loop may end, is then over one device's rows.
    """
    mesh = _mesh()
    if mesh is None or num_rows % mesh.size:
        return function
    rows = PartitionSpec(mesh.axis_names)
    return cast(F, jax.shard_map(function, in_specs=rows, out_specs=rows, check_vma=False))


def members_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """Make a mesh of devices that share a population's members; each member's environments are on one of them."""
    return make_mesh(devices, _MEMBERS)


def by_members(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(_MEMBERS))


def map_members(function: F, mesh: Mesh) -> F:
    """Run a function of arrays [M, ...] on each device's members separately."""
    members = PartitionSpec(_MEMBERS)
    return cast(F, jax.shard_map(function, mesh=mesh, in_specs=members, out_specs=members, check_vma=False))


def _mesh() -> jax.sharding.AbstractMesh | None:
    """Return the mesh of devices that share a program's environments, inside it. None: they are on one."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if _AXIS in mesh.axis_names else None


def shard(tree: PyTree, shardings: PyTree) -> PyTree:
    """Make arrays that every process has whole into arrays of all devices; ``shardings``: one for each leaf."""

    def place(x: Any, sharding: Sharding) -> Any:
        if _is_key(x):
            data = np.asarray(jax.random.key_data(x))
            return jax.random.wrap_key_data(_make(data, sharding), impl=jax.random.key_impl(x))
        return _make(np.asarray(x), sharding)

    return jax.tree.map(place, tree, shardings) if process_count() > 1 else jax.device_put(tree, shardings)


def _make(x: Any, sharding: Sharding) -> jax.Array:
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def own_rows(devices: Sequence[jax.Device], num_rows: int) -> slice:
    """Find this process's rows, of those that ``sharded`` spreads over devices: its own are neighbours."""
    own = [i for i, device in enumerate(devices) if device.process_index == jax.process_index()]
    each = num_rows // len(devices)
    return slice(own[0] * each, (own[-1] + 1) * each)


def join_rows(tree: T, mesh: Mesh, num_rows: int) -> T:
    """Make arrays of all devices, [num_rows, ...], of the rows that each process has."""
    place = sharded(mesh)

    def one(x: Any) -> jax.Array:
        return jax.make_array_from_process_local_data(place, x, (num_rows, *x.shape[1:]))

    return cast(T, jax.tree.map(one, tree))


def local_copy(tree: PyTree, device: jax.Device) -> PyTree:
    """Copy arrays to this process's ``device`` alone. Where they lie across processes, all of these call it."""

    def own(x: jax.Array) -> jax.Array:
        # one at a time, for the devices need not hold all of them
        if not (x.is_fully_replicated or x.is_fully_addressable):
            everywhere = NamedSharding(cast(NamedSharding, x.sharding).mesh, PartitionSpec())
            x = jax.jit(jnp.copy, out_shardings=everywhere)(x)
        if x.is_fully_replicated:
            for shard in x.addressable_shards:
                if shard.device == device:
                    return shard.data
        return x if x.is_fully_addressable else x.addressable_data(0)

    return jax.device_put(jax.tree.map(own, tree), device)


def process_count() -> int:
    """Count the processes that train together."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def is_main_process() -> bool:
    """Return whether this process writes and speaks: the only one, or the first."""
    return process_count() == 1 or jax.process_index() == 0


def as_local(tree: PyTree) -> PyTree:
    """Take arrays that are the same on every device as those of this process alone, to compute with."""
    if process_count() == 1:
        return tree
    here = replicated(make_mesh([shard.device for shard in jax.tree.leaves(tree)[0].addressable_shards]))

    def own(x: jax.Array) -> jax.Array:
        return jax.make_array_from_single_device_arrays(x.shape, here, [shard.data for shard in x.addressable_shards])

    return jax.tree.map(own, tree)


def wait_for_all(what: str) -> None:
    """Wait until each process is here; of one process, do nothing."""
    if process_count() > 1:
        multihost_utils.sync_global_devices(what)


def exchange(tree: PyTree) -> list[PyTree]:
    """Exchange arrays of the same shapes: each process's, in their order, as NumPy's. All of them call it.

    Keys come as arrays of all devices.
    """
    leaves, structure = jax.tree.flatten(tree)
    everywhere = replicated(make_mesh(jax.devices()))

    def of_all(x: Any) -> Iterator[Any]:
        mine = np.asarray(jax.random.key_data(x) if _is_key(x) else x)
        # as bytes: JAX would make 32 bits of what a host environment has as 64
        for each in multihost_utils.process_allgather(np.frombuffer(mine.tobytes(), np.uint8)):
            array = each.view(mine.dtype).reshape(mine.shape)
            key = _is_key(x)
            yield jax.random.wrap_key_data(_make(array, everywhere), impl=jax.random.key_impl(x)) if key else array

    return [jax.tree.unflatten(structure, parts) for parts in zip(*map(of_all, leaves), strict=True)]


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
