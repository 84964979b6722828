"""Ways in which a file is damaged, and what a run makes of a damaged folder."""

import contextlib
import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from orbax.checkpoint import v1 as ocp
from tiny import EVALUATED, STEPS, tiny

from ejax.config import ConfigError, RunConfig
from ejax.run import train
from ejax.store.checkpoint import CheckpointError, verify_checkpoint

TOLD = (ConfigError, CheckpointError, FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError)
"""The errors that the command line turns into one message."""
OF_TIMING = ("time", "charts/SPS")
"""Keys of the log that differ from run to run, besides those that end with ``_s`` or begin so."""
_OF_THE_MACHINE = ("collector/queue", "data/", "memory/")


def _change(file: Path, change: Callable[[bytearray], None]) -> None:
    content = bytearray(file.read_bytes())
    if content:
        change(content)
    file.write_bytes(content)


def _put(content: bytearray, index: int, value: int) -> None:
    content[index] = value


def _replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "first byte": lambda file: _change(file, lambda x: _put(x, 0, x[0] ^ 0xFF)),
    "middle byte": lambda file: _change(file, lambda x: _put(x, len(x) // 2, x[len(x) // 2] ^ 0xFF)),
    "last byte": lambda file: _change(file, lambda x: _put(x, -1, x[-1] ^ 0xFF)),
    "one bit": lambda file: _change(file, lambda x: _put(x, len(x) // 3, x[len(x) // 3] ^ 1)),
    "cut to nothing": lambda file: file.write_bytes(b""),
    "cut in half": lambda file: _change(file, lambda x: x.__delitem__(slice(len(x) // 2, None))),
    "grown": lambda file: file.write_bytes(file.read_bytes() + b"0"),
    "removed": lambda file: file.unlink(),
    "a folder": _replace_by_folder,
}


def asynchronous_run(folder: Path) -> dict[str, Any]:
    """Make the config of eight updates that leave every kind of file, and can be resumed exactly."""
    saved_and_evaluated = EVALUATED | {"eval_freq": 2 * STEPS, "save_frequency_updates": 2}
    return tiny(folder, **saved_and_evaluated, iterations=8, collector={"mode": "async", "max_staleness": 0})


def damage(file: Path, how: str) -> bool:
    """Damage ``file``. False: this leaves it as it is, an empty one for example."""
    before = file.read_bytes()
    DAMAGES[how](file)
    return not file.is_file() or file.read_bytes() != before


def outcome(config: RunConfig, run: Path, resume: str, expected: dict[str, Any]) -> tuple[str, str]:
    """Go on with a damaged run.

    Returns:
        ``(verdict, text)``: ``refused`` or ``reported`` (and the same bits), or a fault: ``unnoticed`` (the same bits
        all the same), ``other bits``, ``raw`` for an error that is no message.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            result = train(config, resume=resume, run_dir=run)
    except TOLD as error:
        return "refused", str(error)
    except Exception as error:
        return "raw", f"{type(error).__name__}: {error}"
    if not result.finished or not same(what_is_left(run, config.trainer.exp_name), expected):
        return "other bits", said.getvalue()
    return ("reported" if said.getvalue() else "unnoticed"), said.getvalue()


def what_is_left(run: Path, exp_name: str) -> dict[str, Any]:
    """Return the newest checkpoint's arrays, and the log without the lines that depend on time."""
    newest = max((run / "checkpoints").glob(f"{exp_name}_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    verify_checkpoint(newest)
    with warnings.catch_warnings():  # orbax warns that arrays come back onto one device
        warnings.simplefilter("ignore")
        arrays = {name: np.asarray(x) for name, x in ocp.load(str((newest / "state").absolute())).items()}
    rows = {file.name: np.frombuffer(file.read_bytes(), np.uint8) for file in (newest / "replay").glob("*")}
    lines = [json.loads(line) for line in (run / "logs" / "metrics.jsonl").read_text().splitlines()]
    return {"name": newest.name, "arrays": arrays | rows, "log": [_steady(line) for line in lines]}


def same(a: dict[str, Any], b: dict[str, Any], *, log: bool = False) -> bool:
    """Return True if the arrays agree in each bit, and with ``log`` the logs in each number."""
    if a["name"] != b["name"] or a["arrays"].keys() != b["arrays"].keys() or (log and a["log"] != b["log"]):
        return False
    return all(
        x.dtype == (y := b["arrays"][name]).dtype and x.tobytes() == y.tobytes() for name, x in a["arrays"].items()
    )


def _steady(line: dict[str, Any]) -> dict[str, Any]:
    return {
        tag: value
        for tag, value in line.items()
        if tag not in OF_TIMING and not tag.endswith("_s") and not tag.startswith(_OF_THE_MACHINE)
    }
