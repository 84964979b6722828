"""Velocity commands, drawn every few seconds:

    v_x, v_y, ω_z ~ uniform;   heading rows: ω_z = clip(k·wrap(ψ* − ψ), range of ω_z);   standing rows: 0
    forward rows: v_x = max(|v_x|, 0.3), v_y = ω_z = 0 (a heading still turns them)
    single rows: two of v_x, v_y, ω_z are 0, and no heading is followed
    before: v_x, v_y, ω_z (then without a heading) are each 0 with its own probability

Source: mjlab's ``UniformVelocityCommand`` as in EmbodiChain 0.3.2. Differs: there a heading turns single rows too, and
forward rows among them go straight on. The zeros are MuJoCo Playground 0.2's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import struct
from flax.core import FrozenDict

from ejax.schema.values import is_number
from ejax.types import Array, Key

NumberRange: TypeAlias = tuple[float, float]

_SLOWEST_FORWARD = 0.3  # m/s
_ZEROS = ("zero_x", "zero_y", "zero_yaw")
_KINDS: dict[type, tuple[str, Any]] = {
    bool: ("true or false", lambda x: isinstance(x, bool)),
    int: ("a whole number", lambda x: isinstance(x, int) and not isinstance(x, bool)),
    float: ("a number", is_number),
}


def check_range(where: str, bounds: NumberRange, *, positive: bool) -> None:
    """Raise ValueError at bounds in the wrong order, or not above 0 where they have to be."""
    if bounds[0] > bounds[1] or (positive and bounds[0] <= 0.0):
        raise ValueError(f"{where} must be [lowest, highest]{', above 0' if positive else ''}, got {list(bounds)}")


def check_kind(name: str, value: Any, example: Any) -> None:
    """Raise ValueError at a value of another kind than ``example``: true or false, a whole number, a number, two of
    one of these; an example of another kind allows any. Configs check a task's fields, but not what is in sections."""
    pair, given_pair = isinstance(example, tuple), isinstance(value, list | tuple)
    one, fits = _KINDS.get(type(example[0] if pair else example), ("", None))
    numbers = value if given_pair else (value,)
    if fits and not (pair == given_pair and len(numbers) == 1 + pair and all(map(fits, numbers))):
        wanted = f"two {one.removeprefix('a ')}s, [lowest, highest]" if pair else one
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


@struct.dataclass(kw_only=True)
class Command:
    velocity: Array  # [3]: v_x, v_y (m/s), ω_z (rad/s), in the base's frame
    heading: Array  # rad
    follows_heading: Array  # bool
    stands: Array  # likewise
    steps_left: Array  # Control steps until the next, int32


