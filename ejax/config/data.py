"""``data``: the demonstrations that behaviour cloning learns from."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

from flax.core import FrozenDict
from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt

from ejax.config.annotations import argument_problems
from ejax.schema.frozen import Kwargs, MayChange, PathText, StrictModel, thaw
from ejax.schema.messages import short_repr
from ejax.schema.problems import Problem
from ejax.schema.registry import DEMONSTRATORS, place_of_task, resolve, trusted_name


class DataConfig(StrictModel):
    """``data``. A key that the source has no use for is an error."""

    source: Literal["engine", "recorded"]
    """``engine``: a worker process demonstrates while training goes on. ``recorded``: kept episodes."""
    chunk_size: PositiveInt = 1
    """Successive frames of one episode that are drawn together; at least ``env.cfg.action_chunk``."""
    history_length: PositiveInt | None = None
    """Draw windows around a frame: as many frames up to it, for a policy to remember, and ``chunk_size`` from it on, to
    be taught. What lies beyond an episode's start or end is padded, and has no part in the loss. None: draw frames that
    are all there."""
    sampling_mode: Literal["episode", "segment", "boundary"] = "episode"
    """Windows that are drawn: any (``episode``), those within one segment (``segment``), those across a change of
    segment (``boundary``)."""
    seed: NonNegativeInt = 0
    """Seed of the windows drawn, and of the engine's attempts."""
    obs_field: str = "obs"
    """Path of what the policy sees: one field where the environment's observation is one array, else the field above
    those of its parts."""
    obs_parts: Kwargs = Field(default_factory=FrozenDict)
    """Paths of single parts of the observation, by name, where they are not below ``obs_field``."""
    action_field: str = "actions"
    """Path of what the policy shall do, such as ``expert_actions`` where the demonstrations' own are noisy."""
    num_workers: MayChange[PositiveInt] = 1
    """Threads that draw ahead of the training."""
    prefetch: MayChange[PositiveInt] = 2
    """Batches that are ready, or on their way."""

    task: Annotated[str, AfterValidator(partial(trusted_name, "task"))] | None = None
    """engine: what demonstrates, a registered name or ``package.module:Name``."""
    task_cfg: Kwargs = Field(default_factory=FrozenDict)
    """engine: arguments of the task."""
    gym_config: Kwargs = Field(default_factory=FrozenDict)
    """engine: in place of ``task``, an EmbodiChain gym config in whose environment is demonstrated: a file, or what is
    in one."""
    action_config: Kwargs = Field(default_factory=FrozenDict)
    """engine: arguments of what demonstrates in ``gym_config``."""
    state_dim: PositiveInt | None = None
    """engine: width of ``obs/robot/qpos``, to be checked."""
    action_dim: PositiveInt | None = None
    """engine: width of ``actions``, to be checked."""
    buffer_device: Literal["cpu"] = "cpu"
    """engine: where the episodes lie, in memory that processes share; batches go to the run's device."""
    buffer_size: PositiveInt = 64
    """engine: episodes that are drawn from at any time."""
    max_episode_steps: PositiveInt = 300
    """engine: the most frames of an episode."""
    refill_threshold: PositiveInt = 50
    """engine: all episodes are replaced after ``refill_threshold · buffer_size`` windows were drawn."""
    refill_policy: Literal["sample_threshold", "manual"] = "sample_threshold"
    """engine: ``manual``, episodes are replaced only where ``episode_sample_budget`` is used up."""
    episode_sample_budget: PositiveInt | None = None
    """engine: windows that may be drawn of one episode. Where too few are left for a batch, it waits for new ones."""
    episode_sample_hard_limit: PositiveInt | None = None
    """engine: the most that ``episode_sample_budget`` may be."""
    max_generation_attempts: PositiveInt = 16
    """engine: failures in a row after which it gives up."""
    initialization_timeout: MayChange[Annotated[PositiveFloat, Field(le=1e9)]] = 300.0
    """engine: s, how long its worker may take to start, compile and fill the buffer."""
    worker_timeout: MayChange[Annotated[PositiveFloat, Field(le=1e9)]] = 120.0
    """engine: s, how long one attempt may take. The first one compiles: ``initialization_timeout`` alone bounds it."""
    shutdown_timeout: Annotated[PositiveFloat, Field(le=1e9)] = 5.0
    """engine: s, how long its worker may take to end before it is killed."""

    folder: MayChange[PathText | None] = None
    """recorded: a LeRobot v3.0 dataset."""
    cache_mb: MayChange[PositiveFloat] = 512.0
    """recorded: MiB of frames that stay decoded."""


