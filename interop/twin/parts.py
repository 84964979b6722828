"""An observation's arrays by dotted path, checked against a spec: the inputs of a deployed policy. No jax, no torch."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from interop.twin.kinds import Spec
from interop.twin.program_spec import ProgramSpec
from interop.twin.spec import WHOLE, PolicySpec
from interop.twin.text import Tokenizer
from interop.twin.vla_spec import NOISE, TOKENIZER, TOKENS, VLASpec


def parts(obs: Any, paths: Sequence[str], spec: Spec) -> dict[str, Any]:
    """Return the observation's arrays at these dotted paths, as they are.

    Raises:
        ValueError: it is missing; the text names the present arrays, and those that the policy reads.
    """
    if not isinstance(obs, Mapping):  # a TensorDict is one
        if list(paths) != [WHOLE]:
            raise ValueError(
                f"the policy reads {', '.join(spec.reads)}, but got one {type(obs).__name__}; give a nest of them"
            )
        return {WHOLE: obs}
    there = _arrays(obs)
    if missing := [path for path in paths if path not in there]:
        raise ValueError(
            f"the observation lacks '{missing[0]}': it has {', '.join(there) or 'nothing'}; the policy reads "
            f"{', '.join(spec.reads)}"
        )
    return {path: there[path] for path in paths}


def narrow(x: Any, name: str, spec: PolicySpec | ProgramSpec) -> Any:
    """Select the entries of a tensor or array [..., F] that the actor reads."""
    read, width = spec.read(name), spec.observation[name]
    if x.ndim == 0 or x.shape[-1] not in (width, len(read)):
        either = f" or, without those that the actor does not read, {len(read)}" if len(read) < width else ""
        numbers = f"{x.shape[-1]} numbers" if x.ndim else "no axis"
        raise ValueError(f"'{name}' has {numbers}, the policy was made for {width}{either}")
    return x[..., list(read)] if x.shape[-1] > len(read) else x


def check_batch(obs: Any, spec: PolicySpec) -> None:
    """Refuse parts of different leading axes.

    Raises:
        ValueError: naming each part's shape.
    """
    _batch({name: list(np.shape(x)) for name, x in parts(obs, spec.reads, spec).items()}, spec)


def check_remembered(memory: Any, rows: tuple[int, ...]) -> None:
    """Refuse a memory [..., M] of another batch than these rows.

    Raises:
        ValueError: naming both.
    """
    if tuple(memory.shape[:-1]) != tuple(rows):
        raise ValueError(
            f"the policy remembers a batch of {list(memory.shape[:-1])}, but got {list(rows)}; call reset() where "
            "other episodes begin"
        )


def network_inputs(spec: PolicySpec | ProgramSpec, obs: Any) -> tuple[list[Any], tuple[int, ...]]:
    """``spec.inputs`` [B, ...] of an observation but for the memory, as NumPy arrays, and its leading axes.

    Raises:
        ValueError: a part that is missing, or of another shape or kind.
    """
    leaves = {name: np.asarray(x) for name, x in parts(obs, spec.reads, spec).items()}
    for name, x in leaves.items():
        if name in spec.images:
            _check_image(x, name, spec)
        elif x.dtype.kind not in "fiub":
            raise ValueError(f"'{name}' must be an array of numbers, got one of {x.dtype}")
        else:
            leaves[name] = narrow(x, name, spec)
    batch = _batch({name: list(x.shape) for name, x in leaves.items()}, spec)
    return [x.reshape(-1, *spec.input_shape(name)) for name, x in leaves.items()], batch


def vla_inputs(
    spec: VLASpec, tokenizer: Tokenizer, obs: Any, noise: Any, as_array: Callable[[Any, str], Any]
) -> tuple[list[Any], tuple[int, ...]]:
    """``spec.inputs`` [B, ...] of an observation, and its leading axes.

    Args:
        noise: [..., K·A]; None: zeros.
        as_array: makes an array or tensor of a part, given its name.

    Raises:
        ValueError: a part that is missing, or of another shape or kind.
    """
    leaves = {name: as_array(x, name) for name, x in parts(obs, (*spec.images, *spec.observation), spec).items()}
    for name in spec.images:
        _check_image(leaves[name], name, spec)
    for name, width in spec.observation.items():
        if len(leaves[name].shape) == 0 or leaves[name].shape[-1] != width:
            raise ValueError(f"'{name}' is {list(leaves[name].shape)}, the policy was made for {width} numbers")
    batch = _batch({name: list(x.shape) for name, x in leaves.items()}, spec)
    leaves[TOKENS] = _tokens(spec, tokenizer, obs, batch)
    if spec.head == "flow":
        size = spec.sizes[0]
        leaves[NOISE] = np.zeros((*batch, size), np.float32) if noise is None else as_array(noise, NOISE)
        if tuple(leaves[NOISE].shape) != (*batch, size):
            raise ValueError(f"noise is {list(leaves[NOISE].shape)}, must be {[*batch, size]}")
    elif noise is not None:
        raise ValueError("noise was given, but the policy has a Gaussian head, which takes none")
    return [leaves[name].reshape(-1, *spec.input_shape(name)) for name in spec.inputs], batch


def vla_tokenizer(directory: Path, spec: VLASpec) -> Tokenizer:
    """Load the tokenizer of an export.

    Raises:
        FileNotFoundError: there is none. ValueError: it is no tokenizer, or of another policy.
    """
    tokenizer = Tokenizer.load(directory / TOKENIZER)
    if (tokenizer.num_tokens, tokenizer.max_words) != (spec.num_tokens, spec.max_words):
        raise ValueError(
            f"{directory / TOKENIZER} has {tokenizer.num_tokens} tokens and {tokenizer.max_words} words, but "
            f"policy.json is for {spec.num_tokens} and {spec.max_words}: they are of two policies"
        )
    return tokenizer


def in_type(x: Any, dtype: str, name: str) -> Any:
    """Cast an array to an input's type. ValueError: a finite number became infinite, or an integer another one."""
    given = np.asarray(x)
    with np.errstate(all="ignore"):
        cast = given.astype(dtype)
        rounds = given.dtype.kind == cast.dtype.kind == "f"
        kept = np.isfinite(cast) | ~np.isfinite(given) if rounds else cast.astype(given.dtype) == given
    if not kept.all():
        raise ValueError(f"'{name}' has {given[~kept].flat[0]} ({given.dtype}), which {dtype} cannot hold")
    return cast


