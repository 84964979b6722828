"""From a config to the parts that it names."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax

from ejax.algorithms.step import RunState, Step, init_run_state, make_rollout_step, spread_episodes
from ejax.config import ConfigError, Problem, RunConfig, TrainerConfig, bind
from ejax.envs.description import describe
from ejax.policies.heads import acting_problems
from ejax.runtime.processes import JOIN, unjoined
from ejax.schema.registry import import_entry
from ejax.training.environments import UserObjects, adopt_envs, build_env, check_own_env
from ejax.training.parts import Ingredients, Parts, group_size, place_rows, replay_notes, with_own
from ejax.training.policies import check_own_policy, make_policy
from ejax.training.steppers import DeviceStepper, Layout, shared_environments
from ejax.types import Env, HostEnv

_MAX_UPDATES_PER_DISPATCH = 64
_PARTS = {
    "demonstrations": "ejax.training.cloning:cloning_parts",
    "host": "ejax.training.host_parts:host_parts",
    "taught": "ejax.algorithms.taught:make_taught",
    "teacher": "ejax.training.teachers:load_teacher",
}
"""Parts that few runs have; they bring the data engine, and the collectors."""


def build(
    config: RunConfig,
    *,
    run: Path = Path(),
    absent: Sequence[jax.Device] | None = None,
    objects: UserObjects | None = None,
) -> Parts:
    """Make environment, policy, optimizer and what steps them.

    Args:
        config: bound, or as it was read.
        run: the folder of the run.
        absent: devices that are not here, to compile for. Several share the environments, without regard to
            ``trainer.distributed``; the state on devices is shapes only.
        objects: the caller's, instead of those that the config names.

    Raises:
        ConfigError: arguments, shapes or a combination that environment, policy, algorithm or collector refuses.
    """
    if config.population is not None:
        text = "is several runs, and this is about one; leave it out, or name a member's config: RUN/members/I/configs"
        raise ConfigError([Problem("population", text)])
    config = bind(config)
    trainer = config.trainer
    devices = all_devices(config) if trainer.distributed and absent is None else None

    if trainer.shard_parameters and absent is None and not trainer.distributed:
        text = f"got {json.dumps(trainer.shard_parameters)}, which needs trainer.distributed: true"
        raise ConfigError([Problem("trainer.shard_parameters", text)])

    size = group_size(config, len(devices or [None]))
    quarantine = run / "quarantine"
    made, eval_env, notes = _ingredients(config, objects, size, quarantine)

    # where the observations come from decides what steps the run: demonstrations, the program itself, a collector
    if config.data is not None:
        parts = import_entry(_PARTS, "demonstrations")(made, config.data, _layout(trainer, devices), run)
    elif not isinstance(made.env, HostEnv) and trainer.collector.mode in ("auto", "device"):
        if absent is not None:
            devices = list(absent) if len(absent) > 1 else None
        parts = _device_parts(made, devices, shapes_only=absent is not None)
    else:
        parts = import_entry(_PARTS, "host")(made, devices, quarantine)
    notes += replay_notes(parts.state, parts.num_devices, run)
    if absent is None:
        state, memories = place_rows(parts.state, run)
        parts = replace(parts, state=state, memories=memories)
    return replace(parts, notes=notes, eval_env=eval_env)


def _ingredients(
    config: RunConfig, objects: UserObjects | None, size: int, quarantine: Path
) -> tuple[Ingredients, Any, tuple[str, ...]]:
    """Make and check the ingredients; the environment to evaluate in, if it is the caller's; and messages."""
    algorithm, options, eval_env = config.algorithm.record, config.algorithm.cfg, None
    # the environment comes first: it decides the policy's shapes, and an algorithm may refuse it
    if objects is None:
        env = build_env(config, num_envs=size, quarantine=quarantine)
    else:
        env, eval_env = adopt_envs(config, objects, num_envs=size, quarantine=quarantine)
    check_own_env(config, env)
    if problems := list(algorithm.action_problems(env.action_space)) or list(algorithm.env_problems(options, env)):
        raise ConfigError(problems)
    policy = make_policy(config.policy, env) if objects is None else objects.policy
    check_own_policy(config.policy, policy, env)
    of_space = acting_problems(policy, env.action_space)
    if problems := [*of_space, *algorithm.policy_problems(options, policy)]:
        raise ConfigError(problems)
    notes = describe(env).notes
    if algorithm.taught(options) is not None:
        teacher, more = import_entry(_PARTS, "teacher")(config, env)
        notes += more
        teach = algorithm.with_teacher or import_entry(_PARTS, "taught")
        algorithm = teach(algorithm, teacher)  # now its update knows the teacher
    return Ingredients(config, algorithm, policy, env, algorithm.make_optimizer(options)), eval_env, notes


