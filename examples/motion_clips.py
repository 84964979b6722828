"""Make clips for TrackingRL: of what a policy of VelocityRL does, or from a script, by inverse kinematics.

    python examples/motion_clips.py trot.npz --run outputs/quadruped_velocity --command 0.6,0,0 --seconds 3
    python examples/motion_clips.py bow.npz --script bow
    python examples/motion_clips.py squat.npz --script squat --robot g1

A script moves the base; the feet stay where they are.
"""

import argparse
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from numpy.typing import NDArray

from ejax.envs.locomotion.catalog import robot_names
from ejax.envs.locomotion.clips import Clip, follow_links
from ejax.envs.locomotion.velocity import VelocityRL, VelocityState
from ejax.envs.terms.commands import hold
from ejax.envs.wrappers.wrapper import innermost, parts_of, replace_parts
from ejax.episodes import episodes
from ejax.play.saved_policy import opened_policy, restore_policy
from ejax.training.environments import build_env

FPS = 50
_WARM_UP = 1.0  # s that a policy walks before its clip begins
_DAMPING, _ITERATIONS = 1e-4, 30  # of the inverse kinematics


def bump(t: NDArray[Any], start: float, end: float) -> NDArray[Any]:
    """Go from 0 to 1 and back between these times, s, without a jump of the acceleration in between."""
    return np.sin(np.pi * np.clip((t - start) / (end - start), 0.0, 1.0)) ** 2


def bow(t: NDArray[Any]) -> NDArray[Any]:
    """Bow deeply, come up, sway to both sides, and sit back: 4 s."""
    down, left, right, back = bump(t, 0.2, 1.6), bump(t, 1.6, 2.4), bump(t, 2.2, 3.0), bump(t, 2.9, 3.9)
    x, y, z = -0.03 * down - 0.03 * back, 0.05 * (left - right), -0.05 * down - 0.04 * back
    return np.stack([x, y, z, 0.2 * (right - left), 0.38 * down - 0.3 * back, 0.15 * (left - right)], axis=1)


def squat(t: NDArray[Any]) -> NDArray[Any]:
    """Go down and up twice: 4 s."""
    zero, down = np.zeros_like(t), bump(t, 0.2, 2.0) + 1.5 * bump(t, 2.0, 3.8)
    return np.stack([zero, zero, -0.07 * down, zero, zero, zero], axis=1)


SCRIPTS: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {"bow": bow, "squat": squat}
"""Changes of the base [T, 6] at times [T], s: x, y, z in m, of a robot 0.285 m tall; roll, pitch, yaw in rad."""


def from_script(name: str, robot: str, seconds: float) -> tuple[Any, Clip]:
    """Return the model and the clip of a script."""
    env: Any = VelocityRL(robot=robot, physics="mujoco")
    legs, model = env.task.robot, env.legged.model
    data, times = mujoco.MjData(model), np.arange(round(seconds * FPS)) / FPS
    moves = SCRIPTS[name](times)
    moves[:, :3] *= legs.height / 0.285
    data.qpos[:7] = [0.0, 0.0, legs.height, 1.0, 0.0, 0.0, 0.0]
    data.qpos[list(env.legged.joint_qpos)] = legs.home
    feet = [(model.body(foot.body).id, np.array(foot.offset)) for foot in legs.feet]
    # legs with fewer than six joints hold a point of the foot, others its orientation too
    turns_too = len(legs.joints) >= 6 * len(feet)
    mujoco.mj_kinematics(model, data)
    goals = [(data.xpos[foot] + data.xmat[foot].reshape(3, 3) @ point, data.xquat[foot].copy()) for foot, point in feet]
    rows = []
    for move in moves:
        data.qpos[:3] = np.array([0.0, 0.0, legs.height]) + move[:3]
        mujoco.mju_euler2Quat(data.qpos[3:7], move[3:], "xyz")
        for _ in range(_ITERATIONS):
            mujoco.mj_kinematics(model, data)
            mujoco.mj_comPos(model, data)
            gaps, slopes = list[NDArray[Any]](), list[NDArray[Any]]()
            for (foot, point), (place, turn) in zip(feet, goals, strict=True):
                at, off = data.xpos[foot] + data.xmat[foot].reshape(3, 3) @ point, np.zeros(3)
                slope = np.zeros((2, 3, model.nv))
                mujoco.mj_jac(model, data, slope[0], slope[1], at, foot)
                mujoco.mju_subQuat(off, turn, data.xquat[foot])
                gaps += [place - at] + [data.xmat[foot].reshape(3, 3) @ off] * turns_too
                slopes += list(slope[: 1 + turns_too])
            gap, slope_of_joints = np.concatenate(gaps), np.concatenate(slopes)[:, 6:]
            square = slope_of_joints.T @ slope_of_joints + _DAMPING * np.eye(model.nv - 6)
            data.qpos[7:] += np.linalg.solve(square, slope_of_joints.T @ gap)
        if np.abs(gap).max() > 2e-3:
            raise ValueError(f"{name}: the feet of {robot} do not reach the ground: {np.abs(gap).max():.3f} m off")
        rows.append(data.qpos.copy())
    return model, follow_links(model, np.array(rows), 1.0 / FPS)