def _check_image(x: Any, name: str, spec: Spec) -> None:
    shape = spec.images[name]
    if str(x.dtype).removeprefix("torch.") != "uint8" or tuple(x.shape[-3:]) != tuple(shape):
        raise ValueError(
            f"'{name}' is {x.dtype} {list(x.shape)}, but the policy was made for uint8 with rows, columns and "
            f"channels {list(shape)}, bytes from 0 to 255; resize it, and do not scale it"
        )


def _tokens(spec: VLASpec, tokenizer: Tokenizer, obs: Any, batch: tuple[int, ...]) -> Any:
    given = isinstance(obs, Mapping) and spec.text in obs.keys()  # noqa: SIM118
    texts = parts(obs, (spec.text,), spec)[spec.text] if given or spec.instruction is None else spec.instruction
    if hasattr(texts, "numpy"):  # a tensor of bytes
        texts = texts.numpy(force=True)
    tokens = tokenizer.tokens(texts, batch)
    # of a sentence that it has no embedding of, it would act as of none
    if spec.sentences:
        known = np.array(spec.sentence_tokens, np.int32)
        found = (tokens[..., None, :] == known).all(axis=-1).any(axis=-1)
        if not found.all():
            raise ValueError(
                f"the sentence encoder was given {len(spec.sentences)} instructions, and '{spec.text}' has another "
                f"one; known are {'; '.join(spec.sentences[:3])}{' …' if len(spec.sentences) > 3 else ''}"
            )
    return tokens


def _batch(shapes: Mapping[str, list[int]], spec: Spec) -> tuple[int, ...]:
    """Return the leading axes of parts of these shapes."""
    leading = [shape[: len(shape) - len(spec.input_shape(name))] for name, shape in shapes.items()]
    if any(axes != leading[0] for axes in leading):
        shown = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"the observation's parts must be of one batch, got {shown}")
    return tuple(leading[0])


def _arrays(obs: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Name all arrays as ``ejax.schema.paths`` does, which is not at hand where a policy is deployed."""
    made: dict[str, Any] = {}
    for key, x in obs.items():
        for name, array in _arrays(x, f"{above}{key}.").items() if isinstance(x, Mapping) else [(f"{above}{key}", x)]:
            if name in made:
                raise ValueError(f"two arrays of the observation are called '{name}'; rename one")
            made[name] = array
    return made
