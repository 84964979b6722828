"""Reversed, big-endian and read-only observations.

RIGHT: the same action as of plain ones, which may be written into.
"""

import numpy as np
from common import main, refused, run

import ejax


@main
def report():
    act = ejax.load(run(trainer={"iterations": 1}).run_dir).act
    plain = np.random.default_rng(0).normal(size=(6, 14)).astype(np.float32)
    given = {
        "reversed": plain[::-1].copy()[::-1],
        "big-endian": plain.astype(">f4"),
        "Fortran": np.asfortranarray(plain),
    }
    for name, obs in given.items():
        if text := refused(act, obs):
            return f"WRONG {name}: {text[:300]}"
        if not np.allclose(act(obs), act(plain), atol=1e-6):
            return f"WRONG {name}: another action"
    return "RIGHT" if act(plain).flags.writeable else "WRONG the action is read-only"
