"""``texts.json``: texts and JAX's tokens of them, which the tokenizer of an export must give without JAX. No jax.

    {"schema_version": 1, "about": …, "texts": [{"utf8": "70757420…", "shown": "put …", "tokens": [5, 3, …]}, …]}

Of states of tokens (``interop.twin.sentences``) there are the tokens' numbers and the mean of their states.

``utf8`` is the text's bytes in hexadecimal; some are not valid UTF-8, which a robot may also be sent.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from interop.standalone_verify import ParityError, parse_json, read_bytes
from interop.twin.kinds import Spec
from interop.twin.parts import load_tokenizer

TEXTS = "texts.json"
"""Texts with JAX's tokens, to check a tokenizer by."""
_SCHEMA_VERSION = 1


def adversarial_texts(vocabulary: Sequence[str], max_words: int) -> list[bytes]:
    """Texts that two tokenizers may take apart differently; the first is empty."""
    known = vocabulary[0]
    several = " ".join(vocabulary[i % len(vocabulary)] for i in range(max_words))
    texts = [
        *("", " \t\r\n", ".,;!?-_'\"", "xyzzy qqqq", f"{several} {known}", " ".join(["xyzzy"] * (max_words + 3))),
        *(several.upper(), f"  {known}\t{known.title()}\n", f"{known}-{known}.{known},{known}", f"({known})!"),
        *(f"{known}x", f"x{known}", f"{known}1 2{known}", f"{known}_{known}", known * 40, "@[`{/:"),
        *(
            "é É ß ﬁ İ",
            f"{known}\u00a0{known}",
            f"{known}\u3000{known}\u2003{known}\u0085",
            "红色 赤い куб",
            f"🟥{known}",
        ),
        *(f"{known}\u0301", f"\u200b{known}\ufeff", f"{known}\0{known}", f"\0{known}"),
    ]
    # no valid UTF-8, which a robot may be sent all the same
    broken = [b"\xff\xfe " + known.encode(), known.encode() + b"\x80", bytes(range(1, 256)), b"\xc3 \xa9"]
    return [*(text.encode() for text in texts), *broken]


def texts_document(texts: Sequence[bytes], tokens: Sequence[list[float]]) -> dict[str, Any]:
    """Make the content of ``texts.json``. ``tokens``: JAX's, as ``TextReader.checked`` has them."""
    return {
        "schema_version": _SCHEMA_VERSION,
        "about": "texts, as their bytes in hexadecimal, and the tokens that JAX makes of them",
        "texts": [
            {"utf8": text.hex(), "shown": text.decode(errors="replace"), "tokens": row}
            for text, row in zip(texts, tokens, strict=True)
        ],
    }


def check_texts(directory: Path, spec: Spec) -> None:
    """Compare the tokenizer of an export that reads text with JAX's stored tokens. Raises ParityError: other tokens,
    the first of them named. FileNotFoundError, ValueError: a file is missing or not an export's."""
    tokenizer = load_tokenizer(directory, spec)
    if tokenizer is None:
        return
    file = directory / TEXTS
    try:
        entries = [(bytes.fromhex(entry["utf8"]), entry["tokens"]) for entry in parse_json(read_bytes(file))["texts"]]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} does not hold texts with their tokens: {repr(error)[:200]}") from error
    if not entries:
        raise ValueError(f"{file} holds no text, so no tokenizer could fail")
    for text, tokens in entries:
        found = tokenizer.checked(text)
        # numbers of tokens are equal or at least one apart; states round as each machine's products do
        if len(found) != len(tokens) or not np.allclose(found, tokens, rtol=0.0, atol=1e-4):
            raise ParityError(f"the tokenizer makes {found} of {text[:80]!r}, JAX {tokens}")
