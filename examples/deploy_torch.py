"""Drive a task with an exported policy in torch. Needs torch and numpy; the task, what it needs.

Of torch the build for the CPU is enough: pip install torch --index-url https://download.pytorch.org/whl/cpu

ejax export RUN --to exported
python examples/deploy_torch.py exported

plays the episode that the export holds, that of ``ejax evaluate RUN --episodes 1``, and prints both returns.
PushCube needs mujoco and no ejax, other tasks ejax (``deployed_task``). Without them the policy answers the export's
own observations, and the difference from JAX's actions is printed.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from deployed_task import play
from numpy.typing import NDArray


def main() -> None:
    parser = argparse.ArgumentParser(description="Drive a task with an exported policy in torch.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="what ejax export wrote")
    parser.add_argument("--torchscript", action="store_true", help="load policy.torchscript instead of policy.pt2")
    parser.add_argument("--pt", action="store_true", help="load policy.pt instead, by loader.zip beside it")
    args = parser.parse_args()
    if args.pt:
        sys.path.insert(0, str(args.directory / "loader.zip"))
        from interop.policy import load_policy

        twin = load_policy(args.directory)  # which keeps a memory itself
        play(args.directory, lambda obs: twin.act(dict(obs) if len(obs) > 1 else next(iter(obs.values()))))
        return
    if args.torchscript:
        policy = torch.jit.load(args.directory / "policy.torchscript")
    else:
        policy = torch.export.load(args.directory / "policy.pt2").module()

    # of a policy with memory: zeros at an episode's start, then what the step before gave
    inputs = json.loads((args.directory / "contract.json").read_text())["observation"]
    memory = [torch.zeros(1, x["shape"][1]) for x in inputs if x["name"] == "memory"]

    @torch.no_grad()
    def act(obs: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        action, *others = policy(*(torch.tensor(x) for x in obs.values()), *memory)
        memory[:] = others[len(others) - len(memory) :]
        return action.numpy()

    play(args.directory, act)


if __name__ == "__main__":
    main()
