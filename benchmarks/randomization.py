"""Cost of randomization: CPU time of PushCube's control steps with and without it, alternating in one process.

Each round takes the same number of control steps of both, of the same episodes; actions are random. The ranges are so
narrow that the physics stays what it is: a lighter cube or a stiffer arm has other contacts, which cost more or less by
themselves. Times are the least of all rounds, of all threads together: other work on the machine only adds.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any, get_args

import jax

from ejax.envs.mujoco.choice import Engine, how_to_install
from ejax.envs.tasks.push_cube import PushCubeRL
from ejax.envs.wrappers.randomized import RandomizedEnv
from ejax.rollout import EnvCarry, reset, step
from ejax.types import Array, Key

CUBE, ROBOT = {"uid": "cube"}, {"uid": "robot"}
PHYSICS = {
    "mass": {"func": "randomize_rigid_object_mass", "params": {"entity_cfg": CUBE, "mass_range": [2.0, 2.0001]}},
    "friction": {
        "func": "randomize_rigid_object_friction",
        "params": {"entity_cfg": CUBE, "friction_range": [0.6, 0.6001]},
    },
    "drives": {
        "func": "randomize_drive_gains",
        "params": {"entity_cfg": ROBOT, "stiffness_range": [1.0, 1.0001], "damping_range": [1.0, 1.0001]},
    },
}
SENSING = {
    "noise": {"func": "add_observation_noise", "params": {"noise": 1e-6, "bias_range": [-1e-6, 1e-6]}},
    "delay": {"func": "delay_action", "params": {"steps_range": [0.0, 1e-4]}},
}
CASES: dict[str, dict[str, Any]] = {
    "physics, once (startup)": {name: {**event, "mode": "startup"} for name, event in PHYSICS.items()},
    "physics, each episode": PHYSICS,
    "noise and delay": SENSING,
    "all of it, each episode": PHYSICS | SENSING,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["mujoco"], choices=get_args(Engine)[1:])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100, help="control steps of a round, as long as an episode")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    print(f"{args.rows} rows, {args.rounds} rounds of {args.steps} control steps; CPU time of one step of one row\n")
    print("| engine | events | without, ms | with, ms | ratio |\n|---|---|---|---|---|")
    for engine in args.engines:
        if how := how_to_install(engine):
            print(f"| `{engine}` | – | not installed: {how} | | |")
            continue
        for name, events in CASES.items():
            plain = PushCubeRL(physics=engine)
            without, with_events = compare(plain, RandomizedEnv(plain, events), args.rows, args.steps, args.rounds)
            ratio = with_events / without
            print(f"| `{engine}` | {name} | {without:.4f} | {with_events:.4f} | {ratio:.3f} |", flush=True)


def compare(plain: Any, randomized: Any, num_rows: int, num_steps: int, num_rounds: int) -> tuple[float, float]:
    """ms of one control step of one row, the least."""
    players = [_player(env, num_rows, num_steps) for env in (plain, randomized)]
    times: list[list[float]] = [[], []]
    for i in range(num_rounds + 1):
        for play, spent in zip(players, times, strict=True):
            start = time.process_time()
            play(jax.random.key(i))
            spent.append(time.process_time() - start)
    first, second = (1e3 * min(spent[1:]) / num_steps / num_rows for spent in times)  # the first compiles
    return first, second


def _player(env: Any, num_rows: int, num_steps: int) -> Callable[[Key], None]:
    """Play a round: the episodes go on from the round before."""

    @jax.jit
    def run(carry: EnvCarry, key: Key) -> EnvCarry:
        def one(carry: EnvCarry, key: Key) -> tuple[EnvCarry, Array]:
            key_action, key_step = jax.random.split(key)
            action = jax.random.uniform(key_action, (num_rows, 6), minval=-0.5, maxval=0.5)
            carry, timestep = step(env, carry, action, key_step)
            return carry, timestep.reward

        return jax.lax.scan(one, carry, jax.random.split(key, num_steps))[0]

    state = [reset(env, jax.random.key(0), num_rows)]

    def play(key: Key) -> None:
        state[0] = jax.block_until_ready(run(state[0], key))

    return play


if __name__ == "__main__":
    main()
