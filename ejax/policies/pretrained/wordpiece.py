"""BERT's tokenizer: text to ids of a vocabulary, equal to those of the package ``tokenizers``, without it.

Text is cleaned, lowered and stripped of accents, split at spaces and around punctuation and CJK characters; each word
is cut into the vocabulary's longest pieces from its left, later ones written ``##piece``. Source: Devlin et al. 2019,
BERT, tokenization.py. Python's Unicode classes 503 rare characters otherwise than the older tables of ``tokenizers``.
"""

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ejax.schema.messages import short_repr
from ejax.schema.plain_files import read_json, read_text

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_SPLIT = re.compile("(" + "|".join(map(re.escape, _SPECIAL)) + ")")
_MAX_WORD_CHARS = 100
"""Characters; a longer word is unknown."""
MAX_TOKENS = 1 << 20
"""Most tokens of a vocabulary; the largest published have a quarter of it."""
_CJK = (
    *((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F)),
    *((0x2B920, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)),
)
_FORM = {
    ("model", "type"): "WordPiece",
    ("model", "unk_token"): "[UNK]",
    ("model", "continuing_subword_prefix"): "##",
    ("model", "max_input_chars_per_word"): _MAX_WORD_CHARS,
    ("normalizer", "type"): "BertNormalizer",
    ("normalizer", "clean_text"): True,
    ("normalizer", "handle_chinese_chars"): True,
    ("pre_tokenizer", "type"): "BertPreTokenizer",
}
"""Entries that ``tokenizer.json`` must have."""


@dataclass(frozen=True)
class WordPiece:
    """A vocabulary, and the cutting of text into it. Raises ValueError for a vocabulary without one of BERT's special
    tokens, or with ids that are not consecutive."""

    vocabulary: Mapping[str, int]
    lowercase: bool = True
    strip_accents: bool = True
    max_length: int = 256
    """The longest sentence in tokens, with [CLS] and [SEP]; the default is all-MiniLM-L6-v2's."""

    def __post_init__(self) -> None:
        missing = [token for token in _SPECIAL if token not in self.vocabulary]
        if missing:
            raise ValueError(f"the vocabulary of {len(self.vocabulary)} tokens lacks {', '.join(missing)}")
        seen: dict[int, str] = {}
        for token, i in self.vocabulary.items():
            if type(i) is not int or not 0 <= i < MAX_TOKENS:
                allowed = f"ids are whole numbers of 0 to {MAX_TOKENS - 1}"
                raise ValueError(
                    f"the vocabulary gives the token {short_repr(token)} the id {short_repr(i)}; {allowed}"
                )
            if i in seen:
                raise ValueError(f"the vocabulary gives {short_repr(seen[i])} and {short_repr(token)} the same id, {i}")
            seen[i] = token

    def ids(self, text: str) -> list[int]:
        """Return ``[CLS] … [SEP]``, without padding; special tokens spelled out in the text count as such."""
        pieces = (
            piece
            for part in _SPLIT.split(text)
            for piece in ((part,) if part in _SPECIAL else self._pieces_of_text(part))
        )
        return [self.vocabulary[piece] for piece in ("[CLS]", *pieces, "[SEP]")]

    def batch(self, texts: Sequence[str], length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return ``(token int32 [N, L], valid bool [N, L])``, padded with [PAD] to L, by default that of the longest
        text.

        Raises ValueError for more than ``length`` or ``max_length`` tokens; sentence-transformers would cut the text.
        """
        rows = [self.ids(text) for text in texts]
        most = self.max_length if length is None else min(length, self.max_length)
        for text, row in zip(texts, rows, strict=True):
            if len(row) > most:
                raise ValueError(f"a text has at most {most} tokens, got {len(row)}: {short_repr(text)}")
        width = max(map(len, rows), default=0) if length is None else length
        token = np.full((len(rows), width), self.vocabulary["[PAD]"], np.int32)
        valid = np.zeros((len(rows), width), bool)
        for i, row in enumerate(rows):
            token[i, : len(row)], valid[i, : len(row)] = row, True
        return token, valid

    def _pieces_of_text(self, text: str) -> Iterator[str]:
        for word in "".join(map(_spaced, _normalized(text, self.lowercase, self.strip_accents))).split():
            yield from self._pieces_of_word(word)

    def _pieces_of_word(self, word: str) -> list[str]:
        if len(word) > _MAX_WORD_CHARS:
            return ["[UNK]"]
        pieces, start = [], 0
        while start < len(word):
            before = "##" if start else ""
            ends = range(len(word), start, -1)
            end = next((end for end in ends if before + word[start:end] in self.vocabulary), None)
            if end is None:
                return ["[UNK]"]  # the word as a whole
            pieces.append(before + word[start:end])
            start = end
        return pieces


def read_wordpiece(folder: Path) -> WordPiece:
    """Read a model folder's ``tokenizer.json``, or else ``vocab.txt`` with one token a line (uncased). Raises
    ValueError if it has neither, or another kind of tokenizer."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        file = folder / "vocab.txt"
        if not file.is_file():
            raise ValueError(f"{folder} has neither tokenizer.json nor vocab.txt, one of which belongs to the weights")
    try:
        if file.suffix == ".txt":
            tokens = read_text(file).splitlines()
            if len(set(tokens)) < len(tokens):
                raise ValueError("has a token twice")
            return WordPiece({token: i for i, token in enumerate(tokens)})
        content = read_json(file)
        vocabulary, form = _vocabulary(content), content["normalizer"]
        lowercase, strip = form["lowercase"], form["strip_accents"]
        return WordPiece(vocabulary, lowercase, lowercase if strip is None else strip)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is not the file of a BERT tokenizer: {error!r}") from error
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _vocabulary(content: Any) -> dict[str, int]:
    for (part, key), wanted in _FORM.items():
        if content[part][key] != wanted:
            raise ValueError(f"has {part}.{key} {short_repr(content[part][key])}; a BERT tokenizer's is {wanted!r}")
    added = {token["content"] for token in content.get("added_tokens", ())} - {*_SPECIAL}
    if added:
        raise ValueError(f"adds tokens to BERT's, which is not supported: {short_repr(sorted(added))}")
    return dict(content["model"]["vocab"].items())


def _normalized(text: str, lowercase: bool, strip_accents: bool) -> str:
    text = "".join(" " if c.isspace() else c for c in text if not _is_dropped(c))
    text = "".join(f" {c} " if _is_cjk(c) else c for c in text)
    if strip_accents:
        text = "".join(c for c in unicodedata.normalize("NFD", text) if unicodedata.category(c) != "Mn")
    return "".join(c.lower() for c in text) if lowercase else text  # one by one: no final sigma


def _spaced(c: str) -> str:
    return f" {c} " if _is_punctuation(c) else c


def _is_dropped(c: str) -> bool:
    return c in "\0\ufffd" or (c not in "\t\n\r" and unicodedata.category(c) in ("Cc", "Cf", "Co", "Cs"))


def _is_cjk(c: str) -> bool:
    return any(first <= ord(c) <= last for first, last in _CJK)


def _is_punctuation(c: str) -> bool:
    ascii_symbol = ord(c) < 128 and c.isprintable() and not c.isalnum() and c != " "
    return ascii_symbol or unicodedata.category(c)[0] == "P"
