"""Runs as their files describe them, and the differences between their configs."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ejax.logs.best import Best, improves
from ejax.logs.charts import LARGEST
from ejax.logs.metric_log import Recorded
from ejax.population.lineage import Exploited
from ejax.store.run_dir import ResolvedConfig, ResolvedTrainer

MISSING = object()
"""In place of a key that a config does not have."""
_SEEDS = {"trainer.seed", "trainer.eval_seed", "data.seed"}
NAMES = {f"trainer.{name}" for name in ("exp_name", "output_dir", "console", "use_wandb", "wandb_project_name")}
"""Keys of a run's names and places, which change nothing that it computes."""


class Session(NamedTuple):
    """From one start of a run's program to its end, or to the last line of one that was killed; seconds since 1970."""

    start: float
    end: float
    is_from_start: bool = True
    """False: without an event file that gives the start, this is the first line."""


@dataclass(frozen=True)
class Run:
    """One run as its files describe it."""

    path: Path
    name: str
    config: dict[str, Any]
    versions: dict[str, Any]
    records: list[dict[str, Any]]
    meta: dict[str, Any] | None
    """Metadata of the newest checkpoint that has readable ones."""
    changes: list[dict[str, Any]]
    starts: tuple[float, ...]
    recorded: tuple[Recorded, ...]
    """Sessions that came to their end; of a member, also those of its population's one program."""
    together: Path | None
    """The population whose one program, and nothing else, trained the run."""
    evaluations: dict[str, dict[str, Any]]
    exports: dict[str, dict[str, Any]]
    """``parity.json`` of exports in the folder, by path."""
    videos: tuple[Path, ...]
    """Newest first."""
    num_quarantined: int
    exploits: tuple[Exploited, ...]
    is_best_member: bool
    """Of its population, as training decided."""
    problems: tuple[str, ...]

    @cached_property
    def trainer(self) -> ResolvedTrainer:
        return ResolvedConfig.model_validate(self.config).trainer

    @property
    def step_name(self) -> str:
        return "samples" if self.config.get("data") else "env steps"

    @property
    def last_step(self) -> int:
        return max((record["step"] for record in self.records), default=0)

    @property
    def updates(self) -> tuple[int, int] | None:
        """Updates that are logged or saved, and those of the whole run; None: the size of one is not known."""
        meta = self.meta or {}
        # a checkpoint knows the environments of a device, resolved.json how long the run is to be by now
        saved = ResolvedConfig.model_validate(meta.get("config") or self.config).trainer
        rows, steps = saved.num_envs * saved.buffer_size, self.trainer.total_timesteps
        total = self.trainer.iterations if steps is None else math.ceil(steps / rows)
        if meta.get("num_updates"):
            rows = max(1, meta["global_step"] // meta["num_updates"])  # steps of an update, on all devices
        elif saved.distributed:
            return None  # on a number of devices that only a checkpoint has
        return max(self.last_step, meta.get("global_step", 0)) // rows, total

    @property
    def state(self) -> str:
        if self.updates is None:
            return "its progress is in no checkpoint"
        done, total = self.updates
        if done < total:
            return f"not finished: {done:,} of {total:,} updates (interrupted, or still under way)"
        if self.meta is None or self.meta.get("num_updates", 0) < total:  # killed after its last line
            return f"not finished: no checkpoint is of its last update, {total:,}"
        return "not finished: its last evaluation is missing" if self.meta.get("evaluation_due") else "finished"

    @property
    def lengths(self) -> str:
        """Lengths, and the steps until which they held; empty where no resume changed it."""
        changed = [each for each in self.changes if each["updates"][0] != each["updates"][1]]
        parts = [f"{each['updates'][0]:,} updates until step {each['step']:,}" for each in changed]
        return ", ".join([*parts, f"then {changed[-1]['updates'][1]:,}"]) if changed else ""

    def series(self, tag: str) -> dict[int, float]:
        """Step -> value; NaN where the log has ``null``. Of two values at one step the later one."""
        # after a resume from an earlier checkpoint the later lines hold
        return {record["step"]: _number(record[tag]) for record in self.records if tag in record}

    @cached_property
    def tags(self) -> frozenset[str]:
        return frozenset(tag for record in self.records for tag in record) - {"step", "time"}

    @cached_property
    def best(self) -> Best | None:
        """Return the best evaluation, by the rule that the run itself keeps its best checkpoint by."""
        best, tag = None, self.trainer.best_eval_metric
        for record in self.records:
            found = {name: _number(value) for name, value in record.items()}
            is_evaluation = tag in found and any(name.startswith("eval/") for name in found)
            if is_evaluation and improves(found, best, tag=tag, mode=self.trainer.best_eval_mode):
                best = Best(found[tag], record["step"], found.get("eval/avg_reward"))
        return best

    def fresh(self, which: Literal["best", "last"]) -> tuple[int, float] | None:
        """Give the number of fresh episodes of that checkpoint and the watched metric. None: it has none."""
        facts, tag = self.evaluations.get(f"fresh_{which}", {}), self.trainer.best_eval_metric
        step = self.last_step if which == "last" else self.best.step if self.best else None
        # of a checkpoint that is not the best, or the last, any more
        if facts.get("step") != step or not isinstance(facts.get(tag), float):
            return None
        return facts["episodes"], facts[tag]

    @property
    def member(self) -> int | None:
        folder = self.path.resolve()
        return int(folder.name) if folder.parent.name == "members" and folder.name.isdecimal() else None

    @property
    def last_evaluation(self) -> tuple[int, float] | None:
        return next(reversed(self.series(self.trainer.best_eval_metric).items()), None)

    @cached_property
    def sessions(self) -> list[Session]:
        """Return those that are recorded, and one for each other start that has lines in the log with times."""
        found = [Session(each.start, each.end) for each in self.recorded]

        def is_recorded(time: float) -> bool:
            return any(each.start <= time <= each.end for each in self.recorded)

        times = [time for record in self.records if (time := record.get("time")) and not is_recorded(time)]
        starts = [start for start in self.starts if times and start <= times[-1] and not is_recorded(start)]
        if not starts or times[0] < starts[0]:
            starts.insert(0, -math.inf)  # the event file of the first of them is gone
        for start, end in pairwise([*starts, math.inf]):
            if own := [time for time in times if start <= time < end]:
                found.append(Session(own[0] if start < 0 else start, max(own), start >= 0))
        return found

    @property
    def wall_s(self) -> float | None:
        return sum(each.end - each.start for each in self.sessions) if self.sessions else None

    @property
    def skipped(self) -> float:
        """Updates that were not applied, as far as logged; a checkpoint has counted them all."""
        logged = sum(
            max(record.get("train/skipped_update") or 0.0, record.get("train/skipped_fraction") or 0.0)
            for record in self.records
        )
        return max(logged, (self.meta or {}).get("skipped_updates", 0.0))

    def time_parts(self) -> list[tuple[str, float]]:
        """List the sums of the tags in seconds that add up; a value that was not finite is left out."""
        sums = {tag: sum(x for x in self.series(tag).values() if x == x) for tag in sorted(self.tags) if _adds_up(tag)}
        return [(f"{tag}, sum of what is logged", seconds) for tag, seconds in sums.items()]


def differing(configs: Sequence[Any], path: str = "") -> list[tuple[str, tuple[Any, ...]]]:
    """``(dotted key, its value in each)`` of the keys in which configs differ; ``MISSING`` where one lacks it."""
    if all(isinstance(config, dict) for config in configs):
        names = sorted(set().union(*configs))
        return [
            found
            for name in names
            for found in differing([config.get(name, MISSING) for config in configs], f"{path}.{name}".lstrip("."))
        ]
    return [] if all(config == configs[0] for config in configs) else [(path, tuple(configs))]


def computing(key: str) -> bool:
    return key not in _SEEDS | NAMES


def same_but_seed(runs: Sequence[Run]) -> list[list[Run]]:
    """Group runs that differ in seeds and names only, in their order. Members that copied each other differ."""
    groups: list[list[Run]] = []
    for run in runs:
        for group in groups:
            if not run.exploits and not any(computing(key) for key, _ in differing([group[0].config, run.config])):
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def _number(value: float | None) -> float:
    return math.nan if value is None or is_not_finite(value) else value


def _adds_up(tag: str) -> bool:
    # data/age_s is how old the data is: no duration of the run's
    is_wait = tag.startswith(("collector/", "data/")) and tag.endswith(("env_s", "policy_s", "wait_s"))
    return is_wait or tag.startswith("time/")


def is_not_finite(value: Any) -> bool:
    return value is None or not abs(value) <= LARGEST


def value_text(value: Any) -> str:
    return "—" if value is MISSING else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
