"""A program that is compiled for GPUs that are not here, and XLA's account of it."""

import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ejax.preflight.run import Memory, Program

from .hlo import Module, parse
from .launches import count_launches


@dataclass(frozen=True)
class Compiled:
    name: str
    """``train``, ``learn`` or ``evaluate``."""
    module: Module
    memory: Memory
    seconds: float
    launches: dict[str, float] | None = None
    """Launches of each loop; see ``count_launches``. None: compiled for a CPU."""
    library_products: bool = False
    """Matrix products are cuBLAS's, none XLA's own."""


def compile_program(program: Program) -> Compiled:
    """Compile a program, and read XLA's account of it."""
    began = time.monotonic()
    with TemporaryDirectory(prefix="ejax-kernels-") as folder:
        compiled, library_products = program.compile(Path(folder))
        module = parse(compiled.as_text() or "")
        launches = count_launches(Path(folder), module)
    return Compiled(
        program.name, module, program.memory(compiled), time.monotonic() - began, launches, library_products
    )
