"""Finished and running runs as one HTML page."""
