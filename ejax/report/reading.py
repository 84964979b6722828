"""The folder of a run, read without its code: nothing that a config names is imported.

Missing or damaged parts are texts in ``Run.problems``; only a folder whose config cannot be read is an error.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ejax.logs.json_records import FactsError, check_facts, read_facts
from ejax.logs.metric_log import read_log, read_sessions
from ejax.population.lineage import EXPLOITS, Exploited, read_exploits
from ejax.report.runs import Run, is_not_finite
from ejax.schema.plain_files import is_side_file
from ejax.store.checkpoint import CheckpointError
from ejax.store.resume_rules import Changes
from ejax.store.run_dir import (
    PopulationSummary,
    ResolvedConfig,
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


class _Evaluation(BaseModel):
    checkpoint: str
    episodes: int
    overrides: list[str] = []


def runs_in(given: Path) -> list[Path]:
    """List the folders of a population's members, or the run's own.

    Raises:
        FileNotFoundError: ``given`` is no run, and no name of one. FactsError: a member is elsewhere.
    """
    path = find_run(given)
    # isdecimal: int() reads ² as no number
    members = [folder for folder in (path / "members").glob("[0-9]*") if folder.name.isdecimal()]
    for folder in members:
        if not _is_inside(folder, path):
            raise FactsError(f"{folder} leads out of the population's folder; give the run that it leads to by itself")
    return sorted(members, key=lambda folder: int(folder.name)) or [path]


def read_run(given: Path) -> Run:
    """Read a run's folder, as by ``find_run``. FileNotFoundError: it is no run. FactsError: no readable config."""
    path = find_run(given)
    resolved = path / "configs" / "resolved.json"
    if not _is_inside(resolved, path):
        raise FactsError(f"{resolved} leads out of the run's folder")
    config = read_facts(resolved, ResolvedConfig)
    folder = _Folder(path)
    try:
        check_configs(path)
    except CheckpointError as error:
        folder.note(error)
    versions = next(iter(folder.facts(folder.files("configs", "versions.json"), Versions).values()), {})
    changes = folder.facts(folder.files("configs", "changes.json"), Changes).values()
    directory, log = RunDirectory(path, config["trainer"]["exp_name"]), path / "logs" / "metrics.jsonl"
    saved = directory.saved() if folder.owns(directory.checkpoints) else []
    meta = folder.newest_meta([file for each in saved if folder.owns(file := each / "meta.json")])
    records, wrong = read_log(log, logged=(meta or {}).get("log")) if folder.owns(log) else ([], [])
    # a fork, and a run from another system's checkpoint, begins at that one's step
    folder.problems += wrong + _gaps(records, begins_at_zero="origin" not in versions) + _not_finite(records)
    folder.problems += [f"logs/{aside.name} was set aside" for aside in folder.files("logs", "metrics.*-*.jsonl")]
    if meta and meta["global_step"] > max((record["step"] for record in records), default=0):
        folder.problems.append(f"the log ends before the newest checkpoint, which is of step {meta['global_step']:,}")
    evaluations = folder.facts(folder.files("evaluations", "*.json"), _Evaluation)
    exports = folder.facts([*folder.files(".", "parity.json"), *folder.files(".", "*/parity.json")], _Export)
    videos = [file for file in folder.files("videos", "**/[!.]*.mp4") if file.is_file()]
    population = path.resolve().parents[1] if path.resolve().parent.name == "members" else None
    ranked = [] if population is None else [file for file in [population / "population.json"] if file.is_file()]
    summary = folder.facts(ranked, PopulationSummary)
    sessions = read_sessions(path / "logs")
    logged = population is not None and any((population / "logs").glob("*/events.out.tfevents.*"))
    together = population if logged else None  # else each member has its own program
    recorded = [*sessions, *(read_sessions(together / "logs") if together else ())]
    return Run(
        path=path,
        name=path.name,
        config=config,
        versions=versions,
        records=records,
        meta=meta,
        changes=[each for facts in changes for each in facts["changes"]],
        starts=_starts(folder.files("logs", "*/events.out.tfevents.*")),
        recorded=tuple(sorted(recorded, key=lambda each: each.start)),
        together=None if sessions else together,
        evaluations={file.stem: facts for file, facts in evaluations.items()},
        exports={str(file.parent.relative_to(path)): facts for file, facts in exports.items()},
        videos=tuple(sorted(videos, key=lambda file: -file.stat().st_mtime_ns)),
        num_quarantined=len(folder.files("quarantine", "**/*.npz")),
        exploits=folder.exploits(population),
        is_best_member=any(str(facts["best"]) == path.resolve().name for facts in summary.values()),
        problems=tuple(dict.fromkeys(folder.problems)),
    )


@dataclass
class _Folder:
    """A run's folder, of which no link leads out, and the problems that were found in it."""

    path: Path
    problems: list[str] = field(default_factory=list)

    def note(self, error: Exception) -> None:
        self.problems.append(str(error).replace(f"{self.path}/", ""))

    def owns(self, file: Path) -> bool:
        """Refuse files that a link out of the run leads to: a page that shows them may be handed on."""
        if not (inside := _is_inside(file, self.path)):
            self.note(FactsError(f"{file} leads out of the run's folder, and is not followed"))
        return inside

    def files(self, folder: str, pattern: str) -> list[Path]:
        found = (path for path in (self.path / folder).glob(pattern) if not is_side_file(path.name))
        return sorted(filter(self.owns, found)) if self.owns(self.path / folder) else []

    def facts(self, files: Iterable[Path], schema: type[BaseModel]) -> dict[Path, dict[str, Any]]:
        found = {}
        for file in files:
            try:
                found[file] = read_facts(file, schema)
            except FactsError as error:
                self.note(error)
        return found

    def exploits(self, population: Path | None) -> tuple[Exploited, ...]:
        if population is not None and _is_inside(population / EXPLOITS, population):
            try:
                return tuple(read_exploits(population))
            except OSError as error:
                self.note(error)
        return ()

    def newest_meta(self, files: Iterable[Path]) -> dict[str, Any] | None:
        metas = self.facts(files, RunMeta).values()  # those that cannot be read are noted, and passed over
        meta = max(metas, key=lambda meta: meta.get("global_step", 0), default=None)
        if meta and meta.get("config"):
            try:
                check_facts(meta["config"], ResolvedConfig)
            except FactsError as error:
                self.note(FactsError(f"the config in the newest checkpoint's meta.json {error}"))
                meta = meta | {"config": {}}
        return meta


def read_export(path: Path) -> dict[str, Any]:
    """Read the ``parity.json`` of an export, a file or its folder.

    Raises:
        FileNotFoundError: there is none. FactsError: it is not what an export writes.
    """
    file = path / "parity.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{path} is no export: it has no parity.json; make one by python -m interop.export")
    return read_facts(file, _Export)


def _is_inside(file: Path, folder: Path) -> bool:
    return Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder))


def _starts(files: Sequence[Path]) -> tuple[float, ...]:
    """Read when each start of the run began to log: its event file is named after the time, in ns."""
    return tuple(sorted(int(found[1]) / 1e9 for file in files if (found := re.search(r"\.(\d{19})$", file.name))))


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
