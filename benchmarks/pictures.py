"""Cost of a 64x64 picture: MuJoCo's renderer on the host beside the ray caster, and how far their pictures part.

The CPU time and the wall time of a batch of PickPlaceRL and PushCubeRL seen by their experts' cameras, without effects.
``--png`` writes both pictures of PickPlaceRL side by side.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import jax
import numpy as np

from ejax.envs.tasks.pick_place import PickPlaceRL
from ejax.envs.tasks.push_cube import PushCubeRL
from ejax.envs.wrappers.rendered import draw_state
from ejax.experts import pick_place, push_cube
from ejax.types import CameraView

TASKS = {"PickPlaceRL": (PickPlaceRL, pick_place.CAMERA), "PushCubeRL": (PushCubeRL, push_cube.CAMERA)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--no-mujoco", action="store_true", help="for machines without OpenGL")
    parser.add_argument("--png", type=Path)
    args = parser.parse_args()
    print(f"{args.rows} pictures of {args.size}x{args.size} on {jax.devices()[0].device_kind}; ms per picture\n")
    print("| | `mujoco` CPU | wall | `raycast` CPU | wall | compile, CPU | difference, levels |")
    print("|---|---|---|---|---|---|---|")
    results = []
    for name, (make, view) in TASKS.items():
        result = measure(make(physics="mujoco"), view, args)
        results.append({"env": name, **result})
        theirs = [f"{each:.2f} ms" for each in result["mujoco"]] if result["mujoco"] else ["–", "–"]
        mine = [f"{each:.2f} ms" for each in result["raycast"]]
        difference = "–" if result["difference"] is None else f"{result['difference']:.2f}"
        cells = [*theirs, *mine, f"{result['compile_s']:.1f} s", difference]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print(json.dumps(results))
    if args.png:
        write_png(args.png)


def measure(env: Any, view: CameraView, args: argparse.Namespace) -> dict[str, Any]:
    state, _ = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), args.rows))
    draw = jax.jit(jax.vmap(lambda state: draw_state(env, state, args.size, args.size, view)))
    started = time.process_time()
    compiled = draw.lower(state).compile()
    compile_s = time.process_time() - started
    mine = np.asarray(compiled(state)).astype(int)
    cost = spent(lambda: jax.block_until_ready(compiled(state)), args.repeats, args.rows)
    if args.no_mujoco:
        return {"mujoco": None, "raycast": cost, "compile_s": compile_s, "difference": None}
    rows = [jax.tree.map(lambda x, i=i: np.asarray(x[i]), state) for i in range(args.rows)]

    def draw_all() -> Any:
        return np.stack([env.render(row, args.size, args.size, view) for row in rows])

    theirs = draw_all().astype(int)
    return {
        "mujoco": spent(draw_all, max(1, args.repeats // 5), args.rows),
        "raycast": cost,
        "compile_s": compile_s,
        "difference": float(np.abs(mine - theirs).mean()),
    }


def spent(call: Callable[[], Any], repeats: int, rows: int) -> tuple[float, float]:
    """(CPU time of all threads, wall time) in ms per row."""
    call()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(repeats):
        call()
    scale = 1e3 / repeats / rows
    return (time.process_time() - cpu) * scale, (time.perf_counter() - wall) * scale


def write_png(path: Path) -> None:
    env, size = PickPlaceRL(physics="mujoco"), 320
    state, _ = jax.jit(env.reset)(jax.random.key(1))
    state = jax.tree.map(np.asarray, state)
    theirs = env.render(state, size, size, pick_place.CAMERA)
    mine = np.asarray(draw_state(env, state, size, size, pick_place.CAMERA))
    iio.imwrite(path, np.concatenate([theirs, np.full((size, 4, 3), 255, np.uint8), mine], axis=1))


if __name__ == "__main__":
    main()
