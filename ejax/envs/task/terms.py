"""Terms: named functions of a ``World`` that make up a task, how each kind is computed, and the order of a step.

    kind          func(…, **params) ->
    rewards       (world): scalar; the total is Σ weight·term, and a term of mode ``replace`` starts the sum again
    observations  (world, obs): the numbers, then clipped, scaled, noisy, with their history. ``obs`` is the observation
                  so far, or under mode ``modify`` the value to modify
    actions       (scene, active): ``ejax.envs.terms.actions.ActionTerm``
    events        (world, key): the world after it; mode ``startup``, ``reset`` or ``interval``
    terminations  (world): ``Outcome``, success, failure or an early end
    commands      (): what draws commands, ``ejax.envs.terms.commands``
    curricula     (): what raises and lowers a row's level, ``ejax.envs.randomization.events``

EmbodiChain's functors of rewards take (world, obs, action, info): ``ejax.envs.terms.registry.as_term`` adapts them.

The order of a step (``Task.step``), of every task:

    1  act                    the action becomes the control of drives or actuators, and moves the physics for one
                              control period
    2  update                 what else happens then: kept numbers, markers, pushes, the next command
    3  apply_events           interval events that are due
    4  observe_noisy          the observation of the world after it
    5  outcome                success, failure, an early end; neither of the first two for a world that is not finite
    6  total                  base reward + Σ weight·term, of the world before and after
    7  end                    terminated: success or failure; truncated: an early end, the time limit, a world that is
                              not finite

Differs from mjlab: interval events come before the ends, so that a fall by a push ends its own step.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import struct
from flax.core import FrozenDict

from ejax.schema.paths import unique
from ejax.types import Array, Key, PyTree

TermKind: TypeAlias = Literal["rewards", "observations", "actions", "events", "terminations", "commands", "curricula"]
"""Named as the sections of a gym config's ``env``."""
KeyOf: TypeAlias = Callable[[int, "Term"], Key]  # The key of an event, by its place and itself
_NOISE = 0x5EED0000


@struct.dataclass(kw_only=True)
class Snapshot:
    """A state and what led there: the world of a task without MuJoCo, whose own code knows where its numbers are."""

    state: Any  # Arrays only, with ``episode_step``
    executed: Any = None  # [A]: the last action as it was done; None at the step's beginning
    before: Any = None  # The world before the last control step; None at an episode's start, and in events and actions
    obs: PyTree = None
    """The observation of ``state``, where terms are computed from it; computed again, its last bits may be others."""
    info: Mapping[str, Array] = struct.field(default_factory=dict)
    """``success`` and ``fail`` of this step, where rewards are computed."""

    @property
    def action(self) -> Any:
        """[A]: the last one, as the state has it, zeros at the start; where it has none, as it was done."""
        return vars(self.state).get("action", self.executed)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Ends of a step: all of them, or those of one term of kind ``terminations``."""

    success: Array | None = None
    """bool; ends the episode, with no value after it, as does ``fail``. None: the task has no notion of success."""
    fail: Array | None = None  # None: never
    truncated: Array | None = None
    """bool: an early end with a value after it; the time limit is not included. None: never."""
    reward: Array | None = None  # Base reward, to which the terms are added. None: 0.
    metrics: dict[str, Array] = field(default_factory=dict)


def join_outcomes(outcomes: Iterable[Outcome]) -> Outcome:
    """Join outcomes: any of them ends the episode; base rewards add up."""
    whole = Outcome()
    # None stays None: a task without a notion of success logs none
    for i, each in enumerate(outcomes):
        # two terms may measure the same
        names = {name: f"{name}_{i}" if name in whole.metrics else name for name in each.metrics}
        whole = Outcome(
            success=_joined(whole.success, each.success),
            fail=_joined(whole.fail, each.fail),
            truncated=_joined(whole.truncated, each.truncated),
            reward=_joined(whole.reward, each.reward, operator.add),
            metrics=unique((*whole.metrics.items(), *((names[k], x) for k, x in each.metrics.items())), "metrics"),
        )
    return whole


def _joined(one: Array | None, other: Array | None, join: Callable[..., Array] = operator.or_) -> Array | None:
    return other if one is None else one if other is None else join(one, other)


@dataclass(frozen=True, kw_only=True)
class Term:
    """One function with its parameters, and what its kind needs in addition."""

    name: str
    func: Callable[..., Any]
    kind: TermKind = "rewards"
    params: Mapping[str, Any] = FrozenDict()
    weight: float = 1.0
    mode: str = ""
    """Event: ``startup``, ``reset``, ``interval``; reward: ``add``, ``replace``; observation: ``add``, ``modify``."""
    interval_step: int = 1  # Control steps of an episode from one interval event to the next
    clip: tuple[float, float] | None = None  # Of an observation's numbers, before all else
    scale: float | tuple[float, ...] | None = None  # Then
    noise: float = 0.0  # Half the width of uniform noise, in the scaled numbers' unit
    history_length: int = 1
    """Control steps whose numbers are observed together, the last one's at the end; 1: the present ones alone."""
    path: tuple[str, ...] = ()  # Its place in a nested observation
    key: str = ""  # Dotted path in a config, for messages

    def __call__(self, *given: Any) -> Any:
        return self.func(*given, **self.params)


