"""Populations: many runs in one program, or one after another, with exploits between them."""

from ejax.population.loop import train_population

__all__ = ["train_population"]
