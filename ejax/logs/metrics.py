"""The sinks of a run's numbers: JSONL and TensorBoard always, the console and Weights & Biases on request.

A run directory holds, in EmbodiChain's layout and with its tags::

    logs/metrics.jsonl                   one line a write: {"step": 8192, "time": 1.7e9, "train/loss": 0.5}
    logs/sessions.jsonl                  one line a call, once it ends: {"start": 1.7e9, "end": 1.7e9}
    logs/notes.log                       one line for each standard stream that went quiet
    logs/<exp_name>/events.out.tfevents… TensorBoard
    logs/wandb_id                        the W&B run to continue, if there is one

Each write reaches the operating system before it returns, in about 0.1 ms for 20 tags: a killed process loses nothing
that it had logged. tensorboardX's own writer would lose its queue, and wait for ever once its disk is full.
"""

import importlib.util
import math
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from ejax.logs.best import Best
from ejax.logs.metric_log import MetricLog, keep_up_to, write_note, write_session
from ejax.runtime.streams import note_losses
from ejax.schema.plain_files import read_text
from ejax.schema.writing import append_file, append_whole, by_product, make_folder, replace_file

_Write: TypeAlias = Callable[[int, Mapping[str, float]], None]


class MetricWriter(AbstractContextManager["MetricWriter"]):
    """The sinks of one run directory. A context manager, used from one thread.

    A run that is not new continues from its update: later JSONL lines are dropped, TensorBoard hides later points, W&B
    continues the same run. Lines that ejax did not write so are set aside and reported.

    Args:
        config: the ``ejax.config.RunConfig`` of the run.
        meta: of the checkpoint that the run continues from; empty for a run from the beginning.
        rows: env steps of one update.
        update: updates that are made already.
        evaluates_again: the evaluation at ``update`` is written a second time: drop the first.
        quiet: without console and W&B, which the config may have.
        started: ``time.monotonic`` when the call began that trains. None: no session is recorded.
        acts: how evaluations act, as the console names it.

    Raises:
        FileExistsError: ``run_dir`` already has metrics, and the run is new.
        ModuleNotFoundError: ``use_wandb`` without wandb installed.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Any,
        meta: Mapping[str, Any],
        *,
        rows: int,
        update: int,
        is_new: bool,
        evaluates_again: bool = False,
        quiet: bool = False,
        started: float | None = None,
        acts: str = "mean action",
    ) -> None:
        trainer, log_dir, step = config.trainer, run_dir / "logs", update * rows
        name, resume_step = trainer.exp_name, None if is_new else step
        wandb = _import_wandb() if trainer.use_wandb and not quiet else None  # before any file is made
        problems: list[str] = []
        with ExitStack() as stack:
            jsonl = log_dir / "metrics.jsonl"
            make_folder(log_dir, run_dir)
            if not is_new:
                problems = keep_up_to(jsonl, step, logged=meta.get("log"), evaluates_again=evaluates_again)
            elif jsonl.exists():
                text = "holds the metrics of an earlier run; resume that run, or choose a new folder"
                raise FileExistsError(f"{jsonl} {text}")
            if started is not None:
                stack.callback(write_session, log_dir, time.time() - (time.monotonic() - started))
            self._log = stack.enter_context(MetricLog(jsonl))
            self._sinks: dict[str, _Write] = {str(jsonl): self._log.write}  # first: the others can be made from it
            self._sinks["TensorBoard"] = _open_tensorboard(log_dir / name, resume_step, stack)
            if wandb is not None:
                self._sinks["W&B"] = _open_wandb(wandb, log_dir, config, stack, resumes=not is_new)
            self._view = None
            if trainer.console and not quiet:
                from ejax.logs.console import make_console  # brings the views and their tables

                shown = {"watched": trainer.best_eval_metric, "acts": acts}
                self._view = make_console(name, total_steps=trainer.num_updates * rows, start_step=step, **shown)
                stack.callback(self._view.close)
            if not quiet:
                note_losses(partial(write_note, log_dir))
            self._stack = stack.pop_all()  # all are open: from here on ``close`` closes them
        for problem in problems:
            self.alarm(problem)

    def write(
        self,
        step: int,
        metrics: Mapping[str, float],
        best: Best | None = None,
        *,
        shown: Mapping[str, float] | None = None,
    ) -> None:
        """Write host-side scalars under their tags: ``train/…``, ``charts/…``, ``eval/…`` and so on.

        NaN is ``null`` in JSONL and left out elsewhere, as EmbodiChain does; JSON has no infinity either.

        Args:
            metrics: tag -> number. Not device arrays: reading one would wait for the device.
            best: the best evaluation so far, for the console.
            shown: the part of them for the console. None: all.
        """
        metrics = {tag: float(value) for tag, value in metrics.items()}
        for name, sink in self._sinks.items():
            with by_product(f"a line of {name}", self.alarm, Exception):  # W&B has its own; the training continues
                sink(step, metrics)
        if self._view is not None:
            self._view.write(step, metrics if shown is None else shown, best)

    def note(self, message: str) -> None:
        if self._view is not None:
            self._view.note(message)

    def alarm(self, message: str) -> None:
        """``note``, or standard error without a console: for what a person must see."""
        if self._view is not None:
            self._view.note(message)
        else:
            print(f"ejax: {message}", file=sys.stderr, flush=True)

    def logged(self) -> dict[str, Any]:
        return self._log.so_far()

    def close(self) -> None:
        self._stack.close()

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


@contextmanager
def _bare_package(name: str) -> Iterator[None]:
    """Let modules of a package be imported without its ``__init__``; who imports the package later gets all of it."""
    if name in sys.modules or (found := importlib.util.find_spec(name)) is None:
        yield
        return
    sys.modules[name] = importlib.util.module_from_spec(found)
    try:
        yield
    finally:
        del sys.modules[name]


def _open_tensorboard(folder: Path, resume_step: int | None, stack: ExitStack) -> _Write:
    """Begin an event file: records of tensorboardX's ``Event`` messages, all tags of one step in one event."""
    with _bare_package("tensorboardX"):  # whose __init__ imports torch where that is installed: 1.2 s
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.record_writer import masked_crc32c

    # Nanoseconds at the end: a resume in the same second gets its own file, and sorts after the earlier one.
    now = time.time_ns()
    name = f"events.out.tfevents.{now // 10**9}.{socket.gethostname()}.{now}"
    file = stack.enter_context(append_file(folder / name, folder.parents[1]))

    def append(**event: Any) -> None:
        """Append one TFRecord: u64 length, its CRC, the message, its CRC."""
        data = Event(wall_time=time.time(), **event).SerializeToString()
        length = struct.pack("<Q", len(data))
        checks = (struct.pack("<I", masked_crc32c(part)) for part in (length, data))
        append_whole(file, length + next(checks) + data + next(checks))

    def write(step: int, metrics: Mapping[str, float]) -> None:
        if value := [{"tag": tag, "simple_value": x} for tag, x in metrics.items() if not math.isnan(x)]:
            append(step=step, summary=Summary(value=value))

    append(file_version="brain.Event:2")
    if resume_step is not None:  # TensorBoard hides what earlier files hold from this step on
        append(step=resume_step + 1, session_log=SessionLog(status=SessionLog.START))
    return write


