"""PushCube in plain MuJoCo, as a robot's controller would see it: no jax, no ejax. Used by the deployment examples.

What the observation holds and in which order, how the action is meant and how often it is due: see the export's
``contract.json``. Where the episode starts, and what JAX earned in it: ``episode.json``. Rewards are computed as in
``ejax.envs.tasks.push_cube``, so that returns can be compared.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

MODEL = Path(__file__).parents[1] / "ejax/envs/assets/push_cube.xml"

Act = Callable[[NDArray[np.float32]], NDArray[np.float32]]
"""Observation [1, 15] -> action [1, 6]."""


class PushCube:
    """One episode of the task that a contract describes.

    Between steps the state is rounded to float32, and the drives' targets are, as in ejax.

    Args:
        start: ``physics.qpos`` [13] (6 joints, cube position, cube quaternion), ``physics.qvel`` [12], ``goal`` [3], m.
    """

    def __init__(self, contract: dict[str, Any], start: dict[str, Any]) -> None:
        if contract["env"]["id"] != "PushCubeRL":
            raise ValueError(f"this example drives PushCubeRL, the policy was trained on {contract['env']['id']}")
        self.config = contract["env"]["parameters"]
        self.model = mujoco.MjModel.from_xml_path(str(MODEL))
        self.data = mujoco.MjData(self.model)
        self.goal = np.array(start["goal"])
        self.steps_per_control = round(1.0 / (contract["control_rate_hz"] * self.model.opt.timestep))
        self.data.qpos[:], self.data.qvel[:] = start["physics.qpos"], start["physics.qvel"]

    def observe(self) -> NDArray[np.float32]:
        """[1, 15]: joint angles (rad), tool centre point, cube, goal (m)."""
        mujoco.mj_kinematics(self.model, self.data)
        tool = self.data.site("tcp").xpos
        return np.concatenate([self.data.qpos[:6], tool, self.cube, self.goal], dtype=np.float32)[None]

    def step(self, action: NDArray[np.float32]) -> tuple[float, bool]:
        """Move the joint targets by the scaled action and hold them for a control period. Returns reward, success."""
        before = self.distance
        delta = np.clip(self.config["action_scale"] * action, -0.5, 0.5)
        self.data.ctrl[:] = (self.data.qpos[:6] + delta).astype(np.float32)
        for _ in range(self.steps_per_control):
            mujoco.mj_step(self.model, self.data)
        self._round()
        success = bool(self.distance < self.config["success_threshold"])
        return self._reward(before - self.distance, delta, success), success

    @property
    def cube(self) -> NDArray[np.float64]:
        return self.data.qpos[6:9]

    @property
    def distance(self) -> float:
        """From cube to goal, horizontal, m."""
        return float(np.linalg.norm((self.cube - self.goal)[:2]))

    @property
    def fell(self) -> bool:
        return bool(self.cube[2] < -0.1)

    def _round(self) -> None:
        self.data.qpos[:] = self.data.qpos.astype(np.float32)
        self.data.qvel[:] = self.data.qvel.astype(np.float32)

    def _reward(self, progress: float, delta: NDArray[np.float32], success: bool) -> float:
        config = self.config
        tool = self.observe()[0, 6:9]
        to_goal = self.goal - self.cube
        push = self.cube - 0.015 * to_goal / (np.linalg.norm(to_goal) + 1e-6) + (0.0, 0.0, 0.015)
        place_weight = config["place_weight"] if progress >= 0.0 else config["place_penalty_weight"]
        reaching = config["reaching_weight"] * (1.0 - np.tanh(5.0 * np.linalg.norm(tool - push)))
        place = place_weight * np.tanh(10.0 * progress)
        effort = config["action_penalty_weight"] * np.linalg.norm(delta)
        return float(reaching + place - effort + config["success_weight"] * success)


def play(directory: Path, act: Act) -> None:
    """Replay an export's episode with its policy, and print the return beside that of JAX.

    The two differ by rounding: the policies answer within a few float32 steps of each other, and physics is the same
    C engine. An error e of the action moves a joint by action_scale·e rad for the rest of the episode.
    """
    contract, episode = (json.loads((directory / f"{name}.json").read_text()) for name in ("contract", "episode"))
    task = PushCube(contract, episode["start"])
    limit = contract["env"]["max_episode_steps"]
    episode_return, length, success = 0.0, 0, False
    while length < limit and not success and not task.fell:
        reward, success = task.step(act(task.observe())[0])
        episode_return, length = episode_return + reward, length + 1
    print(f"return {episode_return:.5f}  length {length}  success {success}  final distance {task.distance:.5f} m")
    there = episode["result"]
    distance = f"final distance {there['metrics/distance_to_goal']:.5f} m"
    print(f"by JAX {there['return']:.5f}  length {there['length']:.0f}  success {bool(there['success'])}  {distance}")
