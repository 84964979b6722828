"""A policy as the program that JAX traces of it, run by torch: the twin where no ``PolicySpec`` describes it. No jax.

    {"weights": {name: [shape, dtype], …}, "constants": [[dtype, shape, bytes in hexadecimal], …], "body":
        {"inputs": 7, "constants": [3, 0], "steps": [["add", [0, 2], {}, 1], …], "results": [8]}}

The values of a body are numbered: its inputs (the policy's, then the weights), those of all constants that it lists,
and what each step gives, here one result of the values 0 and 2. An operation and its options are those of jax.lax
(``OPERATIONS``); a whole number n of an option that depends on the batch B is {"times": k, "plus": c}, n = k·B + c.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from interop.twin.acting import Twin
from interop.twin.networks import checked_image
from interop.twin.spec import ProgramSpec

Options: TypeAlias = Mapping[str, Any]


class TorchProgram(Twin):
    """A deployed policy: ``forward`` takes ``spec.inputs`` and gives ``spec.outputs``; ``act`` takes an observation.
    Raises ValueError: ``spec`` has no program, or one with an operation that ``OPERATIONS`` lacks."""

    spec: ProgramSpec

    def __init__(self, spec: ProgramSpec) -> None:
        super().__init__()
        self.spec = spec
        if spec.program is None:
            raise ValueError("this export is JAX's alone, with no program in policy.json that torch could run")
        try:
            self.names = list(spec.program["weights"])
            made = [torch.zeros(shape, dtype=_dtype(dtype)) for shape, dtype in spec.program["weights"].values()]
            self._weights = nn.ParameterList(nn.Parameter(x, x.is_floating_point()) for x in made)
            self._constants = [f"constant_{i}" for i in range(len(spec.program["constants"]))]
            for name, (dtype, shape, data) in zip(self._constants, spec.program["constants"], strict=True):
                flat = torch.frombuffer(bytearray.fromhex(data), dtype=_dtype(dtype)) if data else torch.zeros(0)
                self.register_buffer(name, flat.to(_dtype(dtype)).reshape(shape), persistent=False)
            self._body = _Body(spec.program["body"])
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
            raise ValueError(f"policy.json has a program of another form: {repr(error)[:200]}") from error

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights by the names that they have in JAX, as ``policy.pt`` has them. Raises RuntimeError: others."""
        wanted = {name: x.shape for name, x in zip(self.names, self._weights, strict=True)}
        given = {name: x.shape for name, x in state_dict.items()}
        if odd := [name for name in wanted | given if wanted.get(name) != given.get(name)]:
            raise RuntimeError(f"the weights are not of this policy, by name or shape: {', '.join(odd)[:300]}")
        numbered = {f"_weights.{i}": state_dict[name] for i, name in enumerate(self.names)}
        return super().load_state_dict(numbered, strict, assign)

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Compute ``spec.outputs`` from ``spec.inputs``. ``leaves``: ``spec.inputs`` [B, ...], in that order."""
        for name, leaf in zip(self.spec.inputs, leaves, strict=True):
            if name in self.spec.images:
                checked_image(leaf, self.spec.images[name])
        constants = [getattr(self, name) for name in self._constants]
        return tuple(self._body.run([*leaves, *self._weights], constants, leaves[0].shape[0]))


class _Body:
    """A body that is ready to run: its steps, each with the values that nothing after it reads."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.constants, self.results = body["constants"], body["results"]
        self.steps: list[tuple[str, list[int], dict[str, Any], int, list[int]]] = []
        start, last = body["inputs"] + len(self.constants), dict[int, int]()
        for name, arguments, options, count in body["steps"]:
            if name not in OPERATIONS and name not in TORCH_NAMES:
                raise ValueError(f"the program has the operation {name!r:.100}, which this interop lacks")
            last |= dict.fromkeys((*arguments, *range(start, start + count)), len(self.steps))
            self.steps.append((name, arguments, {key: _prepared(x) for key, x in options.items()}, start, []))
            start += count
        for value in last.keys() - {*self.results}:
            self.steps[last[value]][-1].append(value)

    def run(self, inputs: Sequence[Tensor], constants: Sequence[Tensor], rows: Any) -> list[Tensor]:
        """Compute the results; ``rows``: B."""
        values: dict[int, Tensor] = dict(enumerate([*inputs, *(constants[i] for i in self.constants)]))
        for name, arguments, options, start, dead in self.steps:
            given = [values[i] for i in arguments]
            if name in TORCH_NAMES:
                values[start] = getattr(torch, TORCH_NAMES[name])(*given)
            else:
                around = {"constants": constants, "rows": rows} if name in ("cond", "scan") else {}
                made = OPERATIONS[name]({key: _of_batch(x, rows) for key, x in options.items()} | around, *given)
                values |= {start: made} if isinstance(made, Tensor) else enumerate(made, start)
            for i in dead:
                del values[i]
        return [values[i] for i in self.results]


