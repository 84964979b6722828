"""Demonstrations of one's own, as ``action_config`` names them."""

from collections.abc import Generator
from typing import Any

import jax
import numpy as np


def nods(env: Any, state: Any, obs: Any, rng: np.random.Generator, steps: int = 40) -> np.ndarray:
    """Nod with the first joint: of any scene."""
    del state
    num_envs = len(jax.tree.leaves(obs)[0])
    actions = np.zeros((steps, num_envs, *env.action_space.shape), np.float32)
    actions[..., 0] = rng.uniform(-0.2, 0.2, (steps, 1))
    return actions


def two_nods(env: Any, state: Any, obs: Any, rng: np.random.Generator) -> Generator[np.ndarray, Any, None]:
    """Nod, and nod back by as much as the joint has turned."""
    first = obs["robot"]["qpos"][:, 0]
    state, obs = yield nods(env, state, obs, rng, steps=5)
    back = nods(env, state, obs, rng, steps=3) * 0.0
    back[..., 0] = first - obs["robot"]["qpos"][:, 0]
    yield back


def no_plan(env: Any, state: Any, obs: Any, rng: np.random.Generator) -> None:
    del env, state, obs, rng


def too_narrow(env: Any, state: Any, obs: Any, rng: np.random.Generator) -> np.ndarray:
    return nods(env, state, obs, rng)[..., :3]
