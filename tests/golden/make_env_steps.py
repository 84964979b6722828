"""Record ``env_steps.npz``: ``python tests/golden/make_env_steps.py [part of a case's name …]``, all by default.

Under the flags of the tests (``tests/conftest.py``). Cases that cannot run here, and those that are not named, keep
what was recorded of them.
"""

import sys
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent


def main(parts: list[str]) -> None:
    sys.path[:0] = [str(FOLDER.parent), str(FOLDER.parent / "helpers"), str(FOLDER.parents[1])]
    import conftest  # noqa: F401  # sets the flags, before JAX starts
    import env_steps

    file, cases = FOLDER / env_steps.FILE, env_steps.cases()
    arrays: dict[str, np.ndarray] = {}
    if file.exists():
        with np.load(file) as recorded:
            arrays = dict(recorded)
    arrays = {key: x for key, x in arrays.items() if key.partition("|")[0] in cases}
    for name, case in cases.items():
        if parts and not any(part in name for part in parts):
            continue
        if why := env_steps.lacking(case):
            print(f"{name}: left as it is: {why}")
            continue
        arrays |= env_steps.packed(name, env_steps.run(name))
        print(f"{name}: recorded", flush=True)
    np.savez_compressed(file, **arrays)
    print(f"{file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
