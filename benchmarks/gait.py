"""Measure how a legged robot of VelocityRL goes under fixed commands.

    python benchmarks/gait.py outputs/quadruped_velocity --episodes 16

Columns: duty, the share of time that each foot is on the ground; the greatest difference of duty between a left and a
right foot; the mean errors of velocity (m/s) and yaw rate (rad/s). The first second of each episode is left out.
"""

import argparse
from pathlib import Path
from typing import Any

COMMANDS = {
    "forward": (0.8, 0.0, 0.0),
    "turning": (0.6, 0.0, 0.5),
    "on the spot": (0.0, 0.0, 0.5),
    "standing": (0.0, 0.0, 0.0),
}
"""m/s forward and to the left, rad/s."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--episodes", type=int, default=16, metavar="N")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each episode")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(
        "| command | duty | left − right | velocity off, m/s | yaw rate off, rad/s |\n|---|---|---|---|---|", flush=True
    )
    for name, command in COMMANDS.items():
        duty, apart, linear, yaw = measure(args.run, command, args.episodes, args.seconds, args.seed)
        feet = " ".join(f"{foot} {share:.2f}" for foot, share in duty.items())
        print(f"| {name} | {feet} | {apart:.2f} | {linear:.2f} | {yaw:.2f} |", flush=True)


def measure(
    run: Path, command: tuple[float, float, float], num_envs: int, seconds: float, seed: int
) -> tuple[dict[str, float], float, float, float]:
    import jax
    import numpy as np

    from ejax.play.saved_policy import chosen_checkpoint, elsewhere, restore_policy
    from ejax.policies.calls import apply_policy
    from ejax.rollout import reset, step
    from ejax.store.run_dir import open_policy_run
    from ejax.training.environments import build_env

    directory, config = open_policy_run(run, None)
    forward, left, turn = command
    ranges = f"lin_vel_x: [{forward}, {forward}], lin_vel_y: [{left}, {left}], ang_vel_z: [{turn}, {turn}]"
    fixed = f"env.cfg.command={{{ranges}, standing: 0, heading: 0, forward: 0}}"
    env: Any = build_env(elsewhere(config, [fixed]), phase="eval", num_envs=num_envs)
    policy, params = restore_policy(config, env, chosen_checkpoint(directory, None, "gait"))
    warm_up, num_steps = int(1.0 / env.control_period), int(seconds / env.control_period)

    def one(envs: Any, key: Any) -> Any:
        action = apply_policy(policy, params, envs.obs, ())[0].mode()
        envs, timestep = step(env, envs, action, key)
        metrics = timestep.info["metrics"]
        return envs, (envs.state.feet.touching, metrics["linear_velocity_error"], metrics["yaw_rate_error"])

    @jax.jit
    def play(key: Any) -> Any:
        envs = reset(env, key, num_envs)
        return jax.lax.scan(one, envs, jax.random.split(key, num_steps))[1]

    touching, linear, yaw = (np.asarray(x)[warm_up:] for x in play(jax.random.key(seed)))
    feet = [foot.body for foot in env.task.robot.feet]
    duty = touching.mean(axis=(0, 1))
    apart = float(np.abs(duty.reshape(-1, 2)[:, 0] - duty.reshape(-1, 2)[:, 1]).max())  # feet come right, left
    return dict(zip(feet, duty.tolist(), strict=True)), apart, float(linear.mean()), float(yaw.mean())


if __name__ == "__main__":
    main()
