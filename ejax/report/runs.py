"""Runs as their files describe them, read without their code: nothing that a config names is imported.

Missing or damaged parts are texts in ``Run.problems``; only a folder whose config cannot be read is an error.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field

from ejax.logs.best import Best, improves
from ejax.logs.charts import LARGEST
from ejax.logs.json_records import FactsError, check_facts, read_facts
from ejax.logs.metric_log import read_log, read_sessions
from ejax.population.lineage import EXPLOITS, Exploited, read_exploits
from ejax.report.gait import Gait
from ejax.schema.plain_files import is_side_file
from ejax.store.checkpoint import CheckpointError
from ejax.store.resume_rules import Changes
from ejax.store.run_dir import (
    PopulationSummary,
    ResolvedConfig,
    ResolvedTrainer,
    RunDirectory,
    RunMeta,
    Versions,
    check_configs,
    find_run,
)


class _Export(BaseModel):
    """The part of ``parity.json`` that is read; its full schema is interop's."""

    checkpoint: str
    global_step: int
    artefacts: dict[str, dict[str, Any]]
    rows: dict[str, int]
    versions: dict[str, str]


_Base64 = Annotated[str, Field(pattern="^[A-Za-z0-9+/=]+$")]


class _Counterfactual(BaseModel):
    """Each sentence from the same starts: pictures are PNG in base64, outcomes and ends [sentences][starts]."""

    sentences: list[str]
    outcomes: list[list[str]]
    starts: list[_Base64]
    ends: list[list[_Base64]]


class _Evaluation(BaseModel):
    checkpoint: str
    episodes: int
    overrides: list[str] = []
    gait: Gait | None = None
    counterfactual: _Counterfactual | None = None


class Session(NamedTuple):
    """From one start of a run's program to its end, or to the last line of one that was killed; seconds since 1970."""

    start: float
    end: float
    is_from_start: bool = True
    """False: without an event file that gives the start, this is the first line."""


def runs_in(given: Path) -> list[Path]:
    """List the folders of a population's members, or the run's own.

    FileNotFoundError: ``given`` is neither a run nor the name of one. FactsError: a member is elsewhere.
    """
    path = find_run(given)
    # isdecimal: int() reads ² as no number
    members = [folder for folder in (path / "members").glob("[0-9]*") if folder.name.isdecimal()]
    for folder in members:
        if not _is_inside(folder, path):
            raise FactsError(f"{folder} leads out of the population's folder; pass the run that it leads to")
    return sorted(members, key=lambda folder: int(folder.name)) or [path]


