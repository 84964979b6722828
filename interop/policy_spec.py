"""What a policy is, apart from its weights: plain data that JSON can hold, read without jax or torch.

Weights come as a ``state_dict`` with EmbodiChain's keys (``interop.weights``); a spec and a state_dict make a policy.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

SCHEMA_VERSION = 1
WHOLE = "obs"
"""The name of an observation that is one array, not a tree of named ones."""

Head = Literal["normal", "tanh_normal", "categorical", "multi_categorical"]


@dataclass(frozen=True, kw_only=True)
class NetworkSpec:
    """An MLP: for each hidden size Linear → [LayerNorm] → activation → [dropout], then Linear [→ last activation]."""

    inputs: tuple[str, ...]
    """Dotted paths of the observation's arrays that it reads, concatenated in this order."""
    normalized: bool
    """(x − mean) / (std + 1e-2) before the first Linear, by the statistics in the state_dict."""
    hidden_sizes: tuple[int, ...]
    activation: str
    last_activation: str | None
    use_layernorm: bool
    dropout_p: float

    @property
    def stride(self) -> int:
        """Modules per hidden layer: Linear i is number i·stride of the ``nn.Sequential``, the output's included."""
        return 2 + self.use_layernorm + (self.dropout_p > 0.0)


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """``sizes``: (A,) for the normals, the number of choices of each dimension for the categoricals."""

    observation: Mapping[str, int]
    """Width of each array of the observation by its dotted path; ``{"obs": O}`` where there is only one."""
    actor: NetworkSpec
    critic: NetworkSpec | None
    head: Head
    sizes: tuple[int, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    """Bounds that a tanh_normal squashes into."""
    log_std_range: tuple[float, float] = (-5.0, 2.0)
    clip: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    """(low, high) that a deployed action is clipped to; the distribution itself knows nothing of it."""

    @property
    def continuous(self) -> bool:
        return self.head in ("normal", "tanh_normal")

    @property
    def outputs(self) -> tuple[str, ...]:
        """What a deployed policy returns, in order."""
        return ("action", "mean", "log_std") if self.continuous else ("action", "logits")

    def output_shape(self, name: str) -> tuple[int, ...]:
        """Of one row of that output."""
        if name == "action" and not self.continuous:
            return () if self.head == "categorical" else (len(self.sizes),)
        return (sum(self.sizes),)

    def width(self, network: NetworkSpec) -> int:
        return sum(self.observation[name] for name in network.inputs)

    def to_json(self) -> str:
        return json.dumps({"schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}, indent=2)

    @staticmethod
    def from_json(text: str) -> "PolicySpec":
        """
        Raises:
            ValueError: of another schema version.
        """
        raw = json.loads(text)
        found = raw.pop("schema_version", None)
        if found != SCHEMA_VERSION:
            raise ValueError(f"the policy spec has schema version {found}, this interop reads {SCHEMA_VERSION}")
        networks = {name: raw.pop(name) for name in ("actor", "critic")}
        actor, critic = (net and NetworkSpec(**_tuples(net)) for net in (networks["actor"], networks["critic"]))
        return PolicySpec(actor=actor, critic=critic, **_tuples(raw))

    @staticmethod
    def load(path: Path) -> "PolicySpec":
        return PolicySpec.from_json(path.read_text())


def _tuples(raw: dict[str, Any]) -> dict[str, Any]:
    """JSON's lists as the tuples they were."""

    def convert(x: Any) -> Any:
        return tuple(map(convert, x)) if isinstance(x, list) else x

    return {name: convert(x) for name, x in raw.items()}
