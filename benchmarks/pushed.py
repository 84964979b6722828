"""Measure whether a policy of PushCube or PushCubeRL pushes the cube or throws it.

    python benchmarks/pushed.py RUN --episodes 1000 [--sample]

Prints success, the mean length of successful episodes, and by the task's own criterion and by EmbodiChain's (the cube
within 0.1 m of the goal for the first time) the share of successes in which the cube is off the floor: its centre more
than 0.0712 m high, as high as that of a cube that stands on an edge.
"""

import argparse
from pathlib import Path
from typing import Any

HIGH = 0.0712  # m
NEAR = 0.1  # m


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run, or a policy that comes with ejax")
    parser.add_argument("--checkpoint", default="latest", metavar="best|latest|PATH")
    parser.add_argument("--episodes", type=int, default=1000, metavar="N")
    parser.add_argument("--seed", type=int, default=77)
    parser.add_argument("--sample", action="store_true", help="samples of the policy's distribution, not its mode")
    print(measure(parser.parse_args()))


def measure(args: Any) -> dict[str, float]:
    import jax
    import numpy as np

    from ejax.episodes import record_episodes
    from ejax.play.saved_policy import opened_policy, restore_policy
    from ejax.training.environments import build_env

    with opened_policy(args.run, checkpoint=args.checkpoint) as (directory, config, path):
        env: Any = build_env(config, phase="eval", num_envs=args.episodes, quarantine=directory.results / "quarantine")
        policy, params = restore_policy(config, env, path)
    key = jax.random.key(args.seed)
    states, ended = record_episodes(policy, env, params, key, num_envs=args.episodes, samples=args.sample)
    ended = np.asarray(ended)
    end = ended.argmax(axis=0)
    rows = np.arange(args.episodes)
    cube = np.asarray(states.physics.qpos)[..., 6:9]
    distance = np.linalg.norm(cube[..., :2] - np.asarray(states.goal)[..., :2], axis=-1)
    worlds = jax.jit(jax.vmap(lambda state: env.succeeds(env.world(state))))
    success = np.asarray(worlds(jax.tree.map(lambda x: x[end, rows], states)))
    near = (distance < NEAR) & (np.arange(len(distance))[:, None] <= end)  # played on past the end
    first, arrived = near.argmax(axis=0), near.any(axis=0)
    return {
        "success": float(success.mean()),
        "steps": float(end[success].mean() + 1),
        "off the floor, own criterion": float((cube[end, rows, 2] > HIGH)[success].mean()),
        "off the floor, EmbodiChain's": float((cube[first, rows, 2] > HIGH)[arrived].mean()),
    }


if __name__ == "__main__":
    main()
