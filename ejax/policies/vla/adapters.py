"""Weights that stay, and low-rank matrices that are trained in their place, of any Flax network.

    y = x·W + b + (alpha / rank)·(x·A)·B,    A, B trained, W, b not

Of the variables, ``params`` is trained, A and B as ``lora_a`` and ``lora_b`` of their layer; weights that stay are in
another collection, which nothing takes a gradient of. Source: Hu et al. 2022, LoRA.
"""

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util

from ejax.policies.mlp import dense_product
from ejax.policies.vla.config import LoraConfig
from ejax.types import Key, Params

KEPT = "kept"
"""Collection of an ``Adapted`` network's weights that stay."""
LORA = ("lora_a", "lora_b")
_ALL = ("",)
Path: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Adapted:
    """A network some of whose weights stay; hashable.

    Args:
        lora: of linear layers whose names begin as one of its ``modules``. None: no layer has any.
        frozen: regular expressions of the beginnings of names, ``expert.layers_0.q.kernel``, of weights that stay.
            None: with ``lora`` all.
    """

    network: nn.Module
    lora: LoraConfig | None
    frozen: tuple[str, ...] | None

    def init(self, key: Key, *args: Any, method: Any) -> Params:
        variables = self.network.init(key, *args, method=method)
        flat = {("params", *path): x for path, x in traverse_util.flatten_dict(variables.pop("params")).items()}
        made: dict[Path, Any] = {}
        for (_, *path), x in flat.items():
            made[KEPT if self._stays(path, flat) else "params", *path] = x
            if self.lora is not None and path[-1] == "kernel" and self._adapts(path[:-1], x):
                own = jax.random.fold_in(key, zlib.crc32(".".join(path).encode()))
                down = nn.initializers.lecun_normal()(own, (x.shape[0], self.lora.rank))
                pair = zip(LORA, (down, jnp.zeros((self.lora.rank, x.shape[1]))), strict=True)
                made |= {("params", *path[:-1], part): y for part, y in pair}
        return {"params": {}, KEPT: {}, **traverse_util.unflatten_dict(made), **variables}

    def apply(self, variables: Params, *args: Any, method: Any, **keywords: Any) -> Any:
        flat = traverse_util.flatten_dict({"params": variables["params"], "": variables[KEPT]})
        whole = {path[1:]: x for path, x in flat.items() if path[-1] not in LORA}
        own = {name: x for name, x in variables.items() if name not in ("params", KEPT)}

        def add(call: Callable[..., Any], given: Any, options: Any, context: nn.module.InterceptorContext) -> Any:
            y, path = call(*given, **options), ("params", *context.module.path)
            if self.lora is None or context.method_name != "__call__" or (*path, LORA[0]) not in flat:
                return y
            down, up = (flat[*path, part].astype(y.dtype) for part in LORA)
            scale = self.lora.alpha / self.lora.rank
            return y + scale * dense_product(dense_product(given[0].astype(y.dtype), down), up)

        with nn.intercept_methods(add):
            given = {"params": traverse_util.unflatten_dict(whole), **own}
            return self.network.apply(given, *args, method=method, **keywords)

    def _adapts(self, module: Path | list[str], kernel: Any) -> bool:
        modules = () if self.lora is None or module[0] == "critic" else self.lora.modules or _ALL
        return kernel.ndim == 2 and any(re.match(each, ".".join(module)) for each in modules)

    def _stays(self, path: list[str], flat: dict[Path, Any]) -> bool:
        kernel = flat.get(("params", *path[:-1], "kernel"))
        if kernel is not None and self._adapts(path[:-1], kernel):
            return True
        chosen = self.frozen if self.frozen is not None else _ALL if self.lora is not None else ()
        return path[0] != "critic" and any(re.match(each, ".".join(path)) for each in chosen)


def merged(params: Params, lora: LoraConfig | None, collection: str) -> Params:
    """Return the variables of the network without adapters, W + (alpha / rank)·A·B; ``collection`` has the W."""
    flat = traverse_util.flatten_dict(params)
    made: dict[Path, Any] = {}
    for path, x in flat.items():
        trained = ("params", *path[1:-1])
        if path[-1] in LORA:
            continue
        if path[0] == collection and ((*trained, LORA[0]) in flat or collection == KEPT):
            path = (*trained, path[-1])
            if path[-1] == "kernel" and lora is not None and (*trained, LORA[0]) in flat:
                down, up = (flat[*trained, part] for part in LORA)
                x = x + lora.alpha / lora.rank * jnp.matmul(down, up, precision="highest")
        made[path] = x
    return dict(traverse_util.unflatten_dict(made))


def adopted(params: Params, own: Params) -> Params:
    """Take variables without adapters for those of ``own`` that have a place among them; A and B stay as they are."""
    given, flat = traverse_util.flatten_dict(params), traverse_util.flatten_dict(own)
    for path in flat:
        if path[-1] not in LORA:
            flat[path] = given[path if path in given else ("params", *path[1:])]
    return dict(traverse_util.unflatten_dict(flat))
