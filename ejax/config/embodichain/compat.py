"""``compat: embodichain-0.2 | embodichain-0.3 | embodichain-seed``: the numbers of one release, where ejax differs.

A compatibility mode is nothing but defaults: each key that the config gives itself wins, and the canonical form of
the config holds the resulting keys, not the mode. What concerns an algorithm's options stands in its record.
"""

import math
from typing import Any

from ejax.algorithms.record import Algorithm

_WIDE = (math.log(1e-6), math.log(1e6))

_FIRST_FINISHED = {"trainer.eval_episode_choice": "first_finished"}

COMPAT: dict[str, dict[str, dict[str, Any]]] = {
    "embodichain-0.2": {"": _FIRST_FINISHED},
    "embodichain-0.3": {"": _FIRST_FINISHED, "actor_critic": {"policy.log_std_range": list(_WIDE)}},
    "embodichain-seed": {"": _FIRST_FINISHED},
}
"""Mode -> policy name ("" for all) -> key -> value. Everything else computes alike."""


def compat_defaults(mode: str, algorithm: Algorithm | None, policy: str) -> dict[str, Any]:
    """The keys that a mode sets, for the run's algorithm and policy."""
    defaults = {key: value for name in ("", policy) for key, value in COMPAT[mode].get(name, {}).items()}
    options = {} if algorithm is None else algorithm.compat.get(mode, {})
    return defaults | {f"algorithm.cfg.{name}": value for name, value in options.items()}
