"""Tests as tables. A row of ``cases`` has a value for each name; one of ``refusals`` is what is given, the key that the
error names, and a word of its text.

@refusals(("trainer.sead=3", "trainer.sead", "unknown key"), ("trainer.num_envs=0", "trainer.num_envs", "than 0"))
def test_a_bad_override(given, key, word): refused(make, given, key=key, word=word)
"""

import re
from collections.abc import Callable
from typing import Any

import pytest

from ejax.config import ConfigError

MAX_MESSAGE = 20_000
"""Characters of a whole error, with all its problems."""


def cases(names: str, *rows: Any, **options: Any) -> pytest.MarkDecorator:
    """Parametrize a test by the names, which spaces divide: a row has a value for each. ``options`` are pytest's."""
    return pytest.mark.parametrize(names.replace(" ", ", "), rows, **options)


def refusals(*rows: tuple[Any, str, str]) -> pytest.MarkDecorator:
    """Parametrize a test by ``given``, ``key`` and ``word``."""
    # without addresses: every worker must collect the same names
    texts = [re.sub(r" at 0x[0-9a-f]+", "", str(given)) for given, *_ in rows]
    ids = [
        f"{text[:60].encode('unicode_escape').decode()}-{key}" for text, (_, key, _) in zip(texts, rows, strict=True)
    ]
    return pytest.mark.parametrize(("given", "key", "word"), rows, ids=ids)


def refused(
    call: Callable[..., Any],
    *args: Any,
    key: str = "",
    word: str = "",
    match: str = "",
    error: Any = (ValueError, TypeError),
    **kwargs: Any,
) -> Any:
    """Return the error of a call: of type ``error``, by default a ConfigError or another ValueError or TypeError.

    One of its problems is at ``key`` (or below it, or begins with it), and has ``word`` in its text; any other error
    has both in its text. ``match`` is an expression that is found in the whole text.
    """
    with pytest.raises(error, match=match or None) as caught:
        call(*args, **kwargs)
    error = caught.value
    assert len(str(error)) < MAX_MESSAGE
    if isinstance(error, ConfigError) and error.problems:
        assert any(each.key.startswith(key) and word in each.text for each in error.problems), str(error)
    else:
        assert key in str(error) and word in str(error), str(error)
    return error


def keys_of(error: ConfigError) -> list[str]:
    """List the keys of an error's problems."""
    return [key for key, _ in error.problems]
