"""Collectors of rollouts outside a jitted program, in step with the learner or in the background; and their buffers."""

from typing import TYPE_CHECKING

from ejax.schema.lazy_names import lazy_names

if TYPE_CHECKING:
    from ejax.collectors.background import AsyncCollector, Schedule
    from ejax.collectors.buffer import RolloutBuffer, RolloutQueue
    from ejax.collectors.collect import collect_rollout
    from ejax.collectors.host import Collected, CollectionStopped, HostCollector, HostStep, Share

__all__ = [
    "AsyncCollector",
    "Collected",
    "CollectionStopped",
    "HostCollector",
    "HostStep",
    "RolloutBuffer",
    "RolloutQueue",
    "Schedule",
    "Share",
    "collect_rollout",
]
__getattr__ = lazy_names(
    "ejax.collectors",
    {
        "ejax.collectors.background": ("AsyncCollector", "Schedule"),
        "ejax.collectors.buffer": ("RolloutBuffer", "RolloutQueue"),
        "ejax.collectors.collect": ("collect_rollout",),
        "ejax.collectors.host": ("Collected", "CollectionStopped", "HostCollector", "HostStep", "Share"),
    },
)
