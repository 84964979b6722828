"""Differences from row to row and from episode to episode: physics, sensors, delays, and how much of it."""
