"""Types of the names that ``ejax.data`` looks up lazily; ``__init__.py`` has the table."""

from ejax.data.chunks import (
    DataBudgetExhaustedError as DataBudgetExhaustedError,
    DataUnavailableError as DataUnavailableError,
    SamplingMode as SamplingMode,
    SequenceSpecCfg as SequenceSpecCfg,
)
from ejax.data.control import EngineState as EngineState, LifecycleEvent as LifecycleEvent
from ejax.data.dataset import OnlineDataset as OnlineDataset
from ejax.data.engine import OnlineDataEngine as OnlineDataEngine
from ejax.data.engine_config import OnlineDataEngineCfg as OnlineDataEngineCfg
from ejax.data.control import OnlineDataWorkerError as OnlineDataWorkerError
from ejax.data.samplers import (
    ChunkSizeSampler as ChunkSizeSampler,
    GMMChunkSampler as GMMChunkSampler,
    UniformChunkSampler as UniformChunkSampler,
)
from ejax.data.task import (
    DemonstrationTask as DemonstrationTask,
    Episode as Episode,
    EpisodeSpec as EpisodeSpec,
    Failure as Failure,
    Origin as Origin,
)
