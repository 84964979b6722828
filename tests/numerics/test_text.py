"""Texts as arrays of bytes."""

import pytest

from ejax.numerics.text import as_bytes, as_text


def test_bytes_are_the_text_and_its_text_is_what_was_encoded() -> None:
    assert as_bytes("put it", 64).tobytes() == b"put it" + 58 * b"\0"
    assert as_text(as_bytes("grün", 5)) == "grün" and as_text([255, 0]) == "\ufffd"


@pytest.mark.parametrize(("text", "complaint"), [("x" * 65, "at most 64 bytes"), ("a\0b", "no zero")])
def test_a_text_that_does_not_fit_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        as_bytes(text, 64)
