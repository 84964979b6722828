"""The interface of a policy of your own, which has no twin: its artefacts are programs. No jax, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from interop.standalone_verify import NEXT_MEMORY
from interop.twin.spec import DeployedForms, MemorySpec


@dataclass(frozen=True, kw_only=True)
class ProgramSpec(DeployedForms):
    """The facts of ``PolicySpec`` that a caller needs, under the same names."""

    observation: Mapping[str, int]
    images: Mapping[str, tuple[int, int, int]]
    memory: MemorySpec | None
    head: Literal["normal", "tanh_normal", "categorical", "multi_categorical", "own"]
    """own: a distribution of your own, of which the most probable action alone is an output."""
    sizes: tuple[int, ...]
    unread: ClassVar[Mapping[str, tuple[int, ...]]] = {}  # type: ignore[misc]  # no field: a program reads all

    @property
    def outputs(self) -> tuple[str, ...]:
        parameters = ("mean", "log_std") if self.continuous else ("logits",)
        outputs = ("action", *(() if self.head == "own" else parameters))
        return outputs if self.memory is None else (*outputs, NEXT_MEMORY)

    @property
    def numbers(self) -> tuple[str, ...]:
        return tuple(self.observation)

    def lacking(self) -> list[str]:
        return [] if self.reads else ["an input"]
