"""Collectors of rollouts outside a jitted program, in step with the learner or in the background; and their buffers."""

from ejax.schema.lazy_names import lazy_names

_PLACES = {
    "ejax.collectors.background": ("AsyncCollector", "Schedule"),
    "ejax.collectors.buffer": ("RolloutBuffer", "RolloutQueue"),
    "ejax.collectors.collect": ("collect_rollout",),
    "ejax.collectors.host": ("Collected", "CollectionStopped", "HostCollector", "Share"),
    "ejax.collectors.group_worker": ("HostStep",),
}
__all__ = sorted(name for names in _PLACES.values() for name in names)
__getattr__ = lazy_names("ejax.collectors", _PLACES)
