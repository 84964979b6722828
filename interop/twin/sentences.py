"""Texts to the states of their tokens as ``ejax.policies.pretrained.token_states`` makes them, by a frozen MiniLM.

    reader = Sentences.load(Path("exported"))
    reader.encode("put the red cube in the left zone")  # float32 [max_words, 384]

A second forward pass beside that one, since ejax is absent where a policy is deployed. NumPy, and ``tokenizers``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interop.standalone_verify import MAX_BYTES, check_plain, read_bytes
from interop.twin.text import TOKENIZER, TextReader, facts_of

KIND, WEIGHTS = "minilm", "minilm.npz"
FEATURES, _HEADS, _LAYERS = 384, 12, 6
_KEPT = 256
_erf = np.vectorize(math.erf, otypes=[np.float32])


@dataclass(frozen=True, eq=False)
class Sentences(TextReader):
    """``weights`` by the names of MiniLM's own file; a text that was met before is not encoded again."""

    tokenizer: Any
    """``tokenizers.Tokenizer``."""
    weights: Mapping[str, NDArray[np.float32]]
    max_words: int
    """Most tokens of a text, [CLS] and [SEP] among them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_states", lru_cache(_KEPT)(self._encode))

    @staticmethod
    def load(directory: Path) -> "Sentences":
        """Load the reader of an export. Raises FileNotFoundError, ValueError: a file is missing, or not an export's;
        ModuleNotFoundError: ``tokenizers`` is not installed."""
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError as error:
            text = "reading this policy's texts needs the package tokenizers: pip install tokenizers"
            raise ModuleNotFoundError(text) from error
        facts = facts_of(read_bytes(directory / TOKENIZER).decode(), KIND, "tokenizer")
        try:
            tokenizer = Tokenizer.from_str(facts["tokenizer"])
        except Exception as error:  # the package's own class is Exception
            raise ValueError(f"{directory / TOKENIZER} is not a file of tokenizers: {str(error)[:200]}") from error
        check_plain(path := directory / WEIGHTS, 4 * MAX_BYTES)
        try:
            with np.load(path, allow_pickle=False) as file:
                weights = dict(file)
        except Exception as error:  # an invalid archive may fail in zipfile or NumPy
            raise ValueError(f"{path} does not hold a text encoder's arrays: {repr(error)[:200]}") from error
        return Sentences(tokenizer, weights, facts["max_words"])

    @property
    def num_tokens(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    def encode(self, text: str | bytes) -> NDArray[np.float32]:
        """[max_words, 384]: the tokens' states, each of mean 0 and variance 1, and zeros behind them. Raises
        ValueError: the text has too many tokens."""
        states: NDArray[np.float32] = self._states(text)  # type: ignore[attr-defined]
        return states

    def checked(self, text: str | bytes) -> list[float]:
        """Return the numbers of the tokens, with zeros up to ``max_words``, and the mean of their states."""
        return checked_numbers(self._ids(text), self.encode(text))

    def _ids(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.rstrip(b"\0").decode(errors="replace")
        ids: list[int] = self.tokenizer.encode(text).ids
        if len(ids) > self.max_words:
            raise ValueError(
                f"an instruction has at most {self.max_words} tokens, got {len(ids)}: {text[:80]!r}; shorten it"
            )
        return ids

    def _encode(self, text: str | bytes) -> NDArray[np.float32]:
        ids = self._ids(text)
        x = self._embed("word", ids) + self._embed("position", [*range(len(ids))]) + self._embed("token_type", [0])
        x = self._norm(x, "embeddings")
        for i in range(_LAYERS):
            at = f"encoder.layer.{i}"
            query, key, value = (
                self._linear(x, f"{at}.attention.{name}").reshape(len(ids), _HEADS, -1).swapaxes(0, 1)
                for name in ("query", "key", "value")
            )
            score = query @ key.swapaxes(1, 2) / np.float32(query.shape[-1] ** 0.5)
            share = np.exp(score - score.max(-1, keepdims=True))
            mixed = (share / share.sum(-1, keepdims=True) @ value).swapaxes(0, 1).reshape(x.shape)
            x = self._norm(x + self._linear(mixed, f"{at}.attention.output.dense"), f"{at}.attention.output")
            inside = self._linear(x, f"{at}.intermediate.dense")
            inside = inside * np.float32(0.5) * (1 + _erf(inside * np.float32(0.5**0.5)))
            x = self._norm(x + self._linear(inside, f"{at}.output.dense"), f"{at}.output")
        x = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
        return np.pad(x, ((0, self.max_words - len(ids)), (0, 0)))

    def _embed(self, kind: str, rows: list[int]) -> NDArray[np.float32]:
        return self.weights[f"embeddings.{kind}_embeddings.weight"][rows]

    def _linear(self, x: NDArray[np.float32], name: str) -> NDArray[np.float32]:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _norm(self, x: NDArray[np.float32], name: str) -> NDArray[np.float32]:
        x = x - x.mean(-1, keepdims=True)
        x /= np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-12)
        return x * self.weights[f"{name}.LayerNorm.weight"] + self.weights[f"{name}.LayerNorm.bias"]


def checked_numbers(ids: list[int], states: NDArray[np.float32]) -> list[float]:
    """Numbers by which ``texts.json`` compares two readers."""
    padded = ids + [0] * (len(states) - len(ids))
    return [*map(float, padded), *states.mean(axis=0).astype(float).round(6).tolist()]