def _prepared(x: Any) -> Any:
    if isinstance(x, dict) and "steps" in x:
        return _Body(x)
    return [_prepared(each) for each in x] if isinstance(x, list) else x


def _of_batch(x: Any, rows: Any) -> Any:
    if isinstance(x, list):
        return [_of_batch(each, rows) for each in x]
    if isinstance(x, dict):
        return x["times"] * rows + x["plus"] if "times" in x else {name: _of_batch(y, rows) for name, y in x.items()}
    return x


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no numbers of the type {name!r:.100}")
    return found


def _broadcast(o: Options, x: Tensor) -> Tensor:
    places = o["broadcast_dimensions"]
    if len(places) < len(o["shape"]):
        x = x.reshape([x.shape[places.index(i)] if i in places else 1 for i in range(len(o["shape"]))])
    return x.expand(o["shape"])


def _slice(o: Options, x: Tensor) -> Tensor:
    steps = o.get("strides") or [1] * x.dim()
    for axis, (start, end, step) in enumerate(zip(o["start_indices"], o["limit_indices"], steps, strict=True)):
        if (end, step, start) != (None, 1, 0):
            x = x[(*[slice(None)] * axis, slice(start, end, step))]
    return x


def _dynamic_slice(o: Options, x: Tensor, *starts: Tensor) -> Tensor:
    for axis, (start, size) in enumerate(zip(starts, o["slice_sizes"], strict=True)):
        if size != x.shape[axis]:
            first = start.long().clamp(0, x.shape[axis] - size)
            x = x.index_select(axis, first + torch.arange(size, device=x.device))
    return x


def _padded(x: Tensor, sides: Sequence[Sequence[int]], value: float = 0.0) -> Tensor:
    """Pad by ``(before, behind)`` of each axis."""
    return functional.pad(x, [side for each in reversed(sides) for side in each], value=value)


def _pad(o: Options, x: Tensor) -> Tensor:
    _refuse(any(between for *_, between in o["padding_config"]), "padding between numbers")
    return _padded(x, [each[:2] for each in o["padding_config"]], float(o["padding_value"]))


def _select(o: Options, which: Tensor, *cases: Tensor) -> Tensor:
    result = cases[0]
    for i, case in enumerate(cases[1:], 1):
        result = torch.where(which if which.dtype == torch.bool else which == i, case, result)
    return result


def _iota(o: Options, like: Tensor) -> Tensor:
    shape, axis = o["shape"], o["dimension"]
    line = torch.arange(shape[axis], dtype=_dtype(o["dtype"]), device=like.device)
    return line.reshape([-1 if i == axis else 1 for i in range(len(shape))]).expand(shape)


def _reduction(reduce: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda o, x: reduce(x, o["axes"]).to(x.dtype) if o["axes"] else x


def _product(x: Tensor, axes: Sequence[int]) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis)
    return x


def _along(accumulate: Callable[..., Any]) -> Callable[..., Tensor]:
    def accumulated(o: Options, x: Tensor) -> Tensor:
        axis = o["axis"]
        made = accumulate(x.flip(axis) if o["reverse"] else x, dim=axis)
        made = (made if isinstance(made, Tensor) else made[0]).to(x.dtype)
        return made.flip(axis) if o["reverse"] else made

    return accumulated


