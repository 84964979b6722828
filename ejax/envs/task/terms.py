"""Terms: named functions of a ``World`` that make up a task, and how each kind of them is computed.

    kind         func(world, …, **params) ->
    reward       scalar; the total is Σ weight·term, and a term of mode ``replace`` starts the sum again
    observation  the numbers, then clipped, scaled, noisy, with those of the steps before (``Shaping``)
    action       ``ejax.envs.manager.functors.actions``
    event        func(world, key): the world after it; mode ``startup``, ``reset`` or ``interval``
    termination  bool: the episode ends, as a failure or, with ``time_out``, cut short (truncated)
    command      func(world, key): the world with what is commanded next
    curriculum   func(world): the world with what has become harder or easier

EmbodiChain's functors of rewards take (world, obs, action, info): ``as_term`` adapts them.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax.core import FrozenDict

from ejax.envs.task.world import World
from ejax.types import Array, Key

Kind: TypeAlias = Literal["reward", "observation", "action", "event", "termination", "command", "curriculum"]
KeyOf: TypeAlias = Callable[[int, "Term"], Key]
"""The key of an event, by its place and itself."""


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """Changes of an observation's numbers, in this order: clip, scale, noise, history."""

    clip: tuple[float, float] | None = None
    scale: float | tuple[float, ...] | None = None
    noise: float = 0.0
    """Half the width of uniform noise, in the scaled numbers' unit."""
    history: int = 1
    """Steps that are seen: 1 is this one alone. The newest are the last numbers; a start fills all."""

    def __post_init__(self) -> None:
        if self.clip is not None and self.clip[0] > self.clip[1]:
            raise ValueError(f"clip must be (lowest, highest), got {self.clip}")
        if not self.noise >= 0.0:
            raise ValueError(f"noise must be >= 0, got {self.noise}")
        if self.history < 1:
            raise ValueError(f"history must be >= 1, got {self.history}")

    def shape(self, values: Array, key: Key | None = None) -> Array:
        """Clip, scale and disturb the numbers of one step; without a key there is no noise."""
        if self.clip is not None:
            values = jnp.clip(values, *self.clip)
        if self.scale is not None:
            values = jnp.asarray(self.scale) * values
        if self.noise and key is not None:
            values = values + self.noise * jax.random.uniform(key, values.shape, minval=-1.0, maxval=1.0)
        return values

    def extend(self, past: Array | None, values: Array) -> Array:
        """The last ``history`` steps, [history, *shape], with the newest last.

        Args:
            past: what this gave in the step before; None: an episode starts.
        """
        if past is None:
            return jnp.broadcast_to(values, (self.history, *values.shape))
        return jnp.concatenate([past[1:], values[None]])


@dataclass(frozen=True, kw_only=True)
class Term:
    """One function with its parameters, and what its kind needs besides."""

    name: str
    func: Callable[..., Any]
    kind: Kind = "reward"
    params: Mapping[str, Any] = FrozenDict()
    weight: float = 1.0
    """Of a reward."""
    mode: str = ""
    """Of an event ``startup``, ``reset``, ``interval``; of a reward ``add``, ``replace``; of an observation ``add``,
    ``modify``."""
    interval_step: int = 1
    """Of an interval event: control steps of an episode from one to the next."""
    time_out: bool = False
    """Of a termination: the episode is cut short; a value follows."""
    shaping: Shaping = Shaping()
    """Of an observation."""
    path: tuple[str, ...] = ()
    """Of an observation: its place in a nested one."""
    key: str = ""
    """Dotted path in a config, for messages."""

    def __call__(self, *given: Any) -> Any:
        return self.func(*given, **self.params)


def compute(
    terms: Iterable[Term], world: World, start: Array | None = None, *, weighted: bool = True
) -> tuple[Array, dict[str, Array]]:
    """Add up the terms of a reward, in their order: r = start + Σ weight·term.

    Args:
        start: what is rewarded before any term. None: 0.
        weighted: the second result holds weight·term; False: the terms alone.

    Returns:
        The reward, float32, and its terms by name.
    """
    total = jnp.zeros(()) if start is None else start
    values: dict[str, Array] = {}
    for term in terms:
        value = jnp.asarray(term(world), jnp.float32)
        share = term.weight * value
        total = share if term.mode == "replace" else total + share
        values[term.name] = share if weighted else value
    return total, values


def fire(events: Sequence[Term], world: World, mode: str, key_of: KeyOf) -> World:
    """The world after the events of one mode, one after the other; of ``interval``, after those that are due.

    An interval event is due after each ``interval_step``-th control step of an episode: one that ended does not shift
    the events of the next.
    """
    for number, event in enumerate(events):
        if event.mode != mode:
            continue
        state = as_world(world, event(world, key_of(number, event))).state
        if mode == "interval":
            due = world.state.episode_step % event.interval_step == 0
            state = jax.tree.map(lambda new, old, due=due: jnp.where(due, new, old), state, world.state)
        world = replace(world, state=state)
    return world


def ends(terms: Iterable[Term], world: World) -> tuple[Array, Array]:
    """Whether the episode fails, and whether it is cut short: (failed, timed_out), bool."""
    failed = timed_out = jnp.zeros((), bool)
    for term in terms:
        ended = jnp.asarray(term(world))
        if ended.shape or ended.dtype != bool:
            raise ValueError(f"termination {term.name} must be true or false, got {ended.dtype}{list(ended.shape)}")
        failed, timed_out = (failed, timed_out | ended) if term.time_out else (failed | ended, timed_out)
    return failed, timed_out


@functools.cache  # equal configs have equal terms
def as_term(func: Callable[..., Array]) -> Callable[..., Array]:
    """Adapt EmbodiChain's f(world, obs, action, info, **params) to f(world, **params).

    ``obs`` and ``info`` are the world's; ``action`` is the policy's, as it gave it.
    """
    signature = inspect.signature(func)
    world, *rest = signature.parameters.values()

    @functools.wraps(func)
    def term(world: World, **params: Any) -> Array:
        return func(world, world.obs, world.action, world.info, **params)

    term.__signature__ = signature.replace(parameters=[world, *rest[3:]])  # type: ignore[attr-defined]  # as inspect asks
    return term


def as_world(world: World, made: Any) -> World:
    """The world that a functor made of ``world``: it may give the state alone."""
    return made if isinstance(made, World) else replace(world, state=made)
