"""Error messages: where ejax says a thing in other words than EmbodiChain, a test reads EmbodiChain's after ejax's."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

_WORDS = {
    r"to fill the buffer": "initial buffer fill exceeded",
    r"for the process that made the engine": "only be called by owner process",
    r"(was killed; .*may be cut off|outlived SIGKILL)": "durability could not be confirmed",
    r"the worker ended \((exit code \d+)\).*before stop\(\)": r"before stop, \1",
}
"""ejax's words -> EmbodiChain's."""


@contextmanager
def translated(words: dict[str, str] = _WORDS) -> Iterator[None]:
    """Raise what is raised inside, with EmbodiChain's words added to a message that says the same in ejax's."""
    try:
        yield
    except Exception as error:
        text = str(error)
        for pattern, theirs in words.items():
            if found := re.search(pattern, text, re.DOTALL):
                text = f"{text} [{found.expand(theirs)}]"
        error.args = (text,)
        if str(error) != text:  # pydantic's
            raise ValueError(text) from error
        raise
