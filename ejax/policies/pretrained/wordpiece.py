"""BERT's tokenizer: text to ids of a vocabulary, equal to those of the package ``tokenizers``, without it.

Text is cleaned, lowered and stripped of accents, split at spaces and around punctuation and CJK characters; each word
is cut into the vocabulary's longest pieces from its left, later ones written ``##piece``. Source: Devlin et al. 2019,
BERT, tokenization.py. Python's Unicode classes 503 rare characters otherwise than the older tables of ``tokenizers``.
"""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ejax.schema.messages import short_repr
from ejax.schema.plain_files import read_json, read_text

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_SPLIT = re.compile("(" + "|".join(map(re.escape, _SPECIAL)) + ")")
_MAX_WORD_CHARS = 100  # characters; a longer word is unknown
MAX_TOKENS = 1 << 20
"""Most tokens of a vocabulary; the largest published have a quarter of it."""
_CJK = re.compile(
    "[\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f"
    "\U0002b920-\U0002ceaf\uf900-\ufaff\U0002f800-\U0002fa1f]"
)
# entries that ``tokenizer.json`` must have
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
        count = Counter(map(repr, self.vocabulary.values()))
        for token, i in self.vocabulary.items():
            if type(i) is not int or not 0 <= i < MAX_TOKENS or count[repr(i)] > 1:
                text = f"the vocabulary gives {short_repr(token)} the id {short_repr(i)}"
                raise ValueError(f"{text}; ids are whole numbers of 0 to {MAX_TOKENS - 1}, each of one token")

    def ids(self, text: str) -> list[int]:
        """Return ``[CLS] … [SEP]``, without padding; special tokens spelled out in the text count as such."""
        pieces = ["[CLS]"]
        for part in _SPLIT.split(text):
            pieces += [part] if part in _SPECIAL else self._pieces_of_text(part)
        return [self.vocabulary[piece] for piece in (*pieces, "[SEP]")]

    def batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return ``(token int32 [N, L], valid bool [N, L])``, padded with [PAD] to the longest text's length L.

        Raises ValueError for more than ``max_length`` tokens; sentence-transformers would cut the text.
        """
        rows = [self.ids(text) for text in texts]
        for text, row in zip(texts, rows, strict=True):
            if len(row) > self.max_length:
                raise ValueError(f"a text has at most {self.max_length} tokens, got {len(row)}: {short_repr(text)}")
        shape = len(rows), max(map(len, rows), default=0)
        token, valid = np.full(shape, self.vocabulary["[PAD]"], np.int32), np.zeros(shape, bool)
        for i, row in enumerate(rows):
            token[i, : len(row)], valid[i, : len(row)] = row, True
        return token, valid

    def _pieces_of_text(self, text: str) -> Iterator[str]:
        text = _normalized(text, self.lowercase, self.strip_accents)
        for word in "".join(f" {c} " if _is_punctuation(c) else c for c in text).split():
            yield from self._pieces_of_word(word)

    def _pieces_of_word(self, word: str) -> list[str]:
        if len(word) > _MAX_WORD_CHARS:
            return ["[UNK]"]
        pieces, start = [], 0
        while start < len(word):
            before = "##" if start else ""  # a piece within a word is another token
            ends = range(len(word), start, -1)
            end = next((end for end in ends if before + word[start:end] in self.vocabulary), None)  # the longest first
            if end is None:
                return ["[UNK]"]  # the word as a whole
            pieces.append(before + word[start:end])
            start = end
        return pieces


def read_wordpiece(folder: Path) -> WordPiece:
    """Read a model folder's ``tokenizer.json``, or else ``vocab.txt`` with one token a line (uncased). Raises
    ValueError if it has neither, or another kind of tokenizer."""
    file = next((path for name in ("tokenizer.json", "vocab.txt") if (path := folder / name).is_file()), None)
    if file is None:
        raise ValueError(f"{folder} has neither tokenizer.json nor vocab.txt, one of which belongs to the weights")
    try:
        if file.suffix == ".txt":
            tokens = read_text(file).splitlines()
            if len(set(tokens)) < len(tokens):
                raise ValueError("has a token twice")
            return WordPiece({token: i for i, token in enumerate(tokens)})
        content = read_json(file)
        _check_form(content)
        lowercase, strip = (content["normalizer"][name] for name in ("lowercase", "strip_accents"))
        return WordPiece(dict(content["model"]["vocab"].items()), lowercase, lowercase if strip is None else strip)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is not the file of a BERT tokenizer: {error!r}") from error
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _check_form(content: Any) -> None:
    for (part, key), wanted in _FORM.items():
        if content[part][key] != wanted:
            raise ValueError(f"has {part}.{key} {short_repr(content[part][key])}; a BERT tokenizer's is {wanted!r}")
    added = {token["content"] for token in content.get("added_tokens", ())} - {*_SPECIAL}
    if added:
        raise ValueError(f"adds tokens to BERT's, which is not supported: {short_repr(sorted(added))}")


def _normalized(text: str, lowercase: bool, strip_accents: bool) -> str:
    text = "".join(" " if c.isspace() else c for c in text if not _is_dropped(c))
    text = _CJK.sub(r" \g<0> ", text)
    if strip_accents:
        text = "".join(c for c in unicodedata.normalize("NFD", text) if unicodedata.category(c) != "Mn")
    return "".join(c.lower() for c in text) if lowercase else text  # one by one: no final sigma


def _is_dropped(c: str) -> bool:
    return c in "\0\ufffd" or (c not in "\t\n\r" and unicodedata.category(c) in ("Cc", "Cf", "Co", "Cs"))


def _is_punctuation(c: str) -> bool:
    ascii_symbol = ord(c) < 128 and c.isprintable() and not c.isalnum() and c != " "
    return ascii_symbol or unicodedata.category(c)[0] == "P"
