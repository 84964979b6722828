"""What a config's programs would do on GPUs that are not here: compiled for them, and counted. Nothing runs."""
