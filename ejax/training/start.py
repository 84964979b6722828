"""Find where a run begins: a new one, one that continues, a fork of another, or one from another system's file."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ejax.config import ConfigError, Problem, RunConfig, bind
from ejax.config.load import parse_untrusted
from ejax.logs.json_records import read_facts
from ejax.runtime.process_exit import refuse_rerun
from ejax.runtime.processes import Group
from ejax.runtime.sharding import is_main_process
from ejax.schema.frozen import with_value
from ejax.schema.messages import short_repr
from ejax.schema.plain_files import expanded
from ejax.schema.registry import is_foreign_checkpoint
from ejax.store.checkpoint import CheckpointError, verify_checkpoint
from ejax.store.resume_rules import check_same_run, differences, with_changes
from ejax.store.run_dir import (
    RunDirectory,
    RunMeta,
    create_run_directory,
    has_no_config,
    new_run_folder,
    newest_run,
    open_run_directory,
)
from ejax.store.run_lock import run_lock
from ejax.training.build import all_devices
from ejax.training.environments import engine_of, resolve_physics
from ejax.training.warm_start import find_checkpoint


@dataclass(frozen=True)
class RunLocation:
    """A run's folder, and what it can continue from."""

    directory: RunDirectory
    config: RunConfig
    """Bound, and with a named physics engine."""
    checkpoint: Path | None = None
    file: str | None = None
    """To start from without a checkpoint: a file of another system, or a checkpoint of another run."""
    recorded: RunConfig | None = None
    """The config that a resumed run records: bound, before it is shared out among other devices."""
    is_new: bool = False
    alarms: tuple[str, ...] = ()
    """Messages that a person must see: damaged checkpoints, a run that starts from the beginning."""
    notes: tuple[str, ...] = ()


def locate_together(find: Callable[[], RunLocation], group: Group) -> RunLocation:
    """Have the first of several processes locate the run, and the others take its word."""
    location = find() if is_main_process() else None
    word = location and {
        "config": location.config.to_dict(),
        "run_dir": str(location.directory.path.absolute()),
        "checkpoint": str(location.checkpoint.absolute()) if location.checkpoint else None,
        "file": location.file,
    }
    found = group.gather(word, "find the run")[0]  # others may see the disk later, or another newest run
    if location is not None:
        return location
    directory = RunDirectory(Path(found["run_dir"]), found["config"]["trainer"]["exp_name"])
    checkpoint = Path(found["checkpoint"]) if found["checkpoint"] else None
    return RunLocation(directory, parse_untrusted(found["config"]), checkpoint, found["file"])


def locate_run(
    config: RunConfig,
    locks: ExitStack,
    resume: str | None = None,
    run_dir: Path | None = None,
    fork: Path | None = None,
) -> RunLocation:
    """Make or open the folder of a run, by these arguments of ``ejax.run.train`` and with its errors. ``locks`` keeps
    the folder's lock."""
    refuse_rerun()
    if fork is not None and resume is not None:
        raise ConfigError([], f"got fork {fork} and resume '{resume}'; a fork is a new run, so pass only one of them")
    run_dir = run_dir and Path(expanded(str(run_dir)))
    if fork is not None:
        passed_over: list[str] = []
        source = str(find_checkpoint(fork, passed_over).absolute())
        return new_run(config, run_dir, locks, source=source, alarms=tuple(passed_over))  # the other run is only read
    if resume is None or is_foreign_checkpoint(resume):
        return new_run(config, run_dir, locks, source=resume)
    return resume_run(config, resume, run_dir, locks)


def new_run(
    config: RunConfig,
    run_dir: Path | None,
    locks: ExitStack,
    *,
    source: str | None = None,
    alarms: tuple[str, ...] = (),
) -> RunLocation:
    """Make the folder of a run from the beginning, or from ``source``: a foreign file or another run's checkpoint."""
    config = bind(config)  # a schedule takes its horizon from the run it begins with
    settled, notes = resolve_physics(config)
    run_dir = run_dir or new_run_folder(config)
    locks.enter_context(run_lock(run_dir))  # before anything is written there
    directory = create_run_directory(config, run_dir, origin=source, notes=notes)
    return RunLocation(directory, settled, file=source, is_new=True, alarms=alarms, notes=notes)


