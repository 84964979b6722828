"""``trainer.collector``: where and when the rollouts are made."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt


class CollectorConfig(BaseModel):
    """All of it is ejax's; EmbodiChain's ``model_type: vla`` means ``mode: async``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    mode: Literal["auto", "device", "host", "async"] = "auto"
    """``device``: pure environments, inside the jitted training step. ``host``: the policy is asked step by step, in
    turn with the updates. ``async``: so too, in a background thread beside the updates. ``auto``: device for pure
    environments, host for those that live outside JAX."""
    num_groups: PositiveInt = 1
    """Groups of environments that are stepped in threads of their own; divides ``num_envs``."""
    max_staleness: NonNegativeInt = 1
    """async: updates that the parameters of a rollout may lack when it is used."""
    schedule: Literal["fixed", "free"] = "fixed"
    """async: ``fixed`` makes every rollout with exactly ``max_staleness`` updates lacking, so that runs are
    reproducible; ``free`` with the newest parameters there are."""
    replay_schedule: str | None = None
    """async: a run's ``schedule.json``; its versions are used again, so that a free run's bits come back."""
    pause_in_evaluation: bool = True
    """async: environments stand still while the policy is evaluated."""
    actor_devices: tuple[str, ...] = ()
    """Where the policy acts, such as ``[cuda:1]``; groups take them in turn. Empty: on ``trainer.device``."""
    learner_devices: tuple[str, ...] = ()
    """Where updates run; several share each batch, environment by environment. Empty: on ``trainer.device``."""
    stop_timeout_s: Annotated[PositiveFloat, Field(le=1e9)] = 10.0
    """How long the end of training waits for the call into an environment that is under way, and for its ``close``."""
    env_timeout_s: Annotated[PositiveFloat, Field(le=1e9)] = 300.0
    """How long a single call into an environment may take before training ends with an error."""
    max_quarantined: NonNegativeInt = 100
    """Episodes of a group that may end because an environment outside JAX gave a NaN or an infinity."""
    max_env_restarts: NonNegativeInt = 0
    """Times that a group's environment outside JAX may be made anew after it raised."""
