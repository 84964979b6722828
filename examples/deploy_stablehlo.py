"""Drive a task with an exported policy in JAX. Needs jax, flatbuffers and numpy; the task, what it needs.

ejax export RUN --to exported --formats stablehlo
python examples/deploy_stablehlo.py exported

plays the episode that the export holds, that of ``ejax evaluate RUN --episodes 1``, and prints both returns.
PushCube needs mujoco and no ejax, other tasks ejax (``deployed_task``). Without them the policy answers the export's
own observations, and the difference from JAX's actions is printed.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.export
import numpy as np
from deployed_task import play
from numpy.typing import NDArray


def main() -> None:
    parser = argparse.ArgumentParser(description="Drive a task with an exported policy in JAX.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="what ejax export wrote")
    directory = parser.parse_args().directory
    program = jax.export.deserialize(bytearray((directory / "policy.stablehlo").read_bytes()))

    # of a policy with memory: zeros at an episode's start, then what the step before gave
    inputs = json.loads((directory / "contract.json").read_text())["observation"]
    memory = [np.zeros((1, x["shape"][1]), np.float32) for x in inputs if x["name"] == "memory"]

    def act(obs: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        action, *others = program.call(*obs.values(), *memory)
        memory[:] = others[len(others) - len(memory) :]
        return np.asarray(action)

    play(directory, act)


if __name__ == "__main__":
    main()
