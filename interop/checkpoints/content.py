"""The content of EmbodiChain's checkpoint files, key by key. Files come from anywhere: all is checked before its use.

``problems(payload)`` names each key whose value no version of EmbodiChain writes there: key, expected value, given
value. Keys that ejax does not read may hold anything, except containers that hold themselves or unfold enormously.
pydantic would do for the forms, but it lists every wrong value of a hostile file before the first is shown.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from interop.dense import in_words, odd_tensor

_MAX_VALUES = 10_000_000
_MAX_DEPTH = 32


def problems(payload: Mapping[str, Any]) -> Iterator[str]:
    """Report the parts of the content that no version writes."""
    version = payload.get("schema_version")
    if _extent(payload) is None:
        yield f"its values contain themselves, lie deeper than {_MAX_DEPTH} levels, or unfold to over {_MAX_VALUES:,}"
    elif version is not None and not _is_whole(version, 1, 3):
        yield f"schema_version {in_words(version)} is unknown; there are 1 and 2, and files without one"
    else:
        yield from _misfits(_PAYLOAD, payload, "")


class _Rule(NamedTuple):
    wanted: str
    holds: Callable[[Any], bool]
    shown: Callable[[Any], str | None] = in_words


def _misfits(form: Any, x: Any, key: str) -> Iterator[str]:
    """Compare a value with a form. ``form``: a ``_Rule``; ``(None, form)``, which may be None; ``[form]``, a list of
    any length, or of the length of several forms; ``{str: form}``, a mapping of such keys; or ``{name: form}``, a
    mapping with these names, those with a ? optional, and any others."""
    if isinstance(form, _Rule):
        if not form.holds(x):
            yield f"'{key}' must be {form.wanted}, got {form.shown(x)}"
    elif isinstance(form, tuple):
        yield from () if x is None else _misfits(form[1], x, key)
    elif isinstance(form, list):
        if not isinstance(x, list | tuple) or len(form) not in (1, len(x)):
            yield f"'{key}' must be a list{f' of {len(form)}' if len(form) > 1 else ''}, got {in_words(x)}"
            return
        for i, value in enumerate(x):
            yield from _misfits(form[i % len(form)], value, f"{key}.{i}")
    elif not isinstance(x, dict):
        yield f"'{key}' must be a mapping, got {in_words(x)}"
    elif isinstance(kind := next(iter(form)), type):
        for name, value in x.items():
            if type(name) is not kind:
                yield f"'{key}' must have keys of {kind.__name__}, got {in_words(name)}"
            else:
                yield from _misfits(form[kind], value, f"{key}.{name if len(str(name)) < 100 else in_words(name)}")
    else:
        for name, each in form.items():
            plain = name.removesuffix("?")
            where = f"{key}.{plain}".lstrip(".")
            if plain in x:
                yield from _misfits(each, x[plain], where)
            elif plain == name:
                yield f"'{where}' is missing; it has {_names(x)}"


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


_COUNT = _Rule("an integer >= 0 of 31 bits", lambda x: _is_whole(x, 0, 2**31))
_NUMBER = _Rule("a finite number", _is_number)
_BOOL = _Rule("true or false", lambda x: type(x) is bool)
_TEXT = _Rule("text", lambda x: type(x) is str)
_PLAIN = _Rule("plain data: numbers, text, lists, mappings", _is_plain)
_ANY = _Rule("anything", lambda x: True)
_TENSOR = _Rule("a dense tensor of finite numbers", lambda x: odd_tensor(x) is None, odd_tensor)
_STATE_DICT = {str: _TENSOR}
_PARAM_GROUP = {
    "lr": _NUMBER,
    "params": [_COUNT],
    "betas?": [_NUMBER, _NUMBER],
    **dict.fromkeys(("eps?", "weight_decay?"), _NUMBER),
    **dict.fromkeys(("amsgrad?", "maximize?", "decoupled_weight_decay?"), _BOOL),
}
_PARAM_STATE = {"step?": _Rule("a whole number >= 0", _is_step), "exp_avg?": _TENSOR, "exp_avg_sq?": _TENSOR}
_STD_RANGE = _Rule("two numbers, 0 < low <= high", _is_std_range)
_METADATA = {
    "algorithm_config?": {str: _PLAIN},
    "modules?": [[_TEXT, _TEXT, _TEXT]],
    "policy_attributes?": {"action_std_range?": (None, _STD_RANGE)},
}
_PAYLOAD = {
    "global_step": _Rule("an integer >= 0 of 63 bits", lambda x: _is_whole(x, 0, 2**63)),
    "policy": _STATE_DICT,
    "num_updates?": (None, _COUNT),
    "world_size?": _Rule("an integer >= 1 of 31 bits", lambda x: _is_whole(x, 1, 2**31)),
    "normalizer_by_rank?": [_STATE_DICT],
    "rng_by_rank?": [{str: _ANY}],
    "ref_policy?": (None, _STATE_DICT),
    "optimizer?": (None, {"state": {int: _PARAM_STATE}, "param_groups": [_PARAM_GROUP]}),
    "lr_scheduler?": (None, {"last_epoch": _COUNT}),
    "lr_scheduler_cfg?": (None, {"name": (None, _TEXT), "kwargs": {str: _PLAIN}}),
    "metadata?": (None, _METADATA),
}


def _names(x: Mapping[Any, Any]) -> str:
    shown = [name if type(name) is str and len(name) < 40 else in_words(name) for name in list(x)[:20]]
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
