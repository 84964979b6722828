"""A robot's tool that sweeps through a cube, on any engine."""

import jax
import jax.numpy as jnp
import numpy as np

from ejax.envs.mujoco.engine import Physics, PhysicsState
from ejax.types import Array

C_ENGINE = Physics("push_cube.xml", engine="mujoco")

# Joint angles that put the tool 0.1 m behind the cube and 0.1 m past the place of its centre, 0.05 m above the floor
# and pointing down (inverse kinematics, done once). The straight way from one to the other sweeps through the cube.
BEHIND_CUBE = (0.321, -1.4, 2.246, -2.416, -1.571, 0.0)

PAST_CUBE = (0.387, -1.132, 1.856, -2.295, -1.571, 0.0)

CUBE = (-0.6, -0.4, 0.05, 1.0, 0.0, 0.0, 0.0)

NUM_STEPS = 30


def sweep(num_rows: int) -> tuple[PhysicsState, Array]:
    """Start state with leaves [N, ...] and controls [T, N, 6]; every row pushes the cube a little differently."""
    qpos = jnp.tile(jnp.array(BEHIND_CUBE + CUBE), (num_rows, 1))
    fraction = jnp.linspace(0.0, 1.0, NUM_STEPS)[:, None, None]
    behind, past = jnp.array(BEHIND_CUBE), jnp.array(PAST_CUBE)
    ctrl = behind[None, None] + fraction * (past - behind)[None, None]
    offset = 0.01 * jax.random.normal(jax.random.key(0), (num_rows, 6))
    return PhysicsState(qpos=qpos, qvel=jnp.zeros((num_rows, 12))), ctrl + offset[None]


def trajectory(physics: Physics, state: PhysicsState, ctrl: Array) -> PhysicsState:
    """States after every control step, leaves [T, N, ...], in one jitted scan."""

    @jax.jit
    def run(state: PhysicsState, ctrl: Array) -> PhysicsState:
        def step(state: PhysicsState, ctrl: Array) -> tuple[PhysicsState, PhysicsState]:
            state = jax.vmap(physics.step)(state, ctrl)
            return state, state

        return jax.lax.scan(step, state, ctrl)[1]

    return run(state, ctrl)


def assert_same_bits(a: PhysicsState, b: PhysicsState) -> None:
    np.testing.assert_array_equal(a.qpos, b.qpos)
    np.testing.assert_array_equal(a.qvel, b.qvel)
