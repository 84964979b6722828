"""Drive the PushCube task with an exported policy in ONNX Runtime. Needs onnxruntime, numpy and mujoco, nothing else.

python -m interop.export RUN --to exported --formats onnx
python examples/deploy_onnx.py exported         # the return of: python -m ejax.evaluate RUN --episodes 1

The returns are the same where the task starts at one place. Where its config draws the places of cube and goal, as
configs/push_cube/ppo.yaml does, the example plays from the middle of their ranges, which it says.
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