_NAMES = tuple(DataConfig.model_fields)
_TASK, _FOLDER = _NAMES.index("task"), _NAMES.index("folder")
_OF_SOURCE = {"engine": _NAMES[_TASK:_FOLDER], "recorded": _NAMES[_FOLDER:]}
"""Keys that one source alone reads, the first of which it needs."""


def data_problems(data: DataConfig, action_chunk: int) -> Iterator[Problem]:
    """Find problems of the section; ``action_chunk``: actions of the policy's one decision."""
    from ejax.data.engine_config import check_budget  # of the data wing alone

    needed, source = _OF_SOURCE[data.source][0], f"source '{data.source}'"
    if not getattr(data, needed) and not data.gym_config:
        yield Problem(f"data.{needed}", f"is missing: {source} needs it{', or gym_config' * (needed == 'task')}")
    unread = {key: source for other, keys in _OF_SOURCE.items() if other != data.source for key in keys}
    if data.refill_policy == "manual":
        unread.setdefault("refill_threshold", "refill_policy 'manual'")
    for key, who in unread.items():
        if getattr(data, key) != DataConfig.model_fields[key].get_default(call_default_factory=True):
            text = f"got {short_repr(getattr(data, key))}, but {who} does not read it; leave it out"
            yield Problem(f"data.{key}", text)
    # one decision of the policy is taught by that many successive actions
    if data.chunk_size < action_chunk:
        text = f"got {data.chunk_size}, but the policy decides on {action_chunk} actions at once; give at least that"
        yield Problem("data.chunk_size", text)
    if data.history_length is not None and data.sampling_mode == "boundary":
        text = "got 'boundary', but windows around a frame (data.history_length) have the modes episode and segment"
        yield Problem("data.sampling_mode", text)
    try:
        check_budget(data.episode_sample_budget, data.episode_sample_hard_limit)
    except ValueError as error:
        yield Problem("data.episode_sample_hard_limit", str(error))
    if data.source == "engine" and data.gym_config:
        yield from _gym_problems(data)
    elif data.task in DEMONSTRATORS:  # a class of your own is imported, and checked, by the worker alone
        yield from task_problems(data.task, data.task_cfg, "data.task_cfg")


def engine_options(data: DataConfig) -> dict[str, Any]:
    """Return the arguments of ``OnlineDataEngineCfg``."""
    from ejax.data.engine_config import OnlineDataEngineCfg

    shared = {each.name for each in dataclasses.fields(OnlineDataEngineCfg)} & DataConfig.model_fields.keys()
    options = {name: thaw(getattr(data, name)) for name in shared}
    return options | ({} if data.task is None else {"task": place_of_task(data.task)})


def _gym_problems(data: DataConfig) -> list[Problem]:
    from ejax.config.embodichain.demonstrations import read_demonstrations  # it imports the experts
    from ejax.data.engine_config import OnlineDataEngineCfg

    try:
        _, arguments = OnlineDataEngineCfg(**engine_options(data)).demonstrator
    except (TypeError, ValueError) as error:
        return [Problem("data.gym_config", str(error))]
    return [Problem(f"data.{key}", text) for key, text in read_demonstrations(**arguments)[1]]


def task_problems(name: str, arguments: FrozenDict, key: str) -> list[Problem]:
    """Find arguments, given at ``key``, that a registered task refuses."""
    make, cfg = resolve("task", name), thaw(arguments)
    problems = argument_problems(make, cfg, key)
    if not problems and cfg.get("env"):
        env = type(make().env)  # costs little: nothing is compiled
        problems = argument_problems(env, cfg["env"], f"{key}.env")
    if not problems:
        try:
            make(**cfg)
        except (TypeError, ValueError) as error:
            problems = [Problem(key, str(error))]
    return problems
