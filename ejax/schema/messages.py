"""Values and texts in messages: short and printable, however long or odd what they come from is."""

from typing import Any

MAX_VALUE_CHARS = 200
MAX_TEXT_CHARS = 2000  # characters of one message: the longest lists of allowed keys fit


def short_repr(value: Any) -> str:
    return shorten(repr(value), MAX_VALUE_CHARS)


def shorten(text: str, most: int = MAX_TEXT_CHARS) -> str:
    """Cut the middle out of a text beyond ``most`` characters, and name its length.

    Characters that a terminal would act on, or cannot encode, are escaped; newlines stay.
    """
    short = _cut(text, most, len(text))
    if short.isprintable():
        return short
    escaped = (c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in short)
    return _cut("".join(escaped), most, len(text))


def _cut(text: str, most: int, length: int) -> str:
    if len(text) <= most:
        return text
    left_out = f" … ({length} characters) … "
    end = (most - len(left_out)) // 3
    return text[: most - len(left_out) - end] + left_out + text[-end:]
