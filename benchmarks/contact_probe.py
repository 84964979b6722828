"""Does Warp read contact sensors right on this machine's GPU? One command, under 3 minutes; the exit code decides.

    python benchmarks/contact_probe.py [--rows 8 16 4096] [--device cpu]

A quadruped stands on the floor, and is stepped by ``Physics.step_sensing`` as in training: many rows, in a scan of
control steps. Its feet's sensors must find the floor, and read the forces that the C engine reads. 0: they do. 1: they
do not, on this card with these versions. 2: it could not be tried.
"""

import argparse
import sys
import time
from importlib.metadata import version
from typing import Any

from ejax.envs.mujoco.choice import how_to_install
from ejax.runtime.device import prepare_jax

NUM_STEPS = 25
"""Control steps: half a second, in which a robot that is set down comes to rest."""
LEAST_FOUND = 0.99
"""Share of rows and feet whose sensors must find the floor in the last control step."""
MAX_FORCE_ERROR = 0.05
"""Relative error of the feet's summed force, beside the C engine's."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 4096], metavar="N")
    parser.add_argument("--device", default="cuda", help="cpu: only that it works; default: cuda")
    args = parser.parse_args()
    if problem := how_to_install("warp"):
        print(f"not tried: Warp is not installed: {problem}", file=sys.stderr)
        return 2
    try:
        prepare_jax(args.device)  # with the flags of a training
    except ValueError as error:
        print(f"not tried: {error}", file=sys.stderr)
        return 2
    import jax

    names = ("jax", "jaxlib", "mujoco", "mujoco-warp", "warp-lang")
    print(jax.devices()[0].device_kind, ", ".join(f"{name} {version(name)}" for name in names), flush=True)
    _, force_there = stand("mujoco", 1)
    passed = True
    for rows in args.rows:
        began = time.monotonic()
        found, force = stand("warp", rows)
        right = found >= LEAST_FOUND and abs(force / force_there - 1.0) <= MAX_FORCE_ERROR
        passed &= right
        text = f"{rows:6,} rows: {found:.3f} of the feet's sensors find the floor, they bear {force:.1f} N"
        print(f"{text} (C engine: {force_there:.1f} N): {'right' if right else 'WRONG'}", end="")
        print(f", {time.monotonic() - began:.0f} s", flush=True)
    print("passed: Warp reads contact sensors here" if passed else "failed: Warp's contact sensors are wrong here")
    return 0 if passed else 1


def stand(engine: Any, rows: int) -> tuple[float, float]:
    """Let a quadruped stand: the share of its feet's sensors that find the floor, and the force that they bear, N."""
    import jax
    import jax.numpy as jnp

    from ejax.envs.locomotion.motion import follow_contacts, start_timers
    from ejax.envs.locomotion.velocity import VelocityRL
    from ejax.envs.mujoco.engine import Physics, PhysicsState
    from ejax.types import Array

    env = VelocityRL(robot="quadruped", physics="mujoco")
    physics = Physics(env.asset, engine, env.num_substeps)
    home = jnp.asarray(env.task.robot.home)

    @jax.jit
    def run(state: PhysicsState) -> tuple[Array, Array]:
        def step(state: PhysicsState, _: None) -> tuple[PhysicsState, Array]:
            return jax.vmap(lambda each: physics.step_sensing(each, home))(state)

        _, readings = jax.lax.scan(step, state, length=NUM_STEPS)  # [control steps, N, physics steps, sensors]
        timers = start_timers(len(env.legged.foot_sensors))

        def feet(readings: Array) -> tuple[Array, Array]:
            _, contacts = follow_contacts(timers, env.legged, readings, env.task.timestep)
            return contacts.found, jnp.linalg.norm(contacts.force, axis=-1).sum()

        found, force = jax.vmap(feet)(readings[-1])
        return found.mean(), force.mean()

    start = jax.vmap(env._start)(jax.random.split(jax.random.key(0), 1))
    share, force = run(jax.tree.map(lambda x: jnp.repeat(x, rows, axis=0), start))
    return float(share), float(force)


if __name__ == "__main__":
    sys.exit(main())
