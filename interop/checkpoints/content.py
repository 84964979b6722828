"""The content of EmbodiChain's checkpoint files, key by key. Files come from anywhere: all is checked before its use.

``problems(payload)`` names each key whose value no version of EmbodiChain writes there: key, expected value, given
value. Keys that ejax does not read may hold anything, except containers that hold themselves or unfold enormously.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch

from interop.dense import describe, odd_tensor

Check: TypeAlias = Callable[[Any, str], Iterator[str]]
"""``check(value, key)``: the problems of the value."""

_MAX_VALUES = 10_000_000
_MAX_DEPTH = 32


def problems(payload: Mapping[str, Any]) -> Iterator[str]:
    """Report the parts of the content that no version writes."""
    version = payload.get("schema_version")
    if _extent(payload) is None:
        yield f"its values contain themselves, lie deeper than {_MAX_DEPTH} levels, or unfold to over {_MAX_VALUES:,}"
    elif version is not None and not _is_whole(version, 1, 3):
        yield f"schema_version {describe(version)} is unknown; there are 1 and 2, and files without one"
    else:
        yield from _PAYLOAD(payload, "")


def _of(wanted: str, holds: Callable[[Any], bool]) -> Check:
    def check(x: Any, key: str) -> Iterator[str]:
        if not holds(x):
            yield f"'{key}' must be {wanted}, got {describe(x)}"

    return check


def _none_or(check: Check) -> Check:
    return lambda x, key: iter(()) if x is None else check(x, key)


def _record(required: Mapping[str, Check], optional: Mapping[str, Check]) -> Check:
    """Check a mapping with these keys; others are ignored."""

    def check(x: Any, key: str) -> Iterator[str]:
        if not isinstance(x, dict):
            yield f"'{key}' must be a mapping, got {describe(x)}"
            return
        for name, its_check in {**required, **optional}.items():
            where = f"{key}.{name}".lstrip(".")
            if name in x:
                yield from its_check(x[name], where)
            elif name in required:
                yield f"'{where}' is missing; it has {_names(x)}"

    return check


def _mapping_of(key_type: type, each: Check) -> Check:
    def check(x: Any, key: str) -> Iterator[str]:
        if not isinstance(x, dict):
            yield f"'{key}' must be a mapping, got {describe(x)}"
            return
        for name, value in x.items():
            if type(name) is not key_type:
                yield f"'{key}' must have keys of {key_type.__name__}, got {describe(name)}"
            else:
                yield from each(value, f"{key}.{name if len(str(name)) < 100 else describe(name)}")

    return check


def _list_of(each: Check, length: int | None = None) -> Check:
    def check(x: Any, key: str) -> Iterator[str]:
        if not isinstance(x, list | tuple) or length not in (None, len(x)):
            yield f"'{key}' must be a list{'' if length is None else f' of {length}'}, got {describe(x)}"
            return
        for i, value in enumerate(x):
            yield from each(value, f"{key}.{i}")

    return check


def _is_whole(x: Any, low: int, end: int) -> bool:
    # not isinstance: True and False are ints, too
    return type(x) is int and low <= x < end


def _is_number(x: Any) -> bool:
    return type(x) in (int, float) and abs(x) < 2**63  # which no NaN is


def _is_step(x: Any) -> bool:
    """Return True for a whole number, also as a tensor of one."""
    if isinstance(x, torch.Tensor):
        x = x.item() if odd_tensor(x) is None and x.numel() == 1 else None
    return _is_number(x) and x == int(x) and 0 <= x < 2**31


def _is_plain(x: Any) -> bool:
    """Return True for a value that a config can hold: no tensors."""
    if isinstance(x, Mapping):
        return all(isinstance(name, str) and _is_plain(value) for name, value in x.items())
    if isinstance(x, list | tuple):
        return all(map(_is_plain, x))
    return x is None or (type(x) in (bool, float, str)) or (type(x) is int and x.bit_length() <= 64)


def _is_std_range(x: Any) -> bool:
    return isinstance(x, list | tuple) and len(x) == 2 and all(map(_is_number, x)) and 0 < x[0] <= x[1]


def _tensor(x: Any, key: str) -> Iterator[str]:
    if odd := odd_tensor(x):
        yield f"'{key}' must be a dense tensor of finite numbers, got {odd}"


def _passes(x: Any, key: str) -> Iterator[str]:
    del x, key
    yield from ()


_COUNT = _of("an integer >= 0 of 31 bits", lambda x: _is_whole(x, 0, 2**31))
_NUMBER = _of("a finite number", _is_number)
_BOOL = _of("true or false", lambda x: type(x) is bool)
_TEXT = _of("text", lambda x: type(x) is str)
_PLAIN = _of("plain data: numbers, text, lists, mappings", _is_plain)
_STATE_DICT = _mapping_of(str, _tensor)
_PARAM_GROUP = _record(
    {"lr": _NUMBER, "params": _list_of(_COUNT)},
    {
        "betas": _list_of(_NUMBER, 2),
        **dict.fromkeys(("eps", "weight_decay"), _NUMBER),
        **dict.fromkeys(("amsgrad", "maximize", "decoupled_weight_decay"), _BOOL),
    },
)
_PARAM_STATE = _record(
    {},
    {"step": _of("a whole number >= 0", _is_step), "exp_avg": _tensor, "exp_avg_sq": _tensor},
)
_METADATA = _record(
    {},
    {
        "algorithm_config": _mapping_of(str, _PLAIN),
        "modules": _list_of(_list_of(_TEXT, 3)),
        "policy_attributes": _record(
            {}, {"action_std_range": _none_or(_of("two numbers, 0 < low <= high", _is_std_range))}
        ),
    },
)
_PAYLOAD = _record(
    {"global_step": _of("an integer >= 0 of 63 bits", lambda x: _is_whole(x, 0, 2**63)), "policy": _STATE_DICT},
    {
        "num_updates": _none_or(_COUNT),
        "world_size": _of("an integer >= 1 of 31 bits", lambda x: _is_whole(x, 1, 2**31)),
        "normalizer_by_rank": _list_of(_STATE_DICT),
        "rng_by_rank": _list_of(_mapping_of(str, _passes)),
        "ref_policy": _none_or(_STATE_DICT),
        "optimizer": _none_or(
            _record({"state": _mapping_of(int, _PARAM_STATE), "param_groups": _list_of(_PARAM_GROUP)}, {})
        ),
        "lr_scheduler": _none_or(_record({"last_epoch": _COUNT}, {})),
        "lr_scheduler_cfg": _none_or(_record({"name": _none_or(_TEXT), "kwargs": _mapping_of(str, _PLAIN)}, {})),
        "metadata": _none_or(_METADATA),
    },
)


def _names(x: Mapping[Any, Any]) -> str:
    shown = [name if type(name) is str and len(name) < 40 else describe(name) for name in list(x)[:20]]
    return ", ".join(shown) + (f" and {len(x) - 20} more" if len(x) > 20 else "") if x else "nothing"


def _extent(tree: Any) -> tuple[int, int] | None:
    """(levels, values) of nested containers with each shared one counted as often as it is met. None: beyond bounds."""
    known: dict[int, tuple[int, int] | None] = {}

    def measure(x: Any, depth: int) -> tuple[int, int] | None:
        if not isinstance(x, Mapping | list | tuple):
            return 0, 1
        if id(x) in known or depth > _MAX_DEPTH:  # None as long as it is being measured: it contains itself
            return known.get(id(x))
        # a pickle can make containers that share or hold themselves: a walk without a memo would not end
        known[id(x)] = None
        levels, values = 0, 1
        for part in x.values() if isinstance(x, Mapping) else x:
            extent = measure(part, depth + 1)
            if extent is None:
                return None
            levels, values = max(levels, extent[0]), values + extent[1]
        if levels >= _MAX_DEPTH or values > _MAX_VALUES:
            return None
        known[id(x)] = levels + 1, values
        return known[id(x)]

    return measure(tree, 0)
