"""Policies to serve: of an export, in ONNX Runtime and without JAX, or of a run, in JAX."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from interop.plain_files import parse_json, read_text
from interop.standalone_verify import check_files, load_contract, load_onnx, read_certificate
from interop.twin.kinds import load_spec
from interop.twin.parts import in_type, network_inputs, vla_inputs, vla_tokenizer
from interop.twin.spec import MEMORY, NEXT_MEMORY
from interop.twin.text import Tokenizer
from interop.twin.vla_spec import VLASpec

Leaves: TypeAlias = list[NDArray[Any]]
"""Arrays [B, ...] of B clients."""
Parts: TypeAlias = Mapping[str, Any]
"""Arrays and texts of one observation by dotted path, without a batch axis."""
_PROMPT = "prompt"
"""The name of the instruction in openpi's observations."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A policy behind the server. It keeps no memory itself, so that each client has its own."""

    runtime: str
    contract: Mapping[str, Any]
    """As ``contract.json``."""
    shapes: Mapping[str, Sequence[tuple[int, ...]]]
    """Those allowed of each part of an observation."""
    required: Sequence[str]
    texts: Mapping[str, int | None]
    """Parts that may be a text -> the length of its bytes as numbers, or None where it stays a text."""
    leaves_of: Callable[[Parts], Leaves]
    """Makes the policy's inputs [1, ...] of checked parts; ValueError: one does not fit."""
    example: Leaves
    """Inputs [1, ...]."""
    first_memory: Leaves
    """[1, ...], at the start of an episode; empty where the policy has none."""
    act: Callable[[Leaves, Leaves], tuple[NDArray[Any], Leaves]]
    """Inputs and memory to ``(actions [B, ...], memory after them)``."""

    @property
    def max_bytes(self) -> int:
        """Bytes of the largest message: 8 for each number, and some for names and texts."""
        return (1 << 16) + 8 * sum(max(int(np.prod(shape)) for shape in each) for each in self.shapes.values())

    def leaves(self, parts: Parts) -> Leaves:
        """Make the policy's inputs. ValueError: a part is unknown, missing or of another form than the contract's."""
        given = dict(parts)
        if _PROMPT in given and _PROMPT not in self.shapes and len(self.texts) == 1:
            given[next(iter(self.texts))] = given.pop(_PROMPT)
        known = self.shapes.keys() | self.texts.keys()
        if unknown := sorted(given.keys() - known):
            raise ValueError(f"the observation has '{unknown[0][:100]}'; the policy knows {', '.join(sorted(known))}")
        if missing := [name for name in self.required if name not in given]:
            raise ValueError(f"the observation lacks '{missing[0]}'; the policy reads {', '.join(self.required)}")
        return self.leaves_of({name: self._checked(name, x) for name, x in given.items()})

    def _checked(self, name: str, x: Any) -> Any:
        shapes, length = self.shapes.get(name, ()), self.texts.get(name)
        if isinstance(x, str):
            data = x.encode()
            if name not in self.texts or len(data) > (length or len(data)):
                most = f"a text of at most {length} bytes" if length else f"numbers {_listed(shapes)}"
                raise ValueError(f"'{name}' is a text of {len(data)} bytes; must be {most}")
            return x if length is None else np.frombuffer(data.ljust(length, b"\0"), np.uint8)
        if shapes and x.shape not in shapes:
            raise ValueError(f"'{name}' is {x.dtype}{list(x.shape)}; must be {_listed(shapes)}, without a batch axis")
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            raise ValueError(f"'{name}' has numbers that are not finite")
        return x


def load_served(path: Path, *, checkpoint: str | None = None, member: int | None = None, device: str = "cpu") -> Served:
    """Load an export, which is a folder with a ``contract.json``, or a run.

    Args:
        checkpoint, member, device: of a run, as ``ejax.load`` takes them.

    Raises:
        FileNotFoundError: it is neither. ValueError: an export that cannot be run. ParityError: one that was changed.
        CheckpointError, ConfigError: as ``ejax.load``.
    """
    if not (path / "contract.json").exists():
        from interop.serving.run_policy import load_run

        return load_run(path, checkpoint=checkpoint, member=member, device=device)
    if checkpoint is not None or member is not None:
        raise ValueError(f"{path} is an export, of one checkpoint; --checkpoint and --member are for runs")
    if not (path / "policy.onnx").exists():
        how = "python -m interop.export RUN --to DIR --formats onnx"
        raise ValueError(f"{path} has no policy.onnx, which serves without JAX: {how}; or serve the run")
    return _load_export(path)


def _load_export(directory: Path) -> Served:
    check_files(directory, read_certificate(directory))
    load_contract(directory)  # of its form
    contract, spec = parse_json(read_text(directory / "contract.json")), load_spec(directory / "policy.json")
    run = load_onnx(directory / "policy.onnx", spec)
    shapes = {name: [tuple(shape)] for name, shape in spec.images.items()}
    # with or without the entries that the policy does not read
    shapes |= {name: [*{(width,), (len(spec.read(name)),)}] for name, width in spec.observation.items()}
    entries = {entry["name"]: entry for entry in contract["observation"]}
    texts = {name: entries[name]["text"]["length"] for name in shapes if "text" in entries.get(name, ())}
    inputs = [name for name in spec.inputs if name != MEMORY]
    if isinstance(spec, VLASpec):
        texts[spec.text], tokenizer = None, vla_tokenizer(directory, spec)
        inputs_of = partial(_vla_inputs, spec, tokenizer)
    else:
        inputs_of = partial(network_inputs, spec)

    def act(leaves: Leaves, memory: Leaves) -> tuple[NDArray[Any], Leaves]:
        outputs = dict(zip(spec.outputs, run([*leaves, *memory]), strict=True))
        return outputs["action"], [outputs[NEXT_MEMORY]] if memory else []

    return Served(
        runtime="onnxruntime",
        contract=contract,
        shapes=shapes,
        required=spec.reads,
        texts=texts,
        leaves_of=lambda parts: [
            in_type(x, spec.input_dtype(name), name) for name, x in zip(inputs, inputs_of(parts)[0], strict=True)
        ],
        example=[np.zeros((1, *spec.input_shape(name)), spec.input_dtype(name)) for name in inputs],
        first_memory=[np.zeros((1, *spec.input_shape(MEMORY)), np.float32)] if spec.remembers else [],
        act=act,
    )


def _vla_inputs(spec: VLASpec, tokenizer: Tokenizer, parts: Parts) -> Any:
    return vla_inputs(spec, tokenizer, parts, None, lambda x, name: np.asarray(x))


def _listed(shapes: Sequence[tuple[int, ...]]) -> str:
    return " or ".join(str(list(shape)) for shape in shapes)
