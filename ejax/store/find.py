"""Find the folder of a run: by its path, by its name, or a new one."""

import glob
import re
import time
from pathlib import Path

from pydantic import BaseModel

from ejax.config import RunConfig
from ejax.logs.json_records import FactsError, read_facts
from ejax.store.run_lock import LOCK


class _Trainer(BaseModel):
    exp_name: str


class ResolvedName(BaseModel):
    """The part of ``resolved.json`` that names the run; the rest is checked as a config."""

    trainer: _Trainer


def new_run_folder(config: RunConfig) -> Path:
    """Make ``<output_dir>/<exp_name>_<time>``, empty."""
    path = Path(config.trainer.output_dir) / f"{config.trainer.exp_name}_{time.strftime('%Y%m%d_%H%M%S')}"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir()
    except FileExistsError:  # two runs in one second, maybe of two processes
        path = path.with_name(f"{path.name}_{time.time_ns() % 10**9:09d}")
        path.mkdir()
    return path


def find_run(path: Path) -> Path:
    """Find the folder of a run; without the time at its end: the newest run of that name.

    Raises:
        FileNotFoundError: ``path`` is no run.
    """
    if "\0" in str(path):
        raise FileNotFoundError(f"{str(path)!r} holds a null character: no file has such a name")
    if not path.exists():
        path = newest_run(path.parent, path.name)
    if not (path / "configs" / "resolved.json").is_file():
        export = "; it is an export: name the run that it was made from" if (path / "parity.json").is_file() else ""
        raise FileNotFoundError(f"{path} is no run of ejax: it has no configs/resolved.json{export}")
    return path


def newest_run(output_dir: Path, exp_name: str) -> Path:
    """Find the run of exactly that name which was started last. FileNotFoundError: there is none."""
    files = output_dir.glob(f"{glob.escape(exp_name)}_*/configs/resolved.json")
    runs = [(file.stat().st_mtime_ns, file.parents[1]) for file in files if _name_of(file, exp_name) == exp_name]
    if not runs:
        raise FileNotFoundError(f"no run of '{exp_name}' in {output_dir}; name the folder of a run")
    return max(runs)[1]


def never_began(path: Path) -> bool:
    """Recognize a folder that a kill left while it was made, before there was a run."""
    return (
        path.is_dir()
        and {each.name for each in path.iterdir()} <= {"configs", "checkpoints", LOCK}
        and not _is_run(path)
    )


def _is_run(path: Path) -> bool:
    return (path / "configs" / "resolved.json").exists() or any((path / "checkpoints").glob("*"))


def _name_of(file: Path, exp_name: str) -> str | None:
    """Read the name that a run recorded; if that fails, ``exp_name`` where the folder's name fits it."""
    try:
        return read_facts(file, ResolvedName)["trainer"]["exp_name"]
    except FactsError:
        return exp_name if re.fullmatch(r"_\d{8}_\d{6}(_\d{9})?", file.parents[1].name.removeprefix(exp_name)) else None
