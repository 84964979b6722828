"""Drive the PushCube task with an exported policy in ONNX Runtime. Needs onnxruntime, numpy and mujoco, nothing else.

python -m interop.export RUN --to exported --formats onnx
python examples/deploy_onnx.py exported

replays the episode that the export holds, that of ``python -m ejax.evaluate RUN --episodes 1``: cube and goal are where
they were there. Both returns are printed.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from push_cube_mujoco import play


def main() -> None:
    parser = argparse.ArgumentParser(description="Drive the PushCube task with an exported policy in ONNX Runtime.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="what interop.export wrote")
    directory = parser.parse_args().directory
    session: Any = onnxruntime.InferenceSession(directory / "policy.onnx", providers=["CPUExecutionProvider"])

    # of a policy with memory: zeros at an episode's start, then what the step before gave
    memory = {x.name: np.zeros((1, x.shape[1]), np.float32) for x in session.get_inputs() if x.name == "memory"}

    def act(obs: NDArray[np.float32]) -> NDArray[np.float32]:
        action, *after = session.run(["action", *(f"next_{name}" for name in memory)], {"obs": obs, **memory})
        memory.update(zip(memory, after, strict=True))
        return action

    play(directory, act)


if __name__ == "__main__":
    main()
