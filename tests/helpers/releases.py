"""The release of JAX that runs the tests: 0.10 is the one that they were written with, later ones run them too."""

from importlib.metadata import version

IS_JAX_0_10 = version("jaxlib").startswith("0.10.")
