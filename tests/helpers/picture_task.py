"""A task that compiles quickly: a picture, an instruction and numbers in, chunks of two actions out."""

from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from numpy.typing import NDArray

from ejax.envs.description import EnvDescription
from ejax.envs.host.pure_host import PureHostEnv
from ejax.numerics.text import as_bytes
from ejax.types import Array, HostTimestep, Key, PyTree, Timestep

TEXTS = ("go left", "go right")
CHUNK = 2
MODEL = {"width": 8, "depth": 1, "num_heads": 2, "image_encoder": {"channels": [2, 2, 4]}, "critic": True}


@struct.dataclass(kw_only=True)
class State:
    place: Array
    told: Array
    count: Array


@dataclass(frozen=True)
class PictureTask:
    """A point [2] that actions move; success is to be on the side that the text says, after three decisions."""

    action_chunk: int = CHUNK

    @property
    def observation_space(self) -> gymnasium.spaces.Dict:
        return gymnasium.spaces.Dict(
            {
                "image": gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8),
                "instruction": gymnasium.spaces.Box(0, 255, (64,), np.uint8),
                "state": gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32),
            }
        )

    @property
    def action_space(self) -> gymnasium.spaces.Box:
        return gymnasium.spaces.Box(-1.0, 1.0, (2 * self.action_chunk,), np.float32)

    description = EnvDescription(text=("instruction",), instructions=TEXTS)
    max_episode_steps = 3

    def reset(self, key: Key) -> tuple[State, PyTree]:
        told = jax.random.randint(key, (), 0, 2)
        state = State(place=jnp.zeros(2), told=told, count=jnp.zeros((), jnp.int32))
        return state, self._observe(state)

    def step(self, state: State, action: Array, key: Key) -> tuple[State, Timestep]:
        del key
        if action.shape != self.action_space.shape:
            raise ValueError(f"an action has shape {self.action_space.shape}, got {action.shape}")
        place = state.place + 0.1 * action.reshape(-1, 2).sum(axis=0)
        state = replace(state, place=place, count=state.count + 1)
        side = jnp.where(state.told == 0, -place[0], place[0])
        done = state.count >= self.max_episode_steps
        info: dict[str, Any] = {"success": done & (side > 0.0)}
        return state, Timestep(
            obs=self._observe(state), reward=side, terminated=jnp.zeros((), bool), truncated=done, info=info
        )

    def _observe(self, state: State) -> PyTree:
        image = jnp.broadcast_to(jnp.uint8(state.count * 10), (8, 8, 3))
        texts = jnp.asarray(np.stack([as_bytes(text, 64) for text in TEXTS]))
        return {"image": image, "instruction": texts[state.told], "state": state.place}


class BrittlePictures(PureHostEnv):
    """The task outside of the program: the first row's place is NaN in every fifth step."""

    description = EnvDescription(text=("instruction",), instructions=TEXTS)

    def __init__(self, num_envs: int) -> None:
        super().__init__(PictureTask(), num_envs)
        self._count = 0

    def step(self, action: NDArray[Any]) -> HostTimestep:
        answer, self._count = super().step(action), self._count + 1
        if self._count % 5:
            return answer
        final_obs = {**answer.final_obs, "state": answer.final_obs["state"].copy()}
        final_obs["state"][0] = np.nan
        return replace(answer, final_obs=final_obs)
