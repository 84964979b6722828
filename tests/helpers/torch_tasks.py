"""A vector environment of torch for the tests, with every habit that such environments have."""

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import torch


class Counting:
    """Row i observes (i, steps of its episode, last action, draw at the reset) in one buffer, written over and over.

    Args:
        length: of an episode, which is cut off; row 0 terminates in the same step.
        final: dotted place in ``info`` for terminal observations. None: there are none.
        copies: a new tensor for each observation.
        partial: the option of ``reset`` that takes indices. None: options are passed over.
        nan_at: the step, over all episodes, at which row 1 observes NaN; 0: never.
    """

    metadata: Mapping[str, Any] = {}

    def __init__(
        self,
        num_envs: int = 3,
        device: str = "cpu",
        *,
        length: int = 3,
        final: str | None = None,
        copies: bool = False,
        partial: str | None = "env_ids",
        nan_at: int = 0,
        max_episode_steps: int = 0,
    ) -> None:
        self.num_envs, self.device, self.length, self.final = num_envs, device, length, final
        self.copies, self.partial, self.nan_at = copies, partial, nan_at
        self.max_episode_steps = max_episode_steps
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,))
        self.single_action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))
        self.generator = torch.Generator().manual_seed(0)
        self.buffer = torch.zeros(num_envs, 4)
        self.buffer[:, 0] = torch.arange(num_envs)
        self.num_steps = 0
        self.actions: list[torch.Tensor] = []
        self.closed = False

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
        if seed is not None:
            self.generator.manual_seed(seed)
        rows = None if options is None or self.partial is None else options.get(self.partial)
        self._start(torch.arange(self.num_envs) if rows is None else rows)
        return self.observe(), {}

    def step(self, action: torch.Tensor) -> tuple[Any, Any, Any, Any, Any]:
        self.actions.append(action)
        self.num_steps += 1
        self.buffer[:, 1] += 1.0
        self.buffer[:, 2] = action[:, 0]
        reward = self.buffer[:, 0] + 0.1 * self.buffer[:, 1]
        truncated = self.buffer[:, 1] >= self.length
        terminated = truncated & (self.buffer[:, 0] == 0.0)
        info: dict[str, Any] = {
            "success": terminated.clone(),
            "metrics": {"count": self.buffer[:, 1].long(), "pair": self.buffer[:, :2].clone()},
        }
        if truncated.any():
            if self.final is not None:
                *sections, name = self.final.split(".")
                place = info
                for section in sections:
                    place = place.setdefault(section, {})
                place[name] = self.observe().clone()
            self._start(truncated.nonzero()[:, 0])
        if self.num_steps == self.nan_at:
            self.buffer[1, 1] = torch.nan
        return self.observe(), reward, terminated, truncated, info

    def close(self) -> None:
        self.closed = True

    def observe(self) -> Any:
        return self.buffer.clone() if self.copies else self.buffer

    def _start(self, rows: torch.Tensor) -> None:
        self.buffer[rows, 1:3] = 0.0
        self.buffer[rows, 3] = torch.rand(len(rows), generator=self.generator)


class Wide(Counting):
    """An environment as wide as PointMassEnv: 14 observations, 2 actions."""

    def __init__(self, num_envs: int = 3, device: str = "cpu", **options: Any) -> None:
        super().__init__(num_envs, device, **options)
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (14,))
        self.single_action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))

    def observe(self) -> Any:
        return torch.cat([self.buffer] * 4, dim=1)[:, :14]


class Nested(Counting):
    """Observes a mapping; its spaces are those of all rows together."""

    def __init__(self, num_envs: int = 3, device: str = "cpu", **options: Any) -> None:
        super().__init__(num_envs, device, **options)
        del self.single_observation_space, self.single_action_space
        box = gymnasium.spaces.Box
        self.observation_space = gymnasium.spaces.Dict(
            {"policy": box(-np.inf, np.inf, (num_envs, 2)), "image": box(0, 255, (num_envs, 2, 2, 3), np.uint8)}
        )
        self.action_space = box(-1.0, 1.0, (num_envs, 1))

    def observe(self) -> Any:
        image = self.buffer[:, 1].to(torch.uint8)[:, None, None, None].expand(-1, 2, 2, 3)
        return {"policy": self.buffer[:, :2], "image": image, "unseen": torch.zeros(1)}