def _import_wandb() -> Any:
    try:
        return importlib.import_module("wandb")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "use_wandb is true, but the package wandb is not installed; run pip install -e '.[wandb]' in ejax's "
            "folder, or set use_wandb to false."
        ) from error


def _open_wandb(wandb: Any, log_dir: Path, config: Any, stack: ExitStack, *, resumes: bool) -> _Write:
    trainer, id_file = config.trainer, log_dir / "wandb_id"
    run_id = read_text(id_file).strip() if resumes and id_file.exists() else None
    make_folder(log_dir / "wandb", log_dir.parent)
    place = {"project": trainer.wandb_project_name, "name": trainer.exp_name, "dir": str(log_dir)}
    # W&B ignores steps below those it already has: after a resume each step still has one value.
    run = wandb.init(**place, config=config.to_dict(), id=run_id, resume="allow")
    replace_file(id_file, run.id, log_dir.parent)

    def finish(kind: type[BaseException] | None, *_: object) -> None:
        with by_product("the end of the run in W&B", errors=Exception):
            run.finish(exit_code=int(kind is not None))

    stack.push(finish)  # not a callback: a run that ends by an exception is marked as failed
    return lambda step, metrics: run.log({tag: x for tag, x in metrics.items() if not math.isnan(x)}, step=step)
