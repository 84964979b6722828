"""Kernels, launches, bytes and operations of each loop that a GPU would run, counted in the compiled program."""
