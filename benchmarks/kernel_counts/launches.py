"""Launches of a program: the kernels and whole CUDA graphs that the host starts one by one.

XLA lists what it runs (its thunks) in files of ``--xla_dump_to``, those that it joined into a graph below that graph.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from ejax.schema.plain_files import read_text

from .hlo import Module

PROGRAM = ""
"""The name of the whole program among its loops."""
_LINE = re.compile(r"^( *)(\d+): k(\w+)")
_PART = re.compile(r"( *)(condition|body|\w*branch\w*):$")
_NAME = re.compile(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)')


@dataclass
class Thunk:
    kind: str
    name: str
    """Name of its instruction in HLO; graphs have none."""
    parts: list[list["Thunk"]] = field(default_factory=list)
    """Parts: of a loop its condition and its body, of a conditional its branches, of a graph what is in it."""


def count_launches(folder: Path, module: Module) -> dict[str, float] | None:
    """Count what one trip of each loop launches, by the name of its instruction; 0: it runs within a graph.

    Args:
        folder: XLA's dump of this program.

    Returns:
        None: the dump has no list, as that of a CPU.
    """
    lists = [*folder.glob("*.thunk_sequence_after_thunk_passes.txt"), *folder.glob("*.thunk_sequence.txt")]
    if not lists:
        return None
    metadata = read_text(next(folder.glob("*.thunk_metadata.txt")))
    counts: dict[str, float] = {}
    counts[PROGRAM] = _launches(read_thunks(read_text(lists[0]), metadata), module, counts)
    return counts


def read_thunks(text: str, metadata: str) -> Thunk:
    """Read XLA's list; ``metadata`` names its numbers."""
    names = {int(number): name for name, number in _NAME.findall(metadata)}
    program = Thunk("Program", PROGRAM, [[]])
    around = [(-1, program)]
    for line in text.splitlines():
        if found := _LINE.match(line):
            while around[-1][0] >= len(found[1]):
                around.pop()
            thunk, parts = Thunk(found[3], names.get(int(found[2]), "")), around[-1][1].parts
            parts[-1:] = [[*parts[-1], thunk]] if parts else [[thunk]]
            around.append((len(found[1]), thunk))
        elif found := _PART.search(line):
            # a condition, printed without its indent, directly follows its loop
            while found[2] != "condition" and around[-1][0] >= len(found[1]):
                around.pop()
            around[-1][1].parts.append([])
    return program


def _launches(thunk: Thunk, module: Module, loops: dict[str, float], in_graph: bool = False) -> float:
    inside = [
        sum(_launches(each, module, loops, in_graph or thunk.kind == "CommandBuffer") for each in part)
        for part in thunk.parts
    ]
    if thunk.kind == "While":
        condition, body = inside
        trips = module.instructions[thunk.name].trip_count
        # XLA counts the trips of a loop of known length itself, without its condition
        loops[thunk.name] = body + (condition if trips is None else 0.0)
        return loops[thunk.name] * (trips or 1) + (condition if trips is None else 0.0)
    if in_graph or thunk.kind == "CommandBuffer":
        return 0.0 if in_graph else 1.0
    if inside:
        return max(inside) if thunk.kind == "Conditional" else sum(inside)
    copied = module.instructions.get(thunk.name) if thunk.kind == "Copy" else None
    is_nothing = thunk.kind in ("AsyncDone", "WaitForStreams") or (copied is not None and copied.num_bytes == 0)
    return 0.0 if is_nothing else 1.0
