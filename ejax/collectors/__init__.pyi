"""Types of the names that ``ejax.collectors`` looks up lazily; ``__init__.py`` has the table."""

from ejax.collectors.background import AsyncCollector as AsyncCollector, Schedule as Schedule
from ejax.collectors.buffer import RolloutBuffer as RolloutBuffer, RolloutQueue as RolloutQueue
from ejax.collectors.collect import collect_rollout as collect_rollout
from ejax.collectors.host import (
    Collected as Collected,
    CollectionStopped as CollectionStopped,
    HostCollector as HostCollector,
    Share as Share,
)
from ejax.collectors.group_worker import HostStep as HostStep
