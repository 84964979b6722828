"""A robot from its own files: the folder crane/ in MuJoCo Menagerie's layout, with meshes. docs/robots.md."""

import jax
import jax.numpy as jnp

import ejax


class Crane(ejax.MuJoCoTask):
    """Success: the grab is at the crate's lid."""

    model = "crane/scene.xml"
    control_period = 0.05
    episode_length = 80
    ends_on_success = False
    weights = {"near": 1.0, "haste": -0.02}

    def start(self, key, world):
        angle, radius = jax.random.uniform(key, (2,), minval=jnp.array([-2.4, 0.25]), maxval=jnp.array([2.4, 0.5]))
        return world.place("crate", [radius * jnp.cos(angle), radius * jnp.sin(angle), 0.04])

    def observe(self, world):
        return {**world.joint_positions(), **world.joint_velocities(), "tip to lid [m]": _to_lid(world)}

    def rewards(self, world, before):
        distance = jnp.linalg.norm(_to_lid(world))
        return {"near": jnp.exp(-5.0 * distance), "haste": jnp.square(world.action - before.action).sum()}

    def succeeds(self, world):
        return jnp.linalg.norm(_to_lid(world)) < 0.03


def _to_lid(world):
    return world.site("lid").position - world.site("tip").position
