"""The program of a policy, as ``interop.twin.program`` runs it: traced by JAX, its operations with their options."""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any

import jax
import numpy as np
import torch
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from ejax.runtime.tree_text import named_leaves
from ejax.types import Array
from interop.artefacts.parity import ConversionError
from interop.exporters.record import named_weights
from interop.policy import make_policy
from interop.twin.program import OPERATIONS, TORCH_NAMES
from interop.twin.spec import ProgramSpec

_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Options of calls (jit, custom_jvp_call, remat), which are a part of the program that calls."""
_ROWS = (5, 7)
"""Batches of the two traces: what differs between them depends on the batch."""


def with_program(spec: ProgramSpec, function: partial[Any]) -> ProgramSpec:
    """Add the program by which torch runs an ``actor_function``. Raises ConversionError: torch lacks one of its
    operations, or more than sizes depends on the batch."""
    (params,) = function.args
    names, weights = list(named_leaves(params)), named_weights(params)
    flat, tree = jax.tree.flatten(params)

    def of_weights(weights: dict[str, Array], *leaves: Array) -> Any:
        given = (weights.get(name, x) for name, x in zip(names, flat, strict=True))
        return function.func(jax.tree.unflatten(tree, given), *leaves)

    forms = [(spec.input_shape(name), np.dtype(spec.input_dtype(name))) for name in spec.inputs]
    programs = []
    for rows in _ROWS:
        leaves = [jax.ShapeDtypeStruct((rows, *shape), dtype) for shape, dtype in forms]
        closed = jax.make_jaxpr(of_weights)(weights, *leaves)
        constants: dict[Any, int] = {}
        # the weights come first there, in the order of their names
        body = _body(closed, constants, [*range(len(leaves), len(leaves) + len(weights)), *range(len(leaves))])
        named = {name: [list(weights[name].shape), str(weights[name].dtype)] for name in sorted(weights)}
        programs.append({"weights": named, "constants": [list(each) for each in constants], "body": body})
    spec = replace(spec, program=_merged(*programs))
    try:
        make_policy(spec, weights)(
            *(torch.zeros(3, *shape, dtype=getattr(torch, str(dtype))) for shape, dtype in forms)
        )
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ConversionError(f"torch cannot run this policy: {str(error)[:500]}") from error
    return spec


def _body(closed: ClosedJaxpr, constants: dict[Any, int], numbers: Sequence[int]) -> dict[str, Any]:
    """Make a body; ``numbers``: those of its inputs, in the order of the jaxpr's."""
    scope = _Scope(constants)
    results = scope.inline(closed.jaxpr, closed.consts, [("input", i) for i in numbers])
    needed, steps = {*results}, []
    for step in reversed(scope.steps):  # what no result needs, such as a critic, is left out
        if needed.intersection(step[-1]):
            steps.append(step)
            needed.update(step[1])
    held = [ref for ref in needed if ref[0] == "constant"]
    held.sort(key=lambda ref: ref[1])
    number: dict[Any, int] = {("input", i): i for i in numbers} | {ref: len(numbers) + i for i, ref in enumerate(held)}
    written = []
    for name, arguments, options, made in reversed(steps):
        given = [number[ref] for ref in arguments]
        written.append([name, given, options, len(made)])
        number |= {ref: len(number) + i for i, ref in enumerate(made)}
    body = {"constants": [ref[1] for ref in held], "steps": written, "results": [number[ref] for ref in results]}
    return {"inputs": len(numbers), **body}


