"""``data``: the demonstrations that behaviour cloning learns from."""

from collections.abc import Iterator
from typing import Literal

from flax.core import FrozenDict
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from ejax.config.explain import argument_problems
from ejax.data.engine_config import OnlineDataEngineCfg
from ejax.schema.frozen import Kwargs, MayChange, PathText, StrictModel, freeze, thaw
from ejax.schema.messages import short_repr
from ejax.schema.problems import ConfigError, Problem
from ejax.schema.registry import DEMONSTRATORS, resolve, trusted_name


class DaggerConfig(StrictModel):
    """``data.dagger``: the learner acts in the engine's environments, and its expert labels what the learner meets."""

    every: PositiveInt = 10
    """Updates of the run from one round to the next, each of ``engine.buffer_size`` new episodes."""
    rounds: PositiveInt | None = None
    """Rounds after which the expert is asked nothing more. None: as many as the run has."""
    beta: float = Field(default=1.0, ge=0.0, le=1.0)
    """The probability of a step, in the first round, that the expert acts in the learner's place."""
    beta_decay: float = Field(default=0.0, ge=0.0, le=1.0)
    """Its factor from round to round: with 0 the learner acts alone after the first, with 1 β stays."""
    max_episodes: PositiveInt | None = None
    """The newest episodes, which alone are drawn from; all are kept. None: all."""


class DataConfig(StrictModel):
    """``data``. A key that the source has no use for is an error."""

    source: Literal["engine", "recorded"]
    """``engine``: a worker process demonstrates during the training. ``recorded``: kept episodes."""
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
    """Seed of the windows drawn, and of the engine's attempts where ``engine.seed`` is 0."""
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

    engine: OnlineDataEngineCfg | None = None
    """engine: its options. ``task`` is a registered name or ``package.module:Name``; ``gym_config`` may be a file."""

    dagger: DaggerConfig | None = None
    """engine: the learner acts, round by round. None: the expert does."""

    folder: MayChange[PathText | None] = None
    """recorded: a LeRobot v3.0 dataset."""
    cache_mb: MayChange[PositiveFloat] = 512.0
    """recorded: MiB of frames that stay decoded."""

    @field_validator("engine")
    @classmethod
    def _known_task(cls, engine: OnlineDataEngineCfg | None) -> OnlineDataEngineCfg | None:
        if engine is None or not isinstance(engine.task, str):
            return engine
        try:
            return engine.replace(task=trusted_name("task", engine.task))
        except ValueError as error:
            raise ConfigError([Problem("data.engine.task", str(error))]) from error


def data_problems(data: DataConfig, action_chunk: int) -> Iterator[Problem]:
    """Find problems of the section; ``action_chunk``: actions of the policy's one decision."""
    engine, source = data.engine, f"source '{data.source}'"
    if data.dagger is not None:
        yield from _dagger_problems(data)
    if data.source == "engine" and engine is None:
        yield Problem("data.engine", f"is missing: {source} needs it, with task or gym_config")
    if data.source == "recorded" and not data.folder:
        yield Problem("data.folder", f"is missing: {source} needs it")
    for key in (("folder", "cache_mb") if data.dagger is None else ("folder",)) if data.source == "engine" else ():
        if getattr(data, key) != DataConfig.model_fields[key].default:
            yield Problem(
                f"data.{key}", f"got {short_repr(getattr(data, key))}, but {source} does not read it; leave it out"
            )
    # one decision of the policy is taught by that many successive actions
    if data.chunk_size < action_chunk:
        text = f"got {data.chunk_size}, but the policy decides on {action_chunk} actions together; use at least that"
        yield Problem("data.chunk_size", text)
    if data.history_length is not None and data.sampling_mode == "boundary":
        text = "got 'boundary', but windows around a frame (data.history_length) have the modes episode and segment"
        yield Problem("data.sampling_mode", text)
    if engine is None:
        return
    if engine.lifecycle_event_capacity:
        text = "a run reads no lifecycle events; leave it out (OnlineDataEngineCfg has it)"
        yield Problem("data.engine.lifecycle_event_capacity", text)
    if engine.refill_policy == "manual" and engine.refill_threshold != OnlineDataEngineCfg.refill_threshold:
        text = f"got {engine.refill_threshold}, but refill_policy 'manual' does not read it; leave it out"
        yield Problem("data.engine.refill_threshold", text)
    if engine.gym_config:
        from ejax.config.embodichain.demonstrations import read_demonstrations  # it imports the experts

        problems = read_demonstrations(**engine.demonstrator[1])[1]
        yield from (Problem(f"data.engine.{key}", text) for key, text in problems)
    elif engine.task in DEMONSTRATORS:  # a class of your own is imported, and checked, by the worker alone
        yield from task_problems(str(engine.task), freeze(engine.task_cfg), "data.engine.task_cfg")


def _dagger_problems(data: DataConfig) -> Iterator[Problem]:
    engine = data.engine
    if engine is None:
        yield Problem("data.dagger", "needs source: engine, whose expert labels what the learner meets")
        return
    if data.action_field == "actions":
        text = "got 'actions', which the learner itself took; name the expert's: expert_actions"
        yield Problem("data.action_field", text)
    for name in ("refill_policy", "refill_threshold", "episode_sample_budget"):
        if getattr(engine, name) != getattr(OnlineDataEngineCfg, name):
            yield Problem(f"data.engine.{name}", "is for a stream without rounds; leave it out, or data.dagger")
    side_by_side = engine.demonstrator[1].get("num_envs", 16)
    if engine.buffer_size % side_by_side:
        text = f"got {engine.buffer_size} episodes of a round, of which {side_by_side} (num_envs) are made together"
        yield Problem("data.engine.buffer_size", f"{text}; use a multiple of {side_by_side}")


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
