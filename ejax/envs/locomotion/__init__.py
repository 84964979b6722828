"""Legged robots that follow velocity commands."""
