"""The gait card of a legged robot: how it goes under each command of a grid, and whether it stays up when it is pushed.

    x, y ∈ {0, ±½, ±1} m/s, yaw ∈ {0, ±½} rad/s, mjlab's ranges; each is held for 8 s, of which the first is left out

    duty             share of time on the ground, of each foot
    asymmetry        the greatest difference between the duty of a foot in an episode of c and that of the foot across
                     from it in one of the mirror image of c: for a straight command, left against right in one episode
    all_down         share of time with all feet on the ground
    slip             m/s: mean level speed of feet on the ground
    air_time         s: mean flight
    torque           N·m: root of the mean square of the drives
    action_rate      root of the mean square of an action's change, of a control step
    velocity_error   m/s: mean of ‖c_xy − v_xy‖ at each step, in the robot's frame; yaw_error, rad/s, of |c_z − ω_z|
    falls            share of episodes

A robot that fell counts until then. Pushes are the robot's own in its task, else ``Push``'s.
"""

import itertools
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.config import RunConfig
from ejax.envs.locomotion.catalog import Push, velocity_task
from ejax.envs.locomotion.mirror import other_sides
from ejax.envs.locomotion.motion import drive_torque, observe_motion
from ejax.envs.locomotion.velocity import VelocityRL, VelocityState
from ejax.envs.terms.commands import hold
from ejax.envs.wrappers.wrapper import innermost, parts_of, replace_parts
from ejax.episodes import decide
from ejax.rollout import EnvCarry, reset, with_memory
from ejax.training.environments import build_env
from ejax.types import Array, ChunkedEnv, Env, Key, Params, Policy

Card = dict[str, Any]
GRID = tuple(itertools.product((-1.0, -0.5, 0.0, 0.5, 1.0), (-1.0, -0.5, 0.0, 0.5, 1.0), (-0.5, 0.0, 0.5)))
NAMED = {
    "forward": (0.5, 0.0, 0.0),
    "fast": (1.0, 0.0, 0.0),
    "backward": (-0.5, 0.0, 0.0),
    "to the left": (0.0, 0.5, 0.0),
    "to the right": (0.0, -0.5, 0.0),
    "in a curve": (0.5, 0.0, 0.5),
    "turning left": (0.0, 0.0, 0.5),
    "turning right": (0.0, 0.0, -0.5),
    "standing": (0.0, 0.0, 0.0),
}
"""Commands of the grid that are shown one by one; m/s forward and to the left, rad/s."""
_STANDING = GRID.index(NAMED["standing"])
_EPISODES = 2  # of each command, and as many with pushes
_SECONDS, _WARM_UP, _SHOWN = 8.0, 1.0, 2.0


def measure_gait(config: RunConfig, policy: Policy, params: Params, *, seed: int) -> Card | None:
    """Play the grid's episodes by the policy's mode. None: this is no velocity task of a legged robot."""
    env: Any = build_env(config, phase="eval", num_envs=1)
    if not isinstance(innermost(env), VelocityRL) or isinstance(env, ChunkedEnv):
        return None
    legs: VelocityRL = innermost(env)
    push = legs.task.push or velocity_task(legs.robot).push or Push()
    cfg = config.env.cfg.copy({"push": asdict(push), "curriculum": None})  # which would change the pushes
    env = build_env(config.model_copy(update={"env": config.env.model_copy(update={"cfg": cfg})}), phase="eval")
    num_steps = round(_SECONDS / env.control_period)
    seen = jax.device_get(_play(policy, env, params, jax.random.key(seed), num_steps=num_steps))
    return {"pushes": asdict(push), **make_card(legs, seen)}


