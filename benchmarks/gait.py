"""Measure how a legged robot of VelocityRL goes under fixed commands.

    python benchmarks/gait.py outputs/quadruped_velocity --episodes 16
    python benchmarks/gait.py outputs/quadruped_velocity --grid     # mjlab's range of commands instead

Columns: duty, the share of time that each foot is on the ground; the greatest difference of duty between a left and a
right foot; the share of time with all feet down; the mean errors of velocity (m/s) and yaw rate (rad/s); and the
share of episodes with a fall. The first second of each episode is left out.
"""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COMMANDS = {
    "forward": (0.8, 0.0, 0.0),
    "backward": (-0.8, 0.0, 0.0),
    "to the left": (0.0, 0.4, 0.0),
    "to the right": (0.0, -0.4, 0.0),
    "turning": (0.6, 0.0, 0.5),
    "on the spot": (0.0, 0.0, 0.5),
    "standing": (0.0, 0.0, 0.0),
}
"""m/s forward and to the left, rad/s."""
GRID = tuple(itertools.product((-1.0, -0.5, 0.0, 0.5, 1.0), (-1.0, -0.5, 0.0, 0.5, 1.0), (-0.5, 0.0, 0.5)))
_HEAD = """\
| command | duty | left − right | all feet down | velocity off, m/s | yaw rate off, rad/s | falls |
|---|---|---|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--checkpoint", default="latest", metavar="best|latest|PATH")
    parser.add_argument("--episodes", type=int, default=16, metavar="N", help="of each command")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each episode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grid", action="store_true", help="all commands of x ±1, y ±1, yaw ±0.5")
    args = parser.parse_args()
    commands = {str(each): each for each in GRID} if args.grid else COMMANDS
    feet, found = measure(args, list(commands.values()))
    print(_HEAD, flush=True)
    for name, row in zip(commands, found, strict=True):
        duty = " ".join(f"{foot} {share:.2f}" for foot, share in zip(feet, row["duty"], strict=True))
        numbers = " | ".join(f"{row[key]:.2f}" for key in ("apart", "down", "linear", "yaw", "falls"))
        print(f"| {name} | {duty} | {numbers} |", flush=True)
    keys = ("linear", "yaw", "falls")
    print("mean of all:", ", ".join(f"{key} {sum(row[key] for row in found) / len(found):.3f}" for key in keys))


def measure(args: Any, commands: Sequence[tuple[float, float, float]]) -> tuple[list[str], list[dict[str, Any]]]:
    from dataclasses import replace

    import jax
    import jax.numpy as jnp
    import numpy as np

    from ejax.envs.terms.commands import hold
    from ejax.play.saved_policy import chosen_checkpoint, restore_policy
    from ejax.policies.calls import apply_policy
    from ejax.rollout import reset, step
    from ejax.store.run_dir import open_policy_run
    from ejax.training.environments import build_env

    directory, config = open_policy_run(args.run, None)
    num_envs = len(commands) * args.episodes
    env: Any = build_env(config, phase="eval", num_envs=num_envs)
    policy, params = restore_policy(config, env, chosen_checkpoint(directory, args.checkpoint, "gait"))
    warm_up, num_steps = int(1.0 / env.control_period), int(args.seconds / env.control_period)
    velocity = jnp.repeat(jnp.array(commands), args.episodes, axis=0)

    def one(envs: Any, key: Any) -> Any:
        action = apply_policy(policy, params, envs.obs, ())[0].mode()
        envs, timestep = step(env, envs, action, key)
        # a robot that fell starts again with a newly drawn command
        envs = replace(envs, state=replace(envs.state, command=hold(envs.state.command, velocity)))
        metrics = timestep.info["metrics"]
        seen = envs.state.feet.touching, metrics["linear_velocity_error"], metrics["yaw_rate_error"]
        return envs, (*seen, timestep.terminated)

    @jax.jit
    def play(key: Any) -> Any:
        envs = reset(env, key, num_envs)
        envs = replace(envs, state=replace(envs.state, command=hold(envs.state.command, velocity)))
        return jax.lax.scan(one, envs, jax.random.split(key, num_steps))[1]

    *seen, fell = (np.asarray(x)[warm_up:] for x in play(jax.random.key(args.seed)))
    touching, linear, yaw = (x.reshape(len(x), len(commands), args.episodes, *x.shape[2:]) for x in seen)
    falls = fell.reshape(len(fell), len(commands), args.episodes).any(axis=0).mean(axis=1)
    rows = []
    for i in range(len(commands)):
        duty = touching[:, i].mean(axis=(0, 1))
        pairs = duty.reshape(-1, 2)  # feet come right, left
        rows.append(
            {
                "duty": duty.tolist(),
                "apart": float(np.abs(pairs[:, 0] - pairs[:, 1]).max()),
                "down": float(touching[:, i].all(axis=-1).mean()),
                "linear": float(linear[:, i].mean()),
                "yaw": float(yaw[:, i].mean()),
                "falls": float(falls[i]),
            }
        )
    return [foot.body for foot in env.task.robot.feet], rows


if __name__ == "__main__":
    main()
