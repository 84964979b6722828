"""Scripted experts: they make the demonstrations that fill the buffer of ``ejax.data``."""