def _dot(o: Options, x: Tensor, y: Tensor) -> Tensor:
    (summed_x, summed_y), (batch_x, batch_y) = o["dimension_numbers"]
    if kind := o.get("preferred_element_type"):
        x, y = x.to(_dtype(kind)), y.to(_dtype(kind))
    if y.dim() == 2 and summed_x == [x.dim() - 1] and summed_y == [0]:
        return x @ y
    of_x, of_y = list(range(x.dim())), list(range(x.dim(), x.dim() + y.dim()))
    for i, j in zip([*summed_x, *batch_x], [*summed_y, *batch_y], strict=True):
        of_y[j] = of_x[i]
    batch, summed = [of_x[i] for i in batch_x], {of_x[i] for i in summed_x}
    return torch.einsum(x, of_x, y, of_y, [*batch, *(i for i in (*of_x, *of_y) if i not in summed.union(batch))])


def _convolution(o: Options, x: Tensor, kernel: Tensor) -> Tensor:
    _refuse({*o["lhs_dilation"], o["batch_group_count"]} != {1}, "transposed convolutions")
    order = o["dimension_numbers"]
    x = _padded(x.permute(order["lhs_spec"]), [(0, 0), (0, 0), *o["padding"]])
    convolve = getattr(functional, f"conv{len(o['window_strides'])}d")
    options = (o["window_strides"], 0, o["rhs_dilation"], o["feature_group_count"])
    y = convolve(x, kernel.permute(order["rhs_spec"]), None, *options)
    return y.permute([order["out_spec"].index(i) for i in range(y.dim())])


def _windows(reduce: Callable[..., Tensor], beyond: float) -> Callable[..., Tensor]:
    def reduced(o: Options, x: Tensor) -> Tensor:
        _refuse({*o["base_dilation"], *o["window_dilation"]} != {1}, "windows with gaps")
        x = _padded(x, o["padding"], beyond)
        for axis, (size, stride) in enumerate(zip(o["window_dimensions"], o["window_strides"], strict=True)):
            x = x if size == stride == 1 else reduce(x.unfold(axis, size, stride), -1)
        return x

    return reduced


def _gather(o: Options, x: Tensor, indices: Tensor) -> Tensor:
    """Read ``x`` at an array of places for each of its axes, all of the result's rank."""
    numbers = o["dimension_numbers"]
    windows, starts = numbers["offset_dims"], numbers["start_index_map"]
    rank = indices.dim() - 1 + len(windows)
    outer = [i for i in range(rank) if i not in windows]
    gone = [*numbers["collapsed_slice_dims"], *numbers["operand_batching_dims"]]
    window_of = dict(zip((i for i in range(x.dim()) if i not in gone), windows, strict=True))
    batch_of = dict(zip(numbers["operand_batching_dims"], numbers["start_indices_batching_dims"], strict=True))

    def line(size: Any, axis: int) -> Tensor:
        return torch.arange(size, device=x.device).reshape([-1 if i == axis else 1 for i in range(rank)])

    places, inside = [], torch.ones([1] * rank, dtype=torch.bool, device=x.device)
    for axis, size in enumerate(o["slice_sizes"]):
        place = line(size, window_of.get(axis, 0))  # of one size where the axis is gone
        if axis in batch_of:
            place = place + line(x.shape[axis], outer[batch_of[axis]])
        if axis in starts:
            start = indices[..., starts.index(axis)].long()
            start = start.reshape([start.shape[outer.index(i)] if i in outer else 1 for i in range(rank)])
            inside = inside & (start >= 0) & (start <= x.shape[axis] - size)
            place = place + start.clamp(0, x.shape[axis] - size)
        places.append(place)
    found = x[tuple(places)]
    if o["mode"] != "FILL_OR_DROP":
        return found
    fill = math.nan if x.is_floating_point() else True if x.dtype == torch.bool else torch.iinfo(x.dtype).min
    return torch.where(inside, found, torch.full_like(found, float(o.get("fill_value", fill))))


def _scan(o: Options, *given: Tensor) -> list[Tensor]:
    num_fixed, num_carry = o["num_consts"], o["num_carry"]
    fixed, carry, columns = given[:num_fixed], given[num_fixed:][:num_carry], given[num_fixed + num_carry :]
    made: list[list[Tensor]] = [[]] * o["length"]
    for i in reversed(range(o["length"])) if o["reverse"] else range(o["length"]):
        after = o["jaxpr"].run([*fixed, *carry, *(x[i] for x in columns)], o["constants"], o["rows"])
        carry, made[i] = tuple(after[:num_carry]), after[num_carry:]
    return [*carry, *(torch.stack(each) for each in zip(*made, strict=True))]


