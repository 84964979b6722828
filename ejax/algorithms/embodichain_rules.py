"""Rules of EmbodiChain 0.2.4, 0.3.2 and its seed version that differ from ejax's, by their options' names."""

from collections.abc import Callable
from functools import partial
from typing import Literal, TypeAlias

import jax.numpy as jnp

from ejax.returns import normalize
from ejax.types import Array, Rollout

TimeoutRule: TypeAlias = Literal["exact", "embodichain", "embodichain-0.2", "embodichain-0.3", "embodichain-seed"]
AdvantageRule: TypeAlias = Literal["embodichain-0.2", "embodichain-0.3", "embodichain-seed"]


def _no_bootstrap(rollout: Rollout, reward: Array, gamma: float) -> tuple[Array, Array, Array]:
    """Take every end of an episode for a terminal one."""
    del gamma
    return reward, rollout.next_value, rollout.done


TIMEOUT_RULES: dict[TimeoutRule, Callable[[Rollout, Array, float], tuple[Array, Array, Array]]] = {
    # a cut-off episode continues with the value of its true final observation
    "exact": lambda rollout, reward, gamma: (reward, rollout.next_value, rollout.terminated),
    "embodichain": _no_bootstrap,
    "embodichain-0.2": _no_bootstrap,
    # the reward of a step that is cut off gets γ·V of the observation BEFORE it
    "embodichain-0.3": lambda rollout, reward, gamma: (
        reward + gamma * rollout.value * rollout.truncated,
        rollout.next_value,
        rollout.done,
    ),
    # the end of the rollout is one of the episode too
    "embodichain-seed": lambda rollout, reward, gamma: (reward, rollout.next_value.at[-1].set(0.0), rollout.done),
}
"""``(rollout, scaled reward, gamma) -> (reward, next_value, terminated)``, the inputs of advantages, [T, N] each, by
``timeout_bootstrap``."""


def _by_moments_of_normalized(advantage: Array, valid: Array | None) -> Array:
    """Compute (A − m)/(s + 1e-8) with mean m and std s of the already normalized A, nearly A itself."""
    normalized = normalize(advantage, valid, offset=1e-8)
    counts = None if valid is None else valid > 0
    deviation = jnp.std(normalized, ddof=1, where=counts)  # 0 where all advantages are equal, else about 1
    return jnp.where(deviation == 0.0, 0.0, (advantage - normalized.mean(where=counts)) / (deviation + 1e-8))


ADVANTAGE_RULES: dict[AdvantageRule, Callable[[Array, Array | None], Array]] = {
    "embodichain-0.2": normalize,  # (A − mean)/std; its floor of 1e-8 would only touch rewards in a tiny unit
    "embodichain-0.3": partial(normalize, offset=1e-8),  # (A − mean)/(std + 1e-8), which goldens hold to 1e-6
    "embodichain-seed": _by_moments_of_normalized,
}
"""``(advantage, 1 where a step counts) -> normalized advantage``, by ``advantage_rule``."""