@dataclass(frozen=True, kw_only=True)
class CommandRanges:
    """Ranges of commands: m/s, rad/s, s, and the parts of commands that stand, follow a heading, go straight on, are
    along or about one axis only, or have no v_x, v_y or ω_z."""

    lin_vel_x: NumberRange = (-1.0, 1.0)
    lin_vel_y: NumberRange = (-1.0, 1.0)
    ang_vel_z: NumberRange = (-0.5, 0.5)
    resampling_time: NumberRange = (3.0, 8.0)
    standing: float = 0.1
    heading: float = 0.3
    forward: float = 0.2
    single: float = 0.0
    zero_x: float = 0.0
    zero_y: float = 0.0
    zero_yaw: float = 0.0
    heading_stiffness: float = 0.5  # 1/s
    least_speed: float = 0.0  # Commands of a smaller norm stand: those that hardly differ from it teach to step at it

    def __post_init__(self) -> None:
        for name in ("lin_vel_x", "lin_vel_y", "ang_vel_z", "resampling_time"):
            check_range(f"command.{name}", getattr(self, name), positive=name == "resampling_time")
        for name in ("standing", "heading", "forward", "single", *_ZEROS):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"command.{name} must be a share, from 0 to 1, got {getattr(self, name)}")
        if not 0.0 <= self.least_speed < float("inf"):
            raise ValueError(f"command.least_speed must be a number of at least 0, got {self.least_speed}")

    def draw(self, key: Key, control_period: float, now: Mapping[str, Array] = FrozenDict()) -> Command:
        """Draw a command; ``steer`` turns it towards its heading, or stops it. ``now``: the numbers that a curriculum
        puts in the place of these."""
        given = {**vars(self), **now}
        names = ("velocity", "time", "heading", "follows", "stands", "forward")
        keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))
        low, high = jnp.array([given[name] for name in ("lin_vel_x", "lin_vel_y", "ang_vel_z")]).T
        velocity = jax.random.uniform(keys["velocity"], (3,), minval=low, maxval=high)
        # never so slow that standing would do
        straight = jnp.zeros(3).at[0].set(jnp.maximum(jnp.abs(velocity[0]), _SLOWEST_FORWARD))
        first, last = given["resampling_time"]
        seconds = jax.random.uniform(keys["time"], (), minval=first, maxval=last)
        follows = jax.random.bernoulli(keys["follows"], given["heading"])
        if any(getattr(self, name) or name in now for name in _ZEROS):
            parts = jnp.array([given[name] for name in _ZEROS])
            zero = jax.random.bernoulli(jax.random.fold_in(key, 2), parts)
            velocity, follows = jnp.where(zero, 0.0, velocity), follows & ~zero[2]
        velocity = jnp.where(jax.random.bernoulli(keys["forward"], given["forward"]), straight, velocity)
        if self.single or "single" in now:
            # turning on the spot or a step aside else hardly occurs, and is taken for standing
            key_single, key_axis = jax.random.split(jax.random.fold_in(key, 1))
            alone, axis = jax.random.bernoulli(key_single, given["single"]), jax.random.randint(key_axis, (), 0, 3)
            one = jnp.zeros(3).at[axis].set(jax.random.uniform(key_axis, (), minval=low[axis], maxval=high[axis]))
            velocity, follows = jnp.where(alone, one, velocity), follows & ~alone
        return Command(
            velocity=velocity,
            heading=jax.random.uniform(keys["heading"], (), minval=-jnp.pi, maxval=jnp.pi),
            follows_heading=follows,
            stands=jax.random.bernoulli(keys["stands"], given["standing"]),
            steps_left=jnp.ceil(seconds / control_period).astype(jnp.int32),
        )

    def after(
        self, command: Command, key: Key, control_period: float, now: Mapping[str, Array] = FrozenDict()
    ) -> Command:
        """Keep the command for one control step more, or draw a new one if its time is up."""
        # drawn every step and selected: rows change their commands at different times
        waiting = replace(command, steps_left=command.steps_left - 1)
        new = self.draw(key, control_period, now)
        return jax.tree.map(lambda new, old: jnp.where(waiting.steps_left <= 0, new, old), new, waiting)

    def steer(self, command: Command, heading: Array, now: Mapping[str, Array] = FrozenDict()) -> Command:
        """Turn the command's yaw rate towards its heading, or stop. ``heading``: the robot's, rad."""
        given = {**vars(self), **now}
        error = command.heading - heading
        # the shorter way round
        error = jnp.arctan2(jnp.sin(error), jnp.cos(error))
        rate = jnp.clip(given["heading_stiffness"] * error, *given["ang_vel_z"])
        velocity = jnp.where(command.follows_heading, command.velocity.at[2].set(rate), command.velocity)
        stands = command.stands | (jnp.linalg.norm(velocity) < given["least_speed"])
        return replace(command, velocity=jnp.where(stands, 0.0, velocity))


def hold(command: Command, velocity: Array) -> Command:
    """Replace the command by ``velocity`` [..., 3], for as long as an episode may last."""
    no = jnp.zeros_like(command.stands)
    longest = jnp.full_like(command.steps_left, jnp.iinfo(command.steps_left.dtype).max)
    velocity = jnp.broadcast_to(jnp.asarray(velocity, command.velocity.dtype), command.velocity.shape)
    return replace(command, velocity=velocity, follows_heading=no, stands=no, steps_left=longest)
