"""Clips of motions to track, as files and at a task's rate.

``.npz`` has the arrays of mjlab's and BeyondMimic's ``csv_to_npz``: T frames of J joints and L links, in the model's
order, in the world's frame:

    fps, joint_pos [T, J] (rad), body_pos_w [T, L, 3] (m), body_quat_w [T, L, 4] (w x y z)
    and, which follow from those: joint_vel, body_lin_vel_w, body_ang_vel_w

``.csv`` has rows like motions retargeted from LAFAN1: x, y, z (m), quaternion (x y z w), joints (rad) in the policy's
order; its frame rate is given. Links and velocities are computed, by MuJoCo's kinematics and from frame to frame as
``csv_to_npz`` does; the links of a file must agree.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from ejax.envs.locomotion.model import LeggedModel
from ejax.schema.messages import did_you_mean
from ejax.schema.plain_files import expanded, open_plain

_FOLDER = Path(__file__).parents[1] / "assets" / "motions"
_APART = 0.02  # m: by how much a file's links may differ from its joints' kinematics


@dataclass(frozen=True, eq=False)
class Clip:
    """T frames of L links, the base first; float32, in the world's frame."""

    qpos: NDArray[np.float32]  # [T, nq]
    qvel: NDArray[np.float32]  # [T, nv]
    link_pos: NDArray[np.float32]  # [T, L, 3]
    link_rotation: NDArray[np.float32]  # [T, L, 3, 3]
    link_vel: NDArray[np.float32]  # [T, L, 3]
    link_ang_vel: NDArray[np.float32]  # [T, L, 3]


def motion_file(motion: str) -> Path:
    """Find a clip: a path, or the name of one that comes with ejax. ValueError: there is none."""
    path = Path(expanded(motion)) if Path(motion).suffix else _FOLDER / f"{motion}.npz"
    if path.suffix not in (".npz", ".csv") or not path.is_file():
        names = sorted(each.stem for each in _FOLDER.glob("[!.]*.npz"))
        hint = f"a file .npz or .csv, or one of ejax's: {', '.join(names)}{did_you_mean(motion, names)}"
        raise ValueError(f"motion: unknown clip {motion}; use {hint}")
    return path.absolute()


@functools.lru_cache(maxsize=16)
def read_clip(path: Path, legged: LeggedModel, period: float, csv_fps: float = 30.0) -> Clip:
    """Read a clip as frames ``period`` s apart. ValueError: it is not one of this robot."""
    model = legged.model
    try:
        with open_plain(path) as file:
            data = _read_csv(file, legged, csv_fps) if path.suffix == ".csv" else dict(np.load(file))
        fps, joints = float(np.ravel(data["fps"])[0]), np.asarray(data["joint_pos"], np.float64)
        places, turns = (np.asarray(data[name], np.float64) for name in ("body_pos_w", "body_quat_w"))
        base = [places[:, 0], turns[:, 0] / np.linalg.norm(turns[:, 0], axis=-1, keepdims=True)]
        qpos = np.concatenate([*base, joints], axis=1)
    except (IndexError, KeyError, OSError, ValueError) as error:
        raise ValueError(f"motion: {path} has no fps, joint_pos, body_pos_w and body_quat_w: {error}") from error
    if qpos.shape[1] != model.nq or len(qpos) < 3 or not np.isfinite(qpos).all() or not fps > 0.0:
        found = f"{len(qpos)} frames of {joints.shape[1]} at fps {fps:g}"
        text = f"3 frames or more of this robot's {model.nq - 7} joints, finite"
        raise ValueError(f"motion: {path} must have {text}; got {found}")
    if places.shape[1] > 1:
        _check_links(path, places, follow_links(model, qpos, 1.0))
    return follow_links(
        model, qpos if abs(fps * period - 1.0) < 1e-3 else _resampled(model, qpos, fps * period), period
    )


def follow_links(model: mujoco.MjModel, qpos: NDArray[Any], period: float) -> Clip:
    """Compute velocities, and the links' motion by MuJoCo's kinematics, from ``qpos`` [T, nq], ``period`` s apart."""
    state, rows, last = mujoco.MjData(model), list[list[NDArray[Any]]](), len(qpos) - 1
    velocity, steps = np.zeros((model.nbody, 6)), np.zeros((2, model.nv))
    for i, state.qpos[:] in enumerate(qpos):
        for step, other in zip(steps, (max(i - 1, 0), min(i + 1, last)), strict=True):
            mujoco.mj_differentiatePos(model, step, period, qpos[i], qpos[other])
        # the mean of the differences to the frames before and after; at the ends there is one
        state.qvel[:] = (steps[1] - steps[0]) / (2.0 if 0 < i < last else 1.0)
        for compute in (mujoco.mj_kinematics, mujoco.mj_comPos, mujoco.mj_comVel):
            compute(model, state)
        for link in range(1, model.nbody):
            mujoco.mj_objectVelocity(model, state, mujoco.mjtObj.mjOBJ_XBODY, link, velocity[link], 0)
        links = state.xpos, state.xmat.reshape(-1, 3, 3), velocity[:, 3:], velocity[:, :3]
        rows.append([state.qvel.copy(), *(each[1:].copy() for each in links)])
    return Clip(qpos.astype(np.float32), *(np.stack(x).astype(np.float32) for x in zip(*rows, strict=True)))


def _read_csv(file: IO[bytes], legged: LeggedModel, fps: float) -> dict[str, Any]:
    table, num_joints = np.loadtxt(file, delimiter=",", ndmin=2), len(legged.joint_qpos)
    if table.shape[1] != 7 + num_joints:
        raise ValueError(f"rows must have 7 numbers of the base and {num_joints} of joints, got {table.shape[1]}")
    joints = np.zeros((len(table), num_joints))
    joints[:, np.array(legged.joint_qpos) - 7] = table[:, 7:]
    base = {"body_pos_w": table[:, None, :3], "body_quat_w": table[:, None, [6, 3, 4, 5]]}
    return {"fps": fps, "joint_pos": joints, **base}


def _check_links(path: Path, places: NDArray[Any], clip: Clip) -> None:
    same = places.shape == clip.link_pos.shape
    if not same or (apart := float(np.abs(places - clip.link_pos).max())) > _APART:
        found = f"up to {apart:.2f} m away" if same else f"{places.shape[1]}"
        text = f"its links are not where its joints put the {clip.link_pos.shape[1]} links of this robot, but {found}"
        order = "it is of another robot, or in another order, such as Isaac Lab's, which is breadth first"
        raise ValueError(f"motion: {path}: {text}: {order}; reorder it, joint_pos too, or leave out all but the base")


def _resampled(model: mujoco.MjModel, qpos: NDArray[Any], step: float) -> NDArray[Any]:
    """Frames ``step`` frames apart, on the shortest way from each to the next."""
    made, way = list[NDArray[Any]](), np.zeros(model.nv)
    for at in np.arange(0.0, len(qpos) - 1 + 1e-6, step):
        first = min(int(at), len(qpos) - 2)
        mujoco.mj_differentiatePos(model, way, 1.0, qpos[first], qpos[first + 1])
        made.append(qpos[first].copy())
        mujoco.mj_integratePos(model, made[-1], way, at - first)
    return np.array(made)
