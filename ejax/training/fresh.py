"""A finished run's figures: its best checkpoint and its last, in episodes that chose neither.

Their seeds are used neither in training nor in the periodic evaluations, the best of which flatters.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt

from ejax.config.models import TrainerConfig
from ejax.evaluation import UNFINISHED_EPISODES
from ejax.logs.json_records import FactsError, read_facts
from ejax.numerics.finite import NONFINITE_EPISODES
from ejax.schema.plain_files import to_json
from ejax.schema.writing import by_product, replace_file
from ejax.store.checkpoint import CheckpointError, load_params, verify_checkpoint
from ejax.types import Params

_FRESH = 0xF4E5  # sets these seeds apart from training and evaluation


class FreshFacts(BaseModel):
    """``evaluations/fresh_<which>.json``; its other keys are tags."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | None]
    checkpoint: str
    step: NonNegativeInt
    episodes: PositiveInt
    seeds: list[int]


def fresh_seeds(trainer: TrainerConfig) -> list[int]:
    """Draw one for each evaluation of ``num_eval_episodes`` that ``final_eval_episodes`` takes; none if it is off."""
    wanted, each = trainer.final_eval_episodes or 0, trainer.num_eval_episodes
    if not trainer.enable_eval:
        return []
    number_of = 1 if wanted == "auto" else math.ceil(wanted / each)
    return np.random.SeedSequence((trainer.seed, trainer.eval_seed, _FRESH)).generate_state(number_of).tolist()


def best_or_last(best: Path | None, last: Path, note: Callable[[str], None]) -> Path:
    """Choose the best checkpoint; the last one if there is none, or if it is damaged, with a note."""
    if best is None:
        return last
    try:
        verify_checkpoint(best)
        return best
    except CheckpointError as error:
        note(f"{error}; the last checkpoint replaces it in the fresh episodes")
        return last


def params_of(checkpoint: Path, last: Path, params: Params) -> Params:
    """Load the policy in a checkpoint to where ``params`` are, which are those of the checkpoint ``last``."""
    if step_of(checkpoint) == step_of(last):  # saved as best and as last
        return params
    own = load_params(checkpoint, jax.eval_shape(lambda: params))
    return jax.tree.map(lambda x, there: jax.device_put(x, there.sharding), own, params)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("_")[2])


def evaluate_fresh(seeds: Sequence[int], play: Callable[[int], Mapping[str, Any]]) -> dict[str, Any]:
    """Take means over the evaluations ``play(seed)``, all of equally many episodes; counts are added up."""
    found = [play(seed) for seed in seeds]
    total = {tag: sum(metrics[tag] for metrics in found) for tag in found[0]}
    counts = (NONFINITE_EPISODES, UNFINISHED_EPISODES)
    return {tag: x if tag in counts else x / len(seeds) for tag, x in total.items()}


def write_fresh(
    run: Path, which: str, checkpoint: Path, trainer: TrainerConfig, metrics: Mapping[str, float]
) -> dict[str, Any]:
    """Write ``evaluations/fresh_<which>.json`` of a run, ``best`` or ``last``, and give what it holds."""
    seeds = fresh_seeds(trainer)
    facts = {
        **metrics,
        "checkpoint": str(checkpoint),
        "step": step_of(checkpoint),
        "episodes": len(seeds) * trainer.num_eval_episodes,
        "seeds": seeds,
    }
    file = run / "evaluations" / f"fresh_{which}.json"
    with by_product(str(file)):
        replace_file(file, to_json(facts, indent=2), run)
    return facts


def read_fresh(run: Path) -> dict[str, dict[str, Any]]:
    """Read what ``write_fresh`` wrote into a run's folder; without what is not there, or cannot be read."""
    found = {}
    for which in ("best", "last"):
        with suppress(FactsError):
            facts = read_facts(run / "evaluations" / f"fresh_{which}.json", FreshFacts)
            found[which] = {name: math.nan if x is None else x for name, x in facts.items()}
    return found
