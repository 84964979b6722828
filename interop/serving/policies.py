"""Policies to serve: of an export, in ONNX Runtime and without JAX, or of a run or LeRobot's folder, in JAX."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from interop.standalone_verify import check_files, load_contract, load_onnx, parse_json, read_bytes, read_certificate
from interop.twin.kinds import load_spec
from interop.twin.parts import in_type, load_tokenizer, policy_inputs
from interop.twin.spec import MEMORY, NEXT_MEMORY

Leaves: TypeAlias = list[NDArray[Any]]
"""Arrays [B, ...] of B clients."""
ObservationParts: TypeAlias = Mapping[str, Any]
"""Arrays and texts of one observation by dotted path, without a batch axis."""
_PROMPT = "prompt"
"""The name of the instruction in openpi's observations."""
PLAN, WEIGHTS = "continue.actions", "continue.weights"
"""Optional parts [K, A] and [K] of an observation: the plan that the chunk goes on as, by ``Execution.weights``."""


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
    """ObservationParts that may be a text -> the length of its bytes as numbers, or None where it stays a text."""
    leaves_of: Callable[[ObservationParts], Leaves]
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

    def leaves(self, parts: ObservationParts) -> Leaves:
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
    """Load an export, which is a folder with a ``contract.json``, LeRobot's folder of pi0 or SmolVLA, or a run.

    Args:
        checkpoint, member, device: of a run, as ``ejax.load`` takes them.

    Raises:
        FileNotFoundError: it is neither. ValueError: an export that cannot be run. ParityError: one that was changed.
        CheckpointError, ConfigError: as ``ejax.load``.
    """
    if (path / "config.json").is_file() and (path / "model.safetensors").is_file():
        return _load_folder(path)
    if not (path / "contract.json").exists():
        return _load_run(path, checkpoint, member, device)
    if checkpoint is not None or member is not None:
        raise ValueError(f"{path} is an export, of one checkpoint; --checkpoint and --member are for runs")
    if not (path / "policy.onnx").exists():
        how = "ejax export RUN --to DIR --formats onnx"
        raise ValueError(f"{path} has no policy.onnx, which serves without JAX: {how}; or serve the run")
    return _load_export(path)


def _load_export(directory: Path) -> Served:
    check_files(directory, read_certificate(directory))
    load_contract(directory)  # of its form
    contract, spec = parse_json(read_bytes(directory / "contract.json")), load_spec(directory / "policy.json")
    run = load_onnx(directory / "policy.onnx", spec)
    shapes = {name: [tuple(shape)] for name, shape in spec.images.items()}
    # with or without the entries that the policy does not read
    shapes |= {name: [*{(width,), (len(spec.read(name)),)}] for name, width in spec.observation.items()}
    entries = {entry["name"]: entry for entry in contract["observation"]}
    texts = {name: entries[name]["text"]["length"] for name in shapes if "text" in entries.get(name, ())}
    tokenizer = load_tokenizer(directory, spec)
    texts |= {spec.text.part: None} if spec.text else {}
    inputs = {name: spec.input_dtype(name) for name in spec.inputs if name != MEMORY}

    def leaves_of(parts: ObservationParts) -> Leaves:
        leaves, _ = policy_inputs(spec, parts, tokenizer)
        return [in_type(x, dtype, name) for (name, dtype), x in zip(inputs.items(), leaves, strict=True)]

    def act(leaves: Leaves, memory: Leaves) -> tuple[NDArray[Any], Leaves]:
        outputs = dict(zip(spec.outputs, run([*leaves, *memory]), strict=True))
        return outputs["action"], [outputs[NEXT_MEMORY]] if memory else []

    return Served(
        runtime="onnxruntime",
        contract=contract,
        shapes=shapes,
        required=spec.reads,
        texts=texts,
        leaves_of=leaves_of,
        example=[np.zeros((1, *spec.input_shape(name)), dtype) for name, dtype in inputs.items()],
        first_memory=[np.zeros((1, *spec.input_shape(MEMORY)), np.float32)] if spec.remembers else [],
        act=act,
    )


