"""Numeric helpers below the algorithms: finite checks, moments, episode bookkeeping, layouts and kernels."""
