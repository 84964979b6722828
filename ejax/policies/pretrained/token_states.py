"""A text's tokens as a frozen MiniLM sees them, inside programs: each text is encoded when it first occurs, by NumPy.

A program asks the host for them (``ejax.runtime.host_call``), where no computation of JAX's may be waited for: hence a
second forward pass beside ``ejax.policies.pretrained.minilm``, whose tests compare the two.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

import jax
import numpy as np
from numpy.typing import NDArray
from scipy.special import erf

from ejax.numerics.text import as_text
from ejax.policies.pretrained.minilm import MINILM_WEIGHTS, MiniLM, WordPiece, load_minilm
from ejax.policies.pretrained.weights import find_weights, load_weights
from ejax.runtime.host_call import host_call
from ejax.schema.messages import short_repr
from ejax.types import Array

Weights = Mapping[str, NDArray[np.float32]]
FEATURES, _HEADS, _LAYERS = MiniLM.features, MiniLM.heads, MiniLM.layers
_KEPT = 4096
"""Texts whose states are kept, 1.5 kB for each token that may be in one."""


@dataclass(frozen=True)
class TokenStates:
    """Texts to states of at most ``max_words`` tokens, [CLS] and [SEP] among them. ``weights``: as ``load_minilm``."""

    weights: str | None = None
    max_words: int = 32

    def __post_init__(self) -> None:
        find_weights(self._source)  # WeightsError: there are none

    def tokens_of(self, text: Array) -> Array:
        """Encode texts as bytes, uint8 [..., L] in UTF-8 padded with zeros, to float32 [..., max_words, 384]: each
        token's state has mean 0 and variance 1; behind the text are zeros. A text of more tokens is an error."""
        shape = jax.ShapeDtypeStruct((*text.shape[:-1], self.max_words, FEATURES), np.float32)
        name = f"token states {self.max_words} {find_weights(self._source)}"
        return host_call(_encoder(self._source, self.max_words), (shape,), text, name=name)[0]

    def encode(self, text: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Do the same outside programs. Raises ValueError for a text of too many tokens."""
        return _encoder(self._source, self.max_words)(text)[0]

    @property
    def tokenizer(self) -> WordPiece:
        return load_minilm(self._source)[2]

    @property
    def num_tokens(self) -> int:
        return int(self.tokenizer.tokenizer.get_vocab_size())

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """Return what ``encode_ids`` reads."""
        used = _weights(self._source).items()
        return {name: x for name, x in used if name.startswith(("embeddings.", "encoder."))}

    @property
    def _source(self) -> str:
        return self.weights or MINILM_WEIGHTS


@cache
def _encoder(source: str, length: int) -> Callable[[NDArray[np.uint8]], tuple[NDArray[np.float32]]]:
    """Make the host's function, uint8 [..., L] -> [..., length, 384], which keeps what it has encoded."""
    weights = _weights(source)
    tokenizer = load_minilm(source)[2]  # which refuses other weights

    @lru_cache(_KEPT)
    def states(data: bytes) -> NDArray[np.float32]:
        ids = tokenizer.ids(text := as_text(np.frombuffer(data, np.uint8)))
        if len(ids) > length:
            remedy = "raise text_encoder.max_words and train again, or shorten it"
            raise ValueError(
                f"an instruction has at most {length} tokens, got {len(ids)}: {short_repr(text)}; {remedy}"
            )
        x = encode_ids(weights, ids)
        x = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
        return np.pad(x, ((0, length - len(ids)), (0, 0)))

    def encode(text: NDArray[np.uint8]) -> tuple[NDArray[np.float32]]:
        rows = np.asarray(text).reshape(-1, text.shape[-1])
        found = np.stack([states(row.tobytes().rstrip(b"\0")) for row in rows])
        return (found.reshape(*text.shape[:-1], length, FEATURES),)

    return encode


def _weights(source: str) -> Weights:
    return {name.replace("attention.self", "attention"): x for name, x in load_weights(source).items()}


def encode_ids(weights: Weights, ids: list[int]) -> NDArray[np.float32]:
    """Compute the last layer's states of one text, [len(ids), 384]; ``weights`` by the names of the file."""

    def linear(x: NDArray[np.float32], name: str) -> NDArray[np.float32]:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: NDArray[np.float32], name: str) -> NDArray[np.float32]:
        x = x - x.mean(-1, keepdims=True)
        x /= np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-12)
        return x * weights[f"{name}.LayerNorm.weight"] + weights[f"{name}.LayerNorm.bias"]

    def heads(x: NDArray[np.float32], name: str) -> NDArray[np.float32]:
        return linear(x, name).reshape(len(ids), _HEADS, -1).swapaxes(0, 1)

    def embed(kind: str, rows: list[int]) -> NDArray[np.float32]:
        return weights[f"embeddings.{kind}_embeddings.weight"][rows]

    x = embed("word", ids) + embed("position", [*range(len(ids))]) + embed("token_type", [0])
    x = norm(x, "embeddings")
    for i in range(_LAYERS):
        at = f"encoder.layer.{i}"
        query, key, value = (heads(x, f"{at}.attention.{name}") for name in ("query", "key", "value"))
        score = query @ key.swapaxes(1, 2) / np.float32(query.shape[-1] ** 0.5)
        share = np.exp(score - score.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        mixed = (share @ value).swapaxes(0, 1).reshape(x.shape)
        x = norm(x + linear(mixed, f"{at}.attention.output.dense"), f"{at}.attention.output")
        inside = linear(x, f"{at}.intermediate.dense")
        inside *= np.float32(0.5) * (1 + erf(inside * np.float32(0.5**0.5)))
        x = norm(x + linear(inside, f"{at}.output.dense"), f"{at}.output")
    return x
