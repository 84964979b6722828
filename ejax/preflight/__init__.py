"""Preflight: robots and tasks are checked, and a config's programs compiled for GPUs that are not here and counted."""
