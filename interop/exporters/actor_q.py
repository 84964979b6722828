"""Export of ``ActorQ``: its actor alone, as an ``ActorOnly`` of the same deterministic actions.

The means are half of the last layer's outputs. The other half, which makes the deviation depend on the observation, is
for exploring: the export keeps its bias alone, as a constant deviation.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from ejax.policies import ActorOnly
from ejax.policies.actor_q import ActorQ
from ejax.types import Params
from interop.exporters import mlp
from interop.exporters.record import Exporter
from interop.twin.spec import Paths, PolicySpec


def _describe(policy: ActorQ, leaves: Mapping[str, Any], paths: Paths) -> tuple[ActorOnly, PolicySpec]:
    return mlp.describe(mlp.actor_only(policy), leaves, paths)


def _exported_params(policy: ActorQ, params: Params) -> Params:
    last = f"linear_{len(policy.actor.hidden_sizes)}"
    actor = params["params"]["actor"]
    (kernel, _), (bias, log_std) = (jnp.split(actor[last][name], 2, axis=-1) for name in ("kernel", "bias"))
    networks = {
        "actor": {**actor, last: {"kernel": kernel, "bias": bias}},
        "log_std": jnp.clip(log_std + policy.initial_log_std, *policy.log_std_range),
    }
    statistics = {name: x for name, x in params.get("normalizer", {}).items() if name.startswith("actor")}
    return {"params": networks} | ({"normalizer": statistics} if statistics else {})


EXPORTER = Exporter(describe=_describe, actor_of=mlp.actor_only, exported_params=_exported_params)
