"""``trainer.collector``: where and when rollouts are made."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from ejax.schema.frozen import MayChange, PathText, StrictModel


class CollectorConfig(StrictModel):
    """All keys are ejax's; EmbodiChain's ``model_type: vla`` means ``mode: async``."""

    mode: Literal["auto", "device", "host", "async"] = "auto"
    """``device``: pure environments, inside the jitted training step. ``host``: the policy acts step by step,
    between the updates. ``async``: the same, in a background thread during updates. ``auto``: device for pure
    environments, host for those that live outside JAX."""
    num_groups: PositiveInt = 1
    """Groups of environments that are stepped in a thread each; divides ``num_envs``, with ``distributed`` those
    of all devices. Of several processes each steps as many."""
    max_staleness: NonNegativeInt = 1
    """async: number of updates that a rollout's parameters may lag behind when it is used."""
    schedule: Literal["fixed", "free"] = "fixed"
    """async: ``fixed`` makes every rollout with parameters exactly ``max_staleness`` updates old, so that runs are
    reproducible; ``free`` with the newest parameters available."""
    replay_schedule: PathText | None = None
    """async: a run's ``schedule.json``; its versions are replayed, so that a free run is reproduced bit for bit."""
    pause_in_evaluation: MayChange[bool] = True
    """async: environments stand still while the policy is evaluated."""
    actor_devices: tuple[str, ...] = ()
    """Devices of this process on which the policy acts, such as ``[cuda:1]``; groups take turns. Empty:
    ``trainer.device``, with ``distributed`` all of the process."""
    learner_devices: tuple[str, ...] = ()
    """Devices on which updates run; several split each batch by environment. Empty: ``trainer.device``, with
    ``distributed`` all devices."""
    stop_timeout_s: MayChange[Annotated[PositiveFloat, Field(le=1e9)]] = 10.0
    """Time that the end of training waits for a running call into an environment, and for its ``close``."""
    env_timeout_s: MayChange[Annotated[PositiveFloat, Field(le=1e9)]] = 300.0
    """Time limit of a single call into an environment, after which training ends with an error."""
    max_quarantined: MayChange[NonNegativeInt] = 100
    """Episodes of a group that may end because an environment outside JAX gave a NaN or an infinity."""
    max_env_restarts: MayChange[NonNegativeInt] = 0
    """Times that a group's environment outside JAX may be recreated after it raised."""
