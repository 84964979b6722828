"""Errors of a user's code that JAX traces: the fault and its line, with the remedy, in place of JAX's own frames."""

import traceback
from pathlib import Path

_OURS = Path(__file__).parents[1]
_REMEDY = {
    "TracerBoolConversionError": "uses Python's if, and, or, not on an array; use jnp.where, &, |, ~",
    "TracerArrayConversionError": "gives an array to NumPy; use jax.numpy",
    "TracerIntegerConversionError": "uses an array where Python wants an integer; index with jnp, or jax.lax",
    "ConcretizationTypeError": "needs an array's value while it is traced; use jnp.where, or jax.lax",
    "UnexpectedTracerError": "uses an array that an earlier trace left behind; keep nothing outside the state",
    "NonConcreteBooleanIndexError": "picks by a mask, which makes an array of unknown size; use jnp.where",
    "KeyReuseError": "uses a key twice; split it",
}


def describe_error(error: Exception) -> str:
    """Name the fault and its line in the user's code, without JAX's own words and frames."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not Path(frame.filename).is_relative_to(_OURS) and "site-packages" not in Path(frame.filename).parts
    ]
    where = f"{frames[-1].filename}, line {frames[-1].lineno}: " if frames else ""
    remedy = next((text for kind in type(error).__mro__ if (text := _REMEDY.get(kind.__name__))), None)
    if remedy is not None:
        line = f" ({frames[-1].line})" if frames and frames[-1].line else ""
        return f"{where}{remedy}{line}"
    text = " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__  # JAX adds more after an empty line
    return f"{where}{text}" if isinstance(error, ValueError) else f"{where}{type(error).__name__}: {text}"
