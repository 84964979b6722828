"""From a policy's numbers to actions of an environment's space: the same in training, evaluation, play and exports.

A rollout keeps the numbers, by which an update computes probabilities: of choices, those from 0 on.
"""

from typing import Any, NamedTuple, TypeAlias

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

Bounds: TypeAlias = tuple[tuple[float | None, ...], tuple[float | None, ...]]


class ActionForm(NamedTuple):
    """A space's actions of a policy's numbers, flat; hashable. ``clip``: (low, high), None where a side is open.
    ``whole``: the nearest integers. ``start``: the actions that choice 0 is. None: as the policy gives it."""

    clip: Bounds | None = None
    whole: bool = False
    start: tuple[int, ...] = ()
    action_shape: tuple[int, ...] | None = None
    dtype: str | None = None


def action_form(space: gymnasium.Space[Any], *, clips: bool = False) -> ActionForm:
    """Describe a space's actions; ``clips``: a Box's numbers are clipped to its bounds, as integers always are."""
    spaces = gymnasium.spaces
    if isinstance(space, spaces.Box):
        whole, bounds = np.dtype(space.dtype).kind in "iu", (space.low, space.high)
        low, high = (tuple(x if np.isfinite(x) else None for x in b.ravel().tolist()) for b in bounds)
        clips = (clips or whole) and any(x is not None for x in (*low, *high))
        return ActionForm((low, high) if clips else None, whole, (), space.shape, str(space.dtype))
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        start = tuple(np.ravel(space.start).tolist())
        return ActionForm(None, False, start if any(start) else (), space.shape, str(space.dtype))
    return ActionForm()  # a custom policy's


def to_action(form: Any, numbers: Any, numpy: Any = np) -> Any:
    """Map a policy's numbers [N, ...] to actions [N, *action_shape]. NumPy's are a copy in the space's dtype.

    Args:
        form: an ``ActionForm``, or any object with its fields.
        numpy: the module that computes: ``numpy``, or ``jax.numpy`` in a program, where floats keep their dtype.
    """
    # a custom policy may return a tree; in a jitted program, numbers that are already right cost no operation
    x = numbers if numpy is jnp else np.asarray(numbers)
    if form.clip is not None or form.start:
        x = _moved(form, x.reshape(x.shape[0], -1), numpy).reshape(x.shape)
    if form.action_shape is not None and x.shape[1:] != form.action_shape:
        x = x.reshape(x.shape[0], *form.action_shape)
    return x if numpy is jnp else np.array(x, form.dtype)  # an environment may write into its action


def _moved(form: ActionForm, rows: Any, numpy: Any) -> Any:
    """Clip, round and count from the start: numbers [N, A]."""
    dtype = np.dtype(form.dtype or rows.dtype)
    dtype = dtype if numpy is np else jax.dtypes.canonicalize_dtype(dtype)

    def each_row(x: Any) -> Any:
        return numpy.broadcast_to(numpy.asarray(x, dtype), rows.shape)

    if form.start:
        return rows + each_row(form.start)
    low, high = ends(form.clip)
    if not form.whole or not form.dtype:
        # in the space's dtype: a bound of 64 bits is not moved by rounding
        rows = numpy.clip(rows, each_row(low), each_row(high))
        return numpy.rint(rows) if form.whole else rows
    most = np.iinfo(dtype)
    low, high = (each_row([min(max(x, most.min), most.max) for x in bound]) for bound in (low, high))
    # clipped before the cast, which would wrap; NaN is the lower bound
    with np.errstate(invalid="ignore"):
        nearest = numpy.where(rows >= high, high, numpy.rint(rows).astype(dtype))
    return numpy.where(rows > low, nearest, low)


def ends(clip: Bounds | None) -> Any:
    """Return (low, high) as numbers: infinite where they are open."""
    return [[end if x is None else x for x in part] for part, end in zip(clip or (), (-np.inf, np.inf), strict=True)]
