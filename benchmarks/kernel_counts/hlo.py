"""Optimized HLO as XLA prints it, read into computations of instructions (openxla.org/xla/operation_semantics)."""

import math
import re
from dataclasses import dataclass
from functools import cached_property

_BITS = {"token": 0, "opaque": 0}
_ARRAY = re.compile(r"([a-z]+\d*[a-z\d]*)\[([\d,]*)\]")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_NAME = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True)
class Shape:
    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        # pred has no width in its name and takes a byte; s4 takes half of one, so bits are rounded up at the end
        named = re.match(r"[a-z]+(\d+)", self.dtype)
        bits = int(named[1]) if named else _BITS.get(self.dtype, 8)
        return -(-self.size * bits // 8)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shapes: tuple[Shape, ...]
    """Shapes of the result: one, or the leaves of a tuple."""
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def num_bytes(self) -> int:
        return sum(shape.num_bytes for shape in self.shapes)

    @property
    def op_name(self) -> str:
        """Place of the traced program that made it, such as ``jit(repeated)/updates/while``; empty if XLA did."""
        return self.find(r'op_name="([^"]*)"') or ""

    @property
    def target(self) -> str:
        return self.find(r'custom_call_target="([^"]*)"') or ""

    @property
    def trip_count(self) -> int | None:
        found = self.find(r'"known_trip_count":\{"n":"(\d+)"')
        return int(found) if found else None

    @property
    def group_size(self) -> int | None:
        """Number of devices in a collective; None: not given."""
        # three spellings: [groups,size]<=[devices], lists of devices, and axes of a named mesh
        if size := self.find(r"replica_groups=\[\d+,(\d+)\]"):
            return int(size)
        if first := self.find(r"replica_groups=\{\{([\d,]+)\}"):
            return len(first.split(","))
        if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", self.attributes):
            sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
            return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", found[2]))
        return None

    def called(self, *roles: str) -> tuple[str, ...]:
        """Return the computations behind attributes such as ``body`` or ``calls``, in their order."""
        texts = [self.find(rf"\b{role}=(\{{[^}}]*\}}|%?[\w.\-]+)") or "" for role in roles]
        return tuple(name for text in texts for name in re.findall(r"[\w.\-]+", text))

    def numbers(self, attribute: str) -> tuple[int, ...]:
        """``lhs_contracting_dims={0,1}`` as (0, 1)."""
        return _integers(self.find(rf"\b{attribute}=\{{([\d,]*)\}}") or "")

    def find(self, pattern: str) -> str | None:
        found = re.search(pattern, self.attributes)
        return found[1] if found else None


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
        """The users of each instruction, seen through bitcasts."""
        found: dict[str, list[Instruction]] = {}
        for each in self.instructions:
            for operand in each.operands if each.opcode != "bitcast" else ():
                if operand in self.by_name:
                    found.setdefault(self.source(operand).name, []).append(each)
        return found

    def source(self, name: str) -> Instruction:
        """Return the instruction of that name, or what it renames where it is a bitcast."""
        found = self.by_name[name]
        return self.source(found.operands[0]) if found.opcode == "bitcast" else found

    @property
    def root(self) -> Instruction:
        return next(each for each in self.instructions if each.is_root)

    def shapes_of(self, instruction: Instruction) -> list[tuple[Shape, ...]]:
        return [self.by_name[name].shapes for name in instruction.operands if name in self.by_name]


@dataclass(frozen=True)
class Module:
    computations: dict[str, Computation]
    entry: Computation

    @cached_property
    def instructions(self) -> dict[str, Instruction]:
        return {each.name: each for computation in self.computations.values() for each in computation.instructions}


def parse(text: str) -> Module:
    """Read a module. ValueError: the text has no entry computation."""
    computations: dict[str, Computation] = {}
    entry = name = None
    lines: list[Instruction] = []
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name, lines = head[2], []
            entry = name if head[1] else entry
        elif line.startswith("}") and name is not None:
            computations[name] = Computation(name, tuple(lines))
            name = None
        elif name is not None and " = " in line:
            lines.append(_instruction(line.strip()))
    if entry is None:
        raise ValueError(f"this is no HLO module: it has no ENTRY computation, and begins with {text[:60]!r}")
    return Module(computations, computations[entry])


def _instruction(line: str) -> Instruction:
    name, _, rest = line.removeprefix("ROOT ").partition(" = ")
    # a tuple's shapes are in parentheses, with spaces between them
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shapes = tuple(Shape(dtype, _integers(dims)) for dtype, dims in _ARRAY.findall(rest[:end]))
    start = rest.index("(", end)
    close = _closing(rest, start)
    opcode = rest[end:start].strip()
    # constants and parameters have numbers there, which are no operands
    operands = () if opcode in ("constant", "parameter") else tuple(_NAME.findall(rest[start:close]))
    return Instruction(name.lstrip("%"), shapes, opcode, operands, rest[close + 1 :], line.startswith("ROOT "))


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(",") if x)


def _closing(text: str, start: int) -> int:
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"unbalanced parentheses in HLO: {text[:120]!r}")
