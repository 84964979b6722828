"""Texts to tokens as ``ejax.policies.vla.words`` does inside a program: by the hash of each word. NumPy only.

    tokenizer = Tokenizer.load(Path("exported/tokenizer.json"))
    tokenizer.encode("put the red cube in the left zone")  # int32 [max_words]

A word is a run of letters a-z, digits, and bytes beyond ASCII; upper case counts as lower case. Token 0 is padding, 1 a
word that is not in the vocabulary; words beyond ``max_words`` are cut off.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interop.standalone_verify import parse_json, read_bytes

TOKENIZER = "tokenizer.json"
_PADDING, _UNKNOWN, _FIRST = 0, 1, 2
_PRIME = 16777619
_MAX_WORDS = 1 << 16
_LOWER = bytes(byte + 32 if 65 <= byte <= 90 else byte for byte in range(256))
_OUTSIDE = bytes(b for b in range(128) if not (97 <= b <= 122 or 48 <= b <= 57))
_APART = bytes.maketrans(_OUTSIDE, b" " * len(_OUTSIDE))


class TextReader:
    """Makes of texts what a policy is given in their place."""

    max_words: int

    def encode(self, text: str | bytes) -> NDArray[Any]:
        """[max_words, ...]: the tokens of a text."""
        raise NotImplementedError

    def checked(self, text: str | bytes) -> list[float]:
        """Return numbers by which two readers of a text are compared."""
        return self.encode(text).astype(float).tolist()

    def tokens(self, texts: Any, batch: tuple[int, ...]) -> NDArray[Any]:
        """Make tokens [*batch, max_words, ...] of one text for all rows (str or bytes), or of texts in ``batch``'s
        shape: a nest of lists, an array of str; or an array of bytes, uint8 [*batch, L], as an observation has it.
        Raises ValueError: something else, or texts of another shape."""
        if isinstance(texts, str | bytes):
            one = self.encode(texts)
            return np.broadcast_to(one, (*batch, *one.shape)).copy()
        array = np.asarray(texts)
        if array.dtype == np.uint8:
            rows = [row.tobytes() for row in array.reshape(-1, array.shape[-1])] if array.ndim else None
            shape = array.shape[:-1]
        else:
            rows, shape = array.reshape(-1).tolist(), array.shape
        if rows is None or shape != batch or not all(isinstance(row, str | bytes) for row in rows):
            text = f"the text must be one str, strs in the shape {list(batch)} of the other parts, or their bytes,"
            raise ValueError(f"{text} uint8 {[*batch, 'L']}; got {array.dtype}{list(array.shape)}")
        found = np.stack([self.encode(row) for row in rows])
        return found.reshape(*batch, *found.shape[1:])


def facts_of(text: str, kind: str, key: str) -> dict[str, Any]:
    """Read a ``tokenizer.json``: type, ``key`` and max_words. Raises ValueError: it is another file, or of another
    type."""
    try:
        raw: dict[str, Any] = parse_json(text)
        found, _, max_words = raw["type"], raw[key], raw["max_words"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"the tokenizer needs type, {key} and max_words: {repr(error)[:200]}") from error
    if found != kind:
        raise ValueError(f"the tokenizer is of the type {repr(found)[:100]}; this policy's is '{kind}'")
    if type(max_words) is not int or not 1 <= max_words <= _MAX_WORDS:
        raise ValueError(f"the tokenizer needs max_words of 1 to {_MAX_WORDS}, got {repr(max_words)[:100]}")
    return raw


@dataclass(frozen=True)
class Tokenizer(TextReader):
    """``vocabulary[i]`` is token i + 2."""

    vocabulary: tuple[str, ...]
    max_words: int

    @staticmethod
    def from_json(text: str) -> "Tokenizer":
        """Read a tokenizer. Raises ValueError: it is not a tokenizer, or of another type."""
        raw = facts_of(text, "words", "vocabulary")
        vocabulary, max_words = raw["vocabulary"], raw["max_words"]
        if not isinstance(vocabulary, list) or not all(isinstance(word, str) for word in vocabulary):
            raise ValueError(f"the tokenizer needs a list of words, got {repr(vocabulary)[:100]}")
        tokenizer = Tokenizer(tuple(vocabulary), max_words)
        odd = [word for word in vocabulary if words_of(word) != [word.encode()]]
        if odd or len(tokenizer._number) != len(vocabulary):
            raise ValueError(f"the tokenizer's words must be single ones in lower case, no two alike, got {odd[:3]}")
        return tokenizer

    @staticmethod
    def load(path: Path) -> "Tokenizer":
        """Load a tokenizer. Raises FileNotFoundError: there is none. ValueError: see ``from_json``."""
        return Tokenizer.from_json(read_bytes(path).decode())

    @property
    def num_tokens(self) -> int:
        return _FIRST + len(self.vocabulary)

    def encode(self, text: str | bytes) -> NDArray[np.int32]:
        """[max_words]: the tokens of a text."""
        tokens = [self._number.get(_hash(word), _UNKNOWN) for word in words_of(text)[: self.max_words]]
        return np.array(tokens + [_PADDING] * (self.max_words - len(tokens)), np.int32)

    @cached_property
    def _number(self) -> dict[int, int]:
        return {_hash(word.encode()): i + _FIRST for i, word in enumerate(self.vocabulary)}


def words_of(text: str | bytes) -> list[bytes]:
    """Split a text into its words. Raises ValueError: half of a surrogate pair, which UTF-8 does not have."""
    data = text.encode() if isinstance(text, str) else text
    return data.translate(_LOWER).translate(_APART).split()


def _hash(word: bytes) -> int:
    """Σ_i b_i·P^i  (mod 2^32)"""
    total = 0
    # Horner's rule, from the last byte
    for byte in reversed(word):
        total = (total * _PRIME + byte) % 2**32
    return total
