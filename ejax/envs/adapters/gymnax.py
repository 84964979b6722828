"""Gymnax environments: ``gymnax:CartPole-v1``. Needs gymnax >= 1.0, which separates termination from time limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp

from ejax.envs.adapters.library import LibraryEnv, as_vectors, check_name, check_options, import_library, resolve_dtypes
from ejax.envs.host.rows import rows_space
from ejax.types import Array, Key, PyTree, Timestep


@dataclass(frozen=True)
class GymnaxEnv(LibraryEnv):
    """A Gymnax environment, stepped by ``step_env``, the transition without Gymnax's own reset.

    ``terminated`` is the flag it returns, ``truncated`` ``time >= max_steps_in_episode``. Both may be true in one step.
    Observations are vectors: grids (MinAtar, [10, 10, C]) are flattened, a Discrete observation is one-hot.
    Box actions are vectors, clipped to the space's bounds.
    """

    params: Any = field(repr=False, compare=False)

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        obs, state = self.env.reset_env(key, self.params)
        return resolve_dtypes(state), self._observe(obs)

    def step(self, state: PyTree, action: Array, key: Key) -> tuple[PyTree, Timestep]:
        self.check_action(action)
        space = self.action_space
        if isinstance(space, gymnasium.spaces.Box):
            action = jnp.clip(action, space.low, space.high).reshape(self.env.action_space(self.params).shape)
        obs, after, reward, terminated, info = self.env.step_env(key, state, action, self.params)
        scalars = {name: jnp.asarray(x) for name, x in info.items() if jnp.ndim(x) == 0}
        metrics = {name: x for name, x in scalars.items() if name != "discount"}  # which repeats ``terminated``
        timestep = Timestep(
            obs=self._observe(obs),
            reward=jnp.asarray(reward, jnp.float32),
            terminated=jnp.asarray(terminated, bool),
            truncated=jnp.asarray(self.env.is_truncated(after, self.params), bool),
            info={"metrics": metrics},
        )
        return resolve_dtypes(after, like=state), timestep

    def _observe(self, obs: PyTree) -> PyTree:
        num_values = getattr(self.env.observation_space(self.params), "n", None)
        return as_vectors(obs if num_values is None else jax.nn.one_hot(obs, num_values))


def make(
    name: str,
    *,
    max_episode_steps: int | None = None,
    differentiable: bool = False,
    env_kwargs: Mapping[str, Any] | None = None,
    **params: Any,
) -> GymnaxEnv:
    """Make a Gymnax environment.

    Args:
        max_episode_steps: time limit. None: Gymnax's.
        differentiable: let gradients pass through the transition, where Gymnax supports it.
        env_kwargs: for the environment's constructor, e.g. ``{"size": 10}`` of DeepSea.
        params: fields of the environment's ``EnvParams``, e.g. ``gravity=9.8``.

    Raises ModuleNotFoundError: Gymnax is not installed; ValueError: an unknown name or parameter, or other spaces.
    """
    gymnax = import_library("gymnax", "gymnax")
    check_name("gymnax", name, gymnax.registered_envs)
    with jax.ensure_compile_time_eval():  # constants, even if called while a program is traced
        try:
            env, defaults = gymnax.make(name, **(env_kwargs or {}))
        except OSError as error:
            raise ValueError(f"gymnax:{name} could not get the files that it downloads: {error}") from error
    if differentiable:
        env = env.with_transition_gradients()
    changes = dict(params) if max_episode_steps is None else params | {"max_steps_in_episode": max_episode_steps}
    check_options(f"gymnax:{name}", "parameter", changes, (item.name for item in fields(defaults)))
    settings = defaults.replace(**changes)
    limit = int(settings.max_steps_in_episode)
    if limit <= 0:
        raise ValueError(f"max_episode_steps must be > 0, got {limit}")
    convert = import_library("gymnax.environments.spaces", "gymnax").gymnax_space_to_gym_space
    action_space = convert(env.action_space(settings))
    is_discrete = isinstance(action_space, gymnasium.spaces.Discrete)
    return GymnaxEnv(
        name=f"gymnax:{name}",
        max_episode_steps=limit,
        options={"differentiable": differentiable, "env_kwargs": dict(env_kwargs or {}), **params},
        env=env,
        params=settings,
        observation_space=rows_space(convert(env.observation_space(settings))),
        action_space=action_space if is_discrete else rows_space(action_space),
    )
