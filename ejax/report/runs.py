"""What the folder of a run tells, read without its code: nothing that a config names is imported.

What is missing or damaged is a text in ``Run.problems``; only a folder whose config cannot be read is an error.
"""

import json
import math
import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt

from ejax.logs.best import Best, improves
from ejax.logs.charts import LARGEST
from ejax.logs.json_records import FactsError, check_facts, read_facts
from ejax.logs.metric_log import read_log
from ejax.store.checkpoint import CheckpointError
from ejax.store.run_dir import RunDirectory, RunMeta, check_configs, find_run
from ejax.training.lineage import EXPLOITS, Exploited, read_exploits
from ejax.training.sessions import Recorded, read_sessions

MISSING = object()
"""In place of a key that a config does not have."""
_SEEDS = {"trainer.seed", "trainer.eval_seed", "data.seed"}
_NAMES = {"trainer.exp_name", "trainer.output_dir", "trainer.console", "trainer.use_wandb"} | {
    "trainer.wandb_project_name"
}
"""Keys that say where a run goes, not what it computes."""


class _Trainer(BaseModel):
    exp_name: str
    seed: int
    num_envs: PositiveInt
    buffer_size: PositiveInt
    iterations: int
    total_timesteps: int | None = None
    best_eval_metric: str
    best_eval_mode: Literal["max", "min"]


class _Config(BaseModel):
    """What a report asks of ``resolved.json``."""

    trainer: _Trainer
    env: dict[str, Any] = {}
    algorithm: dict[str, Any] = {}


class _Meta(RunMeta):
    skipped_updates: float = 0.0


class _Export(BaseModel):
    """What a report asks of ``parity.json``, whose full schema is interop's."""

    checkpoint: str
    global_step: int
    artefacts: dict[str, dict[str, Any]]
    rows: dict[str, int]
    versions: dict[str, str]


class _Evaluation(BaseModel):
    checkpoint: str
    episodes: int
    overrides: list[str] = []


class _Change(BaseModel):
    step: NonNegativeInt
    updates: Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]


class _Changes(BaseModel):
    """The part of ``changes.json`` that a report reads."""

    changes: list[_Change]


class _Versions(BaseModel):
    notes: list[str] = []


@dataclass(frozen=True)
class Session:
    """From one start of a run's program to its end, or to the last line of one that was killed; seconds since 1970."""

    start: float | None
    """None: the program left no event file that tells it."""
    first: float
    last: float

    @property
    def seconds(self) -> float:
        return self.last - (self.first if self.start is None else self.start)


