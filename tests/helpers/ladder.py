"""Gymnasium environments for tests; without JAX, so that processes of their own start fast."""

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray


class Ladder(gymnasium.Env[Any, Any]):
    """Up by 1 a step. Observes [start, height]; falls (terminated) at ``fall``, is cut off at ``limit``.

    The reward is the action's first number; NaN once the actions of an episode add up to more than ``brittle``. A
    step with an action above 1e3 raises.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-10.0, 10.0, (2,), np.float32)

    def __init__(self, fall: int = 4, limit: int = 6, brittle: float = np.inf, first_nan: bool = False) -> None:
        self.fall, self.limit, self.brittle, self.first_nan = fall, limit, brittle, first_nan

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self.start, self.height, self.total = self.np_random.random(), 0, 0.0
        # every other start state falls off early, the others are cut off
        self.falls = self.np_random.random() < 0.5
        return self._obs() * np.float32(np.nan) if self.first_nan else self._obs(), {}

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        action = np.asarray(action, np.float64).reshape(-1)
        if action[0] > 9.0:
            raise RuntimeError("the ladder broke")
        self.height += 1
        self.total += float(action[0])
        terminated = bool(self.falls and self.height == self.fall)
        reward = np.nan if self.total > self.brittle else float(action[0])
        info = {"success": terminated} if terminated or self.height == self.limit else {}
        return self._obs(), reward, terminated, self.height == self.limit and not terminated, info

    def _obs(self) -> NDArray[np.float32]:
        return np.array([self.start, self.height], np.float32)


class Asked(Ladder):
    """Any action and observation space: acts on none of them, reports the action in ``info``."""

    def __init__(self, action_space: gymnasium.Space[Any], observation_space: gymnasium.Space[Any]) -> None:
        super().__init__()
        self.action_space, self.observation_space = action_space, observation_space
        self.actions: list[Any] = []

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        _, reward, terminated, truncated, info = super().step(0.0)
        return self._obs(), reward, terminated, truncated, info

    def _obs(self) -> Any:
        self.observation_space.seed(int(self.start * 1000) + self.height)
        return self.observation_space.sample()