def _cond(o: Options, index: Tensor, *operands: Tensor) -> list[Tensor]:
    """Compute all branches, which have no effects, and select."""
    ways = [branch.run(operands, o["constants"], o["rows"]) for branch in o["branches"]]
    return [_select(o, index.clamp(0, len(ways) - 1), *each) for each in zip(*ways, strict=True)]


def _refuse(wrong: bool, what: str) -> None:
    if wrong:
        raise ValueError(f"torch has no {what}")


_ALIKE = {
    *("abs", "acos", "acosh", "add", "asin", "asinh", "atan", "atan2", "atanh", "ceil", "cos", "cosh", "eq", "erf"),
    *("erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "le", "log", "log1p", "lt", "mul", "ne", "neg", "pow"),
    *("rsqrt", "sign", "sin", "sinh", "sqrt", "square", "sub", "tan", "tanh"),
}
TORCH_NAMES = {name: name for name in _ALIKE}
TORCH_NAMES |= {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "not": "bitwise_not", "rem": "fmod"}
TORCH_NAMES |= {"logistic": "sigmoid", "is_finite": "isfinite", "max": "maximum", "min": "minimum", "erf_inv": "erfinv"}
"""Operations of jax.lax without options -> torch's name."""
OPERATIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("copy", "copy_p", "stop_gradient"), lambda o, x: x),
    "argmax": lambda o, x: (x + 0).argmax(o["axes"][0]).to(_dtype(o["index_dtype"])),  # torch's is not of bool
    "argmin": lambda o, x: (x + 0).argmin(o["axes"][0]).to(_dtype(o["index_dtype"])),
    "broadcast_in_dim": _broadcast,
    "clamp": lambda o, low, x, high: torch.minimum(torch.maximum(x, low), high),
    "concatenate": lambda o, *given: torch.cat(given, o["dimension"]),
    "cond": _cond,
    "conv_general_dilated": _convolution,
    "convert_element_type": lambda o, x: x.to(_dtype(o["new_dtype"])),
    "cummax": _along(torch.cummax),
    "cummin": _along(torch.cummin),
    "cumprod": _along(torch.cumprod),
    "cumsum": _along(torch.cumsum),
    "div": lambda o, x, y: torch.div(x, y, rounding_mode=None if x.is_floating_point() else "trunc"),
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "integer_pow": lambda o, x: x ** o["y"],
    "iota": _iota,
    "pad": _pad,
    "reduce_and": _reduction(lambda x, axes: x.to(torch.uint8).amin(axes)),
    "reduce_max": _reduction(torch.amax),
    "reduce_min": _reduction(torch.amin),
    "reduce_or": _reduction(lambda x, axes: x.to(torch.uint8).amax(axes)),
    "reduce_prod": _reduction(_product),
    "reduce_sum": _reduction(torch.sum),
    "reduce_window_max": _windows(torch.amax, -math.inf),
    "reduce_window_min": _windows(torch.amin, math.inf),
    "reduce_window_sum": _windows(torch.sum, 0.0),
    "reshape": lambda o, x: x.reshape(o["new_sizes"]),
    "rev": lambda o, x: x.flip(o["dimensions"]),
    "round": lambda o, x: x.round() if o["rounding_method"] == "TO_NEAREST_EVEN" else (x + 0.5 * x.sign()).trunc(),
    "scan": _scan,
    "select_n": _select,
    "slice": _slice,
    "split": lambda o, x: torch.split(x, o["sizes"], o["axis"]),
    "squeeze": lambda o, x: x.reshape([size for i, size in enumerate(x.shape) if i not in o["dimensions"]]),
    "stack": lambda o, *given: torch.stack(given, o["axis"]),
    "tile": lambda o, x: x.repeat(o["reps"]),
    "transpose": lambda o, x: x.permute(o["permutation"]),
}
"""Those with options, which come first: from an option's name to its value."""
