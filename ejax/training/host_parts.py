"""The parts of a run whose environments live outside its program: groups of them, a collector, updates."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax

from ejax.algorithms.record import ResetPolicy
from ejax.algorithms.step import init_host_run_state, make_learn
from ejax.collectors import AsyncCollector, HostCollector, Schedule, Share
from ejax.config import ConfigError, Problem, RunConfig, TrainerConfig
from ejax.envs.host.pure_host import PureHostEnv
from ejax.runtime.device import device_problem
from ejax.runtime.processes import Group
from ejax.runtime.sharding import make_mesh, process_count
from ejax.schema.plain_files import read_json
from ejax.training.environments import build_env, sample_obs
from ejax.training.host_steppers import HostStepper
from ejax.training.parts import Ingredients, Parts, group_size, with_own
from ejax.types import Env, HostEnv


def _own_groups(config: RunConfig, devices: Sequence[jax.Device]) -> range:
    """List the numbers of the groups that this process steps: as many as each other one."""
    num_groups = config.trainer.collector.num_groups
    num_devices = Counter(device.process_index for device in devices)
    if len(set(num_devices.values())) > 1:
        text = f"got true for processes of {list(num_devices.values())} devices, which would step unequal numbers of"
        raise ConfigError([Problem("trainer.distributed", f"{text} environments; use the same number in each")])
    share, rest = divmod(num_groups, len(num_devices))
    if rest:
        text = f"got {num_groups}, but each of {len(num_devices)} processes steps as many groups as the others; use"
        text = f"{text} a multiple of {len(num_devices)}: trainer.collector.num_groups={len(num_devices)}"
        raise ConfigError([Problem("trainer.collector.num_groups", text)])
    return range(num_groups)[share * sorted(num_devices).index(jax.process_index()) :][:share]


def host_parts(made: Ingredients, devices: Sequence[jax.Device] | None, quarantine: Path) -> Parts:
    """Make a collector of groups of environments, the first of which there is, and the stepper of its rollouts.

    Args:
        devices: of all processes, with ``trainer.num_envs`` each. None: see ``trainer.collector.learner_devices``.

    Raises:
        ConfigError: an algorithm, groups or devices that do not suit environments outside the program.
    """
    config, algorithm, options = made.config, made.config.algorithm.record, made.config.algorithm.cfg
    if algorithm.update is None:  # APG and SHAC differentiate through the environment
        text = f"{config.algorithm.name} needs an environment inside its program; with host environments"
        raise ConfigError([Problem("algorithm.name", f"{text}: ppo, grpo, reppo, sac, flash_sac, model_shac")])
    if config.trainer.init_at_random_ep_len:
        text = "got true, which is for environments inside the program, with collector.mode: device; leave it out"
        raise ConfigError([Problem("trainer.init_at_random_ep_len", text)])
    num_groups = config.trainer.collector.num_groups
    own = _own_groups(config, devices) if devices else range(num_groups)
    size = group_size(config, len(devices) if devices else 1)
    groups = _groups(config, made.env, len(own), size, quarantine)
    resets = algorithm.resets(options)
    _check_starts(config, resets, groups)
    stepper = _stepper(made, resets, groups, own, devices)
    state = init_host_run_state(
        made.policy,
        made.optimizer,
        made.key,
        sample_obs(groups[0], num_groups * groups[0].num_envs),
        reference=algorithm.keeps_reference(options),
        target=algorithm.keeps_target,
        scales_rewards=config.trainer.normalize_reward,
    )
    state = with_own(state, made, num_groups * groups[0].num_envs)
    # of all the run's groups: a checkpoint has them, and theirs are alike
    envs = stepper.collector.state() * (num_groups // len(groups))
    num_devices = 1 if devices is None else len(devices)
    return Parts(made.policy, made.env, made.optimizer, stepper, replace(state, envs=envs), num_devices)


def _groups(config: RunConfig, first: Env | HostEnv, num_groups: int, size: int, quarantine: Path) -> list[HostEnv]:
    if not isinstance(first, HostEnv):
        return [PureHostEnv(first, size) for _ in range(num_groups)]
    if config.trainer.collector.mode == "device":
        text = f"got 'device', but {config.env.id} lives outside JAX; allowed: auto, host, async"
        raise ConfigError([Problem("trainer.collector.mode", text)])
    # the first one exists: it decided the policy's shapes
    others = [build_env(config, num_envs=size, quarantine=quarantine) for _ in range(num_groups - 1)]
    return [first, *(env for env in others if isinstance(env, HostEnv))]


def _check_starts(config: RunConfig, resets: ResetPolicy, groups: Sequence[HostEnv]) -> None:
    """Refuse shared starts in environments that are not seeded row by row, or whose groups do not fit."""
    if resets.group_size == 1:
        return
    if not groups[0].seeds_rows:
        text = f"is true, but the starts of {config.env.id} cannot be chosen; set it to false"
        raise ConfigError([Problem("algorithm.cfg.shared_start", text)])
    if groups[0].num_envs % resets.group_size:  # starts are shared inside a group
        num_groups = config.trainer.collector.num_groups
        text = f"got {num_groups} groups of {groups[0].num_envs} envs; group_size {resets.group_size} must divide"
        raise ConfigError([Problem("trainer.collector.num_groups", text)])


def _stepper(
    made: Ingredients, resets: ResetPolicy, groups: Sequence[HostEnv], own: range, devices: Sequence[jax.Device] | None
) -> HostStepper:
    config, trainer, wanted = made.config, made.config.trainer, made.config.trainer.collector
    actors, learners = _find_devices(config, devices)
    collector = HostCollector(
        made.policy,
        groups,
        num_steps=trainer.buffer_size,
        seed=trainer.seed,
        dropout=made.dropout,
        restart=resets.restart,
        group_size=resets.group_size,
        share=Share(
            first_group=own.start,
            num_groups=wanted.num_groups,
            devices=actors or ([find_device(trainer.device, "trainer.device")] if learners else None),
            mesh=make_mesh(devices) if devices else None,
        ),
    )
    background = None  # then the main thread collects between updates
    if wanted.mode == "async":
        timeouts = {"stop_timeout_s": wanted.stop_timeout_s, "env_timeout_s": wanted.env_timeout_s}
        background = AsyncCollector(collector, made.key, schedule=_schedule(made.config.trainer), **timeouts)
    update, options = made.algorithm.update, config.algorithm.cfg  # that of a run with a teacher knows it
    return HostStepper(
        collector,
        make_learn(made.policy, made.optimizer, options, update=update, resets=resets),
        made.key,
        background=background,
        devices=learners or None,
        group=Group(trainer.process_timeout_s) if process_count() > 1 else None,
        what=(made.policy, made.optimizer, options, update, resets),
    )


def _find_devices(config: RunConfig, devices: Sequence[jax.Device] | None) -> tuple[list[jax.Device], list[jax.Device]]:
    """Find the devices that act, and those that learn; of neither: wherever the arrays are."""
    trainer, wanted = config.trainer, config.trainer.collector
    actors = [find_device(each, "trainer.collector.actor_devices") for each in wanted.actor_devices]
    learners = [find_device(each, "trainer.collector.learner_devices") for each in wanted.learner_devices]
    if learners and trainer.num_envs % len(learners):
        text = f"got {len(learners)} devices for num_envs {trainer.num_envs}, which they must divide"
        raise ConfigError([Problem("trainer.collector.learner_devices", text)])
    if trainer.shard_parameters:  # found here: the environment decides where the policy acts
        text = f"got {json.dumps(trainer.shard_parameters)}, but the policy acts outside the program, where"
        raise ConfigError([Problem("trainer.shard_parameters", f"{text} a device needs all of it; set it to false")])
    if learners and devices:
        text = "are given with trainer.distributed: true, by which all devices learn; leave them out"
        raise ConfigError([Problem("trainer.collector.learner_devices", text)])
    return actors or [each for each in devices or () if each.process_index == jax.process_index()], learners


def _schedule(trainer: TrainerConfig) -> Schedule:
    wanted = trainer.collector
    recorded, path = None, wanted.replay_schedule
    if wanted.schedule == "free" and path is None and process_count() > 1:
        # each would take the newest parameters at another time, and no list of versions could repeat it
        text = "got 'free' in several processes, which could not be repeated; use 'fixed'"
        raise ConfigError([Problem("trainer.collector.schedule", text)])
    try:
        if path is not None:
            recorded = tuple(int(version) for version in read_json(path)["versions"])
            if len(recorded) < trainer.num_updates:
                raise ValueError(f"it has {len(recorded)} rollouts, and the run {trainer.num_updates} updates")
        return Schedule(wanted.max_staleness, wanted.schedule == "free", recorded)
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"'{path}' is not a schedule.json for this run: {error}"
        raise ConfigError([Problem("trainer.collector.replay_schedule", text)]) from error


def find_device(name: str, key: str) -> jax.Device:
    """Find ``cuda:1`` and the like, of this process; ConfigError at ``key`` if there is none."""
    if problem := device_problem(name):
        raise ConfigError([Problem(key, problem)])
    platform, _, index = name.partition(":")
    return jax.local_devices(backend=platform)[int(index or 0)]
