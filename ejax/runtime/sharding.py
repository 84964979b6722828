"""Several devices, one program: environments are sharded over them, and parameters if configured; the rest is on each.

Nothing is averaged by hand. The program is that of one device; from where its arrays lie, XLA computes each part where
its environments are and adds the parts up. Every device therefore has the same parameters, and the results
are those of one device, apart from the order of sums.

``constrain_split`` acts inside ``jax.set_mesh(make_mesh(devices))``; without a mesh it does nothing.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_AXIS = "env"
_MEMBERS = "member"
_WORTH_SHARDING = 2**14
"""Elements of an array that is worth a message of its own."""


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    return jax.make_mesh((len(devices),), (_AXIS,), devices=list(devices), axis_types=(AxisType.Auto,))


def num_shards() -> int:
    """Inside a program: the number of devices that share it."""
    mesh = _mesh()
    return 1 if mesh is None else mesh.size


def sharded(mesh: Mesh, axis: int = 0) -> NamedSharding:
    """Axis number ``axis`` sharded over the devices."""
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, _AXIS))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def shapes_on(places: Sharding | Any | None, tree: T) -> T:
    """The shapes of arrays, and where they lie: what a program can be lowered for without making them.

    Args:
        tree: of arrays, or of their shapes.
        places: one for all, or a tree of them. None: wherever the program's other arrays lie.
    """
    if places is None:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    if isinstance(places, Sharding):
        places = jax.tree.map(lambda _: places, tree)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, places)


def join(parts: Sequence[T], place: NamedSharding, axis: int) -> T:
    """Trees that each lie on one of this process's devices, in their order, as the parts of arrays of all devices.

    Args:
        axis: along which the parts are joined; ``place`` shards it.
    """

    def one(*shards: jax.Array) -> jax.Array:
        shape = list(shards[0].shape)
        shape[axis] *= place.mesh.size
        return jax.make_array_from_single_device_arrays(tuple(shape), place, list(shards))

    return cast(T, jax.tree.map(one, *parts))


def sharded_somewhere(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """The longest axis that the devices divide is sharded over them; small arrays, and others, are whole on each."""
    divisible = [axis for axis, length in enumerate(shape) if length % mesh.size == 0]
    if not divisible or math.prod(shape) < _WORTH_SHARDING:
        return replicated(mesh)
    return sharded(mesh, max(divisible, key=lambda axis: shape[axis]))


def constrain_split(tree: T) -> T:
    """Inside a program: keep the first axis of every array sharded over the devices, where they divide it."""
    mesh = _mesh()
    if mesh is None:
        return tree

    def place(x: Any) -> Any:
        divisible = x.ndim > 0 and x.shape[0] % mesh.size == 0
        return jax.lax.with_sharding_constraint(x, PartitionSpec(_AXIS)) if divisible else x

    return jax.tree.map(place, tree)


def by_device(function: F, num_rows: int) -> F:
    """Inside a program: a function of arrays [N, ...], each device on its rows by itself, where the devices divide N.

    A reduction over all rows inside, such as whether a solver's loop may end, is then over one device's rows.
    """
    mesh = _mesh()
    if mesh is None or num_rows % mesh.size:
        return function
    rows = PartitionSpec(_AXIS)
    return cast(F, jax.shard_map(function, in_specs=rows, out_specs=rows, check_vma=False))


def members_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """Mesh of devices that share the members of a population; each member's environments are on one of them."""
    return jax.make_mesh((len(devices),), (_MEMBERS,), devices=list(devices), axis_types=(AxisType.Auto,))


def by_members(mesh: Mesh) -> NamedSharding:
    """The first axis, the members, sharded over the devices."""
    return NamedSharding(mesh, PartitionSpec(_MEMBERS))


def map_members(function: F, mesh: Mesh) -> F:
    """A function of arrays [M, ...], each device on its members by itself."""
    members = PartitionSpec(_MEMBERS)
    return cast(F, jax.shard_map(function, mesh=mesh, in_specs=members, out_specs=members, check_vma=False))


def _mesh() -> jax.sharding.AbstractMesh | None:
    """Inside a program: the mesh of devices that share its environments. None: they are on one."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if _AXIS in mesh.axis_names else None
