"""The loops of a program, by the names that a user knows, and what one trip of each costs.

Names come from ``jax.named_scope`` in ejax and MJX.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .cost import Cost, instruction_cost
from .hlo import Computation, Instruction, Module, Shape

UPDATE, ENV_STEP, PHYSICS_STEP, MINIBATCH = "update", "env step", "physics step", "minibatch"
_NOISE = re.compile(r"^(while|body|closed_call|cond|branch_\d+_fun|vmap\(\)|jvp\(\)|transpose\(jvp\(\)\)|checkpoint)$")


@dataclass
class Loop:
    """A while loop, or the whole program."""

    name: str
    trips: int | None
    """None: only known while it runs."""
    path: str = ""
    instruction: str = ""
    """Its name in HLO."""
    op_name: str = ""
    trip: Cost = field(default_factory=Cost)
    """One trip, inner loops included; those of unknown length take one trip."""
    shapes: tuple[Shape, ...] = ()
    inner: "list[Loop]" = field(default_factory=list)

    def walk(self) -> "Iterator[Loop]":
        yield self
        for each in self.inner:
            yield from each.walk()

    def find(self, name: str) -> "Loop | None":
        """Return the costliest loop of that name."""
        found = [each for each in self.walk() if each.name == name]
        return max(found, key=lambda each: each.trip.kernels * (each.trips or 1), default=None)


def count(module: Module) -> Loop:
    """List the loops of a program. Of a conditional's branches the one with more kernels counts."""
    program = Loop("program", 1)
    _fill(module, module.entry, program, program.trip)
    return program


def _fill(module: Module, computation: Computation, around: Loop, cost: Cost) -> None:
    for each in computation.instructions:
        cost.add(instruction_cost(module, computation, each, around.path))
        if each.opcode == "while":
            _add_loop(module, each, around, cost)
        elif each.opcode == "conditional":
            names = each.called("branch_computations") or each.called("true_computation", "false_computation")
            # which branch runs is known on the card alone: the one of more kernels bounds both
            branches = []
            for name in names:
                branches.append(Cost())
                _fill(module, module.computations[name], around, branches[-1])
            cost.add(max(branches, key=lambda branch: branch.kernels))
            cost.host_trips += 1.0
        elif each.opcode in ("call", "async-start"):
            for name in each.called("to_apply", "calls"):
                _fill(module, module.computations[name], around, cost)


def _add_loop(module: Module, instruction: Instruction, around: Loop, cost: Cost) -> None:
    loop = Loop(
        "", instruction.trip_count, instruction=instruction.name, op_name=instruction.op_name, shapes=instruction.shapes
    )
    body = module.computations[instruction.called("body")[0]]
    loop.name = _name(loop, around, body)
    loop.path = f"{around.path} / {loop.name}" if around.path else loop.name
    _fill(module, body, loop, loop.trip)
    around.inner.append(loop)
    # a loop of unknown length counts as one trip, which the report says
    cost.add(loop.trip, loop.trips or 1)
    if loop.trips is None:
        condition = module.computations[instruction.called("condition")[0]]
        # the host reads the condition's result before each trip
        check = Cost(host_trips=1.0)
        _fill(module, condition, loop, check)
        cost.add(check, 2)  # before the one trip and after it
        loop.trip.add(check)


def _name(loop: Loop, around: Loop, body: Computation) -> str:
    own = loop.op_name.removeprefix(around.op_name.removesuffix("/while"))
    scopes = [part for part in own.split("/") if part and not _NOISE.match(part)]
    last = scopes[-1] if scopes else ""
    inside_steps = ENV_STEP in around.path
    if last == "updates":
        return UPDATE
    if last == "minibatches" and MINIBATCH not in around.path:
        return MINIBATCH
    if "env_steps" in last and not inside_steps:
        return f"{ENV_STEP}, backward" if "transpose" in last else ENV_STEP
    # MJX's loops have no scope of their own: they are known by the operations inside them
    is_counted, ops = loop.trips is not None, body.instructions
    may_be_physics = inside_steps and is_counted and PHYSICS_STEP not in around.path
    if may_be_physics and any("/step/forward/" in each.op_name for each in ops):  # it is made of MJX's steps
        return PHYSICS_STEP
    if last == "solve":
        return "solver iteration"
    if around.name == "solver iteration":
        return "line search"
    return re.sub(r"\w+\(([\w.]*)\)", r"\1", last).strip("()") or "loop"
