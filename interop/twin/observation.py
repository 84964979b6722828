"""An observation as the torch twin of a policy reads it: its arrays by dotted path, checked, as tensors. No jax."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interop.dense import describe, is_dense
from interop.twin.spec import WHOLE, PolicySpec


def part(obs: Any, path: str, spec: PolicySpec) -> Any:
    """The observation's array at this dotted path, as it is.

    Raises:
        ValueError: it is missing; the text names the present arrays, and those that the policy reads.
    """
    if not isinstance(obs, Mapping):  # a TensorDict is one
        if path != WHOLE:
            raise ValueError(
                f"the policy reads {', '.join(spec.inputs)}, but got one {type(obs).__name__}; give a nest of them"
            )
        return obs
    if path in obs.keys():  # noqa: SIM118  # TensorDict.__contains__ raises
        return obs[path]
    found: Any = obs
    for name in path.split("."):
        if not isinstance(found, Mapping) or name not in found.keys():  # noqa: SIM118
            raise ValueError(
                f"the observation lacks '{path}': it has {', '.join(_paths(obs)) or 'nothing'}; the policy reads "
                f"{', '.join(spec.inputs)}"
            )
        found = found[name]
    return found


def as_tensor(x: Any, name: str, device: torch.device) -> Tensor:
    """An array as a dense tensor of real numbers; other arrays are copied to ``device``.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(x, Tensor):
        try:
            array = np.asarray(x)
        except ValueError:  # rows of different lengths
            array = np.array(None)
        if array.dtype.kind not in "fiub":
            raise ValueError(f"'{name}' must be a tensor or array of numbers, got a {type(x).__name__}")
        return torch.tensor(array, device=device)
    if not is_dense(x):
        raise ValueError(f"'{name}' must be a dense tensor of real numbers, got {describe(x)}")
    return x


def narrow(x: Tensor, name: str, spec: PolicySpec) -> Tensor:
    """Those entries of an array [..., F] that the actor reads, float32."""
    read, width = spec.read(name), spec.observation[name]
    if x.ndim == 0 or x.shape[-1] not in (width, len(read)):
        either = f" or, without those that the actor does not read, {len(read)}" if len(read) < width else ""
        numbers = f"{x.shape[-1]} numbers" if x.ndim else "no axis"
        raise ValueError(f"'{name}' has {numbers}, the policy was made for {width}{either}")
    x = x.float()
    return x[..., list(read)] if x.shape[-1] > len(read) else x


def check_batch(obs: Any, spec: PolicySpec) -> None:
    """Refuse parts of different leading axes.

    Raises:
        ValueError: naming each part's shape.
    """
    shapes = {name: list(np.shape(part(obs, name, spec))) for name in spec.inputs}
    leading = [shape[: -len(spec.input_shape(name))] for name, shape in shapes.items()]
    if any(axes != leading[0] for axes in leading):
        shown = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"the observation's parts must be of one batch, got {shown}")


def _paths(obs: Mapping[str, Any]) -> list[str]:
    """The paths of all arrays."""
    nested = {str(name): _paths(x) if isinstance(x, Mapping) else [""] for name, x in obs.items()}
    return [f"{name}.{path}".rstrip(".") for name, paths in nested.items() for path in paths]
