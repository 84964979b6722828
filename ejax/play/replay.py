"""``ejax replay FILE``: play again what led an environment to a NaN or an infinity, or what a robot did.

A file of ``examples/robot_loop.py`` has the robot's observations too: they are compared with the environment's.
"""

import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any
from zipfile import BadZipFile

import jax
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from ejax.config.collector import CollectorConfig
from ejax.envs.description import WHOLE
from ejax.envs.host.calls import HostEnvError, call_env, closing
from ejax.logs.json_records import check_facts
from ejax.numerics.finite import name_nonfinite
from ejax.rollout import reset
from ejax.rollout import step as rollout_step
from ejax.runtime.process_exit import exit_with, refused
from ejax.runtime.tree_text import named_leaves
from ejax.schema.command_line import CommandParser
from ejax.schema.plain_files import a_path, open_plain, parse_json
from ejax.schema.trust import add_trust_option, trust_words
from ejax.training.environments import make_env
from ejax.training.watchdog import guarded_calls
from ejax.types import HostEnv

_MAX_UNPACKED = 1 << 30
_OBSERVED = "observation:"
"""Before the dotted path of an array in a robot's file."""
_TOLERANCE = 1e-3
"""Largest difference |x − y|/(1 + |y|) from an observation of a robot."""
_DAMAGED = (BadZipFile, EOFError, MemoryError, NotImplementedError, RuntimeError, zlib.error)
"""Errors of an archive with odd headers: sizes beyond memory, other ways to pack, encryption."""


class _Recipe(BaseModel):
    id: str
    cfg: dict[str, Any]


class _Quarantined(BaseModel):
    recipe: _Recipe
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    seeded: bool
    complete: bool


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0 where it plays as recorded, a NaN in the last step included."""
    parser = CommandParser("ejax replay", description="Play a quarantined episode again.")
    parser.add_argument("file", type=a_path, metavar="FILE", help="<run>/quarantine/….npz")
    add_trust_option(parser)
    args = parser.parse_args(argv)
    trust_words(args.trust)
    try:
        facts, actions, seen = read(args.file)
        recorded = len(actions)
        ending = "of a robot" if seen else "the last not finite"
        print(f"{facts['recipe']['id']}, seed {facts['seed']}: {recorded} recorded steps, {ending}")
        with guarded_calls(facts["recipe"]["id"], CollectorConfig()):
            if seen:
                return _compare(facts, actions, seen)
            found = replay(facts, actions)
    except (OSError, ValueError, TypeError, ImportError, HostEnvError) as error:
        return refused("ejax replay", error)
    if found is None:
        print("all finite: what broke is not in the start state and the actions")
        return 1
    step, what = found
    print(f"not finite at step {step}: {what}")
    print("this is the recorded step" if step == recorded else f"the recorded step was {recorded}")
    return 0 if step == recorded else 1


def read(file: Path) -> tuple[dict[str, Any], NDArray[Any], dict[str, NDArray[Any]]]:
    """Read an episode's facts, its actions [T, ...], and a robot's observations [T, ...] after them, by dotted path.
    Raises ValueError: it cannot be played again."""
    if not file.is_file():
        raise ValueError(f"{file} is not a file; pass <run>/quarantine/….npz")
    try:
        with open_plain(file) as opened, np.load(opened, allow_pickle=False) as archive:
            if not {"facts", "actions"} <= set(archive.files):
                raise ValueError(f"it has {', '.join(archive.files)}")
            # a small archive may unpack to anything
            if (size := sum(part.file_size for part in archive.zip.infolist())) > _MAX_UNPACKED:
                raise ValueError(f"unpacked it has {size} bytes; at most {_MAX_UNPACKED} are read")
            facts = check_facts(parse_json(str(archive["facts"])), _Quarantined)
            actions = np.atleast_1d(archive["actions"])
            seen = {x.removeprefix(_OBSERVED): archive[x] for x in archive.files if x.startswith(_OBSERVED)}
            if odd := [x for x, each in seen.items() if each.dtype.kind not in "biuf" or len(each) != len(actions)]:
                raise ValueError(f"'{odd[0]}' is not an array of numbers for each of the {len(actions)} actions")
    except (*_DAMAGED, LookupError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a file of ejax's quarantine: {error}") from None
    if not facts["seeded"]:  # its start is not known
        text = f"{file} cannot be played again: {facts['recipe']['id']} does not seed its episodes one by one"
        raise ValueError(text)
    if not facts["complete"]:
        raise ValueError(f"{file} cannot be played again: its episode began before what it holds")
    return facts, actions, seen


def replay(facts: dict[str, Any], actions: NDArray[Any]) -> tuple[int, str] | None:
    """Play the actions in one row from the recorded seed.

    Returns:
        The first step, counted from 1, that is not finite, and what of it; None: all are finite.

    Raises:
        UntrustedCodeError: an environment named as ``package.module:Name``, which nobody trusted.
        ValueError: no host environment, or actions of another shape.
    """
    for step, timestep in enumerate(_play(facts, actions, host_only=True), 1):
        last = {"reward": timestep.reward, "final_obs": timestep.final_obs}
        if what := name_nonfinite(jax.tree.map(lambda x: x[0], last)):
            return step, what
    return None


def _compare(facts: dict[str, Any], actions: NDArray[Any], seen: dict[str, NDArray[Any]]) -> int:
    """Print the largest difference from a robot's observations, within an episode. Returns the exit code."""
    worst, step = (0.0, "none"), 0
    for step, timestep in enumerate(_play(facts, actions), 1):
        played = {name or WHOLE: x[0] for name, x in named_leaves(timestep.final_obs).items()}
        for name, recorded in seen.items():
            if name not in played or recorded[step - 1].shape != played[name].shape:
                raise ValueError(f"'{name}' is {list(recorded.shape[1:])}, which {facts['recipe']['id']} does not give")
            error = np.abs(recorded[step - 1] - played[name]) / (1.0 + np.abs(played[name]))
            worst = max(worst, (float(np.nan_to_num(error, nan=np.inf).max()), f"'{name}' at step {step}"))
        if timestep.done[0]:
            break
    end = f"the episode ends there, of {len(actions)} steps" if step < len(actions) else "all"
    print(f"{step} steps played, {end}; the largest difference |x − y|/(1 + |y|) is {worst[0]:.2g}, of {worst[1]}")
    return int(worst[0] > _TOLERANCE)


