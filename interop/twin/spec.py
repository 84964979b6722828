"""A policy without its weights: plain data that JSON can hold. No jax, no torch.

Weights come as a ``state_dict`` with EmbodiChain's keys (``interop.checkpoints.weights``); a spec and a state_dict make
a policy. ``interop.twin.kinds`` writes and reads specs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

from interop.standalone_verify import MEMORY, NEXT_MEMORY

WHOLE_OBS = "obs"
"""The name of an observation that is one array, not a tree: ``ejax.envs.description.WHOLE``, without jax."""
TOKENS, NOISE = "tokens", "noise"
"""Inputs in place of a text, and for the noise that a flow starts from."""

Paths: TypeAlias = tuple[tuple[str, tuple[Any, ...]], ...]
"""Names of an observation's arrays whose keys have dots themselves, and those keys."""
Head = Literal["normal", "tanh_normal", "categorical", "multi_categorical"]


def encoder_name(image: str) -> str:
    """Name the module of an image's encoder, as ``ejax.policies.vision`` does."""
    return f"encoder_{image.replace('.', '_')}"


@dataclass(frozen=True, kw_only=True)
class NetworkSpec:
    """An MLP: for each hidden size Linear → [LayerNorm] → activation → [dropout], then Linear [→ last activation].

    With ``num_blocks``, residual blocks of the two hidden sizes W and I: Linear to W, then for each block
    x + activation(Linear(activation(Linear(x)))), I wide inside, then [RMSNorm: x/√(mean x² + 1e-6)], then Linear."""

    inputs: tuple[str, ...]
    """Dotted paths of the numbers that it reads, concatenated in this order, behind the encoders' features."""
    normalized: bool
    """(x − mean) / (std + 1e-2) before the first Linear, by the statistics in the state_dict."""
    hidden_sizes: tuple[int, ...]
    activation: str
    last_activation: str | None
    use_layernorm: bool
    dropout_p: float
    num_blocks: int = 0
    rms_norm: bool = False

    @property
    def stride(self) -> int:
        """Modules per hidden layer: Linear i is number i·stride of the ``nn.Sequential``, the output's included."""
        return 2 + self.use_layernorm + (self.dropout_p > 0.0)


