"""``compat: embodichain-0.2 | embodichain-0.3 | embodichain-seed``: the numbers of one release, where ejax differs.

A compatibility mode is nothing but defaults: each key that the config gives itself wins, and the canonical form of
the config holds the resulting keys, not the mode.
"""

import math
from typing import Any

_WIDE = (math.log(1e-6), math.log(1e6))

COMPAT: dict[str, dict[str, dict[str, Any]]] = {
    "embodichain-0.2": {
        "": {"trainer.eval_episode_choice": "first_finished"},
        "ppo": {
            "algorithm.cfg.timeout_bootstrap": "embodichain-0.2",
            "algorithm.cfg.skip_nonfinite_updates": False,
        },
        "grpo": {"algorithm.cfg.shared_start": False, "algorithm.cfg.skip_nonfinite_updates": False},
    },
    "embodichain-0.3": {
        "": {"trainer.eval_episode_choice": "first_finished"},
        "ppo": {
            "algorithm.cfg.timeout_bootstrap": "embodichain-0.3",
            "algorithm.cfg.advantage_rule": "embodichain-0.3",
            "algorithm.cfg.clip_grad_per_network": True,
            "algorithm.cfg.skip_nonfinite_updates": False,
        },
        "grpo": {
            "algorithm.cfg.shared_start": False,
            "algorithm.cfg.skip_nonfinite_updates": False,
            "algorithm.cfg.update_normalizers": False,
        },
        "actor_critic": {"policy.log_std_range": list(_WIDE)},
    },
    "embodichain-seed": {
        "": {"trainer.eval_episode_choice": "first_finished"},
        "ppo": {
            "algorithm.cfg.timeout_bootstrap": "embodichain-seed",
            "algorithm.cfg.advantage_rule": "embodichain-seed",
            "algorithm.cfg.skip_nonfinite_updates": False,
        },
        "grpo": {"algorithm.cfg.shared_start": False, "algorithm.cfg.skip_nonfinite_updates": False},
    },
}
"""Mode -> algorithm or policy name ("" for all) -> key -> value. Everything else computes alike."""


def compat_defaults(mode: str, algorithm: str, policy: str) -> dict[str, Any]:
    """The keys that a mode sets, for the run's algorithm and policy."""
    parts = COMPAT[mode]
    return {key: value for name in ("", algorithm, policy) for key, value in parts.get(name, {}).items()}
