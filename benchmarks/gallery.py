"""Moving pictures of trained policies: of docs/gallery.md, and of the README.

MUJOCO_GL=egl python benchmarks/gallery.py CartPoleRL=outputs/cart_pole_ppo VelocityRL=outputs/quadruped_velocity
MUJOCO_GL=egl python benchmarks/gallery.py README=outputs/push_cube_ppo,outputs/quadruped_velocity
"""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

import ejax
from ejax.envs.description import describe
from ejax.types import CameraView

TO = Path(__file__).parents[1] / "docs" / "gallery"
SIZE = (240, 320)
"""Height and width, pixels."""
README_SIZE = (360, 480)
FROM_AFAR = {"CartPoleRL": CameraView(eye=(4.3, -1.3, 1.7), target=(0.0, -1.3, 0.8), fovy=30.0)}
"""Cameras that are not the task's own: nothing keeps a cart in the middle of its rail."""
FPS, SECONDS = 20, 6
Pictures = NDArray[np.uint8]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", nargs="+", metavar="TASK=RUN|README=RUN,RUN")
    args = parser.parse_args()
    TO.mkdir(exist_ok=True)
    for what in args.what:
        task, _, run = what.partition("=")
        if task == "README":
            films = [played(each, size=README_SIZE) for each in run.split(",")]
            length = min(map(len, films))
            save(TO.parent / "ejax.webp", np.concatenate([film[:length] for film in films], axis=2))
        else:
            draw = {"PointMassRL": point_mass, "PlanarReachRL": planar_reach}.get(task)
            save(TO / f"{task.removesuffix('RL').lower()}.webp", played(run, draw, FROM_AFAR.get(task)))


def played(run: str, draw: Any = None, camera: CameraView | None = None, size: tuple[int, int] = SIZE) -> Pictures:
    """[L, H, W, 3]: six seconds of a trained policy's episodes, one after the other."""
    actor = ejax.load(run)
    env: Any = actor.env
    reset, step = jax.jit(env.reset), jax.jit(env.step)
    every = max(1, round(1.0 / FPS / (describe(env).control_period or 1.0)))
    pictures: list[Pictures] = []
    for seed in itertools.count(1):
        key = jax.random.key(seed)
        state, obs = reset(key)
        path: list[Any] = []
        for i in itertools.count():
            path.append(state)
            if i % every == 0:
                pictures.append(env.render(state, size[1], size[0], camera) if draw is None else draw(env, path))
            if len(pictures) >= SECONDS * FPS:
                return np.stack(pictures)
            state, timestep = step(state, actor.act(obs), jax.random.fold_in(key, i))
            obs = timestep.obs
            if bool(timestep.terminated | timestep.truncated):
                pictures += [pictures[-1]] * (FPS // 4)
                break
    raise AssertionError("unreachable")


def point_mass(env: Any, path: Sequence[Any]) -> Pictures:
    """Draw from above: the obstacles, the goal, and the way so far."""
    canvas = Canvas(reach=1.1 * env.workspace_half)
    state = path[-1]
    for centre, radius in zip(np.asarray(state.obstacle_position), np.asarray(state.obstacle_radius), strict=True):
        canvas.disc(centre, float(radius), (160, 168, 176))
    canvas.disc(np.asarray(state.goal_position), 0.04, (43, 138, 62))
    canvas.line([np.asarray(each.position) for each in path], (150, 190, 235), 2)
    canvas.disc(np.asarray(state.position), 0.03, (11, 107, 203))
    return canvas.pixels()


def planar_reach(env: Any, path: Sequence[Any]) -> Pictures:
    """Draw the arm, which hangs down at zero, and the target."""
    canvas, state = Canvas(reach=1.15 * sum(env.link_length)), path[-1]
    first, second = np.cumsum(np.asarray(state.joint_position))
    elbow = env.link_length[0] * np.array([np.sin(first), -np.cos(first)])
    hand = elbow + env.link_length[1] * np.array([np.sin(second), -np.cos(second)])
    canvas.disc(np.asarray(state.target_position), 0.08, (43, 138, 62))
    canvas.line([np.zeros(2), elbow, hand], (11, 107, 203), 5)
    for joint in (np.zeros(2), elbow, hand):
        canvas.disc(joint, 0.06, (28, 32, 36))
    return canvas.pixels()


class Canvas:
    """A light picture of the square ±reach, in m, which ends visibly on a white page."""

    def __init__(self, reach: float) -> None:
        self.reach, self.image = reach, Image.new("RGB", (SIZE[0], SIZE[0]), "#eef1f4")
        self.draw = ImageDraw.Draw(self.image)

    def at(self, place: NDArray[Any]) -> tuple[float, float]:
        half = SIZE[0] / 2
        return half * (1 + float(place[0]) / self.reach), half * (1 - float(place[1]) / self.reach)

    def disc(self, centre: NDArray[Any], radius: float, colour: tuple[int, int, int]) -> None:
        x, y = self.at(centre)
        r = radius / self.reach * SIZE[0] / 2
        self.draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)

    def line(self, places: Sequence[NDArray[Any]], colour: tuple[int, int, int], width: int) -> None:
        self.draw.line([self.at(place) for place in places], fill=colour, width=width, joint="curve")

    def pixels(self) -> Pictures:
        return np.asarray(self.image)


def save(path: Path, pictures: Pictures) -> None:
    """Write a moving picture."""
    first, *others = map(Image.fromarray, pictures)
    first.save(path, save_all=True, append_images=others, duration=1000 // FPS, loop=0, quality=60, method=6)
    print(f"{path.name}: {len(pictures)} frames, {path.stat().st_size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
