"""The interface of a policy of your own, which has no twin: its artefacts are programs. No jax, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from interop.standalone_verify import MEMORY, NEXT_MEMORY
from interop.twin.spec import MemorySpec


@dataclass(frozen=True, kw_only=True)
class ProgramSpec:
    """The facts of ``PolicySpec`` that a caller needs, under the same names."""

    observation: Mapping[str, int]
    images: Mapping[str, tuple[int, int, int]]
    memory: MemorySpec | None
    head: Literal["normal", "tanh_normal", "categorical", "multi_categorical", "own"]
    """own: a distribution of your own, of which the most probable action alone is an output."""
    sizes: tuple[int, ...]
    clip: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    unread: ClassVar[Mapping[str, tuple[int, ...]]] = {}
    pixels_round: ClassVar[bool] = True

    @property
    def continuous(self) -> bool:
        return "categorical" not in self.head

    @property
    def outputs(self) -> tuple[str, ...]:
        parameters = ("mean", "log_std") if self.continuous else ("logits",)
        outputs = ("action", *(() if self.head == "own" else parameters))
        return outputs if self.memory is None else (*outputs, NEXT_MEMORY)

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.reads if self.memory is None else (*self.reads, MEMORY)

    @property
    def numbers(self) -> tuple[str, ...]:
        return tuple(self.observation)

    @property
    def reads(self) -> tuple[str, ...]:
        return (*self.images, *self.observation)

    @property
    def remembers(self) -> bool:
        return self.memory is not None

    @property
    def bytes_read(self) -> tuple[str, ...]:
        return tuple(self.images)

    def read(self, name: str) -> tuple[int, ...]:
        return tuple(range(self.observation[name]))

    def input_shape(self, name: str) -> tuple[int, ...]:
        if self.memory is not None and name == MEMORY:
            return (self.memory.size,)
        return tuple(self.images[name]) if name in self.images else (self.observation[name],)

    def input_dtype(self, name: str) -> str:
        return "uint8" if name in self.images else "float32"

    def output_shape(self, name: str) -> tuple[int, ...]:
        if self.memory is not None and name == NEXT_MEMORY:
            return (self.memory.size,)
        if name == "action" and not self.continuous:
            return () if self.head == "categorical" else (len(self.sizes),)
        return (sum(self.sizes),)

    def lacking(self) -> list[str]:
        return [] if self.reads else ["an input"]
