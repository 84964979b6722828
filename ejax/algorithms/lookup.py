"""Algorithms by name, as configs and checkpoints have them."""

from ejax.algorithms.record import Algorithm
from ejax.schema.registry import resolve


def find_algorithm(name: str) -> Algorithm:
    """Find the record of a registered name, or of ``package.module:ALGORITHM``. ValueError: it is not a record.
    Raises ImportError, UnknownNameError or UntrustedCodeError as ``ejax.schema.registry.resolve``."""
    found = resolve("algorithm", name)
    record = getattr(found, "record", found)  # of a class of ``ejax.collectors.stateful``
    if not isinstance(record, Algorithm):
        text = "name the record that its file ends in, such as package.module:ALGORITHM"
        raise ValueError(f"'{name}' is a {type(found).__name__}, not an ejax.algorithms.record.Algorithm: {text}")
    return record