class Run:
    """One run as its files describe it, found by ``find_run``; a link out of its folder is not followed.

    FileNotFoundError: that is not a run. FactsError: it has no readable config.
    """

    def __init__(self, given: Path) -> None:
        self.path = path = find_run(given)
        self.name = path.name
        self._problems: list[str] = []
        resolved = path / "configs" / "resolved.json"
        if not _is_inside(resolved, path):
            raise FactsError(f"{resolved} leads out of the run's folder")
        self.config = read_facts(resolved, ResolvedConfig)
        try:
            check_configs(path)
        except CheckpointError as error:
            self._note(error)
        self.versions = next(iter(self._facts(self._files("configs", "versions.json"), Versions).values()), {})
        changes = self._facts(self._files("configs", "changes.json"), Changes).values()
        self.changes: list[dict[str, Any]] = [each for facts in changes for each in facts["changes"]]
        self.meta = self._newest_meta()
        self.records = self._read_log()
        # when each start of the run began to log: its event file is named after the time, in ns
        names = [file.name for file in self._files("logs", "*/events.out.tfevents.*")]
        self.starts = sorted(int(found[1]) / 1e9 for name in names if (found := re.search(r"\.(\d{19})$", name)))
        evaluations = self._facts(self._files("evaluations", "*.json"), _Evaluation)
        self.evaluations = {file.stem: facts for file, facts in evaluations.items()}
        exports = self._facts([*self._files(".", "parity.json"), *self._files(".", "*/parity.json")], _Export)
        self.exports = {str(file.parent.relative_to(path)): facts for file, facts in exports.items()}
        videos = [file for file in self._files("videos", "**/[!.]*.mp4") if file.is_file()]
        self.videos = sorted(videos, key=lambda file: -file.stat().st_mtime_ns)  # newest first
        self.num_quarantined = len(self._files("quarantine", "**/*.npz"))
        self._read_population()

    def _read_population(self) -> None:
        """Read what a member's files do not have: exploits, which member is the best, and the program's sessions."""
        folder = self.path.resolve()
        population = folder.parents[1] if folder.parent.name == "members" else None
        logged = population is not None and any((population / "logs").glob("*/events.out.tfevents.*"))
        sessions = read_sessions(self.path / "logs")
        shared = read_sessions(population / "logs") if population is not None and logged else []
        # sessions that came to their end; a member without any was trained by the population's one program alone
        self.recorded = sorted([*sessions, *shared], key=lambda each: each.start)
        self.together = population if logged and not sessions else None
        self.exploits: tuple[Exploited, ...] = ()
        self.is_best_member = False
        if population is None:
            return
        if _is_inside(population / EXPLOITS, population):
            try:
                self.exploits = tuple(read_exploits(population))
            except OSError as error:
                self._note(error)
        files = [file for file in [population / "population.json"] if file.is_file()]
        summary = self._facts(files, PopulationSummary).values()
        self.is_best_member = any(str(facts["best"]) == folder.name for facts in summary)

    def _newest_meta(self) -> dict[str, Any] | None:
        """Read the metadata of the newest checkpoint that has readable ones."""
        directory = RunDirectory(self.path, self.trainer.exp_name)
        saved = directory.saved() if self._owns(directory.checkpoints) else []
        files = [file for each in saved if self._owns(file := each / "meta.json")]
        metas = self._facts(files, RunMeta).values()  # those that cannot be read are noted, and passed over
        meta = max(metas, key=lambda meta: meta.get("global_step", 0), default=None)
        if meta and meta.get("config"):
            try:
                check_facts(meta["config"], ResolvedConfig)
            except FactsError as error:
                self._note(FactsError(f"the config in the newest checkpoint's meta.json {error}"))
                meta = meta | {"config": {}}
        return meta

    def _read_log(self) -> list[dict[str, Any]]:
        log, meta = self.path / "logs" / "metrics.jsonl", self.meta or {}
        records, wrong = read_log(log, logged=meta.get("log")) if self._owns(log) else ([], [])
        # a fork, and a run from another system's checkpoint, begins at that one's step
        self._problems += wrong + _gaps(records, begins_at_zero="origin" not in self.versions) + _not_finite(records)
        self._problems += [f"logs/{aside.name} was set aside" for aside in self._files("logs", "metrics.*-*.jsonl")]
        if meta.get("global_step", 0) > max((record["step"] for record in records), default=0):
            text = f"the log ends before the newest checkpoint, which is of step {meta['global_step']:,}"
            self._problems.append(text)
        return records

    def _note(self, error: Exception) -> None:
        self._problems.append(str(error).replace(f"{self.path}/", ""))

    def _owns(self, file: Path) -> bool:
        """Refuse files that a link out of the run leads to: a page that shows them may be handed on."""
        if not (inside := _is_inside(file, self.path)):
            self._note(FactsError(f"{file} leads out of the run's folder, and is not followed"))
        return inside

    def _files(self, folder: str, pattern: str) -> list[Path]:
        found = (path for path in (self.path / folder).glob(pattern) if not is_side_file(path.name))
        return sorted(filter(self._owns, found)) if self._owns(self.path / folder) else []

    def _facts(self, files: Iterable[Path], schema: type[BaseModel]) -> dict[Path, dict[str, Any]]:
        found = {}
        for file in files:
            try:
                found[file] = read_facts(file, schema)
            except FactsError as error:
                self._note(error)
        return found

    @property
    def problems(self) -> list[str]:
        return list(dict.fromkeys(self._problems))

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
        # of a finished run the last one, where it did better in the same fresh episodes
        step, values = self.evaluations.get("fresh_best", {}).get("step"), self.series(tag)
        return Best(values[step], step) if best and step == self.last_step and step in values else best

    def fresh(self, which: Literal["best", "last"]) -> tuple[int, float] | None:
        """Return the number of fresh episodes of that checkpoint and the watched metric. None: it has none."""
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
        # data/age_s is how old the data is: no duration of the run's
        waits = re.compile(r"(collector|data)/.*(env_s|policy_s|wait_s)|time/.*")
        sums = {tag: sum(x for x in self.series(tag).values() if x == x) for tag in filter(waits.fullmatch, self.tags)}
        return [(f"{tag}, sum of the logged ones", seconds) for tag, seconds in sorted(sums.items())]


def read_parity(path: Path) -> dict[str, Any]:
    """Read the ``parity.json`` of an export, a file or its folder.

    FileNotFoundError: there is none. FactsError: it is not what an export writes.
    """
    file = path / "parity.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{path} is not an export: it has no parity.json; make one by ejax export")
    return read_facts(file, _Export)


def _is_inside(file: Path, folder: Path) -> bool:
    return Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder))


def _gaps(records: Sequence[Mapping[str, Any]], *, begins_at_zero: bool) -> list[str]:
    """List steps between which lines are missing: those of updates come at equal distances, but for the last one."""
    steps = [record["step"] for record in records if any(tag.startswith("train/") for tag in record)]
    known = [0, *steps] if begins_at_zero else steps  # else its first line is where it began
    problems = []
    if back := [(a, b) for a, b in pairwise(steps) if b <= a]:  # a log to which two processes wrote
        problems.append(f"steps go back in metrics.jsonl, first from {back[0][0]:,} to {back[0][1]:,}")
    distances = Counter(b - a for a, b in pairwise(known) if b > a)
    # the most frequent, and of those the smallest
    usual = min(distances, key=lambda distance: (-distances[distance], distance), default=0)
    gaps = [(a, b) for a, b in pairwise(known) if b - a > usual]
    if gaps:
        places = ", ".join(f"{a:,} and {b:,}" for a, b in gaps[:5]) + (", …" if len(gaps) > 5 else "")
        problems.append(f"metrics.jsonl has a line each {usual:,} steps, but none between {places}")
    return problems


def _not_finite(records: Sequence[Mapping[str, Any]]) -> list[str]:
    counts = Counter(tag for record in records for tag, value in record.items() if is_not_finite(value))
    return [f"{tag} was not finite in {count:,} of the lines" for tag, count in sorted(counts.items())]


def _number(value: float | None) -> float:
    return math.nan if value is None or is_not_finite(value) else value


def is_not_finite(value: Any) -> bool:
    return value is None or not abs(value) <= LARGEST
