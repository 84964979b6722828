"""Cost of one instruction of optimized HLO on a GPU: kernels, bytes through memory, floating-point operations.

    dot: 2·|out|·K       convolution: 2·|out|·window·C_in       any other operation: 1 per element of its result

A kernel reads its operands and writes its result, each once; of an array that a fusion only slices, gathers from or
updates in place, only the part. XLA's own cost analysis counts so too, but is not there for absent devices.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass, field

from .hlo import Computation, Instruction, Module, Shape

_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "opt-barrier"),
    *("domain", "while", "conditional", "call", "async-start"),
}
"""Instructions that start no kernel by themselves; neither do those that end in -done, are fused, or copy 0 bytes."""
_MOVES = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "broadcast", "iota", "reshape", "transpose"),
    *("copy", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "pad", "gather", "reverse", "convert"),
    *(
        "partition-id",
        "replica-id",
        "bitcast-convert",
        "fusion",
        "dot",
        "convolution",
        "custom-call",
        "while",
        "conditional",
        "call",
    ),
}
"""Instructions that are no arithmetic on elements, or are counted otherwise."""
_COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+|ragged-all-to-all)(-start)?$"
)
_CALLBACK = re.compile(r"python|callback", re.IGNORECASE)
_SLICES = ("dynamic-slice", "slice", "gather")


@dataclass(frozen=True)
class Collective:
    """Devices that wait for one another."""

    kind: str
    num_bytes: int
    """Bytes of the result on one device."""
    group_size: int | None
    where: str


@dataclass
class Cost:
    """Sums over instructions; floats, since they are multiplied with trip counts."""

    kernels: float = 0.0
    num_bytes: float = 0.0
    dot_flops: Counter[str] = field(default_factory=Counter)
    """By precision: ``f32``, ``f32 exact`` (requested), ``bf16``, …"""
    element_ops: float = 0.0
    """Elementwise and reducing operations, integer ones too."""
    host_trips: float = 0.0
    """Predicates of loops without a known length and of conditionals, which the host may read back."""
    callbacks: float = 0.0
    library_calls: Counter[str] = field(default_factory=Counter)
    """Kernels whose inside is not seen: each counts as one."""
    collectives: Counter[Collective] = field(default_factory=Counter)

    def add(self, other: "Cost", times: float = 1.0) -> None:
        for name, theirs in vars(other).items():
            mine = getattr(self, name)
            if isinstance(mine, Counter):
                for key, count in theirs.items():
                    mine[key] += times * count  # counters of floats
            else:
                setattr(self, name, mine + times * theirs)

    @property
    def num_collectives(self) -> float:
        return sum(self.collectives.values())


def instruction_cost(module: Module, within: Computation, instruction: Instruction, where: str) -> Cost:
    """Count one instruction that is not fused, in the loops ``where``, without what loops and branches call."""
    cost, opcode = Cost(), instruction.opcode
    if opcode in _FREE or opcode.endswith("-done") or (opcode == "copy" and instruction.num_bytes == 0):
        return cost
    cost.kernels = 1.0
    if collective := _COLLECTIVE.match(opcode):
        num_bytes = _result_bytes(instruction)
        cost.collectives[Collective(collective.group(1), num_bytes, instruction.group_size, where)] = 1
        # in memory each card reads its part and writes the result; the links are bounded apart
        cost.num_bytes = 2.0 * num_bytes
        return cost
    _add_operations(module, within, instruction, cost)
    cost.num_bytes = _traffic(module, within, instruction)
    return cost


def _add_operations(module: Module, within: Computation, instruction: Instruction, cost: Cost) -> None:
    for name in instruction.called("calls", "called_computations"):
        fused = module.computations[name]
        for each in fused.instructions:
            _add_operations(module, fused, each, cost)
    opcode, shapes = instruction.opcode, within.shapes_of(instruction)
    if opcode == "dot":
        lhs = shapes[0][0]
        depth = math.prod(lhs.dims[i] for i in instruction.numbers("lhs_contracting_dims"))
        cost.dot_flops[_precision(lhs, instruction)] += 2 * instruction.shapes[0].size * depth
    elif opcode == "convolution":
        cost.dot_flops[_precision(shapes[0][0], instruction)] += _convolution_flops(instruction, shapes[1][0])
    elif opcode == "custom-call":
        cost.library_calls[instruction.target] += 1
        # the names differ between releases of jaxlib: xla_python_gpu_callback, xla_ffi_python_gpu_callback
        cost.callbacks += bool(_CALLBACK.search(instruction.target))
        if flops := _library_flops(instruction, shapes):
            cost.dot_flops[_precision(shapes[0][0], instruction)] += flops
    elif opcode in ("reduce", "reduce-window", "scatter", "sort"):
        # the work is in what is reduced, not in the small result
        operands = [shape for operand in shapes for shape in operand]
        cost.element_ops += max((shape.size for shape in operands), default=0)
    elif opcode not in _MOVES and opcode not in _FREE:
        cost.element_ops += instruction.shapes[0].size if instruction.shapes else 0


def _precision(shape: Shape, instruction: Instruction) -> str:
    """Return the type of a product's numbers after rounding; ``f32 exact`` where the program wants more than TF32."""
    if "algorithm=dot_bf16_bf16_f32" in instruction.attributes:
        return "bf16"
    exact = re.search(r"operand_precision=\{[^}]*highest|algorithm=dot_f32_f32_f32", instruction.attributes)
    return f"{shape.dtype} exact" if exact else shape.dtype


