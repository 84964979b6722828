"""Strict sections, problems with their keys, values, names and trust: reading what users write."""
