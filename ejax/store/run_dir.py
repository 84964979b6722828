"""The folder of a run: where things are in it, and which checkpoint a resumed run starts from.

<output_dir>/<exp_name>_<YYYYmmdd_HHMMSS>/
    configs/resolved.json       the config in canonical form: the run can be repeated from it alone
    configs/versions.json       Python, libraries, device and what it decided; where code lay that is not installed; the
                                file of another system that the run started from
    configs/SHA256              of both, so that a change to what the run is made from is noticed
    configs/changes.json        what resumes changed of resolved.json: where, keys and values, updates of the whole run
    checkpoints/<exp_name>_step_<n>/, <exp_name>_best_step_<n>/     n: environment steps
    logs/metrics.jsonl, logs/<exp_name>/events.out.tfevents.*
    logs/sessions.jsonl         when each call that trained the run began and ended; of members in one program it is in
                                the population's folder; a killed one has none
    videos/
    quarantine/                 what broke environments, for ejax replay
    replay/                     while it trains, with replay.storage: shared: <field>.npy, the rows of the replay buffer
    members/<i>/                of a population: the folder of each member, as of a single run
    population.json             of a population: its members, and which is the best (``ejax.population.lanes``)
    exploits.jsonl              of a population: who went on from whom
    schedule.json               {"versions": […]}: of the parameters that made each rollout, where they may be older
"""

import contextlib
import glob
import os
import platform
import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt

from ejax.config import ConfigError, Problem, RunConfig, load_config
from ejax.config.shipped import POLICIES, shipped_policies
from ejax.logs.best import REWARD, Mode
from ejax.logs.json_records import FactsError, read_facts
from ejax.logs.metric_log import Logged
from ejax.schema.code_places import note_code, noted, two_of_a_name
from ejax.schema.messages import did_you_mean
from ejax.schema.plain_files import expanded, is_side_file, sha256, to_json
from ejax.schema.trust import places_in, trust_options
from ejax.schema.writing import make_folder, move, replace_file
from ejax.store.checkpoint import (
    CheckpointError,
    CheckpointMeta,
    library_versions,
    list_checkpoints,
    recover_checkpoints,
    remove,
    save_arrays,
    save_checkpoint,
    verify_checkpoint,
)
from ejax.store.digests import LISTING, DamagedError, ForeignError, check_digests, render_digests
from ejax.store.run_lock import LOCK
from ejax.store.schedule_file import SCHEDULE
from ejax.types import PyTree

VERSIONS = "versions.json"
NEXT_LISTING = f"{LISTING}.next"
CHANGES = "changes.json"
_CONFIGS = ("resolved.json", VERSIONS)
_TIME = re.compile(r"_\d{8}_\d{6}(_\d{9})?")


class RunMeta(CheckpointMeta):
    """The form of a run's ``meta.json``. What is None was not kept."""

    global_step: NonNegativeInt
    evaluation_due: bool = False
    """Saved before the evaluation of this very update, which a resumed run makes."""
    best_eval_step: NonNegativeInt | None = None
    best_eval_reward: float | None = None
    last_evaluated: NonNegativeInt | None = None
    num_devices: PositiveInt | None = None
    """Those that shared the environments, ``trainer.num_envs`` on each."""
    log: Logged | None = None
    callbacks: dict[str, dict[str, Any]] = Field(default_factory=dict)
    skipped_updates: float = 0.0
    schedule_sha256: str | None = None
    """Digest of the versions in schedule.json, up to this update."""


class Versions(BaseModel):
    """The form of ``configs/versions.json``; its other keys are versions."""

    origin: str | None = None
    code: dict[str, str] = {}
    notes: list[str] = []


class PopulationSummary(BaseModel):
    """The form of ``population.json``."""

    best: NonNegativeInt | None


class ResolvedTrainer(BaseModel):
    """Keys of ``trainer`` in every run's ``resolved.json``, of any version."""

    exp_name: str
    seed: int = 1
    num_envs: PositiveInt = 1
    buffer_size: PositiveInt = 1
    iterations: int = 1
    total_timesteps: int | None = None
    best_eval_metric: str = REWARD
    best_eval_mode: Mode = "max"
    distributed: bool = False


class ResolvedConfig(BaseModel):
    """The form of ``configs/resolved.json``, read without resolving a name."""

    trainer: ResolvedTrainer
    env: dict[str, Any] = {}
    algorithm: dict[str, Any] = {}


