"""EnvPool's C++ environments as a ``HostEnv``: ``envpool:HalfCheetah-v5``. An ended row is reset by the next step."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from ejax.envs.adapters.gymnasium import GymnasiumVector
from ejax.envs.adapters.library import check_name, import_library
from ejax.envs.host.rows import put_rows


class EnvPoolVector(VectorEnv):
    """An EnvPool of N environments, all stepped at once, as one of Gymnasium's vector environments.

    A reset of all rows recreates the pool with their seeds; a row's later episodes follow from its first seed. Rows
    that are reset individually continue their own random numbers.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP, "takes_seeds": True}  # noqa: RUF012  (as in the base)

    def __init__(self, make_pool: Callable[..., Any], num_envs: int, spec: Any) -> None:
        self._make_pool, self.num_envs = make_pool, num_envs
        self.single_observation_space = spec.gymnasium_observation_space
        self.single_action_space = spec.gymnasium_action_space
        self._pool: Any = None
        self._obs: Any = None

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        mask = None if options is None else options["reset_mask"]
        if self._pool is None or mask is None or mask.all():
            self.close()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Gymnasium's, of bounds that float32 rounds
                self._pool = self._make_pool(env_seed=[each % 2**31 for each in seed])  # a C++ int
            self._obs = self._pool.reset()[0]
        else:
            rows = np.flatnonzero(mask).astype(np.int32)
            self._obs = put_rows(rows, self._pool.reset(rows)[0], self._obs)
        return self._obs, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        if self._pool is None:
            raise RuntimeError("step before reset: no episode has started")
        self._obs, *others = self._pool.step(actions)
        return (self._obs, *others)

    def render(self) -> None:
        """Draw nothing."""

    def close(self, **kwargs: Any) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def make(name: str, *, num_envs: int, clip_actions: bool = True, **options: Any) -> GymnasiumVector:
    """Make ``name`` by ``envpool.make``, with its own ``options``; ``clip_actions`` into the action space's bounds.

    Raises ModuleNotFoundError: EnvPool is not installed; ValueError: a wrong option, or no such environment, with the
    nearest names.
    """
    envpool = import_library("envpool", "envpool")
    check_name("envpool", name, envpool.list_all_envs())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            spec = envpool.make_spec(name, **options)
        except (TypeError, AssertionError) as error:
            raise ValueError(f"envpool refuses the options of '{name}': {error}") from error
        make_pool = partial(envpool.make, name, env_type="gymnasium", num_envs=num_envs, **options)
        vector = EnvPoolVector(make_pool, num_envs, spec)
    limit = int(spec.config.max_episode_steps)
    return GymnasiumVector(vector, clip_actions=clip_actions, max_episode_steps=limit)
