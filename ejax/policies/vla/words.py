"""A tokenizer that a jitted program can run: bytes of a text to numbers of words.

A word is a run of letters a-z, digits, and bytes beyond ASCII; upper case counts as lower case. It is known by a hash,

    h(w) = Σ_i b_i·P^i  (mod 2^32),    b_i its bytes

so that a text in a tensor becomes tokens on the device. For MiniLM's pieces see ``ejax.policies.pretrained.minilm``.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.policies.mlp import widen
from ejax.types import Array, Key

PADDING, UNKNOWN = 0, 1
_FIRST = 2  # after padding and unknown
_PRIME = 16777619  # the prime of the FNV hashes


@dataclass(frozen=True)
class Words:
    """``vocabulary[i]`` is token i + 2; 0 is padding, and 1 any other word. Raises ValueError for a word twice, two of
    one hash, or anything but one word."""

    vocabulary: tuple[str, ...]
    max_words: int = 16

    def __post_init__(self) -> None:
        hashes = [_hash(word) for word in self.vocabulary]
        wrong = [word for word in self.vocabulary if split(word) != [word]]
        if wrong:
            raise ValueError(f"the vocabulary has {wrong[:3]}, which are not single words in lower case")
        if len(set(hashes)) != len(hashes):
            raise ValueError("the vocabulary has a word twice, or two words of one hash")

    @property
    def num_tokens(self) -> int:
        return _FIRST + len(self.vocabulary)

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the tokens of a text, [max_words]; words beyond them are cut off."""
        number = {word: i + _FIRST for i, word in enumerate(self.vocabulary)}
        tokens = [number.get(word, UNKNOWN) for word in split(text)[: self.max_words]]
        return np.array(tokens + [PADDING] * (self.max_words - len(tokens)), np.int32)

    def tokens_of(self, text: Array) -> Array:
        """Encode texts as bytes, uint8 [..., L] in UTF-8 padded with zeros, to int32 [..., max_words]."""
        byte, inside, starts, word = _read(text)
        place = widen(jnp.arange(text.shape[-1]), text)
        # of each byte the place that its word begins at
        began = jax.lax.cummax(jnp.where(starts, place, 0), axis=text.ndim - 1)
        powers = np.array([pow(_PRIME, i, 2**32) for i in range(text.shape[-1])], np.uint32)
        share = jnp.where(inside, byte * jnp.asarray(powers)[place - began], jnp.uint32(0))
        number = jnp.arange(self.max_words).reshape((1,) * (text.ndim - 1) + (-1, 1))
        # bytes of all words at once, [words, bytes]: how many words there are is known on the device alone
        mine = (word[..., None, :] == number) & inside[..., None, :]
        hashes = jnp.sum(jnp.where(mine, share[..., None, :], jnp.uint32(0)), axis=-1, dtype=jnp.uint32)
        known = jnp.asarray(np.array([_hash(word) for word in self.vocabulary], np.uint32))  # a constant of the program
        equal = hashes[..., None] == known.reshape((1,) * text.ndim + (-1,))
        token = jnp.where(equal.any(axis=-1), jnp.argmax(equal, axis=-1) + _FIRST, UNKNOWN)
        return jnp.where(mine.any(axis=-1), token, PADDING).astype(jnp.int32)

    def to_json(self) -> str:
        """Write the tokenizer for an export; ``interop.twin.text`` reads it without jax."""
        content = {"type": "words", "max_words": self.max_words, "vocabulary": list(self.vocabulary)}
        return json.dumps(content, indent=1, ensure_ascii=False)


def forget_words(text: Array, key: Key, rate: float) -> Array:
    """Turn each word of ``text``, uint8 [..., L], with probability ``rate`` into bytes that UTF-8 does not have."""
    _, inside, _, word = _read(text)  # punctuation stays: it separates words
    forgotten = jax.random.bernoulli(key, rate, text.shape)
    return jnp.where(inside & jnp.take_along_axis(forgotten, jnp.maximum(word, 0), axis=-1), jnp.uint8(255), text)


def split(text: str) -> list[str]:
    """Split a text into words: "Put the RED cube!" -> ["put", "the", "red", "cube"]."""
    # as bytes: lower() then leaves all beyond ASCII as it is, which is what a program does
    return [word.decode() for word in re.findall(rb"[a-z0-9\x80-\xff]+", text.encode().lower())]


def vocabulary_of(texts: Iterable[str]) -> tuple[str, ...]:
    """Return all words of some texts, sorted."""
    return tuple(sorted({word for text in texts for word in split(text)}))


def _read(text: Array) -> tuple[Array, Array, Array, Array]:
    """Return bytes in lower case, masks of those inside a word and of first ones, and their word's number from 0."""
    byte = text.astype(jnp.uint32)
    byte = jnp.where((byte >= 65) & (byte <= 90), byte + 32, byte)
    inside = ((byte >= 97) & (byte <= 122)) | ((byte >= 48) & (byte <= 57)) | (byte >= 128)
    starts = inside & ~jnp.concatenate([jnp.zeros_like(inside[..., :1]), inside[..., :-1]], axis=-1)
    return byte, inside, starts, jnp.cumsum(starts, axis=-1) - 1


def _hash(word: str) -> int:
    return sum(byte * pow(_PRIME, i, 2**32) for i, byte in enumerate(word.encode())) % 2**32