def resume_run(config: RunConfig, which: str, run_dir: Path | None, locks: ExitStack) -> RunLocation:
    """Open a run's folder, put it in order, and find the checkpoint ``which``: ``latest``, ``best`` or a path."""
    checkpoint = file = None
    if which not in ("latest", "best"):
        checkpoint = Path(which)
        verify_checkpoint(checkpoint, RunMeta)
        run_dir = run_dir or checkpoint.absolute().parents[1]  # RUN/checkpoints/NAME
    elif which == "latest" and run_dir is not None and has_no_config(run_dir):
        alarm = f"a kill came before {run_dir} was a run: it starts from the beginning"
        return new_run(config, run_dir, locks, alarms=(alarm,))
    path = run_dir or newest_run(Path(config.trainer.output_dir), config.trainer.exp_name)
    left_behind = locks.enter_context(run_lock(path)) if (path / "configs").is_dir() else ""  # else it is not a run
    directory, saved = open_run_directory(path)
    filled = {key for key, *_ in differences(config.to_dict(), bind(config).to_dict(), "")}
    for key, _, there in differences(config.to_dict(), saved.to_dict(), ""):
        if key in filled:  # a schedule keeps the horizon that the run was started with, or stretched to
            config = with_value(config, key, there)
    recorded = bind(config)
    check_same_run(recorded, saved)  # before the folder is put in order
    alarms = [*([left_behind] if left_behind else []), *directory.recover()]
    if which == "latest" and not directory.saved():
        file = directory.versions().get("origin")
        text = f"{path} has no checkpoint, a kill came before the first: it starts from {file or 'the beginning'}"
        alarms.append(text)
    elif checkpoint is None:
        checkpoint = directory.find(which, alarms.append)
    config, notes = resolve_physics(recorded, None if checkpoint is None else engine_of(checkpoint))
    if checkpoint is not None:
        num_devices = len(all_devices(config)) if config.trainer.distributed else 1
        config, shared = rescale_for_devices(config, checkpoint, num_devices)
        notes += shared
    return RunLocation(directory, config, checkpoint, file, recorded, alarms=tuple(alarms), notes=notes)


def rescale_for_devices(config: RunConfig, checkpoint: Path, num_devices: int) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the config for this number of devices that computes what the checkpoint's did, and a note if they differ.

    Options for one device (``num_envs``, ``batch_size``) grow as the devices get fewer; minibatches keep their strata.

    Raises:
        ConfigError: the environments, or the rows of a minibatch, cannot be shared by so many.
        CheckpointError: the checkpoint's config is not a config of this run.
    """
    meta = read_facts(checkpoint / "meta.json", RunMeta)
    was = meta.get("num_devices")
    if was is None:  # an older checkpoint
        return config, ()
    record = config.algorithm.record
    before, saved = _saved_options(config, checkpoint, meta["config"])
    # rows of demonstrations are counted by the algorithm, those of rollouts by the environments
    sizes = {} if config.data is None else record.sizes(saved, config.data.chunk_size)
    if (was, before) == (num_devices, config.trainer.num_envs) and sizes.items() <= config.trainer.model_dump().items():
        return config, ()
    num_envs, rest = divmod(was * before, num_devices)  # all environments stay: their states are in the checkpoint
    if rest and config.data is None:
        text = f"the run has {was} x {before} environments, of which {num_devices} devices would leave {rest}"
        raise ConfigError([Problem("trainer.num_envs", f"{text}; use a number of devices that divides them")])
    options = record.rescale_for_devices(with_changes(saved, config.algorithm.cfg), was, num_devices)
    if config.data is None:
        sizes = {"num_envs": num_envs}
        note = f"{num_devices} devices, {num_envs} environments on each; the checkpoint was made on {was} with {before}"
    else:
        sizes = record.sizes(options, config.data.chunk_size)
        note = f"{num_devices} devices share each batch; the checkpoint was made on {was}"
    for key, value in {"algorithm.cfg": options, **{f"trainer.{name}": size for name, size in sizes.items()}}.items():
        config = with_value(config, key, value)
    return config, (note,) if was != num_devices else ()


def _saved_options(config: RunConfig, checkpoint: Path, saved: dict[str, Any]) -> tuple[int, Any]:
    """Read ``num_envs`` and the algorithm's options of a checkpoint. Names in it are compared, never resolved."""
    try:
        num_envs, algorithm = saved["trainer"]["num_envs"], saved["algorithm"]
        name = short_repr(algorithm["name"])
        if algorithm["name"] != config.algorithm.name:
            raise ValueError(f"it names the algorithm {name}, the run's is {config.algorithm.name}")
        if type(num_envs) is not int or num_envs < 1:
            raise ValueError(f"trainer.num_envs is {short_repr(num_envs)}")
        return num_envs, type(config.algorithm.cfg).model_validate_json(json.dumps(algorithm["cfg"]), strict=True)
    except (KeyError, TypeError, ValueError) as error:  # pydantic's is a ValueError
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
        text = f"the config in {checkpoint / 'meta.json'} is not a config of this run: {reason}"
        raise CheckpointError(text) from error
