"""The online data engine: demonstrations from a worker process, in shared memory, for any number of consumers.

Needs NumPy only; ``ejax.data.prefetch``, which imports jax, is apart.
"""

import importlib
from typing import Any

_MODULE_OF = {
    "DataBudgetExhaustedError": "chunks",
    "DataUnavailableError": "chunks",
    "SamplingMode": "chunks",
    "SequenceSpecCfg": "chunks",
    "EngineState": "control",
    "OnlineDataset": "dataset",
    "OnlineDataEngine": "engine",
    "OnlineDataEngineCfg": "engine_config",
    "LifecycleEvent": "control",
    "OnlineDataWorkerError": "failures",
    "ChunkSizeSampler": "samplers",
    "GMMChunkSampler": "samplers",
    "UniformChunkSampler": "samplers",
    "DemonstrationTask": "task",
    "Episode": "task",
    "EpisodeSpec": "task",
    "Failure": "task",
    "Origin": "task",
}
"""Name -> module that has it, imported at the name's first use: a config of data needs no engine."""

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ejax.data' has no attribute '{name}'")
    return getattr(importlib.import_module(f"ejax.data.{_MODULE_OF[name]}"), name)
