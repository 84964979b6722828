"""The folder of a run: where things are in it, and which checkpoint a resumed run starts from.

<output_dir>/<exp_name>_<YYYYmmdd_HHMMSS>/
    configs/resolved.json       the config in canonical form: the run can be repeated from it alone
    configs/versions.json       Python, libraries, device
    checkpoints/<exp_name>_step_<n>/, <exp_name>_best_step_<n>/     n: environment steps
    logs/metrics.jsonl, logs/<exp_name>/events.out.tfevents.*
    videos/
    quarantine/                 what broke environments, for python -m ejax.replay
    schedule.json               {"versions": […]}: of the parameters that made each rollout, where they may be older
"""

import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ejax.checkpoint import CheckpointError, library_versions, list_checkpoints, save_checkpoint, verify_checkpoint
from ejax.config import RunConfig, load_config
from ejax.types import PyTree

_MAY_CHANGE = frozenset(
    {
        "iterations",
        "total_timesteps",
        "enable_eval",
        "eval_freq",
        "num_eval_envs",
        "num_eval_episodes",
        "eval_episode_choice",
        "best_eval_metric",
        "best_eval_mode",
        "save_freq",
        "save_frequency_updates",
        "keep_checkpoints",
        "output_dir",
        "cameras",
        "events.eval",
        "use_wandb",
        "wandb_project_name",
        "log_freq_updates",
        "updates_per_dispatch",
        "console",
        "device",
        "collector.pause_in_evaluation",
        "collector.stop_timeout_s",
        "collector.env_timeout_s",
        "collector.max_quarantined",
        "collector.max_env_restarts",
        "data.num_workers",
        "data.prefetch",
        "data.initialization_timeout",
        "data.worker_timeout",
        "data.folder",
        "data.cache_mb",
    }
)
"""Keys of ``trainer``, and of ``data``, that a resumed run may set anew: none of them changes what an update computes,
and of a folder it is checked that it holds the same episodes. (A learning-rate schedule
keeps the horizon of the run's start.)"""


