"""Cost of crossing between JAX and torch: rollouts in each layout, both ways, and a torch environment's steps.

Needs ``pip install -e '.[torch]'``. All programs are timed alternately, A B C A B C; figures are medians.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium
import jax
import numpy as np
import torch

from ejax.distributions import Normal
from ejax.envs.host.guarded import GuardedEnv
from ejax.types import HostEnv, Rollout
from interop.envs import TorchVector
from interop.tensordict import rollout_from_tensordict, rollout_to_tensordict

NUM_STEPS, NUM_ENVS, OBS_SIZE, ACTION_SIZE = 1024, 64, 59, 8
LAYOUTS = ("seed", "head", "pr122")
ENV_SIZES = (64, 4096)
STEPS_PER_TIMING = 100


class Still:
    """An environment that does next to nothing, so that its steps take as long as the crossing; 1% of its rows end."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (OBS_SIZE,))
        self.single_action_space = gymnasium.spaces.Box(-1.0, 1.0, (ACTION_SIZE,))
        self.obs = torch.randn(num_envs, OBS_SIZE)
        self.reward = torch.randn(num_envs)
        self.never = torch.zeros(num_envs, dtype=torch.bool)
        self.sometimes = torch.rand(num_envs) < 0.01

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[torch.Tensor, dict[str, Any]]:
        del seed, options
        return self.obs, {}

    def step(self, action: torch.Tensor) -> tuple[Any, ...]:
        del action
        info = {"success": self.never, "metrics": {"distance": self.reward}, "final_obs": self.obs}
        return self.obs, self.reward, self.never, self.sometimes, info

    def close(self) -> None:
        """Nothing to close."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every timing in seconds")
    args = parser.parse_args()
    programs = {**rollout_programs(), **env_programs()}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for program in programs.values():
        program()  # compile, allocate
    for _ in range(args.repeats):
        for name, program in programs.items():
            start = time.perf_counter()
            program()
            seconds[name].append(time.perf_counter() - start)
    size = sum(x.nbytes for x in jax.tree.leaves(make_rollout()))
    print(f"rollout [{NUM_STEPS}, {NUM_ENVS}], {OBS_SIZE} observations, {ACTION_SIZE} actions: {size / 2**20:.1f} MiB")
    for name, times in seconds.items():
        count = STEPS_PER_TIMING if name.startswith("step") else 1
        middle, best = median(times) / count, min(times) / count
        print(f"{name:<40} {middle * 1e3:9.4f} ms, best {best * 1e3:9.4f} ms; {1.0 / middle:10,.0f} a second")
    if args.json:
        args.json.write_text(json.dumps(seconds))


def rollout_programs() -> dict[str, Callable[[], object]]:
    rollout = make_rollout()
    last_obs = rollout.obs[-1]
    programs: dict[str, Callable[[], object]] = {}
    for layout in LAYOUTS:
        there = rollout_to_tensordict(rollout, layout, last_obs=last_obs)
        for copy in (True, False):
            how = "copied" if copy else "zero-copy"
            to = partial(rollout_to_tensordict, rollout, layout, last_obs=last_obs, copy=copy)
            programs[f"{layout}, to torch, {how}"] = to
            programs[f"{layout}, to JAX, {how}"] = partial(_back, there, layout, copy)
    return programs


def env_programs() -> dict[str, Callable[[], object]]:
    programs: dict[str, Callable[[], object]] = {}
    for num_envs in ENV_SIZES:
        env = Still(num_envs)
        action = np.zeros((num_envs, ACTION_SIZE), np.float32)
        adapted = TorchVector(env)
        guarded = GuardedEnv(
            TorchVector(env), partial(TorchVector, env), recipe={"id": "still"}, folder=Path("quarantine")
        )
        programs[f"step of {num_envs}, torch alone"] = partial(_step_torch, env, torch.from_numpy(action))
        for name, host in (("as a HostEnv", adapted), ("as a run has it, guarded", guarded)):
            host.reset(np.arange(num_envs, dtype=np.uint32))
            programs[f"step of {num_envs}, {name}"] = partial(_step, host, action)
    return programs


def make_rollout() -> Rollout:
    """Random numbers on the CPU, with the distribution that acted."""
    rng = np.random.default_rng(0)
    shape = (NUM_STEPS, NUM_ENVS)

    def normal(*width: int) -> jax.Array:
        return jax.numpy.asarray(rng.normal(size=(*shape, *width)), jax.numpy.float32)

    flags = jax.numpy.asarray(rng.random(shape) < 0.01)
    return Rollout(
        obs=normal(OBS_SIZE),
        action=normal(ACTION_SIZE),
        log_prob=normal(),
        value=normal(),
        next_value=normal(),
        reward=normal(),
        terminated=flags,
        truncated=flags,
        distribution=Normal(normal(ACTION_SIZE), normal(ACTION_SIZE)),
    )


def _back(there: Any, layout: Any, copy: bool) -> None:
    jax.block_until_ready(rollout_from_tensordict(there, layout, copy=copy))


def _step_torch(env: Still, action: torch.Tensor) -> None:
    with torch.no_grad():
        for _ in range(STEPS_PER_TIMING):
            env.step(action)


def _step(env: HostEnv, action: Any) -> None:
    for _ in range(STEPS_PER_TIMING):
        env.step(action)


if __name__ == "__main__":
    main()
