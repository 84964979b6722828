"""Brax environments, ``brax:ant``, and the adapter for every environment with Brax's interface."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ejax.envs.adapters.library import LibraryEnv, as_vectors, check_name, import_library, resolve_dtypes, vector_space
from ejax.numerics.finite import all_finite
from ejax.types import Array, Key, PyTree, Timestep

_REWARD_TERM = "reward/"


@struct.dataclass(kw_only=True)
class BraxEnvState:
    inner: PyTree  # the library's ``State``
    episode_step: Array


@dataclass(frozen=True)
class BraxEnv(LibraryEnv):
    """The bare environment, without the library's wrappers: ``done`` is ``terminated``, the time limit is counted here.

    Actions in ±1, clipped. Observations are vectors, or a dict of them; images are flattened. Metrics named
    ``reward/<term>`` are ``info["rewards"]``; a metric ``success`` is also ``info["success"]``.
    """

    action_repeat: int
    long_reset: bool = False
    """A reset takes so many physics steps that only the rows that ended should make it."""

    def reset(self, key: Key) -> tuple[BraxEnvState, PyTree]:
        inner = self.env.reset(jax.random.key_data(key))  # Brax is written for keys that are plain arrays
        state = BraxEnvState(inner=resolve_dtypes(inner), episode_step=jnp.zeros((), jnp.int32))
        return state, as_vectors(inner.obs)

    def step(self, state: BraxEnvState, action: Array, key: Key) -> tuple[BraxEnvState, Timestep]:
        del key  # the environment keeps its own in its state
        self.check_action(action)
        action = jnp.clip(action, -1.0, 1.0)

        def one_step(inner: PyTree, _: None) -> tuple[PyTree, tuple[Array, Array]]:
            # a copy: some environments write into the metrics and info that they are given
            after = self.env.step(jax.tree.map(lambda x: x, inner), action)
            return resolve_dtypes(after, like=inner), (jnp.float32(after.reward), jnp.asarray(after.done, bool))

        # The library's wrapper takes the last step's done; here no termination between repeats is lost.
        inner, (reward, done) = jax.lax.scan(one_step, state.inner, None, self.action_repeat)
        episode_step = state.episode_step + 1
        info = _info(inner.metrics)
        if "success" in info:
            info["success"] &= all_finite(inner.obs, reward)
        timestep = Timestep(
            obs=as_vectors(inner.obs),
            reward=reward.sum(),
            terminated=done.any(),
            truncated=episode_step >= self.max_episode_steps,
            info=info,
        )
        return BraxEnvState(inner=inner, episode_step=episode_step), timestep


def make(
    name: str, *, max_episode_steps: int = 1000, action_repeat: int = 1, backend: str | None = None, **options: Any
) -> BraxEnv:
    """Make a Brax environment; ``options`` are for its constructor.

    Args:
        max_episode_steps: time limit. Brax's default for all of its environments: 1000.
        action_repeat: steps of the environment in one step here.
        backend: ``generalized``, ``positional``, ``spring`` or ``mjx``. None: the environment's own.

    Raises ModuleNotFoundError: Brax is not installed; TypeError: a wrong option; ValueError: a wrong name or backend.
    """
    envs = import_library("brax.envs", "brax")
    check_name("brax", name, envs._envs)  # Brax lists its names nowhere else
    options |= {} if backend is None else {"backend": backend}
    with jax.ensure_compile_time_eval():  # constants, even if called while a program is traced
        env = envs.get_environment(name, **options)
    return adapt(f"brax:{name}", env, max_episode_steps=max_episode_steps, action_repeat=action_repeat, options=options)


def adapt(
    name: str,
    env: Any,
    *,
    max_episode_steps: int,
    action_repeat: int = 1,
    long_reset: bool = False,
    options: Mapping[str, Any],
) -> BraxEnv:
    """Adapt an object with Brax's interface; equal ``name`` and ``options`` share compiled programs.
    Raises ValueError: ``max_episode_steps`` or ``action_repeat`` is not positive.
    """
    if max_episode_steps <= 0 or action_repeat <= 0:
        raise ValueError(f"max_episode_steps and action_repeat must be > 0, got {max_episode_steps}, {action_repeat}")
    shapes = jax.eval_shape(env.reset, jax.random.PRNGKey(0))
    return BraxEnv(
        name=name,
        max_episode_steps=max_episode_steps,
        action_repeat=action_repeat,
        long_reset=long_reset,
        options=dict(options),
        env=env,
        observation_space=vector_space(shapes.obs),
        action_space=gymnasium.spaces.Box(-1.0, 1.0, (env.action_size,), np.float32),
    )


def _info(metrics: Mapping[str, Any]) -> dict[str, Any]:
    scalars = {name: jnp.asarray(x) for name, x in metrics.items() if jnp.ndim(x) == 0}
    terms = {name.removeprefix(_REWARD_TERM): x for name, x in scalars.items() if name.startswith(_REWARD_TERM)}
    others = {name: x for name, x in scalars.items() if not name.startswith(_REWARD_TERM)}
    success = {"success": scalars["success"] > 0.5} if "success" in scalars else {}
    return {"rewards": terms, "metrics": others, **success}
