"""Contacts of feet over a control step, and time in the air, from contact sensors read in every physics step.

    found  = in any physics step        peak = the strongest force of any
    landed = touches, and did not in the physics step before
    air'   = 0 where it touches, else air + Δt

Sensors lag one physics step. Source: EmbodiChain 0.3.2's ``ContactHistory``, which samples after each physics step.
"""

import jax.numpy as jnp
from flax import struct

from ejax.envs.locomotion.model import LeggedModel
from ejax.envs.locomotion.robots import LeggedRobot
from ejax.envs.terms.legged_world import Contacts
from ejax.types import Array


@struct.dataclass(kw_only=True)
class FootTimers:
    touching: Array  # [F] bool, in the last physics step that was sensed
    air_time: Array  # [F], s, of a flight that continues; 0 on the ground


def start_timers(num_feet: int) -> FootTimers:
    return FootTimers(touching=jnp.zeros(num_feet, bool), air_time=jnp.zeros(num_feet))


def no_contacts(robot: LeggedRobot) -> Contacts:
    """Make the contacts of a robot in the air, which an episode starts with."""
    num_feet = len(robot.feet)
    none, zero = jnp.zeros(num_feet, bool), jnp.zeros(())
    lengths = {"force": (num_feet, 3), "flight": num_feet, "unwanted_force": len(robot.unwanted)}
    zeros = {name: jnp.zeros(shape) for name, shape in lengths.items()}
    return Contacts(found=none, landed=none, guarded_force=zero, self_contacts=zero, **zeros)


def follow_contacts(
    timers: FootTimers, legged: LeggedModel, readings: Array, timestep: float, self_threshold: float = 10.0
) -> tuple[FootTimers, Contacts]:
    """Compute the contacts of a control step, and the timers after it, from ``readings`` [num_substeps, nsensordata].
    ``timestep``: s, of a physics step; ``self_threshold``: N."""
    force = jnp.stack([_force(readings, places) for places in legged.foot_sensors], axis=1)
    touching = jnp.stack([(readings[:, jnp.array(places)] > 0.0).any(axis=1) for places in legged.foot_sensors], axis=1)
    before, air_time, landed = timers.touching, timers.air_time, jnp.zeros_like(timers.touching)
    flight = jnp.zeros_like(air_time)
    # step by step: a foot may land and leave again within one control step
    for now in touching:
        flight = jnp.where(now & ~before, air_time + timestep, flight)
        landed |= now & ~before
        air_time = jnp.where(now, 0.0, air_time + timestep)
        before = now
    # by the whole vector: components of different steps would be no force that acted
    strongest = jnp.linalg.norm(force, axis=-1).argmax(axis=0)
    contacts = Contacts(
        found=touching.any(axis=0),
        landed=landed,
        force=jnp.take_along_axis(force, strongest[None, :, None], axis=0)[0],
        guarded_force=_strength(readings, legged.guarded_sensors).max(),
        self_contacts=(_strength(readings, legged.self_sensors).max(axis=1) > self_threshold).sum().astype(jnp.float32),
        flight=flight,
        unwanted_force=jnp.array([_strength(readings, places).max() for places in legged.unwanted_sensors]),
    )
    return FootTimers(touching=before, air_time=air_time), contacts


def _force(readings: Array, places: tuple[int, ...]) -> Array:
    """[num_substeps, 3]: f₀·n + f₁·t + f₂·(n × t), added up over the places; 0 in those without a contact."""
    total = jnp.zeros((len(readings), 3), readings.dtype)
    for place in places:
        # a sensor reports in the contact's frame; frames differ from place to place
        force, normal, tangent = (readings[:, place + i : place + i + 3] for i in (1, 4, 7))
        total += force[:, :1] * normal + force[:, 1:2] * tangent + force[:, 2:] * jnp.cross(normal, tangent)
    return total


def _strength(readings: Array, places: tuple[int, ...]) -> Array:
    """[num_substeps, places], N; one column of zeros without places."""
    if not places:
        return jnp.zeros((len(readings), 1), readings.dtype)
    return jnp.stack([jnp.linalg.norm(readings[:, place + 1 : place + 4], axis=-1) for place in places], axis=1)
