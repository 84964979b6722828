"""``embodichain.data_pipeline.datasets``: ejax's own, by the same names."""

from ejax.data import ChunkSizeSampler, GMMChunkSampler, UniformChunkSampler
from interop.dataset import OnlineDataset

__all__ = ["ChunkSizeSampler", "GMMChunkSampler", "OnlineDataset", "UniformChunkSampler"]
