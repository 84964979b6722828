"""Physics engines on PushCube: how far ``warp`` and ``mjx`` part from the C engine, and what a control step costs.

Agreement: one control step (4 substeps) from the same states, those of pushes that the C engine has made, and a whole
trajectory of an arm that touches nothing. Speed: each engine and number of rows in its own process.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

from ejax.envs.mujoco.choice import Engine, how_to_install
from ejax.envs.mujoco.engine import Physics, PhysicsState
from ejax.envs.mujoco.models import ASSETS
from ejax.types import Array

ASSET = "push_cube.xml"
ENOUGH_ITERATIONS = 20
"""Iterations of the solver: more change nothing."""
APART = 1.2e-3
"""m, rad: a step that parts by more is counted."""
# Joint angles 0.1 m behind the cube and 0.1 m past its place: the straight way from one to the other pushes it.
BEHIND_CUBE = (0.321, -1.4, 2.246, -2.416, -1.571, 0.0)
PAST_CUBE = (0.387, -1.132, 1.856, -2.295, -1.571, 0.0)
CUBE = (-0.6, -0.4, 0.05, 1.0, 0.0, 0.0, 0.0)
HOME = (0.0, -1.57, 1.57, -1.57, -1.57, 0.0)
FALLING_CUBE = (-0.6, -0.4, 50.0, 1.0, 0.0, 0.0, 0.0)


def main() -> None:
    args = _parser().parse_args()
    if args.time:
        print(json.dumps(time_steps(args.time, args.rows[0])))
        return
    engines = [name for name in args.engines if _is_here(name)]
    num_rows, num_steps = (2, 6) if args.quick else (16, 30)
    result: dict[str, Any] = {"agreement": [], "speed": []}
    if others := [name for name in engines if name != "mujoco"]:
        print(f"\n{num_rows * num_steps} steps of {num_rows} rows beside the C engine, worst (median)\n")
        print(f"| | {' | '.join(f'`{name}` positions | velocities' for name in others)} |")
        print("|---" * (1 + 2 * len(others)) + "|", flush=True)
        for case in compare(others, num_rows, num_steps, quick=args.quick):
            result["agreement"].append(case)
            cells = [f"{_pair(case[name]['qpos'])} | {_pair(case[name]['qvel'])}" for name in others]
            print(f"| {case['case']} | {' | '.join(cells)} |", flush=True)
        for case in result["agreement"]:
            counts = ", ".join(f"{name} {case[name]['num_apart']} of {case[name]['num_steps']}" for name in others)
            print(f"\n{case['case']}: apart by more than {APART:g}: {counts}")
        result["from_solution"] = from_solution(engines, num_rows, num_steps)
        print(f"\nPushCube as it is, farthest from the solution ({ENOUGH_ITERATIONS} iterations) in one control step:")
        print(", ".join(f"{name} {far:.2g}" for name, far in result["from_solution"].items()))
    print("\nCPU time of one control step of one row, ms (first call, s)\n")
    print(f"| rows | {' | '.join(f'`{name}`' for name in engines)} |\n{'|---' * (1 + len(engines))}|", flush=True)
    for rows in [2] if args.quick else args.rows:
        timings = {name: _time_in_process(name, rows, args.limit) for name in engines}
        result["speed"].append({"rows": rows, **timings})
        print(f"| {rows:,} | {' | '.join(_timing(each, args.limit) for each in timings.values())} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


def sweep(num_rows: int, num_steps: int) -> tuple[PhysicsState, Array]:
    """Start state, leaves [N, ...], and controls [T, N, 6]; every row pushes the cube a little differently."""
    behind, past = jnp.array(BEHIND_CUBE), jnp.array(PAST_CUBE)
    fraction = jnp.linspace(0.0, 1.0, num_steps)[:, None, None]
    ctrl = behind[None, None] + fraction * (past - behind)[None, None]
    offset = 0.01 * jax.random.normal(jax.random.key(0), (num_rows, 6))
    return _at_rest(BEHIND_CUBE + CUBE, num_rows), ctrl + offset[None]


def in_the_air(num_rows: int, num_steps: int) -> tuple[PhysicsState, Array]:
    """Make a case without contact: an arm moves to a pose near its home, a cube falls from far above the floor."""
    pose = jnp.array(HOME) + 0.3 * jax.random.normal(jax.random.key(1), (1, num_rows, 6))
    return _at_rest(HOME + FALLING_CUBE, num_rows), jnp.tile(pose, (num_steps, 1, 1))


def trajectory(physics: Physics, state: PhysicsState, ctrl: Array) -> PhysicsState:
    """States after every control step, leaves [T, N, ...], in one program."""

    def step(state: PhysicsState, ctrl: Array) -> tuple[PhysicsState, PhysicsState]:
        state = jax.vmap(physics.step)(state, ctrl)
        return state, state

    return jax.jit(lambda state, ctrl: jax.lax.scan(step, state, ctrl)[1])(state, ctrl)


def compare(engines: list[Engine], num_rows: int, num_steps: int, *, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield one case after the other, each with what every engine makes of it."""
    pushes, air = sweep(num_rows, num_steps), in_the_air(num_rows, num_steps)
    if not quick:
        name = f"PushCube, solver free to converge ({ENOUGH_ITERATIONS} iterations)"
        yield {"case": name} | _steps_apart(_converging(), engines, *pushes)
    yield {"case": "PushCube as it is (5 iterations)"} | _steps_apart(ASSET, engines, *pushes)
    if not quick:
        yield {"case": "the arm in the air, PushCube as it is"} | _steps_apart(ASSET, engines, *air)
        reference = trajectory(Physics(ASSET, engine="mujoco"), *air)
        made = {name: trajectory(Physics(ASSET, engine=name), *air) for name in engines}
        apart = {name: _apart(each, reference) for name, each in made.items()}
        yield {"case": f"the same, {num_steps} control steps at a stretch"} | apart


