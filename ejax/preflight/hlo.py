"""Optimized HLO as XLA prints it, read into computations of instructions.

Source of the syntax: openxla.org/xla/operation_semantics and XLA's own printer; only what counting needs is kept.
"""

import math
import re
from dataclasses import dataclass
from functools import cached_property

_BITS = {"pred": 8, "token": 0, "opaque": 0}
"""Bits of an element whose type does not name them."""
_ARRAY = re.compile(r"([a-z]+\d*[a-z\d]*)\[([\d,]*)\]")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_NAME = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True)
class Shape:
    """One array."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        return -(-self.size * _bits(self.dtype) // 8)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shapes: tuple[Shape, ...]
    """Shapes of the result: one, or the leaves of a tuple."""
    opcode: str
    operands: tuple[str, ...]
    text: str
    """Text between the parentheses: of a parameter, its number."""
    attributes: str
    """Text after them."""
    is_root: bool

    @property
    def num_bytes(self) -> int:
        return sum(shape.num_bytes for shape in self.shapes)

    @property
    def op_name(self) -> str:
        """Place of the traced program that made it, such as ``jit(repeated)/updates/while``; empty if XLA did."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""

    @property
    def target(self) -> str:
        """Target of a custom call."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found.group(1) if found else ""

    @property
    def trip_count(self) -> int | None:
        """Trip count of a loop, if XLA knows it."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(found.group(1)) if found else None

    @property
    def group_size(self) -> int | None:
        """Number of devices in a collective; None: not given."""
        if found := re.search(r"replica_groups=\[\d+,(\d+)\]", self.attributes):
            return int(found.group(1))
        if found := re.search(r"replica_groups=\{\{([\d,]+)\}", self.attributes):
            return len(found.group(1).split(","))
        if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", self.attributes):
            sizes = dict(re.findall(r"'(\w+)'=(\d+)", found.group(1)))
            return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", found.group(2)))
        return None

    def called(self, *roles: str) -> tuple[str, ...]:
        """The computations behind attributes such as ``body`` or ``calls``, in their order."""
        found: list[str] = []
        for role in roles:
            if match := re.search(rf"\b{role}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes):
                found += re.findall(r"[\w.\-]+", match.group(1))
        return tuple(found)

    def numbers(self, attribute: str) -> tuple[int, ...]:
        """``lhs_contracting_dims={0,1}`` as (0, 1)."""
        found = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", self.attributes)
        return tuple(int(x) for x in found.group(1).split(",") if x) if found else ()


@dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they run."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {each.name: each for each in self.instructions}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = {}
        for each in self.instructions:
            for operand in each.operands:
                found.setdefault(operand, []).append(each)
        return found

    @property
    def root(self) -> Instruction:
        return next(each for each in self.instructions if each.is_root)

    def shapes_of(self, instruction: Instruction) -> list[tuple[Shape, ...]]:
        """Shapes of each operand."""
        return [self.by_name[name].shapes for name in instruction.operands if name in self.by_name]


@dataclass(frozen=True)
class Module:
    computations: dict[str, Computation]
    entry: Computation


def parse(text: str) -> Module:
    """Read a module.

    Raises:
        ValueError: there is no entry computation: this is not the text of an HLO module.
    """
    computations: dict[str, Computation] = {}
    entry: str | None = None
    name: str | None = None
    lines: list[Instruction] = []
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name, lines = head.group(2), []
            entry = name if head.group(1) else entry
        elif line.startswith("}") and name is not None:
            computations[name] = Computation(name, tuple(lines))
            name = None
        elif name is not None and " = " in line:
            lines.append(_instruction(line.strip()))
    if entry is None:
        raise ValueError(f"this is no HLO module: it has no ENTRY computation, and begins with {text[:60]!r}")
    return Module(computations, computations[entry])


def _instruction(line: str) -> Instruction:
    is_root = line.startswith("ROOT ")
    name, _, rest = line.removeprefix("ROOT ").partition(" = ")
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shapes = tuple(
        Shape(dtype, tuple(int(x) for x in dims.split(",") if x)) for dtype, dims in _ARRAY.findall(rest[:end])
    )
    rest = rest[end:].lstrip()
    start = rest.index("(")
    close = _closing(rest, start)
    inside = rest[start + 1 : close]
    opcode = rest[:start]
    operands = () if opcode in ("constant", "parameter") else tuple(_NAME.findall(inside))
    return Instruction(name.lstrip("%"), shapes, opcode, operands, inside, rest[close + 1 :], is_root)


def _closing(text: str, start: int) -> int:
    """The index of the parenthesis that closes the one at ``start``."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"unbalanced parentheses in HLO: {text[:120]!r}")


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits.group(1)) if digits else 8
