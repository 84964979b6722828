"""The torch twin of an ejax policy: EmbodiChain's Policy interface, from a spec and a state_dict. Needs no jax.

policy = load_policy(Path("exported"))
action = policy.act(obs)                                  # tensors or NumPy arrays, deterministic, clipped
action, log_prob, value = policy.get_action(obs)          # EmbodiChain's first versions
td = policy.get_action(TensorDict({"obs": obs}, [N]))     # EmbodiChain 0.2 and 0.3

A policy that no ``PolicySpec`` describes is a ``TorchProgram`` (``interop.twin.program``): ``act`` and ``reset``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from interop.dense import as_floats, as_tensor, in_words, odd_tensor
from interop.plain_pt import load_plain
from interop.standalone_verify import check_plain
from interop.twin.acting import Twin
from interop.twin.distributions import Categorical, Distribution, MultiCategorical, Normal, TanhNormal
from interop.twin.kinds import Spec, load_spec
from interop.twin.networks import (
    ImageEncoder,
    ObsNormalizer,
    ToAction,
    history_step,
    make_mlp,
    make_network,
    make_recurrence,
    recurrent_step,
)
from interop.twin.parts import load_tokenizer, narrow, parts, shared_batch
from interop.twin.program import TorchProgram
from interop.twin.spec import MemorySpec, PolicySpec, encoder_name
from interop.twin.text import TextReader

_OBSERVATION = ("obs", "observation")
"""Names of a ``td``'s observation: EmbodiChain's, and those of its pull request 122."""


class TorchPolicy(Twin):
    """An exported policy as a torch module: actor, and critic where the policy has one.

    Loads its state_dict with ``strict=True``.

    An ``obs`` is one array [..., O], tensor or NumPy, or a nest of them: dicts, a TensorDict, a dict by dotted paths.
    Its leading axes, the same of all parts, are those of the result: [N, O] gives [N, A], and one observation [O]
    gives one action [A]. Parts that the policy does not read are ignored.

    A ``td`` is a TensorDict, or a dict, with the observation as ``obs``, or as ``observation``. As in EmbodiChain,
    ``get_action`` and ``get_value`` write into it and return it; ``evaluate_actions`` returns a new one. In its place
    they take an ``obs`` itself, and return tensors. A nest with a part called ``obs`` goes into a ``td``.

    Images are uint8 [N, height, width, channels]. Where the actor does not read all entries of an array, it takes the
    array as the environment gives it, or without those (as ``contract.json`` lists it); the critic takes all.

    A policy with memory has ``act`` and ``reset``: it remembers the rows of one batch, from the first ``act`` on. The
    others have no place for a memory, and refuse it.
    """

    spec: PolicySpec
    _low: Tensor
    _high: Tensor
    _read: Tensor

    def __init__(self, spec: PolicySpec) -> None:
        super().__init__()
        self.spec = spec
        if spec.continuous and spec.log_std == "parameter":
            self.log_std = nn.Parameter(torch.zeros(spec.sizes))
        if spec.encoder is not None:
            for name, shape in spec.images.items():
                self.add_module(encoder_name(name), ImageEncoder(spec.encoder, shape))
        self._add_memory("actor", spec.memory, len(spec.read_of_all))
        self.actor = make_network(spec.actor, spec.width(spec.actor), spec.num_outputs)
        self.actor_obs_normalizer = _make_normalizer(spec, spec.actor.normalized, spec.normalizer_inputs)
        if spec.critic is not None:
            self._add_memory("critic", spec.critic_memory, sum(spec.observation[name] for name in spec.critic.inputs))
            self.critic = make_network(spec.critic, spec.width(spec.critic), 1)
            own = spec.critic.normalized and (spec.critic_memory is None or spec.critic_memory.type != "actor")
            self.critic_obs_normalizer = _make_normalizer(spec, own, spec.critic.inputs)
        self.to_action = ToAction(spec)
        # constants of the spec, not weights: they move with .to(device) but stay out of the state_dict
        for name, bound in {"low": spec.low, "high": spec.high}.items():
            self.register_buffer(f"_{name}", torch.tensor(bound), persistent=False)
        self.register_buffer("_read", torch.tensor(spec.read_of_all, dtype=torch.int64), persistent=False)

    def _add_memory(self, name: str, memory: MemorySpec | None, num_inputs: int) -> None:
        if memory is None or memory.type not in ("gru", "lstm"):
            return
        if memory.encoder is not None:
            self.add_module(f"{name}_encoder", make_mlp(memory.encoder, num_inputs, memory.width))
            num_inputs = memory.width
        self.add_module(f"{name}_memory", make_recurrence(memory, num_inputs))

    def forward(self, td: Any, deterministic: bool = False) -> Any:
        """Write ``action``, not clipped, ``sample_log_prob`` [N] and ``value`` [N] into ``td``; of a normal head its
        mean ``loc`` and deviation ``scale`` [N, A], too."""
        distribution, value = self._evaluate(_observation(td))
        action = distribution.mode() if deterministic else distribution.sample()
        td["action"] = action
        td["sample_log_prob"] = distribution.log_prob(action)
        td["value"] = value
        if isinstance(distribution, Normal):
            td["loc"], td["scale"] = distribution.mean, torch.exp(distribution.log_std)
        return td

    @torch.no_grad()
    def get_action(self, obs: Any, deterministic: bool = False) -> Any:
        """Act: ``(action [..., A], log_prob [...], value [...])``, not clipped, without gradients; of a ``td``, as
        ``forward``. ``deterministic`` takes the distribution's mode, in place of a sample."""
        if _is_td(obs):
            return self.forward(obs, deterministic)
        td = self.forward({"obs": obs}, deterministic)
        return td["action"], td["sample_log_prob"], td["value"]

    def get_value(self, obs: Any) -> Any:
        """Compute V(obs) [...], zeros without a critic; of a ``td``, write it as ``value``."""
        if not _is_td(obs):
            return self.value(obs)
        obs["value"] = self.value(_observation(obs))
        return obs

    def evaluate_actions(self, obs: Any, actions: Any = None) -> Any:
        """Compute ``(log_prob, entropy, value)``, each [...], of ``actions`` [..., A] taken at ``obs``; of a ``td`` and
        its ``action``, a new one with ``sample_log_prob``, ``entropy`` and ``value``."""
        if actions is None and not _is_td(obs):
            raise ValueError("got an observation without actions; call evaluate_actions(obs, actions), or pass a td")
        td = obs if actions is None else {"obs": obs, "action": as_tensor(actions, "actions", self.device)}
        distribution, value = self._evaluate(_observation(td))
        if td["action"].shape != (wanted := distribution.mode().shape):  # others would be broadcast
            raise ValueError(f"the actions are {list(td['action'].shape)}, must be {list(wanted)}")
        log_prob, entropy = distribution.log_prob(td["action"]), distribution.entropy()
        if actions is not None:
            return log_prob, entropy, value
        evaluated: Any = {} if isinstance(td, dict) else td.empty()
        evaluated["sample_log_prob"], evaluated["entropy"], evaluated["value"] = log_prob, entropy, value
        return evaluated

    def _evaluate(self, obs: Any) -> tuple[Distribution, Tensor]:
        seen = self.see(obs)
        return self.distribution(obs, seen), self.value(obs, seen)

    def _numbers(self, obs: Any) -> list[Tensor]:
        """``spec.actor.inputs``, those entries that the actor reads."""
        numbers = [as_floats(narrow(self._input(obs, name), name, self.spec), name) for name in self.spec.actor.inputs]
        shared_batch({name: list(np.shape(x)) for name, x in parts(obs, self.spec.reads, self.spec).items()}, self.spec)
        return numbers

    def deployed(self) -> nn.Module:
        return Deployed(self)

    def see(self, obs: Any) -> list[Tensor]:
        """Encode each image, once for actor and critic: [N, 2·channels]."""
        return [self.get_submodule(encoder_name(name))(self._input(obs, name)) for name in self.spec.images]

    def distribution(self, obs: Any, seen: list[Tensor] | None = None) -> Distribution:
        """Make the distribution of actions. ``seen``: ``see(obs)``, where it is known already."""
        self._check_memory()
        numbers = self._numbers(obs)
        return self.head(self.output(self.see(obs) if seen is None else seen, numbers)[0])

    def output(
        self, seen: list[Tensor], numbers: list[Tensor], memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the actor's raw output [N, num_outputs], as ``head`` takes it, and its memory after it [N, M].

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
        self._check_memory()
        if self.spec.critic is None:
            name = self.spec.inputs[0]
            rows = self._input(obs, name).shape[: -len(self.spec.input_shape(name))]
            return torch.zeros(rows, device=self._read.device)
        numbers = [as_floats(self._input(obs, name), name) for name in self.spec.critic.inputs]
        if not self.spec.images:
            return self.critic(self.critic_obs_normalizer(torch.cat(numbers, dim=-1)))[..., 0]
        known = self.see(obs) if seen is None else seen
        if numbers:
            known = [*known, self.actor_obs_normalizer(torch.cat(numbers, dim=-1))]
        return self.critic(torch.cat(known, dim=-1))[..., 0]

    def head(self, output: Tensor) -> Distribution:
        """Make the distribution of the actor's output [..., num_outputs]."""
        if self.spec.head == "categorical":
            return Categorical(output)
        if self.spec.head == "multi_categorical":
            return MultiCategorical(tuple(Categorical(part) for part in output.split(self.spec.sizes, dim=-1)))
        low, high = self.spec.log_std_range
        if self.spec.log_std == "network":
            mean, raw = output.chunk(2, dim=-1)
            normal = Normal(mean, low + (high - low) * 0.5 * (1.0 + torch.tanh(raw)))
        else:
            normal = Normal(output, self.log_std.clamp(low, high).expand_as(output))
        return normal if self.spec.head == "normal" else TanhNormal(normal, self._low, self._high)

    def _input(self, obs: Any, name: str) -> Tensor:
        return as_tensor(parts(obs, (name,), self.spec)[name], name, self._read.device)

    def _check_memory(self) -> None:
        if self.spec.memory is not None:
            raise ValueError("a policy with memory is called by act(obs), step by step, and reset() between episodes")


def _is_td(x: Any) -> bool:
    return isinstance(x, Mapping) and any(name in x.keys() for name in _OBSERVATION)  # noqa: SIM118  # of a TensorDict


def _observation(td: Any) -> Any:
    return td[next(name for name in _OBSERVATION if name in td.keys())]  # noqa: SIM118


class Deployed(nn.Module):
    """A twin's actor as a function of plain tensors, to be traced: arrays in, ``spec.outputs`` out, all by position."""

    def __init__(self, policy: TorchPolicy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Compute ``spec.outputs`` from ``spec.inputs``. ``leaves``: in the order of ``spec.inputs``: images, then [N,
        F] float32 each, and the memory [N, M]."""
        policy = self.policy
        *leaves_of_obs, memory = leaves if policy.spec.memory is not None else (*leaves, None)
        images, numbers = leaves_of_obs[: len(policy.spec.images)], leaves_of_obs[len(policy.spec.images) :]
        obs = dict(zip(policy.spec.images, images, strict=True))
        output, after = policy.output(policy.see(obs), list(numbers), memory)
        distribution = policy.head(output)
        action = policy.to_action(distribution.mode())
        parameters: tuple[Tensor, ...] = (output,)
        if isinstance(distribution, Normal | TanhNormal):
            normal = distribution.base if isinstance(distribution, TanhNormal) else distribution
            parameters = (normal.mean, normal.log_std)
        return (action, *parameters) if after is None else (action, *parameters, after)


def deployed(spec: Spec, state_dict: Mapping[str, Any]) -> nn.Module:
    """Make the twin a function of plain tensors: ``spec.inputs`` in, ``spec.outputs`` out, all by position."""
    return make_policy(spec, state_dict).deployed()


def load_policy(directory: Path | str) -> Any:
    """Load the twin from an export's ``policy.json``, ``policy.pt`` and, if it reads text, ``tokenizer.json``.

    Returns:
        A ``TorchPolicy`` or ``TorchProgram``, in evaluation mode.

    Raises:
        FileNotFoundError: ``directory`` is not an export, or has no ``policy.pt``.
        ValueError: one of the files is not an export's, whose code is not run.
    """
    directory = Path(directory)
    spec = load_spec(directory / "policy.json")
    return make_policy(spec, load_state_dict(directory / "policy.pt"), load_tokenizer(directory, spec))


def load_state_dict(path: Path) -> dict[str, Tensor]:
    """Load the weights in an export's ``policy.pt``. Raises FileNotFoundError, ValueError: as ``load_policy``."""
    check_plain(path)
    state_dict = load_plain(path).get("policy")
    if not isinstance(state_dict, dict):
        raise ValueError(f"{path} must hold a state_dict as 'policy', got {in_words(state_dict)}")
    return check_state_dict(path, state_dict)


def check_state_dict(path: Path, state_dict: dict[str, Any]) -> dict[str, Tensor]:
    """Return the state dict itself, if all of it can be a policy's weights. Raises ValueError: it cannot; the text
    names the first."""
    for name, x in state_dict.items():
        if odd := odd_tensor(x):
            raise ValueError(f"{path}: 'policy.{name}' must be a dense tensor of finite numbers, got {odd}")
    return state_dict


def make_policy(spec: Spec, state_dict: Mapping[str, Any], tokenizer: TextReader | None = None) -> Any:
    """Make the twin with these weights (arrays or tensors), in evaluation mode: no dropout.

    Args:
        tokenizer: of a policy that reads text.

    Returns:
        A ``TorchPolicy`` or ``TorchProgram``.

    Raises:
        RuntimeError: the state_dict is not that of such a policy; torch names the keys.
    """
    policy: Any = TorchPolicy(spec) if isinstance(spec, PolicySpec) else TorchProgram(spec)
    if tokenizer is not None:
        policy.tokenizer = tokenizer
    weights = {name: as_tensor(x, name, torch.device("cpu")) for name, x in state_dict.items()}
    policy.load_state_dict(weights, strict=True)
    return policy.eval()


def _make_normalizer(spec: PolicySpec, normalized: bool, inputs: tuple[str, ...]) -> nn.Module:
    return ObsNormalizer(sum(spec.observation[name] for name in inputs)) if normalized else nn.Identity()