@dataclass(frozen=True)
class RunDirectory:
    """One run's folder."""

    path: Path
    exp_name: str
    save_arrays: Callable[[Path, PyTree], None] = save_arrays
    previous: list[Path] = field(default_factory=list, compare=False)
    """The checkpoint of the run that this process read or wrote last, if any."""

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def member(self, index: int) -> "RunDirectory":
        return RunDirectory(self.path / "members" / str(index), self.exp_name)

    @property
    def config_file(self) -> Path:
        return self.path / "configs" / "resolved.json"

    @property
    def results(self) -> Path:
        """The folder that evaluations write to: the run's own; for a policy in the package, which is never written to,
        ``outputs/<name>``."""
        return Path("outputs", self.path.name) if self.path.parent == POLICIES else self.path

    def periodic(self) -> list[Path]:
        """List the checkpoints made along the way, newest first."""
        return list_checkpoints(self.checkpoints, self.exp_name)

    def best(self) -> list[Path]:
        """List the best checkpoint, newest first (two where a run was killed while it changed)."""
        return list_checkpoints(self.checkpoints, f"{self.exp_name}_best")

    def save(self, state: PyTree, meta: dict[str, Any], *, keep: int) -> Path:
        """Save a periodic checkpoint; of the older ones ``keep`` − 1 stay."""
        path = self._save(state, meta["global_step"], meta, best=False)
        for old in self.periodic()[keep:]:  # only now, when the new one is complete
            remove(old)
        return path

    def save_best(self, state: PyTree, meta: dict[str, Any]) -> Path:
        """Save the best checkpoint; the former best goes once the new one is complete."""
        path = self._save(state, meta["global_step"], meta, best=True)
        for old in self.best():
            if old != path:
                remove(old)
        return path

    def save_share(self, state: PyTree, step: int, *, best: bool = False) -> None:
        """Write this process's part of the arrays of a checkpoint, which process 0 saves at the same time."""
        self._save(state, step, None, best=best)

    def _save(self, state: PyTree, step: int, meta: dict[str, Any] | None, *, best: bool) -> Path:
        """Write a checkpoint; ``meta`` None: this process's part of its arrays."""
        path = self.checkpoints / f"{self.exp_name}_{'best_' if best else ''}step_{step}"
        save_checkpoint(self.checkpoints, path.name, state, meta, self.save_arrays, next(iter(self.previous), None))
        self.previous[:] = [path]
        return path

    def recover(self) -> list[str]:
        """Put in place the checkpoints that a kill caught, and report them. For the one process that continues."""
        found = recover_checkpoints(self.checkpoints)
        return [f"recovered {path}: a kill came while it was put in place" for path in found]

    def saved(self) -> list[Path]:
        """List all checkpoints, damaged ones included: those made along the way, then the best."""
        return [*self.periodic(), *self.best()]

    def versions(self) -> dict[str, Any]:
        """Read what the run started from: ``origin``, a checkpoint or file, and ``device``, its ``<platform>: <kind>``.
        Raises CheckpointError: that cannot be read."""
        try:
            return read_facts(self.config_file.with_name(VERSIONS), Versions)
        except FactsError as error:
            raise CheckpointError(f"what the run started from is not known: {error}") from None

    @property
    def resume_command(self) -> str:
        """The command that continues the run; it names the run's own code where this process let that through."""
        options = ""
        with contextlib.suppress(FactsError):  # of a damaged config the command says more
            options = trust_options(read_facts(self.config_file, ResolvedConfig))
        return f"ejax train --run {shlex.quote(str(self.path))} --resume latest{options}"

    def status_line(self) -> str:
        """Describe what is left of a run that ends immediately, and the command to continue it."""
        if not self.config_file.exists():
            return f"{self.path} is not a run yet: nothing was left"
        again = self.resume_command
        newest = next(iter(self.saved()), None)
        if newest is None:
            return f"run {self.path} has no checkpoint yet; {again} starts it from the beginning"
        return f"the last checkpoint is {newest}, what came after it is lost; continue with {again}"

    def archive_after(self, step: int) -> list[Path]:
        """Rename the checkpoints of later env steps, which would pass for the newest ones, and return them."""
        later = [path for path in self.saved() if int(path.name.rpartition("_")[2]) > step]
        return [move(path, path.with_name(f"superseded_{time.time_ns()}_{path.name}"), self.path) for path in later]

    def delete_if_new(self) -> None:
        """Undo ``create_run_directory``, so that the folder can be given again; what others put there stays."""
        configs = [self.config_file.with_name(name) for name in (*_CONFIGS, CHANGES, LISTING)]
        for file in (*configs, *configs[0].parent.glob(".*partial*"), self.path / SCHEDULE, self.path / LOCK):
            if not file.parent.is_symlink() or file.parent == self.path:
                file.unlink(missing_ok=True)
        for folder in (self.config_file.parent, self.checkpoints, self.path):  # empty ones only: the rest is not ours
            if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
                folder.rmdir()

    def find(self, which: str | None, report: Callable[[str], None]) -> Path:
        """Find the newest undamaged checkpoint, ``latest`` or ``best``; damaged ones are reported and passed over.

        Without one that was made along the way, the best one is the latest. ``which`` None: the best, else the latest.

        Raises CheckpointError: there is none.
        """
        which = which or ("best" if self.best() else "latest")
        candidates = self.saved() if which == "latest" else self.best()
        for path in candidates:
            try:
                verify_checkpoint(path, RunMeta)
                return path
            except ForeignError:
                raise
            except CheckpointError as error:
                report(f"{error}; using the one before it")
        seen = f"all {len(candidates)} are damaged" if candidates else "there is none yet"
        raise CheckpointError(f"no {which} checkpoint to resume from in {self.checkpoints}: {seen}")


