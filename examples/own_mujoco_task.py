"""A MuJoCo task of one's own: a desk lamp keeps its light on a moth. docs/tutorials/01_own_task.md goes through it.

cd examples; ejax train --config own_mujoco_task.yaml --trust own_mujoco_task:DeskLamp
"""

import jax
import jax.numpy as jnp

import ejax
from ejax import World
from ejax.types import Array, Key


class DeskLamp(ejax.MuJoCoTask):
    """Four servos take target angles. Success: the light is on the moth."""

    model = "desk_lamp.xml"
    episode_length = 150
    control_period = 0.04
    ends_on_success = False
    weights = {"light": 1.0, "closeness": 0.3, "haste": -0.05}
    speed: float = 0.6
    """Speed of the moth, rad/s: ``env.cfg.speed``."""

    def start(self, key: Key, world: World) -> World:
        return _fly(world.keep(phase=jax.random.uniform(key, (3,), maxval=2.0 * jnp.pi)))

    def update(self, key: Key, world: World, before: World) -> World:
        step = self.speed * self.control_period * jnp.array([1.0, 1.6, 0.7])
        return _fly(world.keep(phase=world.kept["phase"] + step))

    def observe(self, world: World) -> dict[str, Array]:
        return {
            **world.joint_positions(),
            **world.joint_velocities(),
            "bulb to moth [m]": _to_moth(world),
            "direction of the light [1]": world.site("bulb").rotation[:, 0],
        }

    def rewards(self, world: World, before: World) -> dict[str, Array]:
        return {
            "light": jnp.exp(-3.0 * _angle_off(world)),
            "closeness": jnp.exp(-10.0 * jnp.abs(jnp.linalg.norm(_to_moth(world)) - 0.25)),
            "haste": jnp.square(world.action - before.action).sum(),
        }

    def fails(self, world: World) -> Array:
        return world.site("bulb").position[2] < 0.06  # in the desk

    def succeeds(self, world: World) -> Array:
        return _angle_off(world) < 0.15

    def metrics(self, world: World) -> dict[str, Array]:
        return {"angle_off": _angle_off(world)}


def _to_moth(world: World) -> Array:
    """[3], m, from the bulb."""
    return world.body("moth").position - world.site("bulb").position


def _angle_off(world: World) -> Array:
    """Between the light and the way to the moth, rad."""
    light, way = world.site("bulb").rotation[:, 0], _to_moth(world)
    return jnp.arctan2(jnp.linalg.norm(jnp.cross(light, way)), jnp.dot(light, way))


def _fly(world: World) -> World:
    """Place the moth by its phases: before the lamp, within 115° to either side."""
    around, out, up = jnp.sin(world.kept["phase"])
    direction = jnp.stack([jnp.cos(2.0 * around), jnp.sin(2.0 * around), jnp.zeros(())])
    place = direction * (0.5 + 0.1 * out)
    return world.place("moth", place.at[2].set(0.32 + 0.12 * up))
