"""mjlab's own Go1 task, in MuJoCo Warp, for ejax's ``torch:`` (docs/torch_envs.md#mjlab).

ejax train --config examples/mjlab_go1.yaml --trust examples/mjlab_go1.py:make
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces


class MjlabVector:
    """A ``ManagerBasedRlEnv`` of mjlab that shows how episodes end, with Gymnasium's spaces.

    mjlab's own automatic reset passes over the last observation of an episode, so it is off: rows that ended are reset
    here, in the same step, after that observation is taken. A reset of some rows draws the sensors' noise of all rows
    again; the others keep what they had seen.
    """

    def __init__(self, env: Any) -> None:
        if env.cfg.auto_reset:
            raise ValueError("cfg.auto_reset is True; make the environment with auto_reset=False")
        self.env, self.num_envs, self.max_episode_steps = env, env.num_envs, env.max_episode_length
        self.single_observation_space = _space(env.single_observation_space)
        self.single_action_space = _space(env.single_action_space)
        self._obs: Any = None

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        rows = (options or {}).get("env_ids")
        obs, _ = self.env.reset(seed=seed, env_ids=rows)
        self._obs = obs if rows is None else _replace_rows(rows, obs, self._obs)
        return self._obs, {}

    def step(self, action: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        self._obs, reward, terminated, truncated, _ = self.env.step(action)
        terms = self.env.reward_manager
        # mjlab keeps its terms per second, unless their sum is not multiplied by the step's duration
        duration = self.env.step_dt if self.env.cfg.scale_rewards_by_dt else 1.0
        info = {"rewards": dict(zip(terms.active_terms, (terms._step_reward * duration).unbind(1), strict=True))}
        answer = reward.clone(), terminated.clone(), truncated.clone()
        rows = (terminated | truncated).nonzero()[:, 0]
        if len(rows):
            info["final_obs"] = self._obs
            self.reset(options={"env_ids": rows})
        return self._obs, *answer, info

    def close(self) -> None:
        self.env.close()


def make(
    num_envs: int,
    device: str,
    task: str = "Mjlab-Velocity-Flat-Unitree-Go1",
    seed: int = 0,
    simulation: Mapping[str, Any] | None = None,
) -> MjlabVector:
    """Make a registered task of mjlab.

    Args:
        device: cpu, or cuda:0.
        seed: of what mjlab draws once for each row, such as friction.
        simulation: fields of mjlab's ``MujocoCfg`` in place of the task's, such as ``{"solver": "cg"}``.
    """
    import mjlab.tasks  # noqa: F401  # registers them
    import warp
    from mjlab.envs import ManagerBasedRlEnv
    from mjlab.tasks.registry import list_tasks, load_env_cfg

    if task not in list_tasks():
        raise ValueError(f"mjlab has no task '{task}'; it has {', '.join(list_tasks())}")
    warp.config.log_level = warp.LOG_WARNING  # else a line for each kernel
    cfg = load_env_cfg(task)
    cfg.scene.num_envs, cfg.seed, cfg.auto_reset = num_envs, seed, False
    cfg.sim.mujoco = replace(cfg.sim.mujoco, **(simulation or {}))
    return MjlabVector(ManagerBasedRlEnv(cfg, device=device))


def _space(space: Any) -> spaces.Space[Any]:
    """Gymnasium's form of a space of mjlab."""
    if hasattr(space, "spaces"):
        return spaces.Dict({name: _space(part) for name, part in space.spaces.items()})
    low, high = (np.broadcast_to(np.float32(bound), space.shape) for bound in (space.low, space.high))
    return spaces.Box(low, high, space.shape, np.float32)


def _replace_rows(rows: torch.Tensor, new: Any, old: Any) -> Any:
    if isinstance(new, Mapping):
        return {name: _replace_rows(rows, new[name], old[name]) for name in new}
    return old.index_copy(0, rows, new[rows])
