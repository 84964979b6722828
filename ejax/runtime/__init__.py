"""The process around a run: device, processes, signals, exit, time and files."""