def from_solution(engines: list[Engine], num_rows: int, num_steps: int) -> dict[str, float]:
    """Measure how far each engine's 5 iterations leave a position off the solution, m or rad, at worst."""
    state, ctrl = sweep(num_rows, num_steps)
    before = _along(ASSET, state, ctrl)
    solution = _step(Physics(_converging(), engine="mujoco"), before, ctrl)
    made = {name: _step(Physics(ASSET, engine=name), before, ctrl) for name in engines}
    return {name: float(np.abs(each.qpos - solution.qpos).max()) for name, each in made.items()}


def time_steps(engine: Engine, num_rows: int) -> dict[str, float]:
    """Seconds of this process."""
    state, ctrl = sweep(num_rows, 30)
    step = jax.jit(jax.vmap(Physics(ASSET, engine=engine).step))
    began = time.perf_counter()
    jax.block_until_ready(step(state, ctrl[0]))
    first = time.perf_counter() - began
    num_steps = 30 if num_rows < 100 else 6
    began, worked = time.perf_counter(), _cpu_time()
    for i in range(num_steps):
        state = jax.block_until_ready(step(state, ctrl[i]))
    steps = num_steps * num_rows
    return {"first": first, "cpu": (_cpu_time() - worked) / steps, "wall": (time.perf_counter() - began) / steps}


def _is_here(engine: Engine) -> bool:
    how = how_to_install(engine)
    if how:
        print(f"{engine}: skipped, it is not installed: {how}")
    return how is None


def _at_rest(qpos: tuple[float, ...], num_rows: int) -> PhysicsState:
    return PhysicsState(qpos=jnp.tile(jnp.array(qpos), (num_rows, 1)), qvel=jnp.zeros((num_rows, 12)))


def _converging() -> str:
    """PushCube's model, with as many iterations as its solver needs."""
    spec = mujoco.MjSpec.from_file(str(ASSETS / ASSET))
    spec.option.iterations = spec.option.ls_iterations = ENOUGH_ITERATIONS
    spec.compile()
    return spec.to_xml()


def _steps_apart(asset: str, engines: list[Engine], state: PhysicsState, ctrl: Array) -> dict[str, Any]:
    """Take one control step from each state that the C engine comes through."""
    before = _along(asset, state, ctrl)
    reference = _step(Physics(asset, engine="mujoco"), before, ctrl)
    return {name: _apart(_step(Physics(asset, engine=name), before, ctrl), reference) for name in engines}


def _along(asset: str, state: PhysicsState, ctrl: Array) -> PhysicsState:
    """Return the states before every step of the C engine's trajectory, leaves [T, N, ...]."""
    after = trajectory(Physics(asset, engine="mujoco"), state, ctrl)
    return jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest[:-1]]), state, after)


@partial(jax.jit, static_argnames="physics")
def _step(physics: Physics, state: PhysicsState, ctrl: Array) -> PhysicsState:
    """Take one control step of each of [T, N] states, N at a time: with all at once MJX has hung on two cores."""
    return jax.lax.map(lambda rows: jax.vmap(physics.step)(*rows), (state, ctrl))


def _apart(made: PhysicsState, reference: PhysicsState) -> dict[str, Any]:
    """Return the largest difference within each row."""
    qpos = np.abs(made.qpos - reference.qpos).max(-1)
    qvel = np.abs(made.qvel - reference.qvel).max(-1)
    return {
        "qpos": {"worst": float(qpos.max()), "median": float(np.median(qpos))},
        "qvel": {"worst": float(qvel.max()), "median": float(np.median(qvel))},
        "num_apart": int((qpos > APART).sum()),
        "num_steps": qpos.size,
    }


def _time_in_process(engine: Engine, num_rows: int, limit: float) -> dict[str, float] | None:
    """Time a measurement in its own process; None: not done within the limit."""
    command = [sys.executable, __file__, "--time", engine, "--rows", str(num_rows)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit, check=True)
    except subprocess.TimeoutExpired:
        return None
    return json.loads(done.stdout.splitlines()[-1])


def _cpu_time() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _pair(distance: dict[str, float]) -> str:
    return f"{distance['worst']:.2g} ({distance['median']:.1e})"


def _timing(seconds: dict[str, float] | None, limit: float) -> str:
    if seconds is None:
        return f"not done after {limit:.0f} s"
    return f"{1e3 * seconds['cpu']:.2g} ({seconds['first']:.2g})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name in get_args(Engine) if name != "auto"]
    parser.add_argument("--engines", nargs="+", choices=names, default=["mujoco", "warp", "mjx"], help="default: all")
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 1024], help="to time (default: 8 1024)")
    parser.add_argument("--limit", type=float, default=120.0, metavar="S", help="of one timing (default: 120)")
    parser.add_argument("--quick", action="store_true", help="one case, two short pushes, two rows: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures there")
    parser.add_argument("--time", choices=names, help=argparse.SUPPRESS)  # what a timing's own process does
    return parser


if __name__ == "__main__":
    main()
