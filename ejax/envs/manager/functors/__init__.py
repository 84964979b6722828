"""Functors of a gym config, by EmbodiChain's names: pure functions of a world and of parameters."""
