"""Speed and success of the scripted experts: each figure in its own process.

Compilation is timed apart from the rest. Pictures are drawn of episodes that succeeded only. ``--frames`` draws each
segment's last step of one episode of the first two tasks, ``--sentences`` what three instructions make of one scene.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

TASKS = ("push_cube", "pick_place", "instructed_place")
IMAGE = (64, 64)


def main() -> None:
    args = _parse()
    if args.frames:
        _draw_segments(args.frames)
    if args.sentences:
        _draw_sentences(args.sentences)
    if args.frames or args.sentences:
        return
    rows = []
    cores = sorted(os.sched_getaffinity(0))
    print("task              cores  image   success  episodes/s  steps/s  mean length  compile s")
    for task in args.tasks:
        for used in [cores[:1], cores] if len(cores) > 1 else [cores]:
            for image in (None, IMAGE) if args.images else (None,):
                request = {"task": task, "image": image, "num_envs": args.num_envs, "noise": args.noise}
                request["env"] = args.env
                episodes = args.episodes // (8 if image else 1)  # drawing in software is what takes long
                rows.append(_in_process({**request, "episodes": episodes, "cores": used}))
                _print(rows[-1])
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=512, help="attempts per figure; an eighth with pictures")
    parser.add_argument("--num-envs", type=int, default=64, help="environments side by side")
    parser.add_argument("--noise", type=float, default=0.15, help="of the actions, as a part of half their range")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--env", type=json.loads, metavar="JSON", help="fields of the environment")
    parser.add_argument("--images", action=argparse.BooleanOptionalAction, default=True, help="figures with pictures")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--frames", type=Path, help="draw the segments there instead")
    parser.add_argument("--sentences", type=Path, help="draw there what three instructions make of one scene, instead")
    return parser.parse_args()


def _in_process(request: dict[str, Any]) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure, (request,))


def _measure(request: dict[str, Any]) -> dict[str, Any]:
    os.sched_setaffinity(0, request["cores"])  # before jax and the C engine count the cores
    os.environ["JAX_PLATFORMS"] = "cpu"
    from ejax.data import Episode

    module = importlib.import_module(f"ejax.experts.{request['task']}")
    options = {"num_envs": request["num_envs"], "noise": request["noise"], "image_size": request["image"]}
    task = module.make_task(env=request["env"], **options)
    start = time.perf_counter()
    task.attempt(0)
    first = time.perf_counter() - start
    start, lengths, attempts, calls = time.perf_counter(), [], 0, 0
    while attempts < request["episodes"]:
        outcomes = task.generate(calls + 1)
        lengths += [len(each.segment_id) for each in outcomes if isinstance(each, Episode)]
        attempts, calls = attempts + len(outcomes), calls + 1
    elapsed = time.perf_counter() - start
    start = time.perf_counter()
    task.attempt(0)
    again = time.perf_counter() - start
    return {
        **request,
        "cores": len(request["cores"]),
        "attempts": attempts,
        "success_rate": len(lengths) / attempts,
        "episodes_per_s": len(lengths) / elapsed,
        "steps_per_s": sum(lengths) / elapsed,
        "mean_length": sum(lengths) / len(lengths),
        "compile_s": first - again,
    }


def _print(row: dict[str, Any]) -> None:
    image = "x".join(map(str, row["image"])) if row["image"] else "-"
    print(
        f"{row['task']:17} {row['cores']:5}  {image:6} {row['success_rate']:8.3f} {row['episodes_per_s']:11.1f} "
        f"{row['steps_per_s']:8.0f} {row['mean_length']:12.1f} {row['compile_s']:10.1f}",
        flush=True,
    )


def _draw_segments(path: Path) -> None:
    import jax
    import matplotlib.pyplot as plt
    import numpy as np

    pictures = []
    for name in TASKS[:2]:
        module = importlib.import_module(f"ejax.experts.{name}")
        task = module.make_task(num_envs=8)
        attempts = task.attempt(3)
        row = int(np.flatnonzero(attempts.success)[1])
        segment = attempts.segment[: attempts.length[row], row]
        camera = module.CAMERA._replace(effects=True)
        for i, title in enumerate(task._expert.segments):
            last = np.flatnonzero(segment == i)[-1]
            state = jax.tree.map(lambda x, row=row, last=last: x[last, row], attempts.state)
            pictures.append((f"{name.split('_')[0]}: {title}", task.env.render(state, 320, 240, camera)))
    figure, axes = plt.subplots(2, 5, figsize=(12.5, 4.3), layout="constrained")
    for axis, (title, picture) in zip(axes.flat, pictures, strict=True):
        axis.imshow(picture)
        axis.set_title(title, fontsize=9)
        axis.axis("off")
    figure.savefig(path, dpi=100)


def _draw_sentences(path: Path) -> None:
    import jax
    import jax.numpy as jnp
    import matplotlib.pyplot as plt
    import numpy as np

    from ejax.envs.tasks.place_instructions import COLOURS, LENGTH, MEANING, ZONES
    from ejax.experts.instructed_place import InstructedPlaceExpert, make_task
    from ejax.numerics.text import as_bytes
    from ejax.types import CameraView

    env = make_task().env
    one = env.reset(jax.random.key(1))[0]
    colours = [list(COLOURS)[colour] for colour in one.colours]
    wanted = [(colours[0], "left"), (colours[1], "middle"), (colours[1], "right")]
    texts = [next(text for text, pair in MEANING.items() if pair == each) for each in wanted]
    state = jax.tree.map(lambda x: jnp.stack([x] * len(texts)), one).replace(
        target_cube=jnp.array([colours.index(colour) for colour, _ in wanted]),
        target_zone=jnp.array([ZONES.index(zone) for _, zone in wanted]),
        instruction=jnp.stack([jnp.asarray(as_bytes(text, LENGTH)) for text in texts]),
    )
    # from above the robot's shoulder: its left is the picture's left
    camera = CameraView(eye=(-0.45, -0.15, 1.3), target=(-0.7, -0.15, 0.0), fovy=40.0)
    pictures = [("before", env.render(one, 320, 240, camera))]
    expert, step = InstructedPlaceExpert(env), jax.jit(jax.vmap(env.step))
    variation, segment = expert.vary(np.random.default_rng(0), len(texts)), np.zeros(len(texts), int)
    obs, keys = (
        jax.vmap(lambda one: env.observe(env.world(one)))(state),
        jax.random.split(jax.random.key(0), len(texts)),
    )
    for t in range(110):
        action, segment = expert.act(jax.tree.map(np.asarray, obs), segment, variation)
        if t >= 80:  # out of the picture: up, and back to the robot
            action = np.array([[0.0, 0.0, 1.0, -1.0] if t < 85 else [1.0, 0.0, 0.3, -1.0]] * len(texts))
        state, timestep = step(state, jnp.asarray(action, jnp.float32), keys)
        obs = timestep.obs
    ends = [jax.tree.map(lambda x, row=row: x[row], state) for row in range(len(texts))]
    pictures += [(text, env.render(end, 320, 240, camera)) for text, end in zip(texts, ends, strict=True)]
    figure, axes = plt.subplots(1, len(pictures), figsize=(12.5, 2.7), layout="constrained")
    for axis, (title, picture) in zip(axes.flat, pictures, strict=True):
        axis.imshow(picture)
        axis.set_title(title, fontsize=8)
        axis.axis("off")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
