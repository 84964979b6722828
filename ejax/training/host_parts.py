"""The parts of a run whose environments live outside its program: groups of them, a collector, updates."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import optax

from ejax.algorithms.record import Algorithm
from ejax.algorithms.step import EpisodeStarts, init_host_run_state, make_learn
from ejax.collectors import AsyncCollector, HostCollector, Schedule
from ejax.collectors.config import CollectorConfig
from ejax.config import ConfigError, Problem, RunConfig
from ejax.envs.host.pure_host import PureHostEnv
from ejax.training.environments import build_env, sample_obs
from ejax.training.parts import Parts
from ejax.training.steppers import AsyncStepper, HostStepper
from ejax.types import Env, HostEnv, Policy


def host_parts(
    config: RunConfig,
    policy: Policy,
    first: Env | HostEnv,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    *,
    dropout: bool,
    quarantine: Path,
) -> Parts:
    """A collector of groups of environments, the first of which there is, and a stepper in turn with it or beside it.

    Raises:
        ConfigError: an algorithm that needs its environment inside the program; groups or devices that do not divide
            the environments; a device that is not here.
    """
    trainer, algorithm = config.trainer, config.algorithm.record
    if algorithm.update is None:
        text = f"{config.algorithm.name} needs an environment inside its program; with host environments: ppo, grpo"
        raise ConfigError([Problem("algorithm.name", text)])
    groups = _groups(config, first, quarantine)
    starts = algorithm.starts(config.algorithm.cfg)
    _check_starts(config, starts, groups)
    stepper = _stepper(config, algorithm, starts, policy, optimizer, groups, key, dropout=dropout)
    state = init_host_run_state(
        policy,
        optimizer,
        key,
        sample_obs(groups[0], trainer.num_envs),
        reference=algorithm.keeps_reference(config.algorithm.cfg),
        target=algorithm.keeps_target,
    )
    return Parts(policy, first, optimizer, stepper, replace(state, envs=stepper.collector.state()))


def _groups(config: RunConfig, first: Env | HostEnv, quarantine: Path) -> list[HostEnv]:
    """The groups of environments, the first of which there is."""
    trainer = config.trainer
    num_groups, size = trainer.collector.num_groups, trainer.num_envs // trainer.collector.num_groups
    if not isinstance(first, HostEnv):
        return [PureHostEnv(first, size) for _ in range(num_groups)]
    if trainer.collector.mode == "device":
        text = f"got 'device', but {config.env.id} lives outside JAX; allowed: auto, host, async"
        raise ConfigError([Problem("trainer.collector.mode", text)])
    others = [build_env(config, num_envs=size, quarantine=quarantine) for _ in range(num_groups - 1)]
    return [first, *(env for env in others if isinstance(env, HostEnv))]


def _check_starts(config: RunConfig, starts: EpisodeStarts, groups: Sequence[HostEnv]) -> None:
    """Shared starts need environments that are seeded row by row, and groups that fit into the collector's."""
    if starts.group_size == 1:
        return
    if not groups[0].seeds_rows:
        text = f"is true, but the starts of {config.env.id} cannot be chosen; give false"
        raise ConfigError([Problem("algorithm.cfg.shared_start", text)])
    if groups[0].num_envs % starts.group_size:
        num_groups = config.trainer.collector.num_groups
        text = f"got {num_groups} groups of {groups[0].num_envs} envs; group_size {starts.group_size} must divide"
        raise ConfigError([Problem("trainer.collector.num_groups", text)])


def _stepper(
    config: RunConfig,
    algorithm: Algorithm,
    starts: EpisodeStarts,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    groups: Sequence[HostEnv],
    key: jax.Array,
    *,
    dropout: bool,
) -> HostStepper:
    """A collector of these groups, and updates from what it collects."""
    trainer, wanted = config.trainer, config.trainer.collector
    actors = [find_device(each, "trainer.collector.actor_devices") for each in wanted.actor_devices]
    learners = [find_device(each, "trainer.collector.learner_devices") for each in wanted.learner_devices]
    if learners and trainer.num_envs % len(learners):
        text = f"got {len(learners)} devices for num_envs {trainer.num_envs}, which they must divide"
        raise ConfigError([Problem("trainer.collector.learner_devices", text)])
    collector = HostCollector(
        policy,
        groups,
        num_steps=trainer.buffer_size,
        seed=trainer.seed,
        dropout=dropout,
        restart=starts.restart,
        group_size=starts.group_size,
        devices=actors or ([find_device(trainer.device, "trainer.device")] if learners else None),
    )
    learn = make_learn(policy, optimizer, config.algorithm.cfg, update=algorithm.update, starts=starts)
    if wanted.mode != "async":
        return HostStepper(collector, learn, key, devices=learners or None)
    background = AsyncCollector(
        collector,
        key,
        schedule=_schedule(wanted),
        stop_timeout_s=wanted.stop_timeout_s,
        env_timeout_s=wanted.env_timeout_s,
    )
    return AsyncStepper(background, learn, devices=learners or None)


def _schedule(wanted: CollectorConfig) -> Schedule:
    recorded, path = None, wanted.replay_schedule
    try:
        if path is not None:
            recorded = tuple(int(version) for version in json.loads(Path(path).read_text())["versions"])
        return Schedule(wanted.max_staleness, wanted.schedule == "free", recorded)
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"'{path}' is no schedule.json for this run: {error}"
        raise ConfigError([Problem("trainer.collector.replay_schedule", text)]) from error


def find_device(name: str, key: str) -> jax.Device:
    """``cuda:1`` and the like."""
    platform, _, index = name.partition(":")
    try:
        devices = jax.devices(platform)
        return devices[int(index or 0)]
    except (RuntimeError, ValueError, IndexError) as error:
        here = ", ".join(f"{each.platform}:{each.id}" for each in jax.devices())
        raise ConfigError([Problem(key, f"got '{name}'; the devices of jax here are {here}")]) from error
