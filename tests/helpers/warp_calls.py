"""Compile one control step of a legged robot on Warp for an H100 that is not here, and count what a substep launches.

    python warp_calls.py [--no-barrier] ROWS [ROWS ...]

prints ``{"jax": release, "rows": {N: {"calls": C, "copies": K}}}``: calls of Warp, those inside fusions too, and copies
of arrays that are not empty, both in one trip of the physics steps' loop. Where something is not installed, a line says
so and the exit code is 3.
"""

import json
import sys

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from ejax.envs.locomotion.velocity import VelocityRL
from ejax.envs.mujoco.choice import how_to_install
from ejax.envs.mujoco.engine import Physics, PhysicsState
from ejax.preflight.hlo import Computation, parse
from ejax.preflight.plugin import absent_devices, compiler_problem, without_compilation_cache
from ejax.preflight.targets import CARDS
from ejax.types import Array


def count(hlo: str) -> dict[str, int]:
    module = parse(hlo)

    def calls(computation: Computation) -> int:
        inside = [name for each in computation.instructions for name in each.called("calls")]
        own = sum(each.opcode == "custom-call" for each in computation.instructions)
        return own + sum(calls(module.computations[name]) for name in inside)

    loops = [each for computation in module.computations.values() for each in computation.instructions]
    bodies = [module.computations[each.called("body")[0]] for each in loops if each.opcode == "while"]
    (body,) = [each for each in bodies if calls(each)]
    copies = [each for each in body.instructions if each.opcode == "copy" and each.num_bytes]
    return {"calls": calls(body), "copies": len(copies)}


def main(arguments: list[str]) -> int:
    problem = compiler_problem() or how_to_install("warp")
    if problem:
        print(f"jax {jax.__version__}: {problem}")
        return 3
    if "--no-barrier" in arguments:
        jax.lax.optimization_barrier = lambda x: x
    device = SingleDeviceSharding(absent_devices(CARDS["h100"], gpus=1, hosts=1)[0])
    physics = Physics(VelocityRL(robot="quadruped", physics="mujoco").legged.xml, "warp")

    def step(qpos: Array, qvel: Array, ctrl: Array) -> tuple[PhysicsState, Array]:
        return physics.step_sensing(PhysicsState(qpos=qpos, qvel=qvel), ctrl)

    found = {}
    for rows in (argument for argument in arguments if argument.isdecimal()):
        sizes = (physics.model.nq, physics.model.nv, physics.model.nu)
        shapes = [jax.ShapeDtypeStruct((int(rows), size), jnp.float32, sharding=device) for size in sizes]
        with without_compilation_cache():
            found[rows] = count(jax.jit(jax.vmap(step)).lower(*shapes).compile().as_text() or "")
    print(json.dumps({"jax": jax.__version__, "rows": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
