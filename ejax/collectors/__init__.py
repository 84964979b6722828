"""Collectors of rollouts outside a jitted program: in step with the learner, or in the background."""

from ejax.collectors.background import AsyncCollector, Schedule
from ejax.collectors.host import Collected, CollectionStopped, HostCollector, HostStep, Share

__all__ = ["AsyncCollector", "Collected", "CollectionStopped", "HostCollector", "HostStep", "Schedule", "Share"]
