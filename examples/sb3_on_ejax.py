"""Stable-Baselines3's PPO on a task of ejax, through Gymnasium: all environments step in one jitted call.

pip install stable-baselines3
python examples/sb3_on_ejax.py [updates]
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecEnv, VecMonitor

import ejax.envs.gymnasium  # noqa: F401  # registers "ejax/PlanarReach-v0" and the others

TASK = {"id": "ejax/PlanarReach-v0"}


class SB3Vector(VecEnv):
    """A ``gymnasium.vector.VectorEnv`` that resets in the same step, in Stable-Baselines3's form."""

    def __init__(self, env: gymnasium.vector.VectorEnv) -> None:
        self.env = env
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)

    def reset(self) -> np.ndarray:
        obs, _ = self.env.reset(seed=self._seeds if self._seeds[0] is not None else None)
        self._reset_seeds()
        return obs

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        obs, reward, terminated, truncated, info = self.env.step(self.actions)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for row in np.flatnonzero(terminated | truncated):
            infos[row] = {
                "terminal_observation": info["final_obs"][row],
                "TimeLimit.truncated": bool(truncated[row] and not terminated[row]),
                "is_success": bool(info["final_info"]["success"][row]),
            }
        return obs, reward, terminated | truncated, infos

    def close(self) -> None:
        self.env.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self.env, attr_name, None)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        setattr(self.env, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise NotImplementedError(f"rows of one jitted call have no methods of their own, such as {method_name}")

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


def success_rate(model: PPO, seeds: Sequence[int] = range(100)) -> float:
    """Play an episode from each seed in one environment, with the distribution's mode."""
    env = gymnasium.make(**TASK)
    successes = []
    for seed in seeds:
        obs, _ = env.reset(seed=seed)
        ended = False
        while not ended:
            obs, _, terminated, truncated, info = env.step(model.predict(obs, deterministic=True)[0])
            ended = terminated or truncated
        successes.append(info["success"])
    return float(np.mean(successes))


def main(num_updates: int = 500) -> float:
    torch.set_num_threads(1)  # networks this small gain nothing from more, and lose where others use the cores
    env = VecMonitor(SB3Vector(gymnasium.make_vec(num_envs=64, **TASK)))
    model = PPO(
        "MlpPolicy",
        env,
        n_steps=64,
        batch_size=2048,
        gamma=0.9,
        learning_rate=lambda left: 3e-3 * left,
        policy_kwargs={"net_arch": [128, 128], "log_std_init": -0.5},
        seed=0,
    )
    print(f"success before: {success_rate(model):.2f}")
    start = time.perf_counter()
    model.learn(num_updates * 64 * 64)
    seconds = time.perf_counter() - start
    print(f"{model.num_timesteps:,} steps in {seconds:.0f} s, {model.num_timesteps / seconds:,.0f} a second")
    rate = success_rate(model)
    print(f"success after: {rate:.2f}")
    return rate


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
