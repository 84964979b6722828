"""Tensors of a state_dict and their places in the Flax variables; those of an MLP and of a normalizer."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ejax.policies.mlp import NetworkConfig
from ejax.types import Params

StateDict: TypeAlias = dict[str, NDArray[Any]]
EntryKind = Literal["vector", "kernel", "convolution", "row", "deviation", "count"]
"""kernel: transposed; convolution: [rows·columns·in, out] here, [out, in, rows, columns] there; row: [O] here, [1, O]
there; deviation: √ of a variance (torch's √ may differ in the last bit); count: float here, int64 there."""


class Entry(NamedTuple):
    """One tensor of the state_dict and its place in the Flax variables."""

    key: str
    path: tuple[str, ...]
    kind: EntryKind
    shape: tuple[int | None, ...]
    """In torch; None where any number fits: the width of an observation."""

    @property
    def trained(self) -> bool:
        return self.path[0] == "params"

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.int64 if self.kind == "count" else np.float32)

    def to_torch(self, x: Any) -> NDArray[Any]:
        x = np.asarray(x)
        if self.kind == "kernel":
            x = x.T
        elif self.kind == "convolution":
            x = x.reshape(*self.shape[2:], -1, x.shape[-1]).transpose(3, 2, 0, 1)
        elif self.kind == "count":
            x = np.rint(x)
        elif self.kind in ("row", "deviation"):
            x = x[None] if self.kind == "row" else np.sqrt(x)[None]
        return np.array(x, self.dtype, order="C")

    def to_flax(self, x: NDArray[Any]) -> NDArray[Any]:
        if self.kind == "kernel":
            x = x.T
        elif self.kind == "convolution":
            x = x.transpose(2, 3, 1, 0).reshape(-1, len(x))
        elif self.kind == "row":
            x = x[0]
        return np.array(x, np.float32, order="C")


def mlp_entries(
    name: str, config: NetworkConfig, num_outputs: int, path: tuple[str, ...] | None = None
) -> Iterator[Entry]:
    path = path or ("params", name)
    stride = 2 + config.use_layernorm + (config.dropout_p > 0.0)
    width: int | None = None
    for i, size in enumerate((*config.hidden_sizes, num_outputs)):
        linear, module = f"{name}.{i * stride}", (*path, f"linear_{i}")
        yield Entry(f"{linear}.weight", (*module, "kernel"), "kernel", (size, width))
        yield Entry(f"{linear}.bias", (*module, "bias"), "vector", (size,))
        if config.use_layernorm and i < len(config.hidden_sizes):
            layernorm, module = f"{name}.{i * stride + 1}", (*path, f"layernorm_{i}")
            yield Entry(f"{layernorm}.weight", (*module, "scale"), "vector", (size,))
            yield Entry(f"{layernorm}.bias", (*module, "bias"), "vector", (size,))
        width = size


def normalizer_entries(name: str) -> Iterator[Entry]:
    statistics = ("normalizer", name)
    yield Entry(f"{name}.mean", (*statistics, "mean"), "row", (1, None))
    yield Entry(f"{name}.variance", (*statistics, "variance"), "row", (1, None))
    yield Entry(f"{name}.standard_deviation", (*statistics, "variance"), "deviation", (1, None))
    yield Entry(f"{name}.count", (*statistics, "count"), "count", ())


def get(tree: Params, path: tuple[str, ...]) -> Any:
    """Return the leaf at ``path``."""
    for name in path:
        tree = tree[name]
    return tree


def put(tree: Params, path: tuple[str, ...], leaf: NDArray[Any]) -> None:
    """Set the leaf at ``path``, in place."""
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = leaf
