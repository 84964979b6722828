"""Options of a policy's memory: ``ejax.policies.recurrence`` and ``ejax.policies.with_memory`` make it."""

from typing import Literal

from pydantic import PositiveInt, model_validator

from ejax.policies.mlp import NetworkConfig
from ejax.schema.frozen import StrictModel

GATES = {"gru": 3, "lstm": 4}


class MemoryConfig(StrictModel):
    """``policy.actor.memory`` and ``policy.critic.memory``: what stands before the network of ``network_cfg``."""

    type: Literal["gru", "lstm", "history", "actor", "none"]
    """``gru``, ``lstm``, or a window of past observations, ``history``. Of a critic only: ``actor``, it reads what the
    actor's memory gives, and has no part in learning it; ``none``, it reads the observation."""
    hidden_size: PositiveInt | None = None
    """gru, lstm: numbers of each layer. Default: 256."""
    num_layers: PositiveInt | None = None
    """gru, lstm: layers, one above the other. Default: 1."""
    encoder: NetworkConfig | None = None
    """gru, lstm: an MLP before the first layer, whose output has ``hidden_size`` numbers. None: the observation."""
    orthogonal_init: bool = False
    """gru, lstm: orthogonal weights, gate by gate, and zero biases. False: torch's default."""
    length: int | None = None
    """history: K ≥ 2, the observations that are read together, the present one included. Those from before the
    episode are its first."""

    @model_validator(mode="after")
    def _options_of_its_type(self) -> "MemoryConfig":
        of_recurrence = ("hidden_size", "num_layers", "encoder", "orthogonal_init")
        # defaults are None, so that this shows
        given = [name for name in of_recurrence if getattr(self, name) not in (None, False)]
        if given and self.type not in GATES:
            raise ValueError(f"{given[0]} belongs to gru and lstm, not to {self.type}; leave it out")
        if self.length is not None and self.type != "history":
            raise ValueError(f"length belongs to history, not to {self.type}; leave it out")
        if self.type == "history" and (self.length is None or self.length < 2):
            raise ValueError(f"length must be at least 2 for a history, got {self.length}")
        return self

    @property
    def remembers(self) -> bool:
        return self.type not in ("actor", "none")

    @property
    def width(self) -> int:
        return self.hidden_size or 256

    @property
    def depth(self) -> int:
        return self.num_layers or 1

    def size(self, num_observed: int) -> int:
        """Compute M, numbers of the memory."""
        if self.type == "history":
            return ((self.length or 0) - 1) * num_observed + 1
        return self.depth * self.width * (2 if self.type == "lstm" else 1)
