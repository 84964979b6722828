"""The config of a run: its sections, and how they must not contradict each other."""

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from functools import reduce
from typing import Any

from pydantic import BaseModel, Field, ValidationError, model_validator

from ejax.algorithms.demonstrations import SECTION, DemonstrationConfig
from ejax.algorithms.record import RunShape
from ejax.config.data import DataConfig, data_problems, task_problems
from ejax.config.models import AlgorithmConfig, EnvConfig, PolicyConfig, TrainerConfig
from ejax.config.population import SEPARATELY, Member, PopulationConfig, members_of, with_member
from ejax.policies.record import section_problems
from ejax.schema.frozen import StrictModel, thaw
from ejax.schema.messages import short_repr
from ejax.schema.paths import find
from ejax.schema.problems import ConfigError, KeyNote, Problem
from ejax.schema.registry import DEMONSTRATORS
from ejax.schema.values import INT32_MAX, number_problems

NOTHING = "nothing is learned"


class RunConfig(StrictModel):
    """All that a run is made from. Two configs are equal when they describe the same run."""

    env: EnvConfig
    """The environment."""
    trainer: TrainerConfig
    """Length, devices, evaluations and outputs of the run."""
    policy: PolicyConfig
    """The networks."""
    algorithm: AlgorithmConfig
    """The learning rule and its options."""
    data: DataConfig | None = None
    """ejax: the demonstrations that ``bc`` learns from."""
    population: PopulationConfig | None = None
    """ejax: many trainings in one program."""
    notices: tuple[KeyNote, ...] = Field(default=(), exclude=True, repr=False)
    """Keys that the run ignores, for the command line to announce."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunConfig) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(self._parts())

    @property
    def step_name(self) -> str:
        """Name the unit of the run's counter: of the x axis, of ``eval_freq`` and of ``save_freq``."""
        return "samples" if self.algorithm.record.learns_from == "demonstrations" else "env steps"

    def _parts(self) -> tuple[BaseModel | None, ...]:
        return self.env, self.trainer, self.policy, self.algorithm, self.data, self.population

    @property
    def members(self) -> tuple[Member, ...]:
        """Return the members of ``population``; empty without one."""
        return () if self.population is None else tuple(members_of(self.population, self.trainer.seed))

    def of_member(self, member: Member) -> "RunConfig":
        """Return the config of a run that computes the same as a member. Raises ValidationError: there is none."""
        return RunConfig.model_validate_json(json.dumps(with_member(self.to_dict(), member)), strict=True)

    @model_validator(mode="after")
    def _possible(self) -> "RunConfig":
        problems = [*_sizes(self), *_data(self)]
        # of a class that is not there: ``class_problems`` reports it
        with suppress(ImportError, TypeError, ValueError):
            problems += section_problems(self.policy, self.policy.record)
        problems += number_problems(self.model_dump(mode="json"))  # integers written as 1e12 are integers by now
        if not problems:
            problems += _population(self)
        if problems:
            raise ConfigError(problems)
        return self


def bind(config: RunConfig) -> RunConfig:
    """Fill in what a config leaves open until the run is known: what an update sees, such as the horizon of a schedule.
    Idempotent."""
    algorithm = config.algorithm
    options = algorithm.record.bind(algorithm.cfg, config.trainer.num_updates)
    return config.model_copy(update={"algorithm": algorithm.model_copy(update={"cfg": options})})


def idle_notes(config: RunConfig, rows: int) -> list[str]:
    """Say which settings come into effect after the end of the run, and what so never happens. ``rows``: steps of an
    update. The texts of settings by which it learns nothing contain ``NOTHING``."""
    updates, trainer = config.trainer.num_updates, config.trainer
    length, notes = f"the run has {updates} updates, {updates * rows} {config.step_name}", []
    root: Any = config
    for key, end, what in (
        ("algorithm.cfg.learning_starts", updates * rows, f"no gradient step is made, and {NOTHING}"),
        ("algorithm.cfg.critic_warmup_updates", updates - 1, f"{NOTHING} except by the critic"),
        ("population.exploit.every", updates, "no member continues from another"),
        ("trainer.eval_freq", updates * rows if trainer.enable_eval else math.inf, "only the end is evaluated"),
        ("trainer.save_freq", updates * rows, "only the end is saved"),
        ("trainer.save_frequency_updates", updates, "only the end is saved"),
        ("trainer.log_freq_updates", updates, "only the last update is logged"),
    ):
        value = reduce(lambda node, name: getattr(node, name, 0), key.split("."), root)
        if value > end:
            notes.append(f"{key} is {value}, and {length}: {what}")
    if getattr(getattr(config.algorithm.cfg, "optimizer", None), "learning_rate", 1.0) == 0.0:
        notes.append(f"algorithm.cfg.optimizer.learning_rate is 0: {NOTHING}")
    return notes


