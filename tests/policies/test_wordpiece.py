"""Files of BERT's tokenizers, with a small vocabulary; on the real one: test_interop_pretrained.py."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from case_tables import cases, refused

from ejax.policies.pretrained.minilm import WordPiece, read_wordpiece

pytest.importorskip("tokenizers")
TOKENS = [*("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), *("put", "the", "cube", "cub", "##e", "##s", "un", "##put")]
VOCABULARY = {token: i for i, token in enumerate(TOKENS)}


def content(**changes: Any) -> dict[str, Any]:
    """Make a ``tokenizer.json``; changes by part."""
    model: dict[str, Any] = {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": VOCABULARY,
    }
    cleaned = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
    return {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "normalizer": {"type": "BertNormalizer", **cleaned},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "added_tokens": [],
        "model": model,
    } | changes


@pytest.fixture(params=["tokenizer.json", "vocab.txt"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> WordPiece:
    text = json.dumps(content()) if request.param.endswith("json") else "\n".join(TOKENS) + "\n"
    (tmp_path / request.param).write_text(text, encoding="utf-8")
    return read_wordpiece(tmp_path)


def test_a_sentence_begins_with_cls_and_ends_with_sep(tokenizer: WordPiece) -> None:
    assert tokenizer.ids("Put the cubes UNPUT") == [2, 5, 6, 7, 10, 11, 12, 3]


def test_a_special_token_in_the_text_is_that_token(tokenizer: WordPiece) -> None:
    assert tokenizer.ids("put[MASK]the") == [2, 5, 4, 6, 3]


def test_a_batch_is_padded_at_the_end(tokenizer: WordPiece) -> None:
    token, valid = tokenizer.batch(["put", "put the cube"])
    assert token.tolist() == [[2, 5, 3, 0, 0], [2, 5, 6, 7, 3]]
    assert np.array_equal(valid, token != 0)
    assert token.dtype == np.int32


def test_a_text_that_is_too_long_is_refused(tokenizer: WordPiece) -> None:
    refused(tokenizer.batch, ["put " * 300], match="at most 256 tokens, got 302: 'put")


@cases(
    "file text complaint",
    ("vocab.txt", "\n".join([*TOKENS, "put"]), "a token twice"),
    ("vocab.txt", "a", r"of 1 tokens lacks \[PAD\], \[UNK\], \[CLS\], \[SEP\]"),
    ("tokenizer.json", "{", "not the file of a BERT tokenizer"),
    ("tokenizer.json", "[" * 100_000, "not the file of a BERT tokenizer"),
    ("tokenizer.json", json.dumps(content(normalizer={"type": "Odd"})), "not the file of a BERT tokenizer"),
    ("tokenizer.json", json.dumps(content(model={**content()["model"], "vocab": {"[UNK]": 0}})), "lacks"),
    ("other.txt", "", r"has neither tokenizer\.json nor vocab\.txt"),
)
def test_another_file_is_refused(tmp_path: Path, file: str, text: str, complaint: str) -> None:
    (tmp_path / file).write_text(text)
    refused(read_wordpiece, tmp_path, match=complaint)
