"""What a run is made of."""

from dataclasses import dataclass

import optax

from ejax.algorithms.step import RunState
from ejax.config import RunConfig
from ejax.config.models import TrainerConfig
from ejax.training.cadence import Cadence
from ejax.training.steppers import Stepper
from ejax.types import Env, HostEnv, Policy


@dataclass(frozen=True)
class Parts:
    """What a run is made of. Nothing is compiled yet. ``stepper`` owns the environments that need closing."""

    policy: Policy
    env: Env | HostEnv
    optimizer: optax.GradientTransformation
    stepper: Stepper[RunState]
    state: RunState
    """At update 0, without ``policy.init_from``."""
    num_devices: int = 1
    """That share the environments, each ``trainer.num_envs`` of them."""
    eval_env: Env | HostEnv | None = None
    """The caller's own to evaluate in. None: as the config says."""
    notes: tuple[str, ...] = ()
    """Messages on what they are made of."""


def rows_per_update(config: RunConfig, parts: Parts) -> int:
    """Environment steps (of cloning: samples) of one update, on all devices."""
    return config.trainer.buffer_size * config.trainer.num_envs * parts.num_devices


def cadence_of(trainer: TrainerConfig, rows: int) -> Cadence:
    """When a run with this config evaluates, saves and logs; ``rows``: env steps of one update."""
    return Cadence(
        rows=rows,
        num_updates=trainer.num_updates,
        eval_freq=trainer.eval_freq if trainer.enable_eval else 0,
        save_freq=trainer.save_freq,
        save_frequency_updates=trainer.save_frequency_updates,
        log_freq_updates=trainer.log_freq_updates,
    )
