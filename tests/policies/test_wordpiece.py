"""BERT's tokenizer on a small vocabulary; on the real one: test_interop_pretrained.py."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ejax.policies.pretrained.wordpiece import WordPiece, read_wordpiece

TOKENS = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *("put", "the", "cube", "cub", "##e", "##s", "!", "-", "cafe", "你", "好", "un", "##put", "σ", "##σ", "$"),
]
TOKENIZER = WordPiece({token: i for i, token in enumerate(TOKENS)})


def pieces(text: str, tokenizer: WordPiece = TOKENIZER) -> list[str]:
    return [TOKENS[i] for i in tokenizer.ids(text)[1:-1]]


def content(**changes: Any) -> dict[str, Any]:
    """Make a ``tokenizer.json``; changes by ``part__key``."""
    file: dict[str, Any] = {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "added_tokens": [{"content": "[PAD]"}, {"content": "[MASK]"}],
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": TOKENIZER.vocabulary,
        },
    }
    for place, value in changes.items():
        part, _, key = place.partition("__")
        if key:
            file[part][key] = value
        else:
            file[part] = value
    return file


def test_a_sentence_begins_with_cls_and_ends_with_sep() -> None:
    assert TOKENIZER.ids("put the cube") == [2, 5, 6, 7, 3]


def test_words_are_cut_into_the_longest_pieces_from_the_left() -> None:
    assert pieces("cubes unput") == ["cube", "##s", "un", "##put"]


def test_a_word_that_cannot_be_cut_is_unknown_as_a_whole() -> None:
    assert pieces("cubx put") == ["[UNK]", "put"]


@pytest.mark.parametrize(("length", "wanted"), [(100, ["σ", *["##σ"] * 99]), (101, ["[UNK]"])])
def test_a_word_of_more_than_100_characters_is_unknown(length: int, wanted: list[str]) -> None:
    assert pieces("σ" * length) == wanted


def test_punctuation_stands_by_itself() -> None:
    assert pieces("put!-$the") == ["put", "!", "-", "$", "the"]


def test_cjk_characters_stand_by_themselves() -> None:
    assert pieces("你好put") == ["你", "好", "put"]


def test_case_and_accents_go() -> None:
    assert pieces("CAFÉ Cafe\u0301") == ["cafe", "cafe"]


def test_a_sigma_at_the_end_is_lowered_like_any_other() -> None:
    assert pieces("ΣΣ") == ["σ", "##σ"]


def test_control_characters_go_and_every_kind_of_space_separates() -> None:
    assert pieces("p\u200but\tthe\u00a0cube\u2028put\0\ufffd") == ["put", "the", "cube", "put"]


def test_a_special_token_in_the_text_is_that_token() -> None:
    assert pieces("put[MASK]the [mask]") == ["put", "[MASK]", "the", "[UNK]", "[UNK]", "[UNK]"]


def test_case_stays_where_the_vocabulary_has_it() -> None:
    cased = WordPiece(TOKENIZER.vocabulary, lowercase=False, strip_accents=False)
    assert pieces("Put put café", cased) == ["[UNK]", "put", "[UNK]"]


def test_a_batch_is_padded_at_the_end() -> None:
    token, valid = TOKENIZER.batch(["put", "put the cube"])
    assert token.tolist() == [[2, 5, 3, 0, 0], [2, 5, 6, 7, 3]]
    assert np.array_equal(valid, token != 0)
    assert token.dtype == np.int32


def test_a_text_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 256 tokens, got 302: 'put"):
        TOKENIZER.batch(["put " * 300])


def test_a_vocabulary_without_special_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"of 1 tokens lacks \[PAD\], \[UNK\], \[CLS\], \[SEP\], \[MASK\]"):
        WordPiece({"a": 0})


@pytest.mark.parametrize("wrong", [-1, 1.5, 2**40, True, "7", float("inf"), 6])
def test_an_id_that_no_embedding_has_is_refused(wrong: Any, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(content(model__vocab={**TOKENIZER.vocabulary, "put": wrong})))
    with pytest.raises(ValueError, match=r"tokenizer\.json: the vocabulary gives (the token )?'put'"):
        read_wordpiece(tmp_path)


def test_a_token_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join([*TOKENS, "put"]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"vocab\.txt: has a token twice"):
        read_wordpiece(tmp_path)


def test_a_file_of_brackets_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"tokenizer\.json: it is nested deeper than 100 levels"):
        read_wordpiece(tmp_path)


def test_both_files_of_a_tokenizer_give_the_same(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(TOKENS) + "\n", encoding="utf-8")
    assert read_wordpiece(tmp_path) == TOKENIZER
    (tmp_path / "tokenizer.json").write_text(json.dumps(content()), encoding="utf-8")
    assert read_wordpiece(tmp_path) == TOKENIZER


def test_a_file_tells_whether_case_and_accents_count(tmp_path: Path) -> None:
    changed = content(normalizer__lowercase=False, normalizer__strip_accents=True)
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    read = read_wordpiece(tmp_path)
    assert (read.lowercase, read.strip_accents) == (False, True)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model__type": "BPE"}, r"has model\.type 'BPE'; a BERT tokenizer's is 'WordPiece'"),
        ({"pre_tokenizer__type": "Whitespace"}, r"has pre_tokenizer\.type"),
        ({"normalizer": None}, "is not the file of a BERT tokenizer"),
        ({"added_tokens": [{"content": "<robot>"}]}, r"adds tokens to BERT's.*<robot>"),
        ({"model__vocab": {"a": 0}}, "lacks"),
    ],
)
def test_another_tokenizer_is_refused(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(content(**changes)))
    with pytest.raises(ValueError, match=complaint):
        read_wordpiece(tmp_path)


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not the file of a BERT tokenizer"):
        read_wordpiece(tmp_path)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has neither tokenizer\.json nor vocab\.txt"):
        read_wordpiece(tmp_path)
