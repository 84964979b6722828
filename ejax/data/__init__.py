"""The online data engine: demonstrations from a worker process, in shared memory, for any number of consumers.

Needs NumPy only; ``ejax.data.prefetch``, which imports jax, is apart. A config of data needs no engine.
"""

from ejax.schema.lazy_names import lazy_names

_PLACES = {
    "ejax.data.chunks": ("DataBudgetExhaustedError", "DataUnavailableError", "SamplingMode", "SequenceSpecCfg"),
    "ejax.data.control": ("EngineState", "LifecycleEvent", "OnlineDataWorkerError"),
    "ejax.data.dataset": ("OnlineDataset",),
    "ejax.data.engine": ("OnlineDataEngine",),
    "ejax.data.engine_config": ("OnlineDataEngineCfg",),
    "ejax.data.samplers": ("ChunkSizeSampler", "GMMChunkSampler", "UniformChunkSampler"),
    "ejax.data.task": ("DemonstrationTask", "Episode", "EpisodeSpec", "Failure", "Origin"),
}
__all__ = sorted(name for names in _PLACES.values() for name in names)
__getattr__ = lazy_names("ejax.data", _PLACES)
