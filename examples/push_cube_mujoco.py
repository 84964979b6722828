"""PushCube in plain MuJoCo, as a robot's controller would see it: no jax, no ejax. Used by ``deployed_task``.

What the observation holds and in which order, how the action is meant and how often it is due: see the export's
``contract.json``. Where the episode starts, and what JAX earned in it: ``episode.json``. Rewards are computed as in
``ejax.envs.tasks.push_cube``, so that returns can be compared.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

MODEL = Path(__file__).parents[1] / "ejax/envs/assets/push_cube.xml"


class PushCube:
    """One episode of the task that a contract describes.

    Between steps the state is rounded to float32, and the drives' targets are, as in ejax.

    Args:
        start: ``physics.qpos`` [13] (6 joints, cube position, cube quaternion), ``physics.qvel`` [12], ``goal`` [3], m.
    """

    def __init__(self, contract: Mapping[str, Any], start: Mapping[str, Any]) -> None:
        self.config = contract["env"]["parameters"]
        self.model = mujoco.MjModel.from_xml_path(str(MODEL))
        self.data = mujoco.MjData(self.model)
        self.goal = np.array(start["goal"])
        self.steps_per_control = round(1.0 / (contract["control_rate_hz"] * self.model.opt.timestep))
        self.data.qpos[:], self.data.qvel[:] = start["physics.qpos"], start["physics.qvel"]

    def observe(self) -> dict[str, NDArray[np.float32]]:
        """``obs`` [1, 15]: joint angles (rad), tool centre point, cube, goal (m)."""
        numbers = [self.data.qpos[:6], self.tool, self.cube, self.goal]
        return {"obs": np.concatenate(numbers, dtype=np.float32)[None]}

    def step(self, action: NDArray[np.float32]) -> tuple[float, bool]:
        """Move the joint targets by the scaled action [1, 6] and hold them for a control period.

        Returns:
            The reward, and whether the episode has ended.
        """
        before = self.distance
        delta = np.clip(self.config["action_scale"] * action[0], -0.5, 0.5)
        self.data.ctrl[:] = (self.data.qpos[:6] + delta).astype(np.float32)
        for _ in range(self.steps_per_control):
            mujoco.mj_step(self.model, self.data)
        self._round()
        fell = bool(self.cube[2] < -0.1)
        return self._reward(before - self.distance, delta, self.success), self.success or fell

    def result(self) -> dict[str, float]:
        return {"success": self.success, "metrics/distance_to_goal": self.distance}

    @property
    def tool(self) -> NDArray[np.float32]:
        """The tool centre point, m."""
        mujoco.mj_kinematics(self.model, self.data)
        return self.data.site("tcp").xpos.astype(np.float32)

    @property
    def success(self) -> bool:
        return bool(self.distance < self.config["success_threshold"])

    @property
    def cube(self) -> NDArray[np.float64]:
        return self.data.qpos[6:9]

    @property
    def distance(self) -> float:
        """From cube to goal, horizontal, m."""
        return float(np.linalg.norm((self.cube - self.goal)[:2]))

    def _round(self) -> None:
        self.data.qpos[:] = self.data.qpos.astype(np.float32)
        self.data.qvel[:] = self.data.qvel.astype(np.float32)

    def _reward(self, progress: float, delta: NDArray[np.float32], success: bool) -> float:
        config = self.config
        to_goal = self.goal - self.cube
        push = self.cube - 0.015 * to_goal / (np.linalg.norm(to_goal) + 1e-6) + (0.0, 0.0, 0.015)
        place_weight = config["place_weight"] if progress >= 0.0 else config["place_penalty_weight"]
        reaching = config["reaching_weight"] * (1.0 - np.tanh(5.0 * np.linalg.norm(self.tool - push)))
        place = place_weight * np.tanh(10.0 * progress)
        effort = config["action_penalty_weight"] * np.linalg.norm(delta)
        return float(reaching + place - effort + config["success_weight"] * success)
