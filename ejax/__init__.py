"""ejax: reinforcement learning for embodied AI on JAX. See README.md for the map of the package."""

__version__ = "0.1.0"
