"""Compile one control step of a legged robot on Warp for an H100 that is not here, and count what it launches.

    python warp_calls.py ROWS [ROWS ...]

prints ``{"jax": release, "rows": {N: {"calls": C, "copies": K}}}``: calls of Warp, those inside fusions too, and copies
of arrays that are not empty. Where something is not installed, a line says so and the exit code is 3.
"""

import json
import sys

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from benchmarks.kernel_counts.hlo import parse
from ejax.envs.locomotion.velocity import VelocityRL
from ejax.envs.mujoco.choice import how_to_install
from ejax.envs.mujoco.engine import Physics, PhysicsState
from ejax.preflight.run import absent_devices, compiler_problem, without_compilation_cache
from ejax.preflight.targets import CARDS
from ejax.types import Array


def count(hlo: str) -> dict[str, int]:
    lines = [each for computation in parse(hlo).computations.values() for each in computation.instructions]
    calls = [each for each in lines if each.opcode == "custom-call"]
    copies = [each for each in lines if each.opcode == "copy" and each.num_bytes]
    return {"calls": len(calls), "copies": len(copies)}


def main(arguments: list[str]) -> int:
    problem = compiler_problem() or how_to_install("warp")
    if problem:
        print(f"jax {jax.__version__}: {problem}")
        return 3
    device = SingleDeviceSharding(absent_devices(CARDS["h100"], gpus=1, hosts=1)[0])
    physics = Physics(VelocityRL(robot="quadruped", physics="mujoco").legged.xml, "warp")

    def step(qpos: Array, qvel: Array, ctrl: Array) -> tuple[PhysicsState, Array]:
        return physics.step_sensing(PhysicsState(qpos=qpos, qvel=qvel), ctrl)

    found = {}
    for rows in arguments:
        sizes = (physics.model.nq, physics.model.nv, physics.model.nu)
        shapes = [jax.ShapeDtypeStruct((int(rows), size), jnp.float32, sharding=device) for size in sizes]
        with without_compilation_cache():
            found[rows] = count(jax.jit(jax.vmap(step)).lower(*shapes).compile().as_text() or "")
    print(json.dumps({"jax": jax.__version__, "rows": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
