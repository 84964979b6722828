"""Parts of a run, the ingredients of its stepper, and the memory that its replay buffers take."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from ejax.algorithms.host_rows import HostRows, RowMemory
from ejax.algorithms.record import Algorithm
from ejax.algorithms.replay_buffer import Replay, put_back, replays_in, row_bytes, take_out
from ejax.algorithms.step import RunState
from ejax.config import ConfigError, Problem, RunConfig
from ejax.policies.heads import uses_dropout
from ejax.schema.plain_files import read_text
from ejax.schema.writing import make_folder
from ejax.training.steppers import Stepper
from ejax.types import Env, HostEnv, Key, Policy, PyTree

T = TypeVar("T")


@dataclass(frozen=True)
class Ingredients:
    """Objects that a config names, from which its stepper is made."""

    config: RunConfig
    algorithm: Algorithm
    policy: Policy
    env: Env | HostEnv
    optimizer: optax.GradientTransformation

    @property
    def key(self) -> Key:
        """The run's seed key."""
        return jax.random.key(self.config.trainer.seed)

    @property
    def dropout(self) -> bool:
        return uses_dropout(self.policy)


@dataclass(frozen=True)
class Parts:
    """Parts of a run. Nothing is compiled yet. ``stepper`` owns the environments that need closing."""

    policy: Policy
    env: Env | HostEnv
    optimizer: optax.GradientTransformation
    stepper: Stepper[RunState]
    state: RunState
    """At update 0, without ``policy.init_from``."""
    num_devices: int = 1
    """Devices that share the environments, each ``trainer.num_envs`` of them."""
    eval_env: Env | HostEnv | None = None
    """The caller's own to evaluate in. None: the config's."""
    notes: tuple[str, ...] = ()
    memories: tuple[RowMemory, ...] = ()
    """Rows of replay buffers on the host, which has them as long as these parts are there."""


def with_own(state: RunState, made: Ingredients, num_envs: int) -> RunState:
    """Add what the algorithm keeps besides its ``TrainState``, if anything, of all environments of the run.
    ConfigError: a replay buffer that does not fit the memory."""
    make_own = made.algorithm.make_own
    if make_own is None:
        return state
    num_devices = num_envs // made.config.trainer.num_envs
    options = made.algorithm.rescale_for_devices(made.config.algorithm.cfg, num_devices, num_devices)
    make = partial(make_own, options, made.policy, made.env, num_envs)
    if not isinstance(state.update, jax.core.Tracer):  # else it is for devices that are not here
        check_fits(jax.eval_shape(make), num_devices)
    return replace(state, own=make())


def rows_per_update(config: RunConfig, parts: Parts) -> int:
    """Count environment steps (of cloning: samples) of one update, on all devices."""
    return config.trainer.buffer_size * config.trainer.num_envs * parts.num_devices


def group_size(config: RunConfig, num_devices: int) -> int:
    """Share out ``trainer.num_envs`` on each device to groups; ConfigError if these do not divide them."""
    num_groups, num_envs = config.trainer.collector.num_groups, num_devices * config.trainer.num_envs
    if num_envs % num_groups:
        text = f"got {num_groups}, which does not divide the {num_envs} environments of {num_devices} devices"
        raise ConfigError([Problem("trainer.collector.num_groups", text)])
    return num_envs // num_groups


def replay_bytes(state: PyTree) -> int:
    """Count the bytes of the rows of a state's replay buffers on all devices together."""
    return sum(_bytes(each) for each in replays_in(state) if not isinstance(each.rows, HostRows))


def replay_notes(state: PyTree, num_devices: int, run: Path) -> tuple[str, ...]:
    """Describe the replay buffers of a state: ``1,000,000 transitions x 196 B = 187 MiB on the device``."""
    device = "on the device" if num_devices == 1 else f"on {num_devices} devices together"
    return tuple(
        f"replay buffer: {each.shapes.discount.size:,} transitions x {row_bytes(each)} B = "
        f"{_bytes(each) / 2**20:,.0f} MiB {_place(each.rows, run) if isinstance(each.rows, HostRows) else device}"
        for each in replays_in(state)
    )


def check_fits(forms: PyTree, num_devices: int) -> None:
    """Raise a ConfigError for replay buffers of these forms that do not fit the memory of the devices."""
    device = jax.config.jax_default_device or jax.local_devices()[0]  # type: ignore[attr-defined]  # jax defines it at run time
    free, replays = free_bytes(device), replays_in(forms)
    if free is not None and device.platform != "cpu":  # devices of a CPU share its memory
        free *= num_devices
    there = [each for each in replays if not isinstance(each.rows, HostRows)]
    key = "replay.capacity" if len(there) == len(replays) else "demonstrations.num_transitions"
    _refuse_more_than(free, there, f"on {device.platform}", key)


def place_rows(state: T, run: Path) -> tuple[T, tuple[RowMemory, ...]]:
    """Allocate the rows on the host, and return what holds them. ConfigError: there is no room."""
    rest, replays = take_out(state)
    memories = []
    for i, replay in enumerate(replays):
        if not isinstance(replay.rows, HostRows):
            continue
        free, files = free_bytes(jax.local_devices(backend="cpu")[0]), replay.rows.files(run)
        try:
            for file in files:
                make_folder(file.parent, run if file.is_relative_to(run) else None)
                file.unlink(missing_ok=True)  # a killed run's; a process that still maps it keeps it
                free = shutil.disk_usage(file.parent).free
            _refuse_more_than(free, [replay], _place(replay.rows, run))
            memories.append(RowMemory(replay.rows.forms, files))
        except OSError as error:
            text = f"got '{replay.rows.folder}': {error}; choose a writable folder with enough room"
            raise ConfigError([Problem("algorithm.cfg.replay.folder", text)]) from error
        replays[i] = replace(replay, rows=replace(replay.rows, token=jnp.asarray(memories[-1].token)))
    return put_back(rest, replays), tuple(memories)


def _place(rows: HostRows, run: Path) -> str:
    return "in the memory of the host" if rows.folder is None else f"in files in {rows.files(run)[0].parent}"


def _bytes(replay: Replay) -> int:
    return row_bytes(replay) * replay.shapes.discount.size


def _refuse_more_than(free: int | None, replays: Sequence[Replay], where: str, key: str = "replay.capacity") -> None:
    if free is None or (needed := sum(map(_bytes, replays))) <= free:
        return
    size, rows = row_bytes(replays[0]), replays[0].shapes.discount.size
    largest = max(free - (needed - rows * size), 0) // size  # demonstrations keep their rows
    text = f"got {rows}: transitions of {size} bytes make {needed} bytes, and {free} are free {where}"
    raise ConfigError([Problem(f"algorithm.cfg.{key}", f"{text}; the largest that fits is {largest}")])


def free_bytes(device: jax.Device) -> int | None:
    """Return the memory that a device has left, of a CPU the machine's; None: not known."""
    stats: dict[str, Any] = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    try:
        found = re.search(r"MemAvailable: *(\d+) kB", read_text(Path("/proc/meminfo")))
    except OSError:  # not on Linux
        return None
    return None if found is None else 1024 * int(found[1])
