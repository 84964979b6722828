"""One episode of a policy by JAX: its start and its end, so that the task can be replayed without JAX."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ejax.evaluation import evaluate
from ejax.rollout import reset
from ejax.runtime.tree_text import named_leaves
from ejax.types import Env, Params, Policy, PyTree


def reference_episode(policy: Policy, env: Env, params: Params, seed: int) -> dict[str, Any] | None:
    """Play the episode of ``ejax evaluate RUN --episodes 1 --seed SEED``, for ``episode.json``.

    Returns:
        ``start``: the environment's state by dotted path, as lists, random streams as their bits. ``result``: the
        episode's return, length and the environment's other results at its end, null where that is not a number.
        None: the episode does not end within the environment's time limit, or there is none.
    """
    if not env.max_episode_steps:
        return None
    key = jax.random.key(seed)
    episode = evaluate(policy, env, params, key, num_envs=1, num_episodes=1)
    result = {name: float(x[0]) for name, x in episode.items()}
    del result["same_start"]  # one episode has nothing to be compared with
    if result.pop("unfinished") or math.isnan(result["return"]):
        return None
    key_reset, _ = jax.random.split(key)  # as ``evaluate`` does
    return as_document(seed, jax.tree.map(lambda x: x[0], reset(env, key_reset, 1).state), result)


def as_document(seed: int, start: PyTree, result: Mapping[str, float]) -> dict[str, Any]:
    """Write down an episode, from the state that it starts in; see ``reference_episode``."""
    return {
        "schema_version": 1,
        "about": "one episode by JAX with the policy's most probable actions; floats are float32, in the units of env",
        "seed": seed,
        "start": {name: _plain(x) for name, x in named_leaves(start).items()},
        "result": {name: None if math.isnan(x) else x for name, x in result.items()},
    }


def _plain(x: jax.Array) -> Any:
    is_key = jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x).tolist()