class _Scope:
    """The steps of a body so far: ``(operation, its arguments, options, its results)``, a value being a tuple."""

    def __init__(self, constants: dict[Any, int]) -> None:
        self.constants = constants
        """(dtype, shape, bytes) -> its number; those of all bodies."""
        self.steps: list[Any] = []

    def inline(self, jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """Add the steps of a jaxpr; return its results."""
        known: dict[Any, Any] = dict(zip(jaxpr.invars, inputs, strict=True))
        known |= zip(jaxpr.constvars, map(self._constant, consts), strict=True)

        def read(atom: Any) -> Any:
            form = atom.aval
            return self._constant(atom.val, form.dtype) if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            arguments = list(map(read, equation.invars))
            known |= zip(equation.outvars, self._add(equation, arguments), strict=True)
        return list(map(read, jaxpr.outvars))

    def _add(self, equation: Any, arguments: list[Any]) -> list[Any]:
        name, options = equation.primitive.name, dict(equation.params)
        if name not in OPERATIONS and name not in TORCH_NAMES:
            inner = next((options[key] for key in _CALLS if isinstance(options.get(key), Jaxpr | ClosedJaxpr)), None)
            if inner is None:
                raise ConversionError(f"torch has no counterpart of JAX's operation {name}, which this policy has")
            return self.inline(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), arguments)
        if arguments and {kind for kind, *_ in arguments} == {"constant"} and not equation.outvars[0].aval.shape:
            made = equation.primitive.bind(*map(self._value, arguments), **options)
            return [self._constant(x) for x in (made if equation.primitive.multiple_results else [made])]
        if name == "pad":  # torch takes a number here
            if arguments[1][0] != "constant":
                raise ConversionError("this policy pads with a number that is computed; torch pads with a constant")
            arguments, options = arguments[:1], options | {"padding_value": self._value(arguments[1]).item()}
        if name == "slice":  # None: to the end, by which a whole axis is found without its size
            sizes = zip(options["limit_indices"], equation.invars[0].aval.shape, strict=True)
            options["limit_indices"] = [None if limit == size else limit for limit, size in sizes]
        made = [("step", len(self.steps), i) for i in range(len(equation.outvars))]
        given = {key: plain for key, x in options.items() if (plain := self._plain(x)) is not None}
        self.steps.append((name, arguments or [("input", 0)], given, made))  # of which iota takes the device alone
        return made

    def _constant(self, x: Any, dtype: Any = None) -> Any:
        try:
            array = np.asarray(x, dtype)
        except TypeError as error:
            raise ConversionError(f"this policy computes with {type(x).__name__}, such as of a random key") from error
        key = (str(array.dtype), array.shape, array.tobytes().hex())
        return "constant", self.constants.setdefault(key, len(self.constants))

    def _value(self, ref: Any) -> Any:
        dtype, shape, data = list(self.constants)[ref[1]]
        return np.frombuffer(bytes.fromhex(data), dtype).reshape(shape)

    def _plain(self, x: Any) -> Any:
        """Turn an option into what JSON has; None: it has no such, as of a device, and torch needs none."""
        if isinstance(x, ClosedJaxpr):
            return _body(x, self.constants, range(len(x.jaxpr.invars)))
        if hasattr(x, "_asdict"):
            return {name: self._plain(each) for name, each in x._asdict().items()}
        if isinstance(x, tuple | list):
            return [self._plain(each) for each in x]
        if isinstance(x, Enum):
            return x.name
        x = x.item() if isinstance(x, np.generic) else x
        if isinstance(x, float) and not np.isfinite(x):
            return str(x)
        if x is None or isinstance(x, bool | int | float | str):
            return x
        return x.name if isinstance(x, np.dtype) else None


def _merged(x: Any, y: Any) -> Any:
    """Merge the programs of the two batches."""
    if type(x) is int and type(y) is int and x != y:
        times = (y - x) // (_ROWS[1] - _ROWS[0])
        if x + times * (_ROWS[1] - _ROWS[0]) == y:
            return {"times": times, "plus": x - times * _ROWS[0]}
    if isinstance(x, dict) and isinstance(y, dict) and list(x) == list(y):
        return {name: _merged(x[name], y[name]) for name in x}
    if isinstance(x, list | tuple) and isinstance(y, list | tuple) and len(x) == len(y):
        return [_merged(*pair) for pair in zip(x, y, strict=True)]
    if type(x) is type(y) and x == y:
        return x
    raise ConversionError("this policy computes differently for another number of rows, which torch cannot follow")
