"""A task of your own in 20 lines, those of the README: a lamp reaches for a moth. See docs/tutorials/01_own_task.md."""

import jax
import jax.numpy as jnp

import ejax


class Lamp(ejax.MuJoCoTask):
    model = "desk_lamp.xml"  # in examples/; actions of ±1 span each actuator's ctrlrange
    episode_length = 100

    def start(self, key, world):
        low, high = jnp.array([0.2, -0.3, 0.15]), jnp.array([0.4, 0.3, 0.4])
        return world.place("moth", jax.random.uniform(key, (3,), minval=low, maxval=high))

    def way(self, world):
        return world.body("moth").position - world.site("bulb").position

    def observe(self, world):
        return {**world.joint_positions(), **world.joint_velocities(), "bulb to moth [m]": self.way(world)}

    def rewards(self, world, before):
        return {"nearer": jnp.linalg.norm(self.way(before)) - jnp.linalg.norm(self.way(world))}

    def succeeds(self, world):
        return jnp.linalg.norm(self.way(world)) < 0.05
