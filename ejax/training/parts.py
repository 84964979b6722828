"""Parts of a run, and the ingredients of its stepper."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import optax

from ejax.algorithms.host_rows import RowMemory
from ejax.algorithms.record import Algorithm
from ejax.algorithms.step import RunState
from ejax.config import ConfigError, Problem, RunConfig
from ejax.policies.heads import uses_dropout
from ejax.training.replay_memory import check_fits
from ejax.training.steppers import Stepper
from ejax.types import Env, HostEnv, Key, Policy


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
