"""Scripted experts: they make the demonstrations that ``ejax.data`` keeps a buffer full of."""
