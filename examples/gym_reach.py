"""An environment of Gymnasium's form, which ejax trains as it is: docs/gymnasium.md."""

import gymnasium
import numpy as np


class Reach(gymnasium.Env):
    """A point in the plane is pushed to the origin."""

    observation_space = gymnasium.spaces.Box(-2.0, 2.0, (4,), np.float32)  # position m, velocity m/s
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)  # acceleration, 5 m/s²

    def __init__(self, size=1.0):
        self.size = size  # of the square in which an episode starts, m: env.cfg.size

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state, self.steps = np.zeros(4, np.float32), 0
        self.state[:2] = self.np_random.uniform(-self.size, self.size, 2)
        return self.state.copy(), {}

    def step(self, action):
        position, velocity = self.state[:2], self.state[2:]
        velocity = np.clip(velocity + 0.05 * 5.0 * np.asarray(action), -2.0, 2.0)
        position = np.clip(position + 0.05 * velocity, -2.0, 2.0)
        self.state, self.steps = np.concatenate([position, velocity]).astype(np.float32), self.steps + 1
        distance = float(np.linalg.norm(position))
        reached = distance < 0.1
        info = {"success": reached, "rewards": {"distance": -0.1 * distance, "reached": float(reached)}}
        return self.state.copy(), -0.1 * distance + reached, reached, self.steps >= 100, info
