"""The torch twin of an ejax policy: EmbodiChain's Policy interface, from a spec and a state_dict. Needs no jax.

policy = load_policy(Path("exported"))
action = policy.act(obs)                                  # plain tensors, deterministic, clipped
td = policy.get_action(TensorDict({"obs": obs}, [N]))     # EmbodiChain's way
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from interop.policy_spec import WHOLE, NetworkSpec, PolicySpec
from interop.torch_distributions import Categorical, Distribution, MultiCategorical, Normal, TanhNormal

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "none": nn.Identity,
}
_NORMALIZER_EPSILON = 1e-2


class TorchPolicy(nn.Module):
    """Actor, and critic where the policy has one. Loads its state_dict with ``strict=True``.

    A ``td`` is a TensorDict, or a dict, with ``obs``: one tensor [N, O] or a nest of them. As in EmbodiChain,
    ``get_action`` and ``get_value`` write into it and return it; ``evaluate_actions`` returns a new one.
    """

    _low: Tensor
    _high: Tensor
    _clip_low: Tensor
    _clip_high: Tensor

    def __init__(self, spec: PolicySpec) -> None:
        super().__init__()
        self.spec = spec
        if spec.continuous:
            self.log_std = nn.Parameter(torch.zeros(spec.sizes))
        self.actor = _make_mlp(spec.actor, spec.width(spec.actor), sum(spec.sizes))
        self.actor_obs_normalizer = _make_normalizer(spec, spec.actor)
        if spec.critic is not None:
            self.critic = _make_mlp(spec.critic, spec.width(spec.critic), 1)
            self.critic_obs_normalizer = _make_normalizer(spec, spec.critic)
        low, high = spec.clip or ((), ())
        # constants of the spec, not weights: they move with .to(device) but stay out of the state_dict
        for name, bound in {"low": spec.low, "high": spec.high, "clip_low": low, "clip_high": high}.items():
            self.register_buffer(f"_{name}", torch.tensor(bound), persistent=False)

    def forward(self, td: Any, deterministic: bool = False) -> Any:
        """Write ``action``, ``sample_log_prob`` [N] and ``value`` [N] into ``td``. The action is not clipped."""
        distribution = self.distribution(td["obs"])
        action = distribution.mode() if deterministic else distribution.sample()
        td["action"] = action
        td["sample_log_prob"] = distribution.log_prob(action)
        return self.get_value(td)

    @torch.no_grad()
    def get_action(self, td: Any, deterministic: bool = False) -> Any:
        """``forward`` without gradients."""
        return self.forward(td, deterministic)

    def get_value(self, td: Any) -> Any:
        """Write ``value`` [N]: zeros where there is no critic."""
        td["value"] = self.value(td["obs"])
        return td

    def evaluate_actions(self, td: Any) -> Any:
        """``sample_log_prob``, ``entropy`` and ``value``, each [N], of ``td``'s actions."""
        distribution = self.distribution(td["obs"])
        evaluated: Any = {} if isinstance(td, dict) else td.empty()
        evaluated["sample_log_prob"] = distribution.log_prob(td["action"])
        evaluated["entropy"] = distribution.entropy()
        evaluated["value"] = self.value(td["obs"])
        return evaluated

    @torch.no_grad()
    def act(self, obs: Any) -> Tensor:
        """The deterministic action, clipped as the spec says: [N, A] float32, or int32 choices.

        Args:
            obs: a tensor [N, O], or a nest of dicts of them.
        """
        return self.clip(self.distribution(obs).mode())

    def clip(self, action: Tensor) -> Tensor:
        return action if self.spec.clip is None else torch.clamp(action, self._clip_low, self._clip_high)

    def distribution(self, obs: Any) -> Distribution:
        return self.head(self.actor(self.actor_obs_normalizer(_select(obs, self.spec.actor.inputs))))

    def value(self, obs: Any) -> Tensor:
        """[N]"""
        if self.spec.critic is None:
            first = _select(obs, self.spec.actor.inputs[:1])
            return torch.zeros(first.shape[:-1], dtype=first.dtype, device=first.device)
        return self.critic(self.critic_obs_normalizer(_select(obs, self.spec.critic.inputs)))[..., 0]

    def head(self, output: Tensor) -> Distribution:
        """The distribution that the actor's output [..., sum(sizes)] stands for."""
        if self.spec.head == "categorical":
            return Categorical(output)
        if self.spec.head == "multi_categorical":
            return MultiCategorical(tuple(Categorical(part) for part in output.split(self.spec.sizes, dim=-1)))
        normal = Normal(output, self.log_std.clamp(*self.spec.log_std_range).expand_as(output))
        return normal if self.spec.head == "normal" else TanhNormal(normal, self._low, self._high)


