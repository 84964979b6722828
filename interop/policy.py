"""The torch twin of an ejax policy: EmbodiChain's Policy interface, from a spec and a state_dict. Needs no jax.

policy = load_policy(Path("exported"))
action = policy.act(obs)                                  # tensors or NumPy arrays, deterministic, clipped
td = policy.get_action(TensorDict({"obs": obs}, [N]))     # EmbodiChain's way

A vision-language-action policy is a ``TorchVLA`` (``interop.twin.vla``), which has ``act`` alone.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from interop.checkpoints.plain_pt import load_plain
from interop.dense import as_tensor, describe, odd_tensor
from interop.plain_files import check_plain
from interop.twin.distributions import Categorical, Distribution, MultiCategorical, Normal, TanhNormal
from interop.twin.image_encoder import ImageEncoder
from interop.twin.kinds import Spec, load_spec
from interop.twin.memory import history_step, make_recurrence, recurrent_step
from interop.twin.parts import check_batch, narrow, part, vla_tokenizer
from interop.twin.spec import MemorySpec, NetworkSpec, PolicySpec, encoder_name
from interop.twin.text import Tokenizer
from interop.twin.vla import TorchVLA
from interop.twin.vla_spec import VLASpec

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

    An ``obs`` is one array [..., O], tensor or NumPy, or a nest of them: dicts, a TensorDict, a dict by dotted paths.
    Its leading axes, the same of all parts, are those of the result: [N, O] gives [N, A], and one observation [O]
    gives one action [A]. Parts that the policy does not read are ignored.

    A ``td`` is a TensorDict, or a dict, with ``obs``. As in EmbodiChain, ``get_action`` and ``get_value`` write into it
    and return it; ``evaluate_actions`` returns a new one.

    Images are uint8 [N, height, width, channels]. Where the actor does not read all entries of an array, it takes the
    array as the environment gives it, or without those (as ``contract.json`` lists it); the critic takes all.

    A policy with memory has ``act`` and ``reset``: it remembers the rows of one batch, from the first ``act`` on. What
    takes a ``td`` has no place for a memory, and refuses it.
    """

    _low: Tensor
    _high: Tensor
    _clip_low: Tensor
    _clip_high: Tensor
    _read: Tensor

    def __init__(self, spec: PolicySpec) -> None:
        super().__init__()
        self.spec = spec
        if spec.continuous:
            self.log_std = nn.Parameter(torch.zeros(spec.sizes))
        if spec.encoder is not None:
            for name, shape in spec.images.items():
                self.add_module(encoder_name(name), ImageEncoder(spec.encoder, shape))
        self.memory: Tensor | None = None
        """[..., M], of the rows of the last ``act``. None: an episode starts."""
        self._add_memory("actor", spec.memory, len(spec.read_of_all))
        self.actor = _make_mlp(spec.actor, spec.width(spec.actor), sum(spec.sizes))
        self.actor_obs_normalizer = _make_normalizer(spec, spec.actor.normalized, spec.normalizer_inputs)
        if spec.critic is not None:
            self._add_memory("critic", spec.critic_memory, sum(spec.observation[name] for name in spec.critic.inputs))
            self.critic = _make_mlp(spec.critic, spec.width(spec.critic), 1)
            own = spec.critic.normalized and (spec.critic_memory is None or spec.critic_memory.type != "actor")
            self.critic_obs_normalizer = _make_normalizer(spec, own, spec.critic.inputs)
        low, high = spec.clip or ((), ())
        # constants of the spec, not weights: they move with .to(device) but stay out of the state_dict
        for name, bound in {"low": spec.low, "high": spec.high, "clip_low": low, "clip_high": high}.items():
            self.register_buffer(f"_{name}", torch.tensor(bound), persistent=False)
        self.register_buffer("_read", torch.tensor(spec.read_of_all, dtype=torch.int64), persistent=False)

    def _add_memory(self, name: str, memory: MemorySpec | None, num_inputs: int) -> None:
        if memory is None or memory.type not in ("gru", "lstm"):
            return
        if memory.encoder is not None:
            self.add_module(f"{name}_encoder", _make_mlp(memory.encoder, num_inputs, memory.width))
            num_inputs = memory.width
        self.add_module(f"{name}_memory", make_recurrence(memory, num_inputs))

    def forward(self, td: Any, deterministic: bool = False) -> Any:
        """Write ``action``, ``sample_log_prob`` [N] and ``value`` [N] into ``td``. The action is not clipped."""
        seen = self.see(td["obs"])
        distribution = self.distribution(td["obs"], seen)
        action = distribution.mode() if deterministic else distribution.sample()
        td["action"] = action
        td["sample_log_prob"] = distribution.log_prob(action)
        td["value"] = self.value(td["obs"], seen)
        return td

    @torch.no_grad()
    def get_action(self, td: Any, deterministic: bool = False) -> Any:
        """``forward`` without gradients."""
        return self.forward(td, deterministic)

    def get_value(self, td: Any) -> Any:
        """Write ``value`` [N]: zeros without a critic."""
        td["value"] = self.value(td["obs"])
        return td

    def evaluate_actions(self, td: Any) -> Any:
        """``sample_log_prob``, ``entropy`` and ``value``, each [N], of ``td``'s actions."""
        seen = self.see(td["obs"])
        distribution = self.distribution(td["obs"], seen)
        evaluated: Any = {} if isinstance(td, dict) else td.empty()
        evaluated["sample_log_prob"] = distribution.log_prob(td["action"])
        evaluated["entropy"] = distribution.entropy()
        evaluated["value"] = self.value(td["obs"], seen)
        return evaluated

    @torch.no_grad()
    def act(self, obs: Any) -> Any:
        """Return the deterministic action, clipped as the spec has it: [..., A] float32, or int32 choices.

        A policy with memory remembers the observation; where an episode ended, ``reset`` comes before the next one's.

        Returns:
            A tensor; a NumPy array if ``obs`` holds no tensor.

        Raises:
            ValueError: ``obs`` lacks a part that the policy reads, or has one of another shape or kind; or its leading
                axes are not those of what the policy remembers.
        """
        given = {name: part(obs, name, self.spec) for name in self.spec.reads}
        parts = {name: as_tensor(x, name, self._read.device) for name, x in given.items()}
        if self.spec.memory is None:
            distribution = self.distribution(parts)
        else:
            numbers = self._numbers(parts)
            # policies with memory read numbers alone
            output, self.memory = self.output([], numbers, self._remembered(self.spec.memory, numbers[0]))
            distribution = self.head(output)
        action = self.clip(distribution.mode())
        arrays = not any(isinstance(x, Tensor) for x in given.values())
        return action.numpy(force=True) if arrays else action

    def reset(self, rows: Any = None) -> None:
        """Forget: new episodes start, in all rows or in those where ``rows`` [...] is true. The next ``act`` may be of
        another batch, if it is all."""
        if rows is None:
            self.memory = None
        elif self.memory is not None:
            ended = torch.as_tensor(rows, dtype=torch.bool, device=self.memory.device)
            self.memory = torch.where(ended[..., None], 0.0, self.memory)

    def _remembered(self, memory: MemorySpec, x: Tensor) -> Tensor:
        """Return the memory of a batch with the leading axes of ``x`` [..., F]."""
        wanted = (*x.shape[:-1], memory.size)
        if self.memory is None:
            return torch.zeros(wanted, device=x.device)
        if tuple(self.memory.shape) != wanted:
            raise ValueError(
                f"the policy remembers a batch of {list(self.memory.shape[:-1])}, but got {list(x.shape[:-1])}; call "
                "reset() where other episodes begin"
            )
        return self.memory

    def _numbers(self, obs: Any) -> list[Tensor]:
        """``spec.actor.inputs``, those entries that the actor reads."""
        numbers = [narrow(self._input(obs, name), name, self.spec) for name in self.spec.actor.inputs]
        check_batch(obs, self.spec)
        return numbers

    def deployed(self) -> nn.Module:
        return Deployed(self)

    def clip(self, action: Tensor) -> Tensor:
        return action if self.spec.clip is None else torch.clamp(action, self._clip_low, self._clip_high)

    def see(self, obs: Any) -> list[Tensor]:
        """Encode each image, once for actor and critic: [N, 2·channels]."""
        return [self.get_submodule(encoder_name(name))(self._input(obs, name)) for name in self.spec.images]

    def distribution(self, obs: Any, seen: list[Tensor] | None = None) -> Distribution:
        """Make the distribution of actions.

        Args:
            seen: ``see(obs)``, where it is known already.
        """
        if self.spec.memory is not None:
            raise ValueError("a policy with memory is called by act(obs), step by step, and reset() between episodes")
        numbers = self._numbers(obs)
        return self.head(self.output(self.see(obs) if seen is None else seen, numbers)[0])

    def output(
        self, seen: list[Tensor], numbers: list[Tensor], memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the actor's raw output [N, sum(sizes)], as a distribution takes it, and its memory after it [N, M].

        Args:
            numbers: ``spec.actor.inputs``, those entries that it reads.
            memory: [N, M], of a policy with memory.
        """
        if numbers:
            together: Any = torch.cat(numbers, dim=-1)
            if self.spec.memory is not None and memory is not None:
                together, memory = self._remember(self.spec.memory, together, memory)
            elif self.spec.actor.normalized:
                together = self.actor_obs_normalizer(together, self._read if self.spec.unread else None)
            # images first: the order in which the first Linear was trained
            seen = [*seen, together]
        return self.actor(torch.cat(seen, dim=-1)), memory

    def _remember(self, spec: MemorySpec, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the actor's input, and the memory after it."""
        if spec.type == "history":
            window, memory = history_step(spec, x, memory)
            return self.actor_obs_normalizer(window).flatten(-2), memory
        x = self.actor_obs_normalizer(x)
        if spec.encoder is not None:
            x = self.get_submodule("actor_encoder")(x)
        return recurrent_step(spec, self.get_submodule("actor_memory"), x, memory)

    def value(self, obs: Any, seen: list[Tensor] | None = None) -> Tensor:
        """[N]. ``seen`` as in ``distribution``."""
        if self.spec.critic is None:
            name = self.spec.inputs[0]
            rows = self._input(obs, name).shape[: -len(self.spec.input_shape(name))]
            return torch.zeros(rows, device=self._read.device)
        numbers = [self._input(obs, name).float() for name in self.spec.critic.inputs]
        if not self.spec.images:
            return self.critic(self.critic_obs_normalizer(torch.cat(numbers, dim=-1)))[..., 0]
        known = self.see(obs) if seen is None else seen
        if numbers:
            known = [*known, self.actor_obs_normalizer(torch.cat(numbers, dim=-1))]
        return self.critic(torch.cat(known, dim=-1))[..., 0]

    def head(self, output: Tensor) -> Distribution:
        """Make the distribution that the actor's output [..., sum(sizes)] stands for."""
        if self.spec.head == "categorical":
            return Categorical(output)
        if self.spec.head == "multi_categorical":
            return MultiCategorical(tuple(Categorical(part) for part in output.split(self.spec.sizes, dim=-1)))
        normal = Normal(output, self.log_std.clamp(*self.spec.log_std_range).expand_as(output))
        return normal if self.spec.head == "normal" else TanhNormal(normal, self._low, self._high)

    def _input(self, obs: Any, name: str) -> Tensor:
        return as_tensor(part(obs, name, self.spec), name, self._read.device)


class Deployed(nn.Module):
    """A twin's actor as a function of plain tensors, to be traced: arrays in, ``spec.outputs`` out, all by position."""

    def __init__(self, policy: TorchPolicy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Compute ``spec.outputs`` from ``spec.inputs``.

        Args:
            leaves: in the order of ``spec.inputs``: images, then [N, F] float32 each, and the memory [N, M].
        """
        policy = self.policy
        *leaves_of_obs, memory = leaves if policy.spec.memory is not None else (*leaves, None)
        images, numbers = leaves_of_obs[: len(policy.spec.images)], leaves_of_obs[len(policy.spec.images) :]
        obs = dict(zip(policy.spec.images, images, strict=True))
        output, after = policy.output(policy.see(obs), list(numbers), memory)
        distribution = policy.head(output)
        action = policy.clip(distribution.mode())
        parameters: tuple[Tensor, ...] = (output,)
        if policy.spec.continuous:
            parameters = (output, policy.log_std.clamp(*policy.spec.log_std_range).expand_as(output))
        return (action, *parameters) if after is None else (action, *parameters, after)


def deployed(spec: Spec, state_dict: Mapping[str, Any]) -> nn.Module:
    """Make the twin a function of plain tensors: ``spec.inputs`` in, ``spec.outputs`` out, all by position."""
    return make_policy(spec, state_dict).deployed()


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

    def forward(self, x: Tensor, entries: Tensor | None = None) -> Tensor:
        """Normalize features.

        Args:
            entries: which of the features x has. None: all.
        """
        mean, deviation = self.mean[0], self.standard_deviation[0]  # one row: x may have no batch
        if entries is not None:
            mean, deviation = mean[entries], deviation[entries]
        return (x - mean) / (deviation + _NORMALIZER_EPSILON)


TWINS: dict[type, Callable[[Any], Any]] = {PolicySpec: TorchPolicy, VLASpec: TorchVLA}
"""Spec -> torch module, whose ``deployed()`` takes ``spec.inputs`` and gives ``spec.outputs``, all by position."""


def load_policy(directory: Path | str) -> Any:
    """Load the twin from an export's ``policy.json``, ``policy.pt`` and, of a ``TorchVLA``, ``tokenizer.json``.

    Returns:
        A ``TorchPolicy`` or ``TorchVLA``, in evaluation mode.

    Raises:
        FileNotFoundError: ``directory`` is not an export, or has no ``policy.pt``.
        ValueError: one of the files is not an export's; no code in it is run.
    """
    directory = Path(directory)
    spec = load_spec(directory / "policy.json")
    tokenizer = vla_tokenizer(directory, spec) if isinstance(spec, VLASpec) else None
    return make_policy(spec, load_state_dict(directory / "policy.pt"), tokenizer)


def load_state_dict(path: Path) -> dict[str, Tensor]:
    """Load the weights in an export's ``policy.pt``.

    Raises:
        FileNotFoundError, ValueError: as ``load_policy``.
    """
    check_plain(path)
    state_dict = load_plain(path).get("policy")
    if not isinstance(state_dict, dict):
        raise ValueError(f"{path} must hold a state_dict as 'policy', got {describe(state_dict)}")
    return check_state_dict(path, state_dict)


def check_state_dict(path: Path, state_dict: dict[str, Any]) -> dict[str, Tensor]:
    """Return the state dict itself, if all of it can be a policy's weights.

    Raises:
        ValueError: it cannot; the text names the first.
    """
    for name, x in state_dict.items():
        if odd := odd_tensor(x):
            raise ValueError(f"{path}: 'policy.{name}' must be a dense tensor of finite numbers, got {odd}")
    return state_dict


def make_policy(spec: Spec, state_dict: Mapping[str, Any], tokenizer: Tokenizer | None = None) -> Any:
    """Make the twin with these weights (arrays or tensors), in evaluation mode: no dropout.

    Args:
        tokenizer: of a ``TorchVLA``, for texts.

    Returns:
        A ``TorchPolicy`` or ``TorchVLA``.

    Raises:
        RuntimeError: the state_dict is not that of such a policy; torch names the keys.
    """
    policy = TWINS[type(spec)](spec)
    if tokenizer is not None:
        policy.tokenizer = tokenizer
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


def _make_normalizer(spec: PolicySpec, normalized: bool, inputs: tuple[str, ...]) -> nn.Module:
    return ObsNormalizer(sum(spec.observation[name] for name in inputs)) if normalized else nn.Identity()
