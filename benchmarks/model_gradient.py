"""Compare the policy's gradient through a learned model with the true one, over horizons, at a run's checkpoints.

    python benchmarks/model_gradient.py RUN [RUN …] --out docs/model_gradient.png

RUNs are of ``model_shac`` in an environment with a gradient, with their checkpoints (``keep_checkpoints``). Prints, and
draws, the cosine over the horizon, and beside the model's error over the horizon on rows that it was not fitted to.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from plots import COLOURS, finish, panels

HORIZONS = (1, 2, 4, 8, 16)
DRAWS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.png")
    args = parser.parse_args()
    draw({run.name: list(measure(run)) for run in args.runs}, args.out)


def measure(run: Path) -> Any:
    """Yield (env steps, horizon, error over it, mean cosine, mean ratio of norms)."""
    import jax
    import jax.numpy as jnp

    from ejax.algorithms.model_shac import certify, model_of
    from ejax.store.checkpoint import load_checkpoint
    from ejax.store.run_dir import open_run_directory
    from ejax.training.build import build

    directory, config = open_run_directory(run)
    parts: Any = build(config)

    @partial(jax.jit, static_argnames="horizon")
    def compare(state: Any, horizon: int) -> Any:
        options: Any = config.algorithm.cfg.model_copy(update={"segment_length": horizon})
        model, own = model_of(options, parts.policy.action_spec, parts.env), state.own
        errors = model.errors(own.dynamics, own.replay, jax.random.key(0), horizon)

        def once(key: Any) -> Any:
            given: Any = {"env": parts.env, "policy": parts.policy, "config": options}
            return certify(state.train, model, own.dynamics, own.replay, jnp.int32(horizon), key, **given)

        return errors[-1], jax.tree.map(jnp.mean, jax.lax.map(once, jax.random.split(jax.random.key(1), DRAWS)))

    print("run, env steps, horizon, error, cosine, ratio of norms")
    for path in directory.periodic():
        state, _ = load_checkpoint(path, parts.state)
        for horizon in HORIZONS:
            error, metrics = compare(state, horizon)
            numbers = [float(x) for x in (error, metrics["model/gradient_cosine"], metrics["model/gradient_ratio"])]
            steps = int(path.name.rpartition("_")[2])
            print(run.name, steps, horizon, *(f"{x:.3f}" for x in numbers), flush=True)
            yield steps, horizon, *numbers


def draw(measured: dict[str, list[Any]], out: Path) -> None:
    figure, axes = panels(["over the horizon", "over the model's error"])
    for colour, (name, rows) in zip(COLOURS, measured.items(), strict=False):
        all_steps = sorted({row[0] for row in rows})
        for j, steps in enumerate(all_steps):
            own = [row for row in rows if row[0] == steps]
            shade: Any = {"color": colour, "alpha": 0.3 + 0.7 * (j + 1) / len(all_steps)}
            label = f"{name}, {steps:,} steps" if j in (0, len(all_steps) - 1) else None
            axes[0].plot([row[1] for row in own], [row[3] for row in own], marker="o", ms=3, label=label, **shade)
            axes[1].scatter([row[2] for row in own], [row[3] for row in own], s=12, **shade)
    axes[0].set(xscale="log", xticks=HORIZONS)
    axes[0].set_xticklabels([str(h) for h in HORIZONS])
    note = "one line for each checkpoint, darker later; 1: the model's gradient points where the true one does"
    cosine = "cosine of the two gradients"
    finish(figure, axes, out, x=("horizon, steps", "error over the horizon"), y=cosine, note=note)


if __name__ == "__main__":
    main()
