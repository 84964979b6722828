"""Drive the PushCube task with an exported policy in torch. Needs torch, numpy and mujoco; neither jax nor ejax.

python -m interop.export RUN --to exported
python examples/deploy_torch.py exported

replays the episode that the export holds, that of ``python -m ejax.evaluate RUN --episodes 1``: cube and goal are where
they were there. Both returns are printed.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from push_cube_mujoco import play


def main() -> None:
    parser = argparse.ArgumentParser(description="Drive the PushCube task with an exported policy in torch.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="what interop.export wrote")
    parser.add_argument("--torchscript", action="store_true", help="load policy.torchscript instead of policy.pt2")
    args = parser.parse_args()
    if args.torchscript:
        policy = torch.jit.load(args.directory / "policy.torchscript")
    else:
        policy = torch.export.load(args.directory / "policy.pt2").module()

    # of a policy with memory: zeros at an episode's start, then what the step before gave
    inputs = json.loads((args.directory / "contract.json").read_text())["observation"]
    memory = [torch.zeros(1, x["shape"][1]) for x in inputs if x["name"] == "memory"]

    @torch.no_grad()
    def act(obs: NDArray[np.float32]) -> NDArray[np.float32]:
        action, _mean, _log_std, *after = policy(torch.from_numpy(obs), *memory)
        memory[:] = after
        return action.numpy()

    play(args.directory, act)


if __name__ == "__main__":
    main()