def from_policy(run: Path, command: tuple[float, float, float], seconds: float, seed: int) -> tuple[Any, Clip]:
    """Return the model and the clip of what a policy does under a command, without pushes."""
    with opened_policy(run, ["env.cfg.push=null", "env.cfg.curriculum=null"]) as (_, config, checkpoint):
        env: Any = build_env(config, phase="eval", num_envs=1)
        policy, params = restore_policy(config, env, checkpoint)

        def held(state: Any) -> Any:
            return replace_parts(
                state, VelocityState, lambda part: part.replace(command=hold(part.command, jnp.array(command)))
            )

        first, last = round(_WARM_UP * FPS), round((_WARM_UP + seconds) * FPS)
        played = islice(episodes(policy, env, params, seed, patch=held), first, last)
        states = [parts_of(jax.device_get(made.states), VelocityState)[0].physics for made in played]
    model = innermost(env).legged.model
    qpos = np.array([state.qpos[0, 0] for state in states], np.float64)
    qpos[:, :2] -= qpos[0, :2]
    return model, follow_links(model, qpos, 1.0 / FPS)


def write_clip(path: Path, clip: Clip) -> None:
    """Write a clip in the layout of ``ejax.envs.locomotion.clips``, rounded, so that it compresses."""
    turns = np.zeros((*clip.link_pos.shape[:2], 4))
    for turn, matrix in zip(turns.reshape(-1, 4), clip.link_rotation.reshape(-1, 9), strict=True):
        mujoco.mju_mat2Quat(turn, matrix.astype(np.float64))
    arrays = {
        "joint_pos": clip.qpos[:, 7:],
        "joint_vel": clip.qvel[:, 6:],
        "body_pos_w": clip.link_pos,
        "body_quat_w": turns,
        "body_lin_vel_w": clip.link_vel,
        "body_ang_vel_w": clip.link_ang_vel,
    }
    rounded: dict[str, Any] = {name: (np.round(x * 2**14) / 2**14).astype(np.float32) for name, x in arrays.items()}
    np.savez_compressed(path, fps=np.array([FPS]), **rounded)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--script", choices=SCRIPTS)
    parser.add_argument("--robot", choices=robot_names(), default="quadruped")
    parser.add_argument("--run", type=Path, help="of VelocityRL")
    parser.add_argument("--command", type=lambda text: tuple(map(float, text.split(","))), default=(0.6, 0.0, 0.0))
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if (args.script is None) == (args.run is None):
        parser.error("pass --script or --run")
    if args.script:
        _, clip = from_script(args.script, args.robot, args.seconds)
    else:
        _, clip = from_policy(args.run, args.command, args.seconds, args.seed)
    write_clip(args.file, clip)
    print(f"{args.file}: {len(clip.qpos)} frames, {args.file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