def create_run_directory(
    config: RunConfig, path: Path, *, origin: str | None = None, notes: Sequence[str] = ()
) -> RunDirectory:
    """Make the folder of a new run and write its config and versions.

    Args:
        origin: what the run starts from: a file of another system, or a checkpoint of another run.
        notes: on what the config left open and this machine decided.

    Raises:
        FileExistsError: ``path`` holds a run already.
    """
    versions = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": f"{jax.devices()[0].platform}: {jax.devices()[0].device_kind}",
        **library_versions(),
        **({"code": code} if (code := note_code(places_in(config.to_dict()))) else {}),
        **({} if origin is None else {"origin": os.path.abspath(origin)}),
        **({"notes": list(notes)} if notes else {}),
    }
    directory = RunDirectory(path, config.trainer.exp_name)
    if directory.config_file.exists():
        text = f"{path} holds a run already; resume it with {directory.resume_command}, or choose another folder"
        raise FileExistsError(text)
    try:
        facts = zip(_CONFIGS, (config.to_dict(), versions), strict=True)
        texts = {name: to_json(values, indent=2) for name, values in facts}
        # the digests come first: a run without its seal would look damaged
        seal = {LISTING: render_digests({name: sha256(text.encode()) for name, text in texts.items()})}
        make_folder(directory.checkpoints, path)  # a kill may have come right after it
        for name, text in reversed((texts | seal).items()):  # the config last and whole: it makes the folder a run
            replace_file(directory.config_file.with_name(name), text, path)
    except BaseException:
        directory.delete_if_new()
        raise
    return directory


def new_run_folder(config: RunConfig) -> Path:
    """Make ``<output_dir>/<exp_name>_<time>``, empty."""
    path = Path(config.trainer.output_dir) / f"{config.trainer.exp_name}_{time.strftime('%Y%m%d_%H%M%S')}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        text = f"got {path.parent}, which is a file or lies below one; name another folder"
        raise ConfigError([Problem("trainer.output_dir", text)]) from error
    try:
        path.mkdir()
    except FileExistsError:  # two runs in one second, maybe of two processes
        path = path.with_name(f"{path.name}_{time.time_ns() % 10**9:09d}")
        path.mkdir()
    return path


def find_run(path: Path, *, policy: bool = False) -> Path:
    """Find the folder of a run; without the time at its end: the newest run of that name. ``policy``: or, where neither
    is there, a policy that comes with ejax, by its bare name. Raises FileNotFoundError: ``path`` is not a run."""
    if "\0" in str(path):
        raise FileNotFoundError(f"{str(path)!r} holds a null character: no file has such a name")
    path = Path(expanded(str(path)))
    if not path.exists():
        own = shipped_policies() if path.parent == Path() else {}
        try:
            path = newest_run(path.parent, path.name, list(own) if policy else [])
        except FileNotFoundError:
            if path.name not in own:
                raise
            if not policy:
                text = "is a policy that comes with ejax, without the run that trained it"
                raise FileNotFoundError(f"{path} {text}; policy.init_from={path} starts a new run from it") from None
            path = POLICIES / path.name
    if not (path / "configs" / "resolved.json").is_file():
        export = "; it is an export: name the run that it was made from" if (path / "parity.json").is_file() else ""
        raise FileNotFoundError(f"{path} is not a run of ejax: it has no configs/resolved.json{export}")
    return path