def _sizes(config: RunConfig) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.num_updates > INT32_MAX:
        text = f"means {trainer.num_updates} updates; at most {INT32_MAX} are counted"
        yield Problem("trainer.iterations" if trainer.total_timesteps is None else "trainer.total_timesteps", text)
    facts = trainer.model_dump(include={"num_envs", "buffer_size", "distributed"})
    several = {
        "population": config.population is not None,
        "trainer.distributed": trainer.distributed,
        "trainer.collector.learner_devices": len(trainer.collector.learner_devices) > 1,
    }
    shared_by = next((key for key, applies in several.items() if applies), None)
    shape = RunShape(policy=config.policy.name, shared_by=shared_by, **facts)
    if shape.rows > INT32_MAX and max(trainer.buffer_size, trainer.num_envs) <= INT32_MAX:
        yield Problem("trainer.buffer_size", f"{shape.rows_text}; at most {INT32_MAX} are counted")
    record = config.algorithm.record
    yield from record.problems(config.algorithm.cfg, shape)
    if trainer.profile is not None and trainer.profile.start >= trainer.num_updates:
        text = f"got {trainer.profile.start}, but the run has {trainer.num_updates} updates; choose an earlier one"
        yield Problem("trainer.profile.start", text)
    if trainer.normalize_reward and not record.learns_from_rewards:
        text = f"got true, but {config.algorithm.name} does not learn from the rewards of rollouts; leave it out"
        yield Problem("trainer.normalize_reward", text)
    # with distributed they divide those of all devices, whose number is known when the run is built
    if trainer.num_envs % trainer.collector.num_groups and not trainer.distributed:
        text = f"got {trainer.collector.num_groups}, which does not divide num_envs {trainer.num_envs}"
        yield Problem("trainer.collector.num_groups", text)
    # an evaluation of no episodes has no average
    if trainer.enable_eval and trainer.num_eval_episodes < 1:
        yield Problem("trainer.num_eval_episodes", "got 0 with enable_eval; use at least 1, or set enable_eval: false")


def _data(config: RunConfig) -> Iterator[Problem]:
    name, data = config.algorithm.name, config.data
    if config.algorithm.record.learns_from != "demonstrations":
        if data is not None:
            text = f"{name} learns from its environments; leave it out, or use an algorithm such as bc"
            yield Problem("data", text)
        demonstrated = getattr(config.algorithm.cfg, "demonstrations", None)
        if isinstance(demonstrated, DemonstrationConfig) and demonstrated.task in DEMONSTRATORS:
            yield from task_problems(demonstrated.task, demonstrated.task_cfg, f"{SECTION}.task_cfg")
        return
    if data is None:
        text = f"is missing: {name} needs {{source: engine, engine: {{task: …}}}} or {{source: recorded, folder: …}}"
        yield Problem("data", text)
        return
    yield from data_problems(data, config.env.action_chunk)
    memory, number = config.policy.actor and config.policy.actor.memory, data.history_length
    if number is not None and number > 1 and not memory and config.policy.record.built_in:
        text = f"got {number}, but the policy remembers nothing; set it to 1, or add policy.actor.memory"
        yield Problem("data.history_length", text)
    # an update whose windows a buffer cannot give would wait for ever
    engine, windows = data.engine, config.trainer.buffer_size // data.chunk_size
    budget = None if engine is None else engine.episode_sample_budget
    if engine is not None and budget is not None and windows > budget * engine.buffer_size:
        allowed = f"with data.engine.buffer_size {engine.buffer_size} allows {budget * engine.buffer_size} windows"
        text = f"got {budget}, which {allowed} before new episodes come, and one update takes {windows}"
        yield Problem("data.engine.episode_sample_budget", text)


def _population(config: RunConfig) -> Iterator[Problem]:
    population = config.population
    if population is None:
        return
    record, name = config.algorithm.record, config.algorithm.name
    if record.learns_from == "demonstrations" or record.taught(config.algorithm.cfg) is not None:
        text = f"{name} cannot train a population; use ppo, grpo, apg or shac, or"
        yield Problem("population", f"{text} {SEPARATELY}")
    if config.trainer.profile is not None:
        yield Problem("trainer.profile", "traces a single run; leave it out, or name one member's config")
    if population.exploit is not None:
        if len(config.members) < 2:
            yield Problem("population.exploit", "needs at least two members; set population.seeds to 2")
        for key, values in population.vary.items():
            if ".kwargs." in key or isinstance(values[0], tuple):
                text = f"cannot multiply {key}, whose range is not known; leave it out of population, or exploit"
                yield Problem("population.exploit", text)
    seen = set()
    for member in config.members:
        combination = tuple(member.values.items())  # members with other seeds only have the same problems
        if combination in seen:
            continue
        seen.add(combination)
        try:
            own = config.of_member(member)
        except ValidationError as error:
            texts = [each["msg"].removeprefix("Value error, ") for each in error.errors()]
            reasons = "; ".join(texts).replace("Extra inputs are not permitted", "unknown key")
            shown = ", ".join(f"{key}={short_repr(thaw(value))}" for key, value in member.values.items())
            yield Problem("population", f"{shown} is not a config: {reasons}")
            continue
        tree = own.to_dict()
        for key in member.values:
            if not _varies(find(tree, key)):
                # a program has numbers with a fraction as arrays; all else is compiled into it
                text = f"got {short_repr(thaw(member.values[key]))}, which is not a number with a fraction (a whole one"
                yield Problem(f"population.{key}", f"{text} decides shapes and loops); {SEPARATELY}")


def _varies(value: Any) -> bool:
    """Return whether a program can have an option as an array: a number with a fraction, or some."""
    return isinstance(value, float) or (isinstance(value, list) and bool(value) and all(map(_varies, value)))
