"""Console, files and notebooks that show a run: metrics, charts, usage, JSON records."""
