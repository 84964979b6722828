"""Drive the PushCube task with an exported policy in ONNX Runtime. Needs onnxruntime, numpy and mujoco, nothing else.

python -m interop.export RUN --to exported --formats onnx
python examples/deploy_onnx.py exported

replays the episode that the export holds, that of ``python -m ejax.evaluate RUN --episodes 1``: cube and goal are where
they were there. Both returns are printed.
"""

import argparse
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from push_cube_mujoco import play


def main() -> None:
    parser = argparse.ArgumentParser(description="Drive the PushCube task with an exported policy in ONNX Runtime.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="what interop.export wrote")
    directory = parser.parse_args().directory
    session = onnxruntime.InferenceSession(directory / "policy.onnx", providers=["CPUExecutionProvider"])

    def act(obs: NDArray[np.float32]) -> NDArray[np.float32]:
        return session.run(["action"], {"obs": obs})[0]

    play(directory, act)


if __name__ == "__main__":
    main()
