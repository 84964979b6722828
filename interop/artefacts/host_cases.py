"""``interop.artefacts.cases.observe`` for environments outside JAX: they cannot be stepped twice from one state, so
they are played again from their seeds."""

from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from ejax.collectors.player import act
from ejax.policies.calls import first_memory, forget_outside
from ejax.types import HostEnv, Params, Policy, PyTree
from interop.artefacts.cases import Bounds, as_read, leaves_of, steps_to_observe
from interop.artefacts.parity import Arrays
from interop.twin.kinds import Spec
from interop.twin.spec import MEMORY


def observe_host(
    policy: Policy, env: HostEnv, params: Params, spec: Spec, bounds: Bounds | None
) -> tuple[Arrays, bool | None]:
    """Act in the environment with sampled actions, so that the observations spread as in training.

    Returns:
        The observations [B, ...] by path; whether the environment clips actions to ``bounds`` (wrappers between it and
        the policy included): from the same seeds, actions far beyond them did the same as clipped ones. None: it is
        not even reproducible under the same actions.
    """
    seed = np.random.SeedSequence(0).generate_state(env.num_envs).astype(np.uint32)
    key = jax.random.key(0)
    obs = env.reset(seed)
    memory = first_memory(policy, env.num_envs)
    seen: list[PyTree] = []
    actions: list[NDArray[Any]] = []
    for t in range(steps_to_observe(spec, env.observation_space)):
        leaves = leaves_of(obs) | ({} if memory == () else {MEMORY: memory["actor"]})
        seen.append(jax.tree.map(np.array, leaves))  # a copy: it may write the next one over this one
        drawn, given, memory = act(policy, params, obs, memory, key, np.int32(t), {})
        actions.append(np.asarray(drawn if given is None else given))
        timestep = env.step(actions[-1])
        obs = timestep.obs
        ended = timestep.terminated | timestep.truncated | ~np.asarray(timestep.info.get("valid", True))
        memory = forget_outside(policy, memory, ended)
    together = as_read(spec, jax.tree.map(lambda *steps: np.concatenate(steps), *seen))
    return together, False if bounds is None else _clips(env, seed, np.stack(actions), bounds)


def _clips(env: HostEnv, seed: NDArray[np.uint32], actions: NDArray[Any], bounds: Bounds) -> bool | None:
    """Play actions of which every other one goes beyond the bounds, on the side that the policy's leans to."""
    low, high = (np.broadcast_to(np.asarray(bound, actions.dtype), actions.shape) for bound in bounds)
    beyond = np.where(actions < (low + high) / 2.0, low - (high - low), high + (high - low))
    chosen = np.random.default_rng(0).random(actions.shape[:2]) < 0.5
    far = np.where(chosen[..., None], beyond, np.clip(actions, low, high))
    near = np.clip(far, low, high)
    expected = _play(env, seed, near)
    if not _equal(expected, _play(env, seed, near)):
        return None
    return _equal(expected, _play(env, seed, far))


def _play(env: HostEnv, seed: NDArray[np.uint32], actions: NDArray[Any]) -> list[NDArray[Any]]:
    """Return all answers of the environment."""
    env.reset(seed)
    answers: list[NDArray[Any]] = []
    for action in actions:
        step = env.step(action)
        answers += [np.array(leaf) for leaf in jax.tree.leaves((step.obs, step.reward, step.final_obs))]
    return answers


def _equal(a: list[NDArray[Any]], b: list[NDArray[Any]]) -> bool:
    return all(np.array_equal(x, y, equal_nan=True) for x, y in zip(a, b, strict=True))
