"""The release of JAX that runs the tests: 0.10 is the one that they were written with, later ones run them too."""

from importlib.metadata import version

import pytest

IS_JAX_0_10 = version("jaxlib").startswith("0.10.")
names_of_loops = pytest.mark.skipif(
    not IS_JAX_0_10, reason="preflight, whose extra pins jax 0.10.2, reads the names that its compiler gives to loops"
)
