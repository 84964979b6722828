"""Environments outside the compiled program: bounded calls, checked rows, pure environments among them."""