@partial(jax.jit, static_argnames=("policy", "env", "num_steps"))
def _play(policy: Policy, env: Env, params: Params, key: Key, *, num_steps: int) -> dict[str, Array]:
    """Play all commands, quiet and pushed: leaves [T, C, 2, E, ...]."""
    shape = (len(GRID), 2, _EPISODES)
    num_envs, legs = int(np.prod(shape)), innermost(env)
    command = jnp.broadcast_to(jnp.array(GRID)[:, None, None], (*shape, 3)).reshape(num_envs, 3)
    pushed = jnp.broadcast_to(jnp.array([[False], [True]]), shape).reshape(num_envs)
    key_reset, key_steps = jax.random.split(key)

    def held(state: VelocityState) -> VelocityState:
        never = jnp.iinfo(state.push_in.dtype).max
        push_in = jnp.where(pushed, state.push_in, never)
        return replace(state, command=hold(state.command, command), push_in=push_in)

    def one_step(carry: tuple[EnvCarry, Array], t: Array) -> tuple[tuple[EnvCarry, Array], dict[str, Array]]:
        envs, stands = carry
        (before,) = parts_of(envs.state, VelocityState)
        envs, made = decide(policy, env, params, envs, jax.random.fold_in(key_steps, t))  # nobody starts again
        (state,) = parts_of(envs.state, VelocityState)
        metrics, timestep = made.timestep.info["metrics"], made.timestep
        seen = jax.vmap(partial(_observe, legs))(state, before.action) | {
            "velocity_error": metrics["linear_velocity_error"],
            "yaw_error": metrics["yaw_rate_error"],
            "counts": stands,
            "falls": stands & timestep.terminated,
        }
        return (envs, stands & ~timestep.done), {name: x.reshape(*shape, *x.shape[1:]) for name, x in seen.items()}

    envs = with_memory(reset(env, key_reset, num_envs), policy)
    envs = replace(envs, state=replace_parts(envs.state, VelocityState, held))
    return jax.lax.scan(one_step, (envs, jnp.ones(num_envs, bool)), jnp.arange(num_steps))[1]


def _observe(legs: VelocityRL, state: VelocityState, last_action: Array) -> dict[str, Array]:
    """Measure one robot after a control step."""
    robot = legs.task.robot
    motion = observe_motion(robot, legs.legged, state.physics)
    torque = drive_torque(robot, motion, legs.control(legs.world(state), state.action))
    speed = jnp.linalg.norm(motion.foot_vel[:, :2], axis=-1)
    return {
        "touching": state.feet.touching,
        "slip": jnp.sum(speed * state.feet.touching),
        "torque": jnp.mean(torque**2),
        "action_rate": jnp.mean((state.action - last_action) ** 2),
    }


def make_card(legs: VelocityRL, seen: Mapping[str, NDArray[Any]]) -> Card:
    """Average what ``_play`` saw; leaves [T, C, 2, E, ...]."""
    period, feet = legs.control_period, [foot.body for foot in legs.task.robot.feet]
    falls = seen["falls"].any(axis=0).mean(axis=-1)  # [C, 2]
    first = round(_WARM_UP / period)
    quiet = {name: x[first:, :, 0] for name, x in seen.items()}
    counts, touching = quiet["counts"], quiet["touching"].astype(bool)
    num_counted = np.maximum(counts.sum(axis=(0, 2)), 1)

    def mean(x: NDArray[Any]) -> NDArray[Any]:
        weight = counts.reshape(*counts.shape, *[1] * (x.ndim - 3))
        num = num_counted.reshape(-1, *[1] * (x.ndim - 3))
        # a robot that falls at once has no gait
        return np.asarray(np.where(num > 1, (x * weight).sum(axis=(0, 2)) / num, np.nan))

    duty = mean(quiet["touching"])
    landings = mean(np.diff(touching.astype(int), axis=0, prepend=touching[:1]) > 0).sum(axis=-1)
    columns = {name: mean(quiet[name]) for name in ("velocity_error", "yaw_error")} | {
        "falls": falls[:, 0],
        "all_down": mean(np.asarray(touching.all(axis=-1))),
        "slip": mean(quiet["slip"]) / np.maximum(duty.sum(axis=-1), 1e-6),
        "air_time": _share((1.0 - duty).sum(axis=-1) * period, landings),
        "torque": np.sqrt(mean(quiet["torque"])),
        "action_rate": np.sqrt(mean(quiet["action_rate"])),
    }
    across, mirrored = np.arange(len(feet)), [GRID.index((x, -y, -yaw)) for x, y, yaw in GRID]
    with suppress(ValueError):  # feet without sides are their own counterparts
        across = np.array(other_sides(feet))
    # by episode: a policy that limps now on the left, now on the right is symmetric, its gaits are not
    num_steps = counts.sum(axis=0)[..., None]
    own = _share((touching & counts[..., None]).sum(axis=0), num_steps)
    apart = np.abs(own - own[mirrored][..., across]).max(axis=-1)
    columns["asymmetry"] = _share(np.nansum(apart, axis=-1), np.isfinite(apart).sum(axis=-1))
    moving = np.arange(len(GRID)) != _STANDING
    ranges = legs.task.command
    lows, highs = np.array([ranges.lin_vel_x, ranges.lin_vel_y, ranges.ang_vel_z]).T
    trained = ((np.array(GRID) >= lows) & (np.array(GRID) <= highs)).all(axis=1)
    summary = {name: _average(x[moving]) for name, x in columns.items() if name != "all_down"} | {
        "velocity_error": _average(columns["velocity_error"]),
        "yaw_error": _average(columns["yaw_error"]),
        "all_down_standing": _average(columns["all_down"][[_STANDING]]),
        "falls": _average(falls[:, 0]),
        # of all flights, since a leg that is held up has none
        "air_time": _number(_share(np.nansum((1.0 - duty[moving]) * period), np.nansum(landings[moving]))),
        "survive_pushes": 1.0 - float(falls[:, 1].mean()),
        "velocity_error_in_range": _average(columns["velocity_error"][trained]),
        "yaw_error_in_range": _average(columns["yaw_error"][trained]),
    }
    last = first + round(_SHOWN / period)
    still = seen["touching"].astype(bool) & seen["counts"][..., None]
    shown = {name: still[first:last, GRID.index(each), 0, 0] for name, each in NAMED.items()}
    return {
        "feet": feet,
        "control_period": period,
        "summary": summary,
        "episodes": {"each_command": _EPISODES, "pushed": _EPISODES * len(GRID), "seconds": _SECONDS},
        "commands": [list(each) for each in GRID],
        "in_range": int(trained.sum()),
        "duty": [[_number(share) for share in row] for row in duty],
        "columns": {name: [_number(x) for x in column] for name, column in columns.items()},
        "contacts": {name: ["".join(str(int(x)) for x in foot) for foot in steps.T] for name, steps in shown.items()},
    }