def newest_run(output_dir: Path, exp_name: str, others: Sequence[str] = ()) -> Path:
    """Find the run of exactly that name which was started last. FileNotFoundError: there is none; ``others`` are names
    that the caller would take as well."""
    files = output_dir.glob(f"{glob.escape(exp_name)}_*/configs/resolved.json")
    # by the time in its name: what is written there later, and what others copied, counts for nothing
    runs = [path for path in (file.parents[1] for file in files) if _TIME.fullmatch(path.name.removeprefix(exp_name))]
    if not runs:
        names = {_TIME.sub("", file.parents[1].name) for file in output_dir.glob("*/configs/resolved.json")}
        more = f", or a policy of ejax's: {', '.join(others)}" if others else ""
        hint = did_you_mean(exp_name, sorted({*names, *others}))
        raise FileNotFoundError(f"no run of '{exp_name}' in {output_dir}; name the folder of a run{more}{hint}")
    return max(runs)


def has_no_config(path: Path) -> bool:
    """Return whether a kill left the folder while it was made, before there was a run."""
    there = {each.name for each in path.iterdir() if not is_side_file(each.name)} if path.is_dir() else {""}
    if there - {"configs", "checkpoints", LOCK}:
        return False
    return not (path / "configs" / "resolved.json").exists() and not any((path / "checkpoints").glob("*"))


def open_run_directory(path: Path, *, policy: bool = False) -> tuple[RunDirectory, RunConfig]:
    """Open a run, found as by ``find_run``, with its config; but for the device, which is the CPU. Raises
    FileNotFoundError: ``path`` is not a run. CheckpointError: its config was changed or damaged. ConfigError: it names
    code that nobody trusted (``ejax.schema.trust``)."""
    path = find_run(path, policy=policy)
    check_configs(path)
    file = path / "configs" / "resolved.json"
    # a file as any other: what it names is not trusted; and who reads it chooses the device
    with contextlib.suppress(CheckpointError):  # the first runs do not have it
        noted.update(RunDirectory(path, "").versions().get("code", {}))
    try:
        config = load_config(file, device="cpu")
        # once more: what this process has read from another run is not looked up again
        if text := next(filter(None, map(two_of_a_name, places_in(config.to_dict()))), None):
            raise ConfigError([Problem("", text)], str(file))
    finally:
        noted.clear()
    return RunDirectory(path, config.trainer.exp_name), config


def check_configs(path: Path) -> None:
    """Compare the configs of a run with their digests. CheckpointError: they were changed or damaged."""
    file = path / "configs" / "resolved.json"
    try:
        if (file.parent / LISTING).exists():  # the first runs of ejax have none
            try:
                check_digests(file.parent, _CONFIGS)
            except DamagedError:  # a kill may have come while a resume recorded what it changed
                if not (file.parent / NEXT_LISTING).exists():
                    raise
                check_digests(file.parent, _CONFIGS, NEXT_LISTING)
        read_facts(file, ResolvedConfig)
    except ForeignError as error:
        raise ForeignError(f"run {path}: configs/{error}") from None
    except (DamagedError, FactsError) as error:
        raise CheckpointError(
            f"the configs of run {path} are damaged: {error}. Put back a copy of that folder; without one, write the "
            f"value of 'config' in {path}/checkpoints/<name>/meta.json into resolved.json, and remove {LISTING}"
        ) from None


def open_policy_run(path: Path, member: int | None = None) -> tuple[RunDirectory, RunConfig]:
    """Open a run, or a policy that comes with ejax, for its policy: of a population, one member. ``member`` None: the
    best one, by ``trainer.best_eval_metric``, or without evaluations by the reward in training. Raises ValueError:
    ``member`` is out of range."""
    directory, config = open_run_directory(path, policy=True)
    if config.population is None:
        if member is not None:
            raise ValueError(f"got member {member}, but {directory.path} is not a population, and has none")
        return directory, config
    if member is None:
        remedy = f"name {directory.member(0).path} or another"  # members train on without a best one
        try:
            member = read_facts(directory.path / "population.json", PopulationSummary)["best"]
        except FactsError as error:
            raise CheckpointError(f"which member is the best is not known, {remedy}: {error}") from None
        if member is None:
            raise CheckpointError(f"{directory.path} has no best member yet; {remedy}")
    if not 0 <= member < (count := len(config.members)):
        raise ValueError(f"got member {member}; {directory.path} has 0 to {count - 1}")
    return open_run_directory(directory.member(member).path)
