"""Kept episodes: LeRobot v3.0 datasets, read and written. Needs the extra ``data``."""