def _load_run(run: Path, checkpoint: str | None, member: int | None, device: str) -> Served:
    """Load a run's policy: its most probable actions, clipped where the environment clips them."""
    import jax  # here: an export is served without it

    from ejax.envs.actions import to_action
    from ejax.envs.description import WHOLE, describe
    from ejax.play.acting import load
    from ejax.play.chunks import continued, is_flow
    from ejax.policies.calls import first_memory
    from ejax.policies.chunks import GUIDANCE
    from ejax.runtime.tree_text import named_leaves
    from ejax.schema.plain_files import to_json
    from interop.artefacts.contract import run_contract

    actor = load(run, checkpoint=checkpoint, member=member, device=device)
    example, tree = jax.tree.flatten(actor.example)
    shapes = {name or WHOLE: [x.shape[1:]] for name, x in named_leaves(actor.example).items()}
    contract = run_contract(actor.config.to_dict()["env"], actor.env, actor.form.clip is not None)
    memory, memory_tree = jax.tree.flatten(first_memory(actor.policy, 1))
    # a chunk that may go on as a plan: inputs behind the observation's
    horizon = actor.config.env.action_chunk if is_flow(actor.policy, actor.params, actor.example) else 0
    size = (horizon, contract["action"]["shape"][0] // max(horizon, 1))
    plan = [np.zeros((1, *shape), np.float32) for shape in (size, size[:1]) if horizon]

    def leaves_of(parts: ObservationParts) -> Leaves:
        rows, _ = actor.rows(jax.tree.unflatten(tree, [parts[x] for x in shapes]))
        if (PLAN in parts) != (WEIGHTS in parts):
            raise ValueError(f"pass both '{PLAN}' and '{WEIGHTS}', or neither")
        given = zip((PLAN, WEIGHTS), plan, strict=False)  # of no plan: none
        return [*jax.tree.leaves(rows), *(np.asarray(parts.get(x, one[0]), np.float32)[None] for x, one in given)]

    def act(leaves: Leaves, memory: Leaves) -> tuple[NDArray[Any], Leaves]:
        rows = jax.tree.unflatten(tree, leaves[: len(example)])
        if plan:
            chunks = continued(actor.policy, actor.params, rows, *leaves[len(example) :], GUIDANCE)
            return to_action(actor.form, chunks), memory
        action, after = actor.answer(rows, jax.tree.unflatten(memory_tree, memory))
        return action, [np.asarray(x) for x in jax.tree.leaves(after)]

    return Served(
        runtime="jax",
        contract=parse_json(to_json(contract, "null")),  # plain lists and maps, which both msgpack and JSON take
        shapes=shapes | {name: [x.shape[1:]] for name, x in zip((PLAN, WEIGHTS), plan, strict=False)},
        required=list(shapes),
        texts={name: shapes[name][0][0] for name in describe(actor.env).text},
        leaves_of=leaves_of,
        example=[*example, *plan],
        first_memory=[np.asarray(x) for x in memory],
        act=act,
    )


def _load_folder(folder: Path) -> Served:
    """Load pi0 or SmolVLA from a folder of LeRobot's: chunks without noise, in the robot's units."""
    import jax

    from ejax.policies.vla.lerobot_folder import tokenizer
    from ejax.policies.vla.lerobot_policy import open_folder

    policy, params, spaces = open_folder(folder)
    encode, shapes = tokenizer(str(policy.folder), policy.tokens), {name: x.shape or () for name, x in spaces.items()}
    spec = policy.spec
    entries = [{"name": name, "shape": ["batch", *shape]} for name, shape in shapes.items()]
    action = {"chunk": {"shape": [spec.horizon, spec.action_dim]}}

    def leaves_of(parts: ObservationParts) -> Leaves:
        if not isinstance(parts[_PROMPT], str):
            raise ValueError(f"'{_PROMPT}' must be a text")
        given = [in_type(parts[name], str(x.dtype), name) for name, x in spaces.items()]
        return [x[None] for x in (*given, *encode(parts[_PROMPT]))]

    @jax.jit
    def answer(leaves: Leaves) -> Any:
        *given, token, read = leaves
        seen = dict(zip(spaces, given, strict=True))
        return policy.chunk(params, {**seen, "token": token, "read": read}).mode()

    return Served(
        runtime="jax",
        contract={"schema_version": 1, "model": spec.kind, "observation": entries, "action": action},
        shapes={name: [shape] for name, shape in shapes.items()},
        required=[*shapes, _PROMPT],
        texts={_PROMPT: None},
        leaves_of=leaves_of,
        example=leaves_of({_PROMPT: "", **{name: np.zeros(shape) for name, shape in shapes.items()}}),
        first_memory=[],
        act=lambda leaves, memory: (np.asarray(answer(leaves)), memory),
    )


def _listed(shapes: Sequence[tuple[int, ...]]) -> str:
    return " or ".join(str(list(shape)) for shape in shapes)
