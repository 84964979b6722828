"""EnvPool's C++ environments as a ``HostEnv``: ``envpool:HalfCheetah-v5``. An ended row is reset by the next step."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from ejax.envs.adapters.library import check_name, import_library
from ejax.envs.host.rows import as_rows, into_space, put_rows, rows_space
from ejax.types import HostTimestep, PyTree


class EnvPoolVector:
    """An EnvPool of N environments, all stepped at once.

    EnvPool takes seeds only when it is made, so a reset of all rows recreates it; later episodes of a row follow from
    its first seed. ``info["valid"]`` is False in the step that only resets.

    Args:
        make_pool: makes one from ``seed``, one for each row.
    """

    seeds_rows = False

    def __init__(
        self,
        make_pool: Callable[[list[int]], Any],
        *,
        num_envs: int,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        max_episode_steps: int = 0,
        clip_actions: bool = True,
    ) -> None:
        self._make_pool, self.num_envs = make_pool, num_envs
        self._raw_space = observation_space
        self.observation_space, self.action_space = rows_space(observation_space), action_space
        self.max_episode_steps, self.clip_actions = max_episode_steps, clip_actions
        self.row_seed = np.zeros(num_envs, np.uint32)
        self._pool: Any = None
        self._obs: PyTree = None
        self._resets_next = np.zeros(num_envs, bool)

    def reset(self, seed: NDArray[np.uint32], rows: NDArray[np.bool_] | None = None) -> PyTree:
        """Rows chosen individually continue their own random numbers, not ``seed``."""
        if self._pool is None or rows is None or rows.all():
            self.close()
            self.row_seed = np.asarray(seed, np.uint32)
            self._pool = self._make_pool([int(each) % 2**31 for each in seed])
            self._obs = as_rows(self._raw_space, self._pool.reset()[0])
            self._resets_next = np.zeros(self.num_envs, bool)
            return self._obs
        chosen = np.flatnonzero(rows).astype(np.int32)
        new = as_rows(self._raw_space, self._pool.reset(chosen)[0])
        self._obs = put_rows(chosen, new, self._obs)
        self._resets_next &= ~rows
        return self._obs

    def step(self, action: NDArray[Any]) -> HostTimestep:
        if self._pool is None:
            raise RuntimeError("step before reset: no episode has started")
        given = into_space(self.action_space, action, clip=self.clip_actions)
        raw, reward, terminated, truncated, info = self._pool.step(given)
        valid, self._resets_next = ~self._resets_next, np.array(terminated | truncated, bool)
        self._obs = as_rows(self._raw_space, raw)
        success = info.get("success", np.full(self.num_envs, np.nan))
        return HostTimestep(
            obs=self._obs,
            reward=np.array(reward, np.float32),
            terminated=np.array(terminated, bool),
            truncated=np.array(truncated, bool),
            info={"success": np.array(success, np.float32), "valid": valid},
            final_obs=self._obs,
        )

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def make(name: str, *, num_envs: int, clip_actions: bool = True, **options: Any) -> EnvPoolVector:
    """``envpool.make`` of ``name``.

    Args:
        num_envs: N, stepped together.
        clip_actions: into the bounds of the action space, before a step.
        options: EnvPool's own, such as ``num_threads`` or ``max_episode_steps``.

    Raises:
        ValueError: no such environment (the message gives the nearest names), or a wrong option.
        ModuleNotFoundError: EnvPool is not installed.
    """
    envpool = import_library("envpool", "envpool")
    check_name("envpool", name, envpool.list_all_envs())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Gymnasium's, of bounds that float32 rounds
        try:
            spec = envpool.make_spec(name, **options)
        except (TypeError, AssertionError) as error:
            raise ValueError(f"envpool refuses the options of '{name}': {error}") from error
        observation_space, action_space = spec.gymnasium_observation_space, spec.gymnasium_action_space
    return EnvPoolVector(
        partial(_make_pool, envpool, name, num_envs, options),
        num_envs=num_envs,
        observation_space=observation_space,
        action_space=action_space,
        max_episode_steps=int(spec.config.max_episode_steps),
        clip_actions=clip_actions,
    )


def _make_pool(envpool: Any, name: str, num_envs: int, options: dict[str, Any], seed: list[int]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return envpool.make(name, env_type="gymnasium", num_envs=num_envs, env_seed=seed, **options)
