"""The machinery of a run: its parts, its folder, its evaluations, its numbers, and how it ends."""
