"""Preflight: a config's programs compiled for GPUs that are not here, and counted. Nothing runs."""