@dataclass(frozen=True)
class Run:
    """One run as its files tell it."""

    path: Path
    config: dict[str, Any]
    versions: dict[str, Any]
    records: list[dict[str, Any]]
    """The lines of ``metrics.jsonl``, as they are."""
    meta: dict[str, Any] | None
    """Of the newest checkpoint that has one to read."""
    changes: list[dict[str, Any]]
    """Changes by resumes, as in ``changes.json``."""
    starts: tuple[float, ...]
    recorded: tuple[Recorded, ...]
    """Sessions that came to their end; of a member, also those of its population's one program."""
    together: Path | None
    """The population whose one program, and nothing else, trained the run."""
    evaluations: dict[str, dict[str, Any]]
    """``evaluations/*.json`` by name."""
    exports: dict[str, dict[str, Any]]
    """``parity.json`` of exports in the folder, by path."""
    videos: tuple[Path, ...]
    """Newest first."""
    num_quarantined: int
    """Episodes that are kept under ``quarantine/``."""
    exploits: tuple[Exploited, ...]
    """Who went on from whom in the population that the run is a member of."""
    problems: tuple[str, ...]

    @property
    def trainer(self) -> dict[str, Any]:
        return self.config["trainer"]

    @property
    def step_name(self) -> str:
        """What the run counts: of cloning, whose data comes from a data engine or a recording, samples."""
        return "samples" if self.config.get("data") else "env steps"

    @property
    def last_step(self) -> int:
        return max((record["step"] for record in self.records), default=0)

    @property
    def updates(self) -> tuple[int, int] | None:
        """Updates that are logged or saved, and those that the run was to have; None: nothing says how large one is."""
        # a checkpoint knows the environments of a device, resolved.json how long the run is to be by now
        trainer = ((self.meta or {}).get("config") or self.config)["trainer"]
        rows = trainer["num_envs"] * trainer["buffer_size"]
        total = self.trainer["iterations"]
        if self.trainer.get("total_timesteps") is not None:
            total = math.ceil(self.trainer["total_timesteps"] / rows)
        if self.meta and self.meta.get("num_updates"):
            rows = max(1, self.meta["global_step"] // self.meta["num_updates"])
        elif trainer.get("distributed"):
            return None  # on as many devices as only a checkpoint tells
        return max(self.last_step, (self.meta or {}).get("global_step", 0)) // rows, total

    @property
    def state(self) -> str:
        """Whether the run came to its end."""
        if self.updates is None:
            return "no checkpoint says how far it is"
        done, total = self.updates
        if done < total:
            return f"not finished: {done:,} of {total:,} updates (interrupted, or still under way)"
        if self.meta is None or self.meta.get("num_updates", 0) < total:  # killed after its last line
            return f"not finished: no checkpoint is of its last update, {total:,}"
        return "not finished: its last evaluation is missing" if self.meta.get("evaluation_due") else "finished"

    @property
    def lengths(self) -> str:
        """From which step which length held; empty where no resume changed it."""
        told = [(each["step"], *each["updates"]) for each in self.changes if each["updates"][0] != each["updates"][1]]
        parts = [f"{before:,} updates until step {step:,}" for step, before, _ in told]
        return ", ".join([*parts, f"then {told[-1][2]:,}"]) if told else ""

    def series(self, tag: str) -> dict[int, float]:
        """Step -> value; NaN where the log has ``null``. Of two values at one step the later one."""
        return {record["step"]: _number(record[tag]) for record in self.records if tag in record}

    @cached_property
    def tags(self) -> frozenset[str]:
        return frozenset(tag for record in self.records for tag in record) - {"step", "time"}

    @cached_property
    def best(self) -> Best | None:
        """The best evaluation, by the rule that the run itself keeps its best checkpoint by."""
        best, tag = None, self.trainer["best_eval_metric"]
        for record in self._evaluated():
            if tag in record and improves(record, best, tag=tag, mode=self.trainer["best_eval_mode"]):
                best = Best(record[tag], record["step"], record.get("eval/avg_reward"))
        return best

    def fresh(self, which: Literal["best", "last"]) -> tuple[int, float] | None:
        """Give the number of fresh episodes of that checkpoint, and the watched metric over them.

        None: it was not, or the run has another one by now.
        """
        facts, tag = self.evaluations.get(f"fresh_{which}", {}), self.trainer["best_eval_metric"]
        step = self.last_step if which == "last" else self.best.step if self.best else None
        if facts.get("step") != step or not isinstance(facts.get(tag), float):
            return None
        return facts["episodes"], facts[tag]

    @property
    def member(self) -> int | None:
        """Its number in the population that it is a member of."""
        folder = self.path.resolve()
        return int(folder.name) if folder.parent.name == "members" and folder.name.isdecimal() else None

    @property
    def last_evaluation(self) -> tuple[int, float] | None:
        """The step and the value of the watched metric, of the evaluation that came last."""
        return next(reversed(self.series(self.trainer["best_eval_metric"]).items()), None)

    @cached_property
    def sessions(self) -> list[Session]:
        """Those that are recorded, and one for each other start that has lines in the log with times."""
        begun, firsts, times = [each.start for each in self.recorded], dict[int, float](), list[float]()

        def number(time: float) -> int:
            """The number of the recorded session that it is in; -1: none."""
            i = bisect_right(begun, time) - 1
            return i if i >= 0 and time <= self.recorded[i].end else -1

        for time in (record["time"] for record in self.records if record.get("time")):
            if (i := number(time)) < 0:
                times.append(time)
            else:
                firsts.setdefault(i, time)
        found = [Session(each.start, firsts.get(i, each.end), each.end) for i, each in enumerate(self.recorded)]
        if not times:
            return found
        starts: list[float | None] = [start for start in self.starts if start <= times[-1] and number(start) < 0]
        if not starts or times[0] < (starts[0] or 0.0):
            starts.insert(0, None)
        ends = [start for start in starts[1:] if start is not None] + [math.inf]
        for start, end in zip(starts, ends, strict=True):
            own = [time for time in times if (start or 0.0) <= time < end]
            if own:
                found.append(Session(start, own[0], max(own)))
        return found

    @property
    def wall_s(self) -> float | None:
        return sum(session.seconds for session in self.sessions) if self.sessions else None

    @property
    def skipped(self) -> float:
        """Updates that were not applied, as far as logged; a checkpoint, where there is one, has counted them all."""
        logged = sum(
            max(record.get("train/skipped_update") or 0.0, record.get("train/skipped_fraction") or 0.0)
            for record in self.records
        )
        return max(logged, (self.meta or {}).get("skipped_updates", 0.0))

    def time_parts(self) -> list[tuple[str, float]]:
        """Where the seconds went, as far as the log tells; parts may overlap, and are not all."""
        between = (self._until_first_line(), self._until_evaluations())  # of logs that do not say it themselves
        says = any(tag.startswith("time/") for tag in self.tags)
        parts = [] if says else [(name, seconds) for name, seconds in between if seconds]
        for tag in sorted(tag for tag in self.tags if _is_duration(tag)):
            parts.append((f"{tag}, sum of what is logged", sum(x for x in self.series(tag).values() if x == x)))
        return parts

    def _until_first_line(self) -> tuple[str, float]:
        seconds = sum(session.first - session.start for session in self.sessions if session.start is not None)
        return "from a start to its first line: compiling, the first update", seconds

    def _until_evaluations(self) -> tuple[str, float]:
        pairs = [
            (before, after)
            for before, after in pairwise(self.records)
            if before["step"] == after["step"] and _is_evaluation(after) and not _is_evaluation(before)
        ]
        seconds = sum(
            gap for before, after in pairs if 0 < (gap := (after.get("time") or 0) - (before.get("time") or 0)) < 1e9
        )
        return "from an update's line to its evaluation's: evaluating, saving", seconds

    def _evaluated(self) -> Iterator[dict[str, Any]]:
        for record in self.records:
            if _is_evaluation(record):
                yield {tag: _number(value) for tag, value in record.items()}


def runs_in(given: Path) -> list[Path]:
    """The run's folder itself; of a population, those of its members.

    Raises:
        FileNotFoundError: ``given`` is no run, and no name of one. FactsError: a member is elsewhere.
    """
    path = find_run(given)
    members = [folder for folder in (path / "members").glob("[0-9]*") if folder.name.isdecimal()]
    for folder in members:
        if not _is_inside(folder, path):
            raise FactsError(f"{folder} leads out of the population's folder; give the run that it leads to by itself")
    return sorted(members, key=lambda folder: int(folder.name)) or [path]


def read_run(given: Path) -> Run:
    """Read a run's folder.

    Args:
        given: the folder, or without the time at its end: the newest run of that name.

    Raises:
        FileNotFoundError: it is no run. FactsError: its config cannot be read.
    """
    path = find_run(given)
    resolved = path / "configs" / "resolved.json"
    if not _is_inside(resolved, path):
        raise FactsError(f"{resolved} leads out of the run's folder")
    config = read_facts(resolved, _Config)
    problems: list[str] = []

    def tell(error: Exception) -> None:
        problems.append(str(error).replace(f"{path}/", ""))

    def own(file: Path) -> bool:
        """Refuse files that a link out of the run leads to: a page that shows them may be handed on."""
        if not (inside := _is_inside(file, path)):
            tell(FactsError(f"{file} leads out of the run's folder, and is not followed"))
        return inside

    def files(folder: str, pattern: str) -> list[Path]:
        return sorted(filter(own, (path / folder).glob(pattern))) if own(path / folder) else []

    try:
        check_configs(path)
    except CheckpointError as error:
        tell(error)
    versions = next(iter(_facts(filter(own, [path / "configs" / "versions.json"]), _Versions, tell).values()), {})
    changed = _facts(files("configs", "changes.json"), _Changes, tell)
    directory, log = RunDirectory(path, config["trainer"]["exp_name"]), path / "logs" / "metrics.jsonl"
    saved = [*directory.periodic(), *directory.best()] if own(directory.checkpoints) else []
    meta = _newest_meta([file for each in saved if own(file := each / "meta.json")], tell)
    records, wrong = read_log(log, logged=(meta or {}).get("log")) if own(log) else ([], [])
    # a fork, and a run from another system's checkpoint, begins at that one's step
    problems += wrong + _gaps(records, begins_at_zero="origin" not in versions) + _not_finite(records)
    problems += [f"logs/{aside.name} was set aside" for aside in files("logs", "metrics.*-*.jsonl")]
    if meta and meta["global_step"] > max((record["step"] for record in records), default=0):
        problems.append(f"the log ends before the newest checkpoint, which is of step {meta['global_step']:,}")
    evaluations = _facts(files("evaluations", "*.json"), _Evaluation, tell)
    exports = _facts([*files(".", "parity.json"), *files(".", "*/parity.json")], _Export, tell)
    videos = [file for file in files("videos", "**/[!.]*.mp4") if file.is_file()]
    videos.sort(key=lambda file: -file.stat().st_mtime_ns)
    population = path.resolve().parents[1] if path.resolve().parent.name == "members" else None
    exploits = []
    if population is not None and _is_inside(population / EXPLOITS, population):
        try:
            exploits = read_exploits(population)
        except OSError as error:
            tell(error)
    starts, sessions = _starts(files("logs", "*/events.out.tfevents.*")), read_sessions(path / "logs")
    logged = population is not None and any((population / "logs").glob("*/events.out.tfevents.*"))
    together = population if logged else None  # else each member has its own program
    recorded = [*sessions, *(read_sessions(together / "logs") if together else ())]
    return Run(
        path=path,
        config=config,
        versions=versions,
        records=records,
        meta=meta,
        changes=[each for facts in changed.values() for each in facts["changes"]],
        starts=starts,
        recorded=tuple(sorted(recorded, key=lambda each: each.start)),
        together=None if sessions else together,
        evaluations={file.stem: facts for file, facts in evaluations.items()},
        exports={str(file.parent.relative_to(path)): facts for file, facts in exports.items()},
        videos=tuple(videos),
        num_quarantined=len(files("quarantine", "**/*.npz")),
        exploits=tuple(exploits),
        problems=tuple(dict.fromkeys(problems)),
    )


def read_export(path: Path) -> dict[str, Any]:
    """The ``parity.json`` of an export.

    Args:
        path: that file, or the folder that it is in.

    Raises:
        FileNotFoundError: there is none. FactsError: it is not what an export writes.
    """
    file = path / "parity.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{path} is no export: it has no parity.json; make one by python -m interop.export")
    return read_facts(file, _Export)


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
    """Whether a key says what is computed: no name and no seed."""
    return key not in _SEEDS | _NAMES