class Added(NamedTuple):
    """Terms that a config adds to a task's own."""

    events: tuple[Term, ...] = ()
    rewards: tuple[Term, ...] = ()
    weights: Mapping[str, float] = FrozenDict()  # The reward's terms, where a config changes them


def total(
    terms: Iterable[Term],
    world: Any,
    *,
    own: Mapping[str, Array] = FrozenDict(),
    weights: Mapping[str, float | Array] = FrozenDict(),
    start: Array | None = None,
) -> tuple[Array, dict[str, Array], dict[str, Array]]:
    """Add up a reward: r = start + Σ weight·term, first of a task's ``own`` terms, then of ``terms``, in their order.

    Args:
        own: name -> scalar, computed by the task itself.
        weights: of own terms, else 1; those of ``terms`` have theirs, unless one is given here.
        start: by default 0.

    Returns:
        The reward, the weighted terms by name, and the terms as they are; float32.
    Raises:
        ValueError: two terms of one name, or one that is not a scalar.
    """
    terms = tuple(terms)
    given = unique((*own.items(), *((term.name, term(world)) for term in terms)), "terms of the reward")
    raw = {name: jnp.asarray(x, jnp.float32) for name, x in given.items()}
    if odd := [f"{name} has shape {x.shape}" for name, x in raw.items() if x.shape]:
        raise ValueError(f"every term of the reward must be a scalar; {', '.join(odd)}")
    weights = {**{term.name: term.weight for term in terms}, **weights}
    replacing = {term.name for term in terms if term.mode == "replace"}
    reward, weighted = jnp.zeros(()) if start is None else start, {}
    for name, x in raw.items():
        weighted[name] = weights.get(name, 1.0) * x
        # as EmbodiChain does: what came before a replacing term is forgotten, not subtracted
        reward = weighted[name] if name in replacing else reward + weighted[name]
    return reward, weighted, raw


def observe(term: Term, number: int, world: Any, obs: Any, key: Key | None = None) -> Array:
    """Compute one term: clipped, scaled, then with noise. ``number``: its place, by which its noise is drawn; without a
    key there is none."""
    values = jnp.asarray(term(world, obs))
    if term.clip is not None:
        values = jnp.clip(values, *term.clip)
    if term.scale is not None:
        values = jnp.asarray(term.scale) * values
    if key is not None and term.noise:
        # apart from the events' keys, which are folded from the same one by their places
        own = jax.random.fold_in(key, _NOISE + number)
        values = values + term.noise * jax.random.uniform(own, values.shape, minval=-1.0, maxval=1.0)
    return values


def remember(term: Term, values: Array, kept: Array | None) -> Array:
    """Add an observation to those of the steps before, [history_length, ...]; without such it counts for all of them,
    as at an episode's start."""
    row = values[None]
    return jnp.repeat(row, term.history_length, axis=0) if kept is None else jnp.concatenate([kept[1:], row])


def observe_all(terms: Sequence[Term], world: Any, key: Key | None = None) -> Array:
    """Join the terms of an observation into one vector, float32."""
    parts = (observe(term, number, world, {}, key) for number, term in enumerate(terms))
    return jnp.concatenate([part.reshape(-1).astype(jnp.float32) for part in parts])


def apply_events(events: Sequence[Term], world: Any, mode: str, key_of: KeyOf) -> Any:
    """Apply one mode's events in order; of ``interval``, those whose ``interval_step`` divides the control step."""
    for number, event in enumerate(events):
        if event.mode != mode:
            continue
        # computed every step and selected: rows of a batch are due at different times
        state = as_world(world, event(world, key_of(number, event))).state
        if mode == "interval":
            due = world.state.episode_step % event.interval_step == 0
            state = jax.tree.map(lambda new, old, due=due: jnp.where(due, new, old), state, world.state)
        world = replace(world, state=state)
    return world


def as_world(world: Any, made: Any) -> Any:
    """Complete the result of a functor, which may return only the state. ValueError: it returns anything else."""
    after = made if isinstance(made, Snapshot) else replace(world, state=made)
    old, new = ([jnp.shape(x) for x in jax.tree.leaves(each.state)] for each in (world, after))
    # an episode's start may add parts
    if type(after.state) is not type(world.state) or (len(new) == len(old) and new != old):
        wanted = "must return the world or its state, with the shapes of its parts"
        raise ValueError(f"returned {type(made).__name__}; {wanted}")
    return after
