"""The facts of a population that has ended, as ``ejax train`` prints them."""

from ejax.config import RunConfig
from ejax.population.lanes import PopulationResult
from ejax.population.lineage import EXPLOITS, lineage, read_exploits, value_texts
from ejax.runtime.process_exit import refused
from ejax.training.command import last_evaluation, of_fresh_episodes, print_facts
from ejax.training.evaluators import read_fresh


def print_population(name: str, config: RunConfig, result: PopulationResult) -> int:
    """Print the facts of a population that has ended. Returns the exit code."""
    best, tag = result.best_member, config.trainer.best_eval_metric
    broken = [i for i, alive in enumerate(result.alive) if not alive]
    skipping = [i for i, skipped in enumerate(result.skipped_updates) if skipped > 0.5 * result.num_updates]
    of_best: dict[str, str] = {}
    if best is not None:
        exploits, at = read_exploits(result.run_dir), result.best_eval_steps[best]
        of_best = value_texts(exploits, best, at, result.members[best].values)
        if exploits:
            of_best["its lineage"] = lineage(exploits, best)
            of_best["exploits"] = f"{len(exploits)}: {result.run_dir / EXPLOITS}"
        of_best[f"its best {tag}"] = str(result.best_eval_values[best])
        of_best |= of_fresh_episodes(read_fresh(result.run_dir / "members" / str(best)), tag)
    facts = {
        **last_evaluation(result.last_eval_metrics),
        "best member": "none" if best is None else f"{best}: seed {result.members[best].seed}",
        **of_best,
        "broken members": ", ".join(map(str, broken)) or None,
        "members that skipped most updates": ", ".join(map(str, skipping)) or None,
        "latest checkpoint": result.latest_checkpoint_path or "each member's own",
    }
    print_facts(config, result, facts, " of each", " of all")
    if len(broken) == len(result.members):  # some that broke are a result, all are a failure
        return refused(f"ejax {name}", "every member broke; lower algorithm.cfg.optimizer.learning_rate", 3)
    return 0
