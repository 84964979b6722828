"""Policies on a page: ``ejax play RUN --web FILE``."""