def _convolution_flops(instruction: Instruction, kernel: Shape) -> int:
    labels = instruction.find(r"dim_labels=\w+_(\w+)->")
    outputs = kernel.dims[labels.index("o")] if labels else 1
    return 2 * instruction.shapes[0].size * (kernel.size // max(outputs, 1))


def _library_flops(instruction: Instruction, shapes: list[tuple[Shape, ...]]) -> int:
    """Count the operations of library calls whose operands imply it; 0 for the others."""
    # the shapes of these products are in the library's own options, not in HLO's
    target = instruction.target
    if "gemm" in target or "cublas$lt$matmul" in target:
        found = instruction.find(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
        axes = [-1] if found is None else [int(x) for x in re.findall(r"\d+", found)]
        return 2 * instruction.shapes[0].size * math.prod(shapes[0][0].dims[axis] for axis in axes)
    if target.startswith("__cudnn$conv"):
        return _convolution_flops(instruction, shapes[1][0])
    if "potrf" in target:  # n³/3 of each matrix
        return shapes[0][0].size * shapes[0][0].dims[-1] // 3
    if "triangularSolve" in target or "trsm" in target:  # n² of each right-hand side
        return shapes[1][0].size * shapes[0][0].dims[-1]
    return 0


def _result_bytes(instruction: Instruction) -> int:
    """Return the bytes of a collective; one that only starts has its operands in the result too, in front."""
    if not instruction.opcode.endswith("-start") or instruction.opcode == "all-reduce-start":
        return instruction.num_bytes
    shapes = instruction.shapes[: 2 * len(instruction.operands)]
    return sum(shape.num_bytes for shape in shapes[len(instruction.operands) :])


def _traffic(module: Module, within: Computation, instruction: Instruction) -> float:
    operands = [sum(shape.num_bytes for shape in shapes) for shapes in within.shapes_of(instruction)]
    written = instruction.num_bytes
    # read and written: the part alone
    if instruction.opcode in _SLICES:
        return 2.0 * written
    if instruction.opcode == "dynamic-update-slice":  # in place: the row is read and written, not the array
        return 2.0 * operands[1]
    # a fusion may take a slice of an operand only: its parameters show how much is really read
    called = instruction.called("calls") if instruction.opcode == "fusion" else ()
    if not called:
        return float(sum(operands) + written)
    fused = module.computations[called[0]]
    read = sum(_read(fused, each) for each in fused.instructions if each.opcode == "parameter")
    return float(read + _written(fused, fused.root))


def _read(fused: Computation, parameter: Instruction) -> int:
    total = 0
    for user in fused.users.get(parameter.name, []):
        in_place = user.opcode == "dynamic-update-slice"
        is_whole = not in_place and user.opcode not in _SLICES
        # as the index of a slice, or as what is written, it is read whole
        if is_whole or fused.source(user.operands[0]) is not parameter:
            return parameter.num_bytes
        total += 0 if in_place else user.num_bytes
    return min(total, parameter.num_bytes)


def _written(fused: Computation, root: Instruction) -> int:
    if root.opcode == "tuple":
        return sum(_written(fused, fused.by_name[name]) for name in root.operands)
    source = fused.source(root.name)
    # in place: the rows are written, not the array around them
    updates = source.opcode == "dynamic-update-slice"
    return fused.by_name[source.operands[1]].num_bytes if updates else root.num_bytes
