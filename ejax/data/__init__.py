"""The online data engine: demonstrations from a worker process, through shared memory, to any number of consumers.

Needs NumPy only, so that worker and consumers start fast; ``ejax.data.prefetch``, which imports jax, is apart.
"""

from ejax.data.chunks import DataBudgetExhaustedError, DataUnavailableError, SamplingMode
from ejax.data.context import SequenceSpecCfg
from ejax.data.control import EngineState
from ejax.data.dataset import OnlineDataset
from ejax.data.engine import OnlineDataEngine
from ejax.data.engine_config import OnlineDataEngineCfg
from ejax.data.events import LifecycleEvent
from ejax.data.failures import OnlineDataWorkerError
from ejax.data.samplers import ChunkSizeSampler, GMMChunkSampler, UniformChunkSampler
from ejax.data.task import DemonstrationTask, Episode, EpisodeSpec, Failure, Origin

__all__ = [
    "ChunkSizeSampler",
    "DataBudgetExhaustedError",
    "DataUnavailableError",
    "DemonstrationTask",
    "EngineState",
    "Episode",
    "EpisodeSpec",
    "Failure",
    "GMMChunkSampler",
    "LifecycleEvent",
    "OnlineDataEngine",
    "OnlineDataEngineCfg",
    "OnlineDataWorkerError",
    "OnlineDataset",
    "Origin",
    "SamplingMode",
    "SequenceSpecCfg",
    "UniformChunkSampler",
]
