"""An observation's arrays by dotted path, checked against a spec: the inputs of a deployed policy. No jax, no torch."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interop.twin.kinds import Spec
from interop.twin.sentences import Sentences
from interop.twin.spec import NOISE, TOKENS, WHOLE_OBS, TextSpec
from interop.twin.text import TOKENIZER, TextReader, Tokenizer


def parts(obs: Any, paths: Sequence[str], spec: Spec) -> dict[str, Any]:
    """Return the observation's arrays at these dotted paths, as they are. Raises ValueError: it is missing; the text
    names the present arrays, and those that the policy reads."""
    if not isinstance(obs, Mapping):  # a TensorDict is one
        if list(paths) != [WHOLE_OBS]:
            text = f"the policy reads {', '.join(spec.reads)}, but got a single {type(obs).__name__}; pass a mapping"
            raise ValueError(text)
        return {WHOLE_OBS: obs}
    there = _arrays(obs)
    if missing := [path for path in paths if path not in there]:
        text = f"the observation lacks '{missing[0]}': it has {', '.join(there) or 'nothing'};"
        raise ValueError(f"{text} the policy reads {', '.join(spec.reads)}")
    return {path: there[path] for path in paths}


def narrow(x: Any, name: str, spec: Spec) -> Any:
    """Select the entries of a tensor or array [..., F] that the actor reads."""
    read, width = spec.read(name), spec.observation[name]
    if x.ndim == 0 or x.shape[-1] not in (width, len(read)):
        either = f" or, without those that the actor does not read, {len(read)}" if len(read) < width else ""
        numbers = f"{x.shape[-1]} numbers" if x.ndim else "no axis"
        raise ValueError(f"'{name}' has {numbers}, the policy was made for {width}{either}")
    return x[..., list(read)] if x.shape[-1] > len(read) else x


def check_remembered(memory: Any, rows: tuple[int, ...]) -> None:
    """Refuse a memory [..., M] of another batch than these rows. Raises ValueError: naming both."""
    if tuple(memory.shape[:-1]) != tuple(rows):
        text = f"the policy remembers a batch of {list(memory.shape[:-1])}, but got {list(rows)};"
        raise ValueError(f"{text} call reset() where other episodes begin")


def numbers_of(x: Any, name: str) -> NDArray[Any]:
    """Make a NumPy array of a part of an observation. Raises ValueError: it holds no numbers."""
    array = np.asarray(x)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"'{name}' must be an array of numbers, got one of {array.dtype}")
    return array


def policy_inputs(
    spec: Spec,
    obs: Any,
    tokenizer: TextReader | None = None,
    noise: Any = None,
    as_array: Callable[[Any, str], Any] = numbers_of,
) -> tuple[list[Any], tuple[int, ...]]:
    """Make ``spec.inputs`` [B, ...] but the memory of an observation, and return its leading axes, too.

    Args:
        tokenizer: of a policy that reads text.
        noise: [..., K·A], that a flow starts from. None: zeros.
        as_array: makes an array or tensor of a part, given its name.

    Raises:
        ValueError: a part that is missing, or of another shape or kind.
    """
    leaves = {name: as_array(x, name) for name, x in parts(obs, (*spec.images, *spec.numbers), spec).items()}
    for name, x in leaves.items():
        if name not in spec.images:
            leaves[name] = narrow(x, name, spec)
        elif str(x.dtype).removeprefix("torch.") != "uint8" or tuple(x.shape[-3:]) != tuple(spec.images[name]):
            raise ValueError(
                f"'{name}' is {x.dtype} {list(x.shape)}, but the policy was made for uint8 with rows, columns and "
                f"channels {list(spec.images[name])}, bytes from 0 to 255; resize it, and do not scale it"
            )
    batch = shared_batch({name: list(x.shape) for name, x in leaves.items()}, spec)
    if spec.text is not None:
        if tokenizer is None:
            raise ValueError("the policy was made without its tokenizer; pass one to make_policy")
        leaves[TOKENS] = _tokens(spec, spec.text, tokenizer, obs, batch)
    if spec.head == "flow":
        wanted = (*batch, *spec.input_shape(NOISE))
        leaves[NOISE] = np.zeros(wanted, np.float32) if noise is None else as_array(noise, NOISE)
        if tuple(leaves[NOISE].shape) != wanted:
            raise ValueError(f"noise is {list(leaves[NOISE].shape)}, must be {list(wanted)}")
    elif noise is not None:
        raise ValueError(f"noise was given, but the policy has a head, {spec.head}, that takes none")
    return [leaves[name].reshape(-1, *spec.input_shape(name)) for name in spec.inputs if name in leaves], batch


def load_tokenizer(directory: Path, spec: Spec) -> TextReader | None:
    """Load the tokenizer of an export; None: the policy reads no text. Raises FileNotFoundError: there is none.
    ValueError: it is not a tokenizer, or of another policy. ModuleNotFoundError: it needs ``tokenizers``."""
    if (own := spec.text) is None:
        return None
    tokenizer = Sentences.load(directory) if own.features else Tokenizer.load(directory / TOKENIZER)
    if (tokenizer.num_tokens, tokenizer.max_words) != (own.num_tokens, own.max_words):
        text = f"{directory / TOKENIZER} has {tokenizer.num_tokens} tokens and {tokenizer.max_words} words, but"
        raise ValueError(f"{text} policy.json is for {own.num_tokens} and {own.max_words}: of different policies")
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


def _tokens(spec: Spec, own: TextSpec, tokenizer: TextReader, obs: Any, batch: tuple[int, ...]) -> Any:
    given = isinstance(obs, Mapping) and own.part in obs.keys()  # noqa: SIM118
    texts = parts(obs, (own.part,), spec)[own.part] if given or own.instruction is None else own.instruction
    if hasattr(texts, "numpy"):  # a tensor of bytes
        texts = texts.numpy(force=True)
    return tokenizer.tokens(texts, batch)


def shared_batch(shapes: Mapping[str, list[int]], spec: Spec) -> tuple[int, ...]:
    """Return the leading axes of parts of these shapes. Raises ValueError: they differ; naming each part's shape."""
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
