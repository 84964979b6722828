"""Drive a task with an exported policy in ONNX Runtime. Needs onnxruntime and numpy; the task, what it needs.

ejax export RUN --to exported --formats onnx
python examples/deploy_onnx.py exported

plays the episode that the export holds, that of ``ejax evaluate RUN --episodes 1``, and prints both returns.
PushCube needs mujoco and no ejax, other tasks ejax (``deployed_task``). Without them the policy answers the export's
own observations, and the difference from JAX's actions is printed.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from deployed_task import play
from numpy.typing import NDArray


def main() -> None:
    parser = argparse.ArgumentParser(description="Drive a task with an exported policy in ONNX Runtime.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="what ejax export wrote")
    directory = parser.parse_args().directory
    session: Any = onnxruntime.InferenceSession(directory / "policy.onnx", providers=["CPUExecutionProvider"])

    # of a policy with memory: zeros at an episode's start, then what the step before gave
    memory = {x.name: np.zeros((1, x.shape[1]), np.float32) for x in session.get_inputs() if x.name == "memory"}

    def act(obs: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        action, *after = session.run(["action", *(f"next_{name}" for name in memory)], {**obs, **memory})
        memory.update(zip(memory, after, strict=True))
        return action

    play(directory, act)


if __name__ == "__main__":
    main()
