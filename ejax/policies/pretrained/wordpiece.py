"""Text to ids of a BERT's vocabulary, by the package ``tokenizers`` (the extra ``pretrained``)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ejax.schema.messages import short_repr
from ejax.schema.plain_files import read_text

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


@dataclass(frozen=True)
class WordPiece:
    """A tokenizer that puts [CLS] before a text and [SEP] after it."""

    tokenizer: Any
    """``tokenizers.Tokenizer``, without padding and truncation."""
    max_length: int = 256
    """The longest sentence in tokens, with [CLS] and [SEP]; the default is all-MiniLM-L6-v2's."""

    @property
    def vocabulary(self) -> dict[str, int]:
        ids: dict[str, int] = self.tokenizer.get_vocab()
        return ids

    def ids(self, text: str) -> list[int]:
        """Return ``[CLS] … [SEP]``, without padding; special tokens spelled out in the text count as such."""
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return ``(token int32 [N, L], valid bool [N, L])``, padded with [PAD] to the longest text's length L.

        Raises ValueError for more than ``max_length`` tokens; sentence-transformers would cut the text.
        """
        rows = [self.ids(text) for text in texts]
        for text, row in zip(texts, rows, strict=True):
            if len(row) > self.max_length:
                raise ValueError(f"a text has at most {self.max_length} tokens, got {len(row)}: {short_repr(text)}")
        shape = len(rows), max(map(len, rows), default=0)
        token, valid = np.full(shape, self.tokenizer.token_to_id("[PAD]"), np.int32), np.zeros(shape, bool)
        for i, row in enumerate(rows):
            token[i, : len(row)], valid[i, : len(row)] = row, True
        return token, valid


def read_wordpiece(folder: Path) -> WordPiece:
    """Read a model folder's ``tokenizer.json``, or else ``vocab.txt`` with one token a line (uncased).

    Raises ValueError if it has neither, or one that ``tokenizers`` cannot read or that lacks a special token of BERT's;
    ModuleNotFoundError without ``tokenizers``.
    """
    file = next((path for name in ("tokenizer.json", "vocab.txt") if (path := folder / name).is_file()), None)
    if file is None:
        raise ValueError(f"{folder} has neither tokenizer.json nor vocab.txt, one of which belongs to the weights")
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    try:
        text = read_text(file)
        if file.suffix == ".txt":
            tokens = text.splitlines()
            if len(set(tokens)) < len(tokens):
                raise ValueError("it has a token twice")
            read = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
            read.normalizer, read.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        else:
            read = Tokenizer.from_str(text)
        missing = [token for token in _SPECIAL if read.token_to_id(token) is None]
        if missing:
            raise ValueError(f"its vocabulary of {read.get_vocab_size()} tokens lacks {', '.join(missing)}")
    except Exception as error:  # tokenizers raises this class itself
        raise ValueError(f"{file} is not the file of a BERT tokenizer: {error}") from error
    read.no_padding()
    read.no_truncation()
    read.add_special_tokens([token for token in (*_SPECIAL, "[MASK]") if read.token_to_id(token) is not None])
    around: Any = ((token, read.token_to_id(token)) for token in ("[SEP]", "[CLS]"))
    read.post_processor = processors.BertProcessing(*around)
    return WordPiece(read)
