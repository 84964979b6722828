"""The one task framework: a world, terms that are computed from it, and the order of a step."""
