"""Policies: Flax Linen modules ``obs -> (distribution, value)`` and the pure functions that use them."""
