"""Drive a task from text with an exported vision-language-action policy, which runs in a process without jax.

ejax export RUN --to exported --formats pt,onnx
python examples/deploy_vla.py exported                     # the child needs torch and numpy
python examples/deploy_vla.py exported --runtime onnx      # the child needs onnxruntime and numpy
python examples/deploy_vla.py exported --say "put the red cube in the left zone"

Two processes. The child is the robot's controller: it is sent pictures, joint angles and an instruction as text, and
answers with actions. The parent is the world: it steps ejax's environment, from the starts of
``ejax evaluate RUN --seed SEED``. With ``--say`` the instruction is yours and not the episode's.
"""

import argparse
import io
import json
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[1]
_UNWANTED = {"torch": ("jax", "flax"), "onnx": ("jax", "flax", "torch")}


class Controller(Protocol):
    """``{"image": [N, H, W, 3], "state": [N, F], "instruction": [N] of str} -> [N, K·A]``"""

    def __call__(self, obs: Mapping[str, Any]) -> NDArray[np.float32]: ...


def serve(directory: Path, runtime: str, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer observations, as the child, until there are no more."""
    sys.path.append(str(directory / "loader.zip"))  # where ejax's folder is not here
    if runtime == "torch":
        from interop.policy import load_policy
    else:
        from interop.onnx_policy import load_policy
    policy = load_policy(directory)
    while (obs := _receive(requests)) is not None:
        _send(answers, {"action": policy.act(obs)})
        if there := [name for name in _UNWANTED[runtime] if sys.modules.get(name) is not None]:
            raise RuntimeError(f"the controller has imported {', '.join(there)}")


@contextmanager
def controller(directory: Path, runtime: str, start: Sequence[str] | None = None) -> Iterator[Controller]:
    """Start the child, and return it as a function.

    Args:
        start: the command line that calls ``serve``. None: this file's.
    """
    command = start or (sys.executable, __file__, str(directory), "--runtime", runtime, "--serve")
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        if child.stdin is None or child.stdout is None:
            raise RuntimeError("the controller has no pipes")
        requests, answers = child.stdin, child.stdout

        def ask(obs: Mapping[str, Any]) -> NDArray[np.float32]:
            _send(requests, obs)
            answer = _receive(answers)
            if answer is None:
                raise RuntimeError(f"the controller has ended, exit code {child.wait()}; its message is above")
            return answer["action"]

        yield ask


def play(
    env: Any, ask: Controller, spec: Mapping[str, Any], *, episodes: int, seed: int, say: str | None = None
) -> list[dict[str, Any]]:
    """Episodes of the environment, all at once.

    Args:
        spec: of the policy, ``policy.json``.
        say: the instruction. None: those of the episodes.

    Returns:
        For each its ``instruction``, ``return``, ``length`` and, where the environment reports it, ``success``.
    """
    import jax

    from ejax.rollout import reset, step

    one_step = jax.jit(step, static_argnames="env")
    key_reset, key_steps = jax.random.split(jax.random.key(seed))
    carry = reset(env, key_reset, episodes)
    running = np.ones(episodes, bool)
    records: list[dict[str, Any]] = [{"return": 0.0, "length": 0} for _ in range(episodes)]
    for t in range(env.max_episode_steps):
        obs = {name: np.asarray(carry.obs[name]) for name in (*spec["images"], *spec["observation"])}
        texts = _texts(carry.obs, spec, episodes) if say is None else [say] * episodes
        if texts:
            obs[spec["text"]["part"]] = np.array(texts)
        carry, timestep = one_step(env, carry, ask(obs), jax.random.fold_in(key_steps, t))
        for i in np.flatnonzero(running):
            record = records[i]
            record.setdefault("instruction", texts[i] if texts else spec["text"]["instruction"])
            record["return"] += float(timestep.reward[i])
            record["length"] += 1
            if "success" in timestep.info:
                record["success"] = bool(timestep.info["success"][i])
        running &= ~np.asarray(timestep.terminated | timestep.truncated)
        if not running.any():
            break
    return records


def answer_recorded(directory: Path, ask: Controller, say: str, most: int = 16) -> str:
    """Let the policy answer pictures and joint angles of ``observations.npz``, and an instruction, as text."""
    spec = json.loads((directory / "policy.json").read_text())
    with np.load(directory / "observations.npz", allow_pickle=False) as file:
        names = (*spec["images"], *spec["observation"])
        obs = {name: file[f"environment/observation/{name}"][:most] for name in names}
    rows = len(next(iter(obs.values())))
    action = ask({**obs, spec["text"]["part"]: np.array([say] * rows)})
    return f"{rows} observations, {say!r}: actions {list(action.shape)}, from {action.min():.3f} to {action.max():.3f}"


def _texts(obs: Mapping[str, Any], spec: Mapping[str, Any], episodes: int) -> list[str]:
    """Return the environment's words, as a person would say them; nothing where it has none."""
    if spec["text"]["part"] not in obs:
        return []
    rows = np.asarray(obs[spec["text"]["part"]])
    return [rows[i].tobytes().rstrip(b"\0").decode() for i in range(episodes)]


def _send(stream: BinaryIO, arrays: Mapping[str, Any]) -> None:
    """Send the length of an .npz in 8 bytes, then the .npz."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    stream.write(struct.pack("<Q", file.tell()) + file.getvalue())
    stream.flush()


def _receive(stream: BinaryIO) -> dict[str, NDArray[Any]] | None:
    """Receive what ``_send`` sent; None at the end."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    with np.load(io.BytesIO(stream.read(*struct.unpack("<Q", head))), allow_pickle=False) as file:
        return dict(file)


def main() -> None:
    parser = argparse.ArgumentParser(description="Drive a task from text with an exported policy, without jax.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="what ejax export wrote")
    parser.add_argument("--runtime", choices=("torch", "onnx"), default="torch", help="of the child")
    parser.add_argument("--episodes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--say", metavar="TEXT", help="the instruction; default: those of the episodes")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    directory: Path = args.directory.resolve()
    if args.serve:
        serve(directory, args.runtime, sys.stdin.buffer, sys.stdout.buffer)
        return
    try:
        from ejax.config.models import EnvConfig
        from ejax.training.environments import make_env
    except ModuleNotFoundError as error:
        print(f"the task is not played: {error.name} is not installed. The export's own observations instead:")
        with controller(directory, args.runtime) as ask:
            print(answer_recorded(directory, ask, args.say or "put the red cube in the left zone"))
        return
    contract, spec = (json.loads((directory / f"{name}.json").read_text()) for name in ("contract", "policy"))
    named = EnvConfig(**{key: contract["env"][key] for key in EnvConfig.model_fields if key in contract["env"]})
    env = make_env(named.id, named.cfg, num_envs=args.episodes, wrappers=named.layers)
    with controller(directory, args.runtime) as ask:
        for record in play(env, ask, spec, episodes=args.episodes, seed=args.seed, say=args.say):
            outcome = f"success {record['success']}  " if "success" in record else ""
            print(f"return {record['return']:.5f}  length {record['length']}  {outcome}{record['instruction']!r}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # started as a file, Python looks for modules beside it
    main()
