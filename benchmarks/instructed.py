"""Does the instruction decide? Success of policies of InstructedPlaceRL under controls, over fresh episodes.

    python benchmarks/instructed.py clone=outputs/clone tuned=outputs/tuned --episodes 500
    python benchmarks/instructed.py words=outputs/words --sentences benchmarks/notes/sentences.tsv

The rows are the scripted expert, random actions, and the runs that are named. A policy that follows the
instruction, and not what is meant, succeeds in one of six episodes with a shuffled instruction.
"""

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejax.envs.tasks.instructed_place import InstructedPlaceRL, Question
from ejax.envs.tasks.place_instructions import COLOURS, LENGTH, ZONES
from ejax.numerics.text import as_bytes
from ejax.schema.trust import trust

CONTROLS: dict[str, dict[str, Any]] = {
    "right": {},
    "shuffled": {"instruction": "shuffled"},
    "held-out wordings": {"wordings": "held_out"},
    "held-out pairs": {"pairs": "held_out"},
}
"""Fields of InstructedPlaceRL."""
BLANK = "blank picture"
SENTENCES = "other sentences"
COLUMNS = (*CONTROLS, BLANK, SENTENCES)
_OWN = "instructed:OtherSentences"


@dataclass(frozen=True)
class OtherSentences(InstructedPlaceRL):
    """The task with the sentences of a file: lines of a colour, a zone and a text, separated by tabs."""

    sentences: str = ""

    def _draw_task(self, key: jax.Array) -> dict[str, Any]:
        rows = [line.split("\t") for line in Path(self.sentences).read_text(encoding="utf-8").splitlines()]
        texts = jnp.asarray(np.stack([as_bytes(text, LENGTH) for *_, text in rows]))
        colours = jnp.asarray([list(COLOURS).index(colour) for colour, *_ in rows])
        key_text, key_other, key_cube = jax.random.split(key, 3)
        i, cube = jax.random.randint(key_text, (), 0, len(rows)), jax.random.randint(key_cube, (), 0, 2)
        other = (colours[i] + jax.random.randint(key_other, (), 1, len(COLOURS))) % len(COLOURS)
        asked = Question(cube, jnp.zeros(2, jnp.int32), jnp.stack([texts[i], texts[i]])) if self.ask_others else None
        return {
            "other": asked,  # which evaluations do not read
            "colours": jnp.where(jnp.arange(2) == cube, colours[i], other),
            "target_cube": cube,
            "target_zone": jnp.asarray([ZONES.index(zone) for _, zone, _ in rows])[i],
            "instruction": texts[i],
        }


def main() -> None:
    args = _parse()
    print("| policy | " + " | ".join(COLUMNS) + " |")
    print("|---" * (len(COLUMNS) + 1) + "|", flush=True)
    table: dict[str, dict[str, float]] = {}
    if args.baselines:
        table["expert"] = {name: _expert(env, args.episodes) for name, env in CONTROLS.items()}
        _print("expert", table)
        table["random"] = {name: _random(env, args.episodes, args.seed) for name, env in CONTROLS.items()}
        _print("random", table)
    began = time.monotonic()
    for name, run in args.runs:
        table[name] = {control: _success(run, env, args) for control, env in CONTROLS.items()}
        table[name] |= {BLANK: _success(run, {}, args, "env.wrappers.RenderedEnv.blank=true")}
        if args.sentences:
            trust(_OWN)
            table[name] |= {SENTENCES: _success(run, {"sentences": args.sentences}, args, f"env.id={_OWN}")}
        _print(name, table)
    print(f"\n{args.episodes} episodes each; the runs took {time.monotonic() - began:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(table, indent=2))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=_named, metavar="NAME=RUN", help="folders of runs")
    parser.add_argument("--episodes", type=int, default=500, metavar="N")
    parser.add_argument("--seed", type=int, default=20260, help="of the start states; not that of any training")
    parser.add_argument("--baselines", action=argparse.BooleanOptionalAction, default=True, help="expert and random")
    parser.add_argument("--sentences", type=Path, metavar="FILE", help="another column: those of OtherSentences")
    parser.add_argument("--json", type=Path, help="write the figures there")
    return parser.parse_args()


def _named(text: str) -> tuple[str, Path]:
    name, given, path = text.partition("=")
    if not given or not Path(path).is_dir():
        raise argparse.ArgumentTypeError(f"pass NAME=FOLDER of a run, got {text!r}")
    return name, Path(path)


def _print(name: str, table: Mapping[str, Mapping[str, float]]) -> None:
    cells = [f"{table[name][control]:.3f}" if control in table[name] else "–" for control in COLUMNS]
    print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def _success(run: Path, env: Mapping[str, Any], args: argparse.Namespace, *overrides: str) -> float:
    from ejax.play.saved_policy import evaluate_run

    fields = [f"env.cfg.{name}={value}" for name, value in env.items()]
    found: Any = evaluate_run(run, [*fields, *overrides], num_episodes=args.episodes, num_envs=50, seed=args.seed)
    return float(found["eval/success_rate"])


def _expert(env: Mapping[str, Any], num_episodes: int) -> float:
    """Score the expert, which reads the meaning: a shuffled instruction changes nothing."""
    from ejax.data import Episode
    from ejax.experts.instructed_place import make_task

    task = make_task(env=env, num_envs=100)
    outcomes = [each for call in range(-(-num_episodes // 100)) for each in task.generate(call)]
    return sum(isinstance(each, Episode) for each in outcomes) / len(outcomes)


def _random(fields: Mapping[str, Any], num_episodes: int, seed: int) -> float:
    from ejax.types import Array, Key

    env = InstructedPlaceRL(physics="mujoco", **fields)

    def one_step(carry: tuple[Any, Array, Array], key: Key) -> tuple[tuple[Any, Array, Array], None]:
        state, success, done = carry
        action = jax.random.uniform(key, (num_episodes, 4), minval=-1.0, maxval=1.0)
        state, timestep = jax.vmap(lambda state, action: env.step(state, action, key))(state, action)
        success |= timestep.info["success"] & ~done
        return (state, success, done | timestep.terminated | timestep.truncated), None

    @jax.jit
    def play(key: Key) -> Array:
        key_start, key_actions = jax.random.split(key)
        state, _ = jax.vmap(env.reset)(jax.random.split(key_start, num_episodes))
        nothing = jnp.zeros(num_episodes, bool)
        keys = jax.random.split(key_actions, env.max_episode_steps)
        return jax.lax.scan(one_step, (state, nothing, nothing), keys)[0][1]

    return float(play(jax.random.key(seed)).mean())


if __name__ == "__main__":
    main()
