"""Work of a program: floating-point operations, and bytes that no fusion avoids, counted in what JAX traced.

    product: 2·|out|·K       convolution: 2·|out|·|kernel| / C_out       other arithmetic: 1 an element of its result

Elementwise operations are taken to be fused with what reads them, so that the bytes are those of products,
convolutions, reductions, sorts, gathers and scatters: their operands, once, and their results. A scan counts as often
as it repeats, a loop of unknown length once, and of a conditional's branches the one with most operations.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

_MOVES = {
    "broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "concatenate", "pad", "rev", "iota", "copy",
    "slice", "dynamic_slice", "dynamic_update_slice", "gather", "convert_element_type", "bitcast_convert_type", "eq",
    "stop_gradient", "select_n", "split", "random_wrap", "random_unwrap", "copy_p", "device_put", "pvary",
}  # fmt: skip
"""Operations that are not arithmetic on elements."""
_REDUCES = ("reduce_", "scatter", "arg", "cum", "sort")
_PASSES = ("dot_general", "conv_general_dilated", "gather", *_REDUCES)
"""Beginnings of operations that read operands from memory and write results to it."""


@dataclass
class Work:
    """Counts of one run of a program."""

    products: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Operations of products and convolutions by the type of the numbers: ``f32 exact`` where TF32 will not do."""
    elements: float = 0.0
    num_bytes: float = 0.0
    open_loops: int = 0
    """Loops whose length is known only as they run."""

    def add(self, other: "Work", times: float = 1.0) -> None:
        for name, flops in other.products.items():
            self.products[name] += times * flops
        self.elements += times * other.elements
        self.num_bytes += times * other.num_bytes
        self.open_loops += other.open_loops

    @property
    def flops(self) -> float:
        return sum(self.products.values()) + self.elements


def count_work(jaxpr: ClosedJaxpr | Jaxpr) -> Work:
    """Count the work of a traced program, ``jax.jit(f).trace(…).jaxpr``."""
    work = Work()
    for equation in (jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr).eqns:
        name = equation.primitive.name
        values = (each if isinstance(each, tuple | list) else [each] for each in equation.params.values())
        programs = [each for value in values for each in value if isinstance(each, ClosedJaxpr | Jaxpr)]
        # scatter-add has a program for one element
        inner = [] if name.startswith("scatter") else [count_work(each) for each in programs]
        if name == "cond":
            work.add(max(inner, key=lambda each: each.flops))
            continue
        for each in inner:
            work.add(each, equation.params["length"] if name == "scan" else 1)
        if name == "while":
            work.open_loops += 1
        if not inner:
            _add_operation(work, name, equation)
    return work


def _add_operation(work: Work, name: str, equation: Any) -> None:
    operands, results = ([variable.aval for variable in side] for side in (equation.invars, equation.outvars))
    result: Any = results[0] if results else None
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        depth = math.prod(operands[0].shape[axis] for axis in contracted)
        work.products[_precision(operands[0], equation.params)] += 2.0 * result.size * depth
    elif name == "conv_general_dilated":
        channels = operands[1].shape[equation.params["dimension_numbers"].rhs_spec[0]]
        flops = 2.0 * result.size * operands[1].size / channels
        work.products[_precision(operands[0], equation.params)] += flops
    elif name.startswith(_REDUCES):
        work.elements += max((_size(each) for each in operands), default=0)
    elif name not in _MOVES:
        work.elements += _size(result)
    if name.startswith(_PASSES):
        # of an array that is gathered from or scattered into only the rows are touched
        touched = operands[1:] if name.startswith(("gather", "scatter")) else operands
        work.num_bytes += sum(map(_bytes, (*touched, *(() if name.startswith("scatter") else results))))


def _precision(operand: Any, params: dict[str, Any]) -> str:
    dtype = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}.get(str(operand.dtype), str(operand.dtype))
    wanted = str(params["precision"])
    if "BF16_BF16_F32" in wanted:
        return "bf16"
    exact = "HIGHEST" in wanted or "F32_F32_F32" in wanted.replace("TF32", "")
    return f"{dtype} exact" if exact and dtype == "f32" else dtype


def _size(shape: Any) -> int:
    return getattr(shape, "size", 0)  # a token has none


def _bytes(shape: Any) -> float:
    is_key = jax.dtypes.issubdtype(shape.dtype, jax.dtypes.prng_key)
    return _size(shape) * (8 if is_key else shape.dtype.itemsize)
