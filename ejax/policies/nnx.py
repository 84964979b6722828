"""A Flax NNX module as a policy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from ejax.types import Key, Params, PyTree


@dataclass(frozen=True)
class NnxPolicy:
    """Policy from a factory ``make(rngs) -> module``, where ``module(obs) -> (distribution, value)``.

    The module's ``nnx.Param`` are trained; its other variables are carried as they were made.

    Example:
        policy = NnxPolicy(lambda rngs: MyModule(rngs=rngs))
        params = policy.init(key, obs)
    """

    make: Callable[[nnx.Rngs], Any]

    def init(self, key: Key, obs: PyTree) -> Params:
        del obs  # an NNX module knows its sizes
        _, trained, carried = nnx.split(self.make(nnx.Rngs(key)), nnx.Param, ...)  # type: ignore[misc]  # flax's stub
        return {"params": nnx.to_pure_dict(trained), "carried": nnx.to_pure_dict(carried)}

    def apply(self, params: Params, obs: PyTree, **kwargs: Any) -> Any:
        shape = nnx.eval_shape(lambda: self.make(nnx.Rngs(jax.random.key(0))))
        graph, trained, carried = nnx.split(shape, nnx.Param, ...)  # type: ignore[misc]  # flax's stub
        nnx.replace_by_pure_dict(trained, params["params"])
        nnx.replace_by_pure_dict(carried, params["carried"])
        return nnx.merge(graph, trained, carried)(obs, **kwargs)