def same_but_seed(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs in groups that differ in seeds and names only, in their order. Members that copied each other differ."""
    groups: list[list[Run]] = []
    for run in runs:
        for group in groups:
            if not run.exploits and not any(computing(key) for key, _ in differing([group[0].config, run.config])):
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def _is_inside(file: Path, folder: Path) -> bool:
    return Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder))


def _number(value: float | None) -> float:
    return math.nan if value is None or _is_not_finite(value) else value


def _is_evaluation(record: Mapping[str, Any]) -> bool:
    return any(tag.startswith("eval/") for tag in record)


def _is_duration(tag: str) -> bool:
    """Tags in seconds that add up; ``data/age_s`` is how old the data is."""
    return tag.startswith("time/") or (
        tag.startswith(("collector/", "data/")) and tag.endswith(("env_s", "policy_s", "wait_s"))
    )


def _facts(
    files: Iterable[Path], schema: type[BaseModel], tell: Callable[[Exception], None]
) -> dict[Path, dict[str, Any]]:
    """What is in each file that can be read; the others are told."""
    found = {}
    for file in files:
        try:
            found[file] = read_facts(file, schema)
        except FactsError as error:
            tell(error)
    return found


def _newest_meta(files: Sequence[Path], tell: Callable[[Exception], None]) -> dict[str, Any] | None:
    """Of the checkpoint with the most steps; its arrays are not looked at."""
    metas = _facts(files, _Meta, tell)
    meta = max(metas.values(), key=lambda meta: meta.get("global_step", 0), default=None)
    if meta and meta.get("config"):
        try:
            check_facts(meta["config"], _Config)
        except FactsError as error:
            tell(FactsError(f"the config in the newest checkpoint's meta.json {error}"))
            meta = meta | {"config": {}}
    return meta


def _starts(files: Sequence[Path]) -> tuple[float, ...]:
    """When each start of the run began to log: its event file is named after the time, in ns."""
    return tuple(sorted(int(found[1]) / 1e9 for file in files if (found := re.search(r"\.(\d{19})$", file.name))))


def _gaps(records: Sequence[Mapping[str, Any]], *, begins_at_zero: bool) -> list[str]:
    """Steps between which lines are missing: those of updates come at equal distances, but for the last one."""
    steps = [record["step"] for record in records if any(tag.startswith("train/") for tag in record)]
    known = [0, *steps] if begins_at_zero else steps
    problems = []
    if back := [(a, b) for a, b in pairwise(steps) if b <= a]:
        problems.append(f"steps go back in metrics.jsonl, first from {back[0][0]:,} to {back[0][1]:,}")
    distances = Counter(b - a for a, b in pairwise(known) if b > a)
    usual = min(distances, key=lambda distance: (-distances[distance], distance), default=0)
    gaps = [(a, b) for a, b in pairwise(known) if b - a > usual]
    if gaps:
        places = ", ".join(f"{a:,} and {b:,}" for a, b in gaps[:5]) + (", …" if len(gaps) > 5 else "")
        problems.append(f"metrics.jsonl has a line each {usual:,} steps, but none between {places}")
    return problems


def _not_finite(records: Sequence[Mapping[str, Any]]) -> list[str]:
    counts = Counter(tag for record in records for tag, value in record.items() if _is_not_finite(value))
    return [f"{tag} was not finite in {count:,} of the lines" for tag, count in sorted(counts.items())]


def _is_not_finite(value: Any) -> bool:
    return value is None or not abs(value) <= LARGEST


def as_text(value: Any) -> str:
    """A value of a config, for a table."""
    return "—" if value is MISSING else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