def _share(x: Any, total: Any) -> NDArray[Any]:
    return np.asarray(np.where(total > 0.0, x / np.maximum(total, 1e-9), np.nan))


def _average(x: NDArray[Any]) -> float | None:
    return _number(x[np.isfinite(x)].mean()) if np.isfinite(x).any() else None


def _number(x: Any) -> float | None:
    return round(float(x), 4) if np.isfinite(x) else None


def card_text(card: Card) -> str:
    """Format a card: a line for each of the named commands, and the averages."""
    columns = {"asymmetry": "L-R", "all_down": "all down"}
    columns |= {"velocity_error": "m/s", "yaw_error": "rad/s", "falls": "falls"}
    rows = [["gait under", *(f"duty {foot.split('_')[0]}" for foot in card["feet"]), *columns.values()]]
    for name, command in NAMED.items():
        i = card["commands"].index(list(command))
        rows.append([name, *map(_text, card["duty"][i]), *(_text(card["columns"][column][i]) for column in columns)])
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    aligned = [[row[0].ljust(first), *map(str.rjust, row[1:], widths)] for row in rows]
    lines = ["  ".join(row) for row in aligned]
    facts = {name: _text(x) for name, x in card["summary"].items()}
    lines += [
        f"{len(card['commands'])} commands (x ±1, y ±1 m/s, yaw ±0.5 rad/s): {facts['velocity_error']} m/s, "
        f"{facts['yaw_error']} rad/s off; falls {facts['falls']}",
        f"in the task's ranges ({card['in_range']} of them): {facts['velocity_error_in_range']} m/s, "
        f"{facts['yaw_error_in_range']} rad/s off",
        f"walking: asymmetry {facts['asymmetry']}, flight {facts['air_time']} s, slip {facts['slip']} m/s, torque "
        f"{facts['torque']} N·m, action rate {facts['action_rate']}",
        f"standing: all feet down {facts['all_down_standing']} of the time",
        f"pushed: {facts['survive_pushes']} of {card['episodes']['pushed']} episodes without a fall",
    ]
    return "\n".join(lines)


def _text(x: float | None) -> str:
    return "–" if x is None else f"{x:.2f}"