@dataclass(frozen=True)
class RunDirectory:
    """One run's folder."""

    path: Path
    exp_name: str

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def config_file(self) -> Path:
        return self.path / "configs" / "resolved.json"

    def periodic(self) -> list[Path]:
        """The checkpoints made along the way, newest first."""
        return list_checkpoints(self.checkpoints, self.exp_name)

    def best(self) -> list[Path]:
        """The best checkpoint, newest first (two where a run was killed while it changed)."""
        return list_checkpoints(self.checkpoints, f"{self.exp_name}_best")

    def save(self, state: PyTree, meta: dict[str, Any], *, keep: int) -> Path:
        """Save a periodic checkpoint; of the older ones ``keep`` − 1 stay."""
        path = save_checkpoint(self.checkpoints, f"{self.exp_name}_step_{meta['global_step']}", state, meta)
        for old in self.periodic()[keep:]:
            shutil.rmtree(old)
        return path

    def save_best(self, state: PyTree, meta: dict[str, Any]) -> Path:
        """Save the best checkpoint; the former best goes once the new one is complete."""
        path = save_checkpoint(self.checkpoints, f"{self.exp_name}_best_step_{meta['global_step']}", state, meta)
        for old in self.best():
            if old != path:
                shutil.rmtree(old)
        return path

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename the checkpoints of later env steps: a run that goes on from ``step`` makes its own.

        They would else pass for the newest ones, and new ones would be cleared away in their place.
        """
        later = [path for path in (*self.periodic(), *self.best()) if int(path.name.rpartition("_")[2]) > step]
        return [path.rename(path.with_name(f"superseded_{time.time_ns()}_{path.name}")) for path in later]

    def write_schedule(self, first: int, versions: Sequence[int]) -> None:
        """Versions of rollouts ``first``, ``first`` + 1, …; those of earlier ones stay, later ones are replaced.

        Raises:
            CheckpointError: the file lacks the earlier ones.
        """
        file = self.path / "schedule.json"
        earlier = json.loads(file.read_text())["versions"][:first] if first else []
        if len(earlier) < first:
            raise CheckpointError(f"{file} has {len(earlier)} versions of the {first} before this resume")
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps({"versions": [*earlier, *versions]}))
        os.replace(partial, file)

    def take_back(self) -> None:
        """Undo ``create_run_directory`` for a run that could not begin, so that the folder can be given again.

        What others put there stays.
        """
        for file in (self.config_file, self.config_file.with_name("versions.json"), self.path / "schedule.json"):
            file.unlink(missing_ok=True)
        for folder in (self.config_file.parent, self.checkpoints, self.path):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def find(self, which: str, report: Callable[[str], None]) -> Path:
        """The newest undamaged checkpoint: ``latest`` or ``best``. Damaged ones are reported and passed over.

        Raises:
            CheckpointError: there is none.
        """
        candidates = self.periodic() if which == "latest" else self.best()
        for path in candidates:
            try:
                return verify_checkpoint(path).path
            except CheckpointError as error:
                report(f"{error}; using the one before it")
        seen = f"all {len(candidates)} are damaged" if candidates else "there is none yet"
        raise CheckpointError(f"no {which} checkpoint to resume from in {self.checkpoints}: {seen}")


def create_run_directory(config: RunConfig, path: Path | None = None) -> RunDirectory:
    """Make the folder of a new run and write its config and versions.

    Args:
        path: instead of ``<output_dir>/<exp_name>_<time>``.

    Raises:
        FileExistsError: ``path`` holds a run already.
    """
    name = config.trainer.exp_name
    if path is None:
        path = Path(config.trainer.output_dir) / f"{name}_{time.strftime('%Y%m%d_%H%M%S')}"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir()
        except FileExistsError:  # two runs in one second, maybe of two processes
            path = path.with_name(f"{path.name}_{time.time_ns() % 10**9:09d}")
    directory = RunDirectory(path, name)
    if directory.config_file.exists():
        raise FileExistsError(
            f"{path} holds a run already; go on with it by python -m ejax.train --run {path} --resume latest, or give "
            "another folder"
        )
    directory.config_file.parent.mkdir(parents=True)
    directory.checkpoints.mkdir()
    directory.config_file.write_text(json.dumps(config.to_dict(), indent=2))
    versions = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": f"{jax.devices()[0].platform}: {jax.devices()[0].device_kind}",
        **library_versions(),
    }
    (path / "configs" / "versions.json").write_text(json.dumps(versions, indent=2))
    return directory


def open_run_directory(path: Path) -> tuple[RunDirectory, RunConfig]:
    """An existing run and the config that it was started with, but for the device, which is the CPU.

    Args:
        path: the run's folder, or without the time at its end: the newest run of that name.

    Raises:
        FileNotFoundError: ``path`` is no run.
        ConfigError: its config is damaged, or names code that nobody trusted (``ejax.trust``).
    """
    file = path / "configs" / "resolved.json"
    if not path.exists():
        path = newest_run(path.parent, path.name)
        file = path / "configs" / "resolved.json"
    if not file.is_file():
        raise FileNotFoundError(f"{path} is no run of ejax: it has no configs/resolved.json")
    # a file as any other: what it names is not trusted; and where the run was trained does not matter to those who read
    # it, since they say themselves where they compute
    config = load_config(file, device="cpu")
    return RunDirectory(path, config.trainer.exp_name), config


def newest_run(output_dir: Path, exp_name: str) -> Path:
    """The run of that name which was started last.

    Raises:
        FileNotFoundError: there is none.
    """
    runs = [file.parents[1] for file in output_dir.glob(f"{exp_name}_*/configs/resolved.json")]
    if not runs:
        raise FileNotFoundError(
            f"no run of '{exp_name}' in {output_dir}; give the run's folder (to python -m ejax.train by --run)"
        )
    return max(runs, key=lambda run: (run / "configs" / "resolved.json").stat().st_mtime_ns)


def check_same_run(config: RunConfig, saved: RunConfig) -> None:
    """Refuse to resume under a config that would compute something else.

    Raises:
        CheckpointError: naming each key that differs and may not.
    """
    differ = [
        f"{key} is {json.dumps(there)} in the run and {json.dumps(here)} now"
        for key, there, here in differences(saved.to_dict(), config.to_dict(), "")
        if not _may_change(key.removeprefix("trainer."))
    ]
    if differ:
        raise CheckpointError("this config is not the one that the run was started with: " + "; ".join(differ))


def _may_change(key: str) -> bool:
    return any(key == allowed or key.startswith(f"{allowed}.") for allowed in _MAY_CHANGE)


def differences(a: Any, b: Any, path: str) -> list[tuple[str, Any, Any]]:
    """``(key, in a, in b)`` of the values that differ in two nested mappings; dotted keys that begin with ``path``."""
    if isinstance(a, dict) and isinstance(b, dict):
        names = sorted(a.keys() | b.keys())
        return [d for name in names for d in differences(a.get(name), b.get(name), f"{path}.{name}".lstrip("."))]
    return [] if a == b else [(path, a, b)]