def _play(facts: dict[str, Any], actions: NDArray[Any], *, host_only: bool = False) -> Iterator[Any]:
    """Yield the time step of each action in one row; a pure environment plays as ``ejax evaluate --episodes 1``.

    Not by ``ejax.episodes``: the actions are given, and there is no policy.
    """
    name = facts["recipe"]["id"]
    # guarded, as in training: it is known to misbehave
    env = call_env(name, "make", make_env, name, facts["recipe"]["cfg"], num_envs=1)
    if host_only and not isinstance(env, HostEnv):
        raise ValueError(f"{name} is not a host environment")
    with closing(env) if isinstance(env, HostEnv) else nullcontext():
        shape = tuple(env.action_space.shape or ())
        if actions.dtype.kind not in "biuf" or actions.shape[1:] != shape:
            text = f"{name} takes numbers of shape {list(shape)}; record the episode with this environment"
            raise ValueError(f"the actions are {actions.dtype} of shape {list(actions.shape[1:])}, {text}")
        if isinstance(env, HostEnv):
            call_env(name, "reset", env.reset, np.array([facts["seed"]], np.uint32))
            yield from (call_env(name, "step", env.step, action[None]) for action in actions)
            return
        key_reset, key_steps = jax.random.split(jax.random.key(facts["seed"]))
        carry, one_step = reset(env, key_reset, 1), jax.jit(rollout_step, static_argnames="env")
        for i, action in enumerate(actions):
            carry, timestep = one_step(env, carry, action[None], jax.random.fold_in(key_steps, i))
            yield jax.device_get(timestep)


if __name__ == "__main__":
    exit_with(main)