@dataclass(frozen=True, kw_only=True)
class MemorySpec:
    """Memory between the numbers and a network; see ``ejax.policies.recurrence``."""

    type: Literal["gru", "lstm", "history", "actor", "own"]
    """actor: the critic reads what the actor's memory gives; own: of a custom policy."""
    size: int = 0
    """M, numbers of the memory: zeros where an episode starts."""
    width: int = 0
    """gru, lstm: H, numbers of a layer."""
    depth: int = 0
    """gru, lstm: layers."""
    encoder: NetworkSpec | None = None
    """gru, lstm: an MLP before them, with ``width`` outputs."""
    length: int = 0
    """history: K, observations that are read together."""

    def features(self, num_observed: int) -> int:
        """Numbers that the network reads."""
        return self.length * num_observed if self.type == "history" else self.width


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """x/127.5 − 1, then for each layer zeros around → convolution → ReLU, then a spatial softmax: where each channel of
    the last layer is active, Σ softmax·(row, column) in ±1. All rows come before all columns."""

    channels: tuple[int, ...]
    kernels: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def width(self) -> int:
        """Number of features of an image."""
        return 2 * self.channels[-1]

    @property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """Zeros before and behind rows and columns, of each layer: a place is as often seen at one end as the other."""
        return tuple(((kernel - 1) // 2, kernel - 1 - (kernel - 1) // 2) for kernel in self.kernels)

    def places(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the last layer."""
        for stride in self.strides:
            height, width = -(-height // stride), -(-width // stride)
        return height, width


@dataclass(frozen=True, kw_only=True)
class ActsInSpace:
    """A head's numbers as the environment's action: ``ejax.envs.actions.ActionForm`` without jax. ``whole`` numbers are
    floats here; ``action_shape`` None: the head's."""

    clip: tuple[tuple[float | None, ...], tuple[float | None, ...]] | None = None
    whole: bool = False
    start: tuple[int, ...] = ()
    action_shape: tuple[int, ...] | None = None
    dtype: ClassVar[None] = None
    paths: Paths = ()
    """Not in the file: a deployed policy takes its inputs by name."""


class DeployedForms(ActsInSpace):
    """Inputs and outputs of a deployed policy that reads numbers and images; the fields are its subclasses'."""

    observation: Mapping[str, int]
    images: Mapping[str, tuple[int, int, int]]
    memory: MemorySpec | None
    unread: Mapping[str, tuple[int, ...]]
    head: str
    sizes: tuple[int, ...]
    text: "TextSpec | None" = None
    pixels_round: bool = True
    """True: the value of a pixel is rounded; x/127.5 − 1 is, (x − 127)/128 is not."""

    @property
    def numbers(self) -> tuple[str, ...]:
        """The arrays of numbers among the inputs."""
        return tuple(self.observation)

    @property
    def continuous(self) -> bool:
        return "categorical" not in self.head

    @property
    def reads(self) -> tuple[str, ...]:
        """The parts of an observation that the inputs are made of."""
        return (*self.images, *self.numbers)

    def read(self, name: str) -> tuple[int, ...]:
        """Entries of an array of numbers that the actor reads."""
        unread = self.unread.get(name, ())
        return tuple(i for i in range(self.observation[name]) if i not in unread)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs, in order: images, the numbers that the actor reads, its memory."""
        return self.reads if self.memory is None else (*self.reads, MEMORY)

    @property
    def remembers(self) -> bool:
        """True: an input and an output are its memory."""
        return self.memory is not None

    @property
    def bytes_read(self) -> tuple[str, ...]:
        """The parts of an observation that are bytes."""
        return tuple(self.images)

    def input_shape(self, name: str) -> tuple[int, ...]:
        """Shape of one row of that input."""
        if self.memory is not None and name == MEMORY:
            return (self.memory.size,)
        return tuple(self.images[name]) if name in self.images else (len(self.read(name)),)

    def input_dtype(self, name: str) -> str:
        return "uint8" if name in self.images else "float32"

    def output_shape(self, name: str) -> tuple[int, ...]:
        """Shape of one row of that output."""
        if self.memory is not None and name == NEXT_MEMORY:
            return (self.memory.size,)
        if name == "action" and self.action_shape is not None:
            return tuple(self.action_shape)
        if name == "action" and not self.continuous:
            return () if self.head == "categorical" else (len(self.sizes),)
        return (sum(self.sizes),)


@dataclass(frozen=True, kw_only=True)
class PolicySpec(DeployedForms):
    """``sizes``: (A,) for the normals, the number of choices of each dimension for the categoricals."""

    observation: Mapping[str, int]
    """Width of each array of numbers by its dotted path; ``{"obs": O}`` of a single one."""
    images: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    """(height, width, channels) of each image by its name, uint8, in the order in which their features come."""
    encoder: EncoderSpec | None = None
    """The encoder of each image, each with its weights. None: there are no images."""
    actor: NetworkSpec
    critic: NetworkSpec | None = None
    """With images, actor and critic share the encoders and the actor's normalizer, which is of all the numbers."""
    memory: MemorySpec | None = None
    """The actor's. A deployed policy takes it as the input ``memory``, and gives the next one."""
    critic_memory: MemorySpec | None = None
    unread: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Entries of the numbers that the actor does not read, sorted. A deployed policy does not take them."""
    head: Head
    sizes: tuple[int, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    """Bounds that a tanh_normal squashes into."""
    log_std_range: tuple[float, float] = (-5.0, 2.0)
    log_std: Literal["parameter", "network"] = "parameter"
    """parameter: log-deviations in the state_dict, clipped to ``log_std_range``. network: the second half of the
    actor's outputs, which a tanh maps to it."""

    @property
    def num_outputs(self) -> int:
        """Outputs of the actor's network."""
        return sum(self.sizes) * (2 if self.continuous and self.log_std == "network" else 1)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs of a deployed policy, in order."""
        outputs = ("action", "mean", "log_std") if self.continuous else ("action", "logits")
        return outputs if self.memory is None else (*outputs, NEXT_MEMORY)

    @property
    def numbers(self) -> tuple[str, ...]:
        return self.actor.inputs

    @property
    def read_of_all(self) -> tuple[int, ...]:
        """The actor's entries among all its numbers concatenated, which is what its normalizer is over."""
        read, start = [], 0
        for name in self.normalizer_inputs:
            read += [start + i for i in self.read(name)] if name in self.actor.inputs else []
            start += self.observation[name]
        return tuple(read)

    @property
    def normalizer_inputs(self) -> tuple[str, ...]:
        """The arrays that the actor's normalizer is over."""
        return tuple(self.observation) if self.images else self.actor.inputs

    @property
    def features(self) -> int:
        """Number of the encoders' features of all images."""
        return self.encoder.width * len(self.images) if self.encoder else 0

    def width(self, network: NetworkSpec) -> int:
        """Input width of the network's first Linear."""
        read = (
            len(self.read_of_all) if network is self.actor else sum(self.observation[name] for name in network.inputs)
        )
        memory = self.memory if network is self.actor else self.critic_memory
        if memory is not None and self.memory is not None and memory.type == "actor":
            return self.memory.features(len(self.read_of_all))
        return self.features + (read if memory is None else memory.features(read))

    def lacking(self) -> list[str]:
        """List the parts that the policy reads and the spec does not have."""
        networks = [network for network in (self.actor, self.critic) if network is not None]
        read = {name for network in networks for name in network.inputs}
        encoder = ["an encoder"] if self.images and self.encoder is None else []
        unsized = any(network.num_blocks and len(network.hidden_sizes) != 2 for network in networks)
        return [
            *(read - self.observation.keys()),
            *encoder,
            *(["the two hidden_sizes of its blocks"] if unsized else []),
        ]


@dataclass(frozen=True, kw_only=True)
class TextSpec:
    """The text that a policy reads as ``TOKENS``: numbers of its words by ``interop.twin.text``, or states of its
    tokens by ``interop.twin.sentences``."""

    part: str
    """Its name in the observation."""
    instruction: str | None = None
    """Leaves an observation without text."""
    max_words: int
    num_tokens: int
    """Padding, the unknown word, and the vocabulary."""
    features: int = 0
    """Numbers of a token's state; 0: the token is a number."""


@dataclass(frozen=True, kw_only=True)
class ProgramSpec(DeployedForms):
    """A policy that is known by its program: the facts of ``PolicySpec`` that a caller needs, under the same names."""

    observation: Mapping[str, int]
    images: Mapping[str, tuple[int, int, int]]
    memory: MemorySpec | None = None
    head: Literal["normal", "tanh_normal", "categorical", "multi_categorical", "flow", "own"]
    """own: a custom distribution, whose most probable action is the only output. flow: a function of its noise."""
    sizes: tuple[int, ...]
    text: TextSpec | None = None
    horizon: int = 0
    """Actions of a decision, where the policy itself has them."""
    pixels_round: bool = True
    unread: ClassVar[Mapping[str, tuple[int, ...]]] = {}  # type: ignore[misc]  # no field: a program reads all
    program: Any = None
    """As ``interop.twin.program`` runs it. None: only JAX runs it."""

    @property
    def inputs(self) -> tuple[str, ...]:
        tokens, noise = (TOKENS,) if self.text else (), (NOISE,) if self.head == "flow" else ()
        return (*self.images, *self.numbers, *tokens, *noise, *((MEMORY,) if self.memory else ()))

    @property
    def outputs(self) -> tuple[str, ...]:
        parameters: dict[str, tuple[str, ...]] = {"own": (), "flow": ("unclipped",)}
        default = ("mean", "log_std") if self.continuous else ("logits",)
        outputs = ("action", *parameters.get(self.head, default))
        return outputs if self.memory is None else (*outputs, NEXT_MEMORY)

    @property
    def reads(self) -> tuple[str, ...]:
        return (*super().reads, *((self.text.part,) if self.text and self.text.instruction is None else ()))

    @property
    def bytes_read(self) -> tuple[str, ...]:
        return (*self.images, *((self.text.part,) if self.text else ()))

    def input_shape(self, name: str) -> tuple[int, ...]:
        if name == TOKENS and self.text is not None:
            return (self.text.max_words, *((self.text.features,) if self.text.features else ()))
        return (self.sizes[0],) if name == NOISE and self.head == "flow" else super().input_shape(name)

    def input_dtype(self, name: str) -> str:
        return "int32" if name == TOKENS and self.text and not self.text.features else super().input_dtype(name)

    def lacking(self) -> list[str]:
        return [] if self.inputs else ["an input"]
