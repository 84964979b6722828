"""Flax NNX modules as policies, and the normalizer of observations for them."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ejax.numerics.moments import add_rows
from ejax.policies.normalize import PolicyStateError, normalized
from ejax.types import Array, Key, Params, PyTree


class Normalizer(nnx.Variable):
    """A statistic of observations that changes in calls with ``observe`` alone; the collection ``normalizer``."""


class ObsNormalizer(nnx.Module):
    """Normalizer of an NNX module: ``ejax.policies.normalize.ObsNormalizer`` for observations of ``size`` numbers."""

    def __init__(self, size: int) -> None:
        self.mean = Normalizer(jnp.zeros(size))
        self.variance = Normalizer(jnp.ones(size))
        self.count = Normalizer(jnp.zeros(()))

    def __call__(self, x: Array, *, observe: bool | Array = False) -> Array:
        old = (self.count[...], self.mean[...], self.variance[...])
        if observe is not False:
            new = add_rows(old, x, None if observe is True else observe)
            self.count[...], self.mean[...], self.variance[...] = new
        return normalized(x, *old[1:])


_COLLECTIONS = {"params": nnx.Param, "normalizer": Normalizer, "batch_stats": nnx.BatchStat}  # as Flax Linen names them


@dataclass(frozen=True)
class NnxPolicy:
    """Policy from a factory ``make(rngs) -> module``, where ``module(obs) -> (distribution, value)``.

    The module's ``nnx.Param`` are trained. The attributes ``deterministic`` and ``use_running_average`` are True, but

        nnx.Dropout    drops with ``dropout_seed``: while it collects, and the same units in the update
        nnx.BatchStat  moves once in an update, as ``ejax.policies.normalize`` has it

    Other variables are carried as made. ``dropout_seed`` and ``observe`` go to a ``__call__`` that takes them.
    """

    make: Callable[[nnx.Rngs], Any]

    @property
    def drops(self) -> bool:
        """True of a module that drops units in training: it draws random numbers, or takes a ``dropout_seed``."""
        return "dropout_seed" in self._accepted or bool(jax.tree.leaves(self._parts[1]))

    def init(self, key: Key, obs: PyTree) -> Params:
        del obs  # an NNX module knows its sizes
        module = self.make(nnx.Rngs(key))
        layers = (x for _, x in nnx.iter_graph(module) if isinstance(x, nnx.Dropout) and x.deterministic is not True)
        if not self.drops and any(layer.rate > 0.0 for layer in layers):
            raise PolicyStateError("nnx.Dropout without rngs would drop nothing; pass it rngs, or deterministic=True")
        return _split(module)[2]

    def apply(
        self,
        params: Params,
        obs: PyTree,
        *,
        dropout_seed: Array | None = None,
        observe: bool | Array = False,
        mutable: Sequence[str] = (),
        **keywords: Any,
    ) -> Any:
        """Evaluate ``obs``, with ``keywords`` of the module; ``observe`` and ``mutable`` as in
        ``ejax.policies.normalize``.

        ``dropout_seed`` [...] uint32 alone decides a row's dropped units; None: no dropout. Raises PolicyStateError for
        random numbers without it, or for the steps of a sequence; for a variable that changes where it must not, or
        statistics that never do.
        """
        if observe is not False and "observe" in self._accepted:
            keywords["observe"] = observe
        if dropout_seed is not None and "dropout_seed" in self._accepted:
            keywords["dropout_seed"], dropout_seed = dropout_seed, None
        if dropout_seed is None:
            return self._call(params, obs, None, mutable, keywords)
        if "memory" in keywords:
            text = "random streams of a module, as of nnx.Dropout, have one mask for all steps of a sequence; let it"
            advice = "take dropout_seed for ejax.policies.mlp.consistent_dropout, and keep no rngs"
            raise PolicyStateError(f"{text} {advice}")

        def one_row(obs: PyTree, seed: Array) -> Any:
            batch_of_one = jax.tree.map(lambda x: x[None], obs)  # modules expect a leading axis
            answer = self._call(params, batch_of_one, jax.random.key(seed), (), keywords)
            return jax.tree.map(lambda x: x[0], answer)

        shape = dropout_seed.shape
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(shape) :]), obs)
        answers = jax.vmap(one_row)(rows, dropout_seed.reshape(-1))
        return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), answers)

    @cached_property
    def _parts(self) -> tuple[Any, PyTree, Params]:
        graphs = []

        def shapes() -> tuple[PyTree, Params]:  # split inside: outside, a shape in place of an array counts as static
            graph, streams, variables = _split(self.make(nnx.Rngs(jax.random.key(0))))
            graphs.append(graph)
            return streams, variables

        arrays = jax.eval_shape(shapes)
        return graphs[0], *arrays

    @cached_property
    def _abstract(self) -> Any:
        graph, streams, variables = self._parts
        return nnx.merge(graph, streams, *variables.values())

    @cached_property
    def _accepted(self) -> frozenset[str]:
        return frozenset(inspect.signature(self._abstract.__call__).parameters)

    def _call(self, params: Params, obs: PyTree, key: Key | None, mutable: Sequence[str], keywords: Any) -> Any:
        """Call the module with ``key`` of all random numbers. None: there must be none."""
        graph, streams, _ = self._parts
        # a new module each call: its variables change in place, and tracers must not outlive their trace
        module = nnx.merge(graph, _seeded(streams, key), *params.values())
        if key is None:
            module.set_attributes(deterministic=True, raise_if_not_found=False)
        if "batch_stats" not in mutable:
            module.set_attributes(use_running_average=True, raise_if_not_found=False)
        # by identity: an array that is set again has changed
        before = {path: value for path, _, value in _arrays(module)}
        answer = module(obs, **keywords)
        changed = [(path, x) for path, x, value in _arrays(module) if value is not before.get(path)]
        kinds = [_COLLECTIONS[name] for name in mutable]
        allowed = (nnx.Intermediate, *kinds, *([nnx.RngState] if key is not None else []))
        for path, variable in changed:
            if not isinstance(variable, allowed):
                raise PolicyStateError(_lost(path, variable))
        if not mutable:
            return answer
        if "observe" not in self._accepted and not all(any(isinstance(x, kind) for _, x in changed) for kind in kinds):
            text = f"{type(module).__name__} has statistics ({', '.join(mutable)}) that never move"
            raise PolicyStateError(f"{text}: let its __call__ take observe, and move them where that is given")
        return answer, {name: nnx.to_pure_dict(nnx.state(module, _COLLECTIONS[name])) for name in mutable}


class NnxPolicyWithMemory(NnxPolicy):
    """``NnxPolicy`` with memory, of a module with ``init_memory(num_rows)`` and ``module(obs, memory=…, first=…)``."""

    def init_memory(self, num_rows: int) -> PyTree:
        return self._abstract.init_memory(num_rows)


def _split(module: Any) -> tuple[Any, PyTree, Params]:
    """Split into ``(graph, random streams, variables)``, of the statistics only the collections that exist."""
    graph, streams, *parts, carried = nnx.split(module, nnx.RngState, *_COLLECTIONS.values(), ...)  # type: ignore[misc]
    variables = {name: nnx.to_pure_dict(part) for name, part in zip(_COLLECTIONS, parts, strict=True)}
    plain = [path for path, x, _ in _arrays(module) if not isinstance(x, nnx.Variable)]
    if plain and len(list(_arrays(module))) > len(jax.tree.leaves((streams, parts, carried))):
        names = ", ".join(".".join(map(str, path)) for path in plain)
        raise PolicyStateError(f"the module keeps arrays that NNX does not see ({names}); wrap them: nnx.data(array)")
    present = {name: part for name, part in variables.items() if name == "params" or part}
    return graph, nnx.to_pure_dict(streams), {**present, "carried": nnx.to_pure_dict(carried)}


def _seeded(streams: PyTree, key: Key | None) -> PyTree:
    leaves, form = jax.tree.flatten(streams)

    def start(number: int, like: Any) -> Array:
        if not jnp.issubdtype(like.dtype, jax.dtypes.prng_key):  # a stream's count of its draws
            return jnp.zeros(like.shape, like.dtype)
        return jax.random.split(jax.random.fold_in(jax.random.key(0) if key is None else key, number), like.shape)

    # without a key nothing is drawn: constants keep the random numbers out of the program
    with jax.ensure_compile_time_eval() if key is None else nullcontext():
        return jax.tree.unflatten(form, [start(number, like) for number, like in enumerate(leaves)])


def _arrays(module: Any) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """Yield ``(path, variable, its array)`` of all variables, and of arrays without one."""
    for path, x in nnx.iter_graph(module):
        if isinstance(x, nnx.Variable):  # its value is an array, or what NNX keeps for one
            yield path, x, x.get_value()
        elif isinstance(x, jax.Array | np.ndarray):
            yield path, x, x


def _lost(path: tuple[Any, ...], variable: Any) -> str:
    kind = type(variable).__name__ if isinstance(variable, nnx.Variable) else "no variable"
    name = f"{'.'.join(map(str, path))} ({kind})"
    if isinstance(variable, nnx.RngState):
        text = f"the module draws from {name} though it is deterministic, and would draw the same at every step; let"
        return f"{text} its layers follow their attribute deterministic, or take dropout_seed"
    text = f"the module changes {name} while it acts, and that would be lost; change an nnx.BatchStat where"
    return f"{text} use_running_average is False, a Normalizer where observe is given, or add a memory to the module"