def _device_parts(made: Ingredients, devices: list[jax.Device] | None, *, shapes_only: bool) -> Parts:
    trainer, algorithm, options = made.config.trainer, made.algorithm, made.config.algorithm.cfg

    # the whole first state in one program; environments of all devices are made here and sharded by the stepper
    among = len(devices) if devices else 1
    make_first = partial(make_first_state, made, num_envs=among * trainer.num_envs)
    state = jax.eval_shape(make_first) if shapes_only else make_first()  # devices that are absent hold no arrays

    functions = (algorithm.update, algorithm.make_step, algorithm.resets)
    what = (*functions, made.policy, made.env, options, trainer.buffer_size, made.dropout)
    stepper = DeviceStepper(
        device_step(made, options),
        made.key,
        max_updates(trainer),
        layout=_layout(trainer, devices),
        what=None if algorithm.taught(options) else what,  # a teacher is not compared, so no program is shared
    )
    return Parts(made.policy, made.env, made.optimizer, stepper, state, among)


def _layout(trainer: TrainerConfig, devices: Sequence[jax.Device] | None) -> Layout | None:
    """Lay a run out over several devices. ConfigError: some that share a copy of the parameters do not divide all."""
    if devices is None:
        return None
    num_devices, share = len(devices), trainer.shard_parameters
    if isinstance(share, bool):
        share = num_devices if share else 1
    if num_devices % share:
        allowed = ", ".join(["true", *(str(n) for n in range(2, num_devices) if num_devices % n == 0)])
        text = f"got {share}, which does not divide the {num_devices} devices; allowed: {allowed}"
        raise ConfigError([Problem("trainer.shard_parameters", text)])
    return shared_environments(devices, share=share)


def max_updates(trainer: TrainerConfig) -> int:
    """Return the most updates of a dispatch; how many it makes is a traced number, so that one program serves all."""
    per_dispatch = trainer.updates_per_dispatch
    return _MAX_UPDATES_PER_DISPATCH if per_dispatch == "auto" else per_dispatch


def device_step(made: Ingredients, options: Any) -> Step:
    """Make a step of environments, which are inside the program, and update; ``options`` may hold arrays."""
    algorithm, env, num_steps = made.algorithm, cast(Env, made.env), made.config.trainer.buffer_size
    if algorithm.make_step is not None:
        return algorithm.make_step(made.policy, env, made.optimizer, options, num_steps=num_steps, dropout=made.dropout)
    return make_rollout_step(
        made.policy,
        env,
        made.optimizer,
        options,
        update=algorithm.update,
        resets=algorithm.resets(options),
        num_steps=num_steps,
        dropout=made.dropout,
    )


def make_first_state(made: Ingredients, num_envs: int) -> RunState:
    """Make the state at update 0, with environments inside the program."""
    algorithm, options, env = made.algorithm, made.config.algorithm.cfg, cast(Env, made.env)
    state = init_run_state(
        made.policy,
        env,
        made.optimizer,
        made.key,
        num_envs=num_envs,
        reference=algorithm.keeps_reference(options),
        target=algorithm.keeps_target,
        scales_rewards=made.config.trainer.normalize_reward,
    )
    if made.config.trainer.init_at_random_ep_len:
        try:
            state = replace(state, envs=spread_episodes(env, state.envs, made.key))
        except ValueError as error:
            problem = Problem("trainer.init_at_random_ep_len", f"got true, but {error}; set it to false")
            raise ConfigError([problem]) from error
    return with_own(state, made, num_envs)


def all_devices(config: RunConfig) -> list[jax.Device]:
    """List the devices of the configured kind, in this machine or in those of all processes that train together."""
    if scheduler := unjoined():
        text = f"got true in one of several processes of {scheduler} that do not know each other; {JOIN}"
        raise ConfigError([Problem("trainer.distributed", text)])
    return jax.devices(config.trainer.device.partition(":")[0])