class Deployed(nn.Module):
    """A twin's actor as a function of plain tensors, to be traced: arrays in, ``spec.outputs`` out, all by position."""

    def __init__(self, policy: TorchPolicy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        """
        Args:
            leaves: [N, F] float32 each, in the order of ``spec.actor.inputs``.
        """
        policy = self.policy
        output = policy.actor(policy.actor_obs_normalizer(torch.cat(leaves, dim=-1)))
        distribution = policy.head(output)
        action = policy.clip(distribution.mode())
        if not policy.spec.continuous:
            return action, output
        return action, output, policy.log_std.clamp(*policy.spec.log_std_range).expand_as(output)


class ObsNormalizer(nn.Module):
    """(x − mean) / (std + 1e-2) with EmbodiChain's buffers. The statistics stay as they were loaded."""

    mean: Tensor
    standard_deviation: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, width))
        self.register_buffer("variance", torch.ones(1, width))
        self.register_buffer("standard_deviation", torch.ones(1, width))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / (self.standard_deviation + _NORMALIZER_EPSILON)


def load_policy(directory: Path | str) -> TorchPolicy:
    """The twin from an export's ``policy.json`` and ``policy.pt``, in evaluation mode."""
    directory = Path(directory)
    state_dict = torch.load(directory / "policy.pt", weights_only=True, map_location="cpu")["policy"]
    return make_policy(PolicySpec.load(directory / "policy.json"), state_dict)


def make_policy(spec: PolicySpec, state_dict: Mapping[str, Any]) -> TorchPolicy:
    """The twin with these weights (arrays or tensors), in evaluation mode: no dropout.

    Raises:
        RuntimeError: the state_dict is not that of such a policy; torch tells the keys.
    """
    policy = TorchPolicy(spec)
    policy.load_state_dict({name: torch.as_tensor(x) for name, x in state_dict.items()}, strict=True)
    return policy.eval()


def _make_mlp(network: NetworkSpec, width: int, num_outputs: int) -> nn.Sequential:
    modules: list[nn.Module] = []
    for size in network.hidden_sizes:
        modules.append(nn.Linear(width, size))
        if network.use_layernorm:
            modules.append(nn.LayerNorm(size))
        modules.append(ACTIVATIONS[network.activation]())
        if network.dropout_p > 0.0:
            modules.append(nn.Dropout(network.dropout_p))
        width = size
    modules.append(nn.Linear(width, num_outputs))
    if network.last_activation is not None:
        modules.append(ACTIVATIONS[network.last_activation]())
    return nn.Sequential(*modules)


def _make_normalizer(spec: PolicySpec, network: NetworkSpec) -> nn.Module:
    return ObsNormalizer(spec.width(network)) if network.normalized else nn.Identity()


def _select(obs: Any, inputs: tuple[str, ...]) -> Tensor:
    """The arrays at these dotted paths, concatenated: [..., O] float32."""
    if isinstance(obs, Tensor):
        if inputs != (WHOLE,):
            raise ValueError(
                f"the policy reads the observation's parts {inputs}, but got one tensor; give a nest of them"
            )
        return obs.float()
    leaves = []
    for path in inputs:
        node = obs
        for name in path.split("."):
            node = node[name]
        leaves.append(node.float())
    return torch.cat(leaves, dim=-1)
