"""Many trainings in one program: members that differ in their seeds and in numbers of the algorithm's options.

On a CPU they are trained one after the other, bit for bit as runs by themselves; on an accelerator side by side, by
``vmap``, whose sums may be added up in another order. ``exploit`` copies members (Jaderberg et al. 2017).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh

from ejax.algorithms.step import RunState, Step
from ejax.numerics.episodes import episode_metrics
from ejax.numerics.finite import all_finite
from ejax.optim import LearningRate
from ejax.runtime.sharding import map_members
from ejax.schema.frozen import with_value
from ejax.types import Array, Key, Metrics, PyTree, TrainState

Values = Mapping[str, Any]
"""Dotted key of an algorithm's options -> its value of one member; of all of them, with a first axis [M]."""
FITNESS = "charts/episode_reward_avg_100"
"""Compared by ``exploit``: the mean return of each member's last 100 episodes of training."""
PARENT = "population/parent"
"""Metric [M]: the member whose parameters each one continues from; its own number where it copies none."""
_EXPLOIT = 0x9B7
"""Folded into the key, so that what is drawn here is not drawn in a member."""


@struct.dataclass(kw_only=True)
class PopulationState:
    update: Array
    """Updates done, int32."""
    members: RunState
    """Leaves [M, ...]. Of a member that broke: as it was before."""
    values: dict[str, Array]
    """[M] each."""
    alive: Array
    """[M] bool: False from the update on that made a member's parameters non-finite."""

    @property
    def train(self) -> TrainState:
        return self.members.train


@dataclass(frozen=True, kw_only=True)
class Exploit:
    """See ``ejax.config.population.ExploitConfig``."""

    every: int
    count: int
    """Members that copy, and that are copied from."""
    perturb: tuple[float, ...]
    bounds: Mapping[str, tuple[float, float]]
    make_optimizer: Callable[[Values], optax.GradientTransformation]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The members' places on the hardware."""

    together: bool
    """Side by side on a device, instead of one after the other."""
    mesh: Mesh | None = None
    """The devices that share them. None: one has all."""

    def each(self, function: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Make a function of one member one of all: arguments and results get a first axis [M]."""

        def of_all(*args: PyTree) -> PyTree:
            return jax.vmap(function)(*args) if self.together else jax.lax.map(lambda each: function(*each), args)

        return of_all if self.mesh is None else map_members(of_all, self.mesh)


def with_values(options: Any, values: Values) -> Any:
    """Put these values, arrays among them, in place of the options' own. They are not checked."""
    return reduce(lambda changed, item: with_value(changed, *item), values.items(), options)


def make_population_step(
    make_step: Callable[[Values], Step], *, placement: Placement, stops_at_nonfinite: bool, exploit: Exploit | None
) -> Callable[[PopulationState, Key], tuple[PopulationState, Metrics]]:
    """Make one update of every member, ``(state, keys [M]) -> (state, metrics [M])``.

    With ``stops_at_nonfinite`` an update that is not applied in whole breaks a member, as it ends a single run.
    """

    def one(state: RunState, values: Values, alive: Array, update: Array, key: Key) -> tuple[RunState, Array, Metrics]:
        step = make_step(values)  # inside the trace: values are arrays here

        def train(state: RunState) -> tuple[RunState, Metrics]:
            return step(state, jax.random.fold_in(key, update))

        def hold(state: RunState) -> tuple[RunState, Metrics]:
            shapes = jax.eval_shape(train, state)[1]
            return state, {name: jnp.full(x.shape, jnp.nan, x.dtype) for name, x in shapes.items()}

        # under vmap both branches run: side by side, a broken member costs as much as one that trains
        after, metrics = jax.lax.cond(alive, train, hold, state)
        sound = all_finite(after.train.params)
        if stops_at_nonfinite:  # as ``ejax.training.reporter.refuse_nonfinite``
            skipped = [metrics.get(f"train/skipped_{name}", 0.0) for name in ("update", "fraction")]
            excessive = metrics.get("train/skipped_excessive_gradient", 0.0)
            sound &= (jnp.maximum(*skipped) - excessive <= 0.0) & jnp.isfinite(metrics.get("train/loss", 0.0))
        after = jax.tree.map(lambda old, new: jnp.where(sound, new, old), state, after)
        return after, alive & sound, metrics

    def step(state: PopulationState, keys: Key) -> tuple[PopulationState, Metrics]:
        # mapped over members like all else, so that it needs their axis
        updates = jnp.broadcast_to(state.update, state.alive.shape)
        members, alive, metrics = placement.each(one)(state.members, state.values, state.alive, updates, keys)
        state = replace(state, update=state.update + 1, members=members, alive=alive)
        metrics = {**metrics, "population/alive": alive.astype(jnp.float32)}
        if exploit is None:
            return state, metrics
        # a population has no key: the first member's serves
        return _maybe_exploit(state, metrics, jax.random.fold_in(keys[0], _EXPLOIT), exploit)

    return step


def own_keys(keys: Key, update: Array) -> Key:
    """Leave the keys [M] as they are, for ``repeat_step``: the members fold the update into their own."""
    del update
    return keys


def exploited(state: PopulationState, fitness: Array, key: Key, exploit: Exploit) -> tuple[PopulationState, Array]:
    """Let the members of the lowest fitness [M] continue from those of the highest, with values near theirs.

    A broken member has the lowest fitness, and lives again. One of fitness NaN, not known, neither gives nor receives:
    its first episode may be the longest. Environments and random numbers stay each member's own. The second result is
    the member that each one continues from, [M] int32.
    """
    num_members = fitness.shape[0]
    key_donor, key_perturb = jax.random.split(key)
    known = state.alive & jnp.isfinite(fitness)
    waits = state.alive & jnp.isnan(fitness)
    # best first, and last what broke, so that it receives and never gives; what is not known stands in the middle
    middle = -jnp.nanmedian(jnp.where(known, fitness, jnp.nan))
    order = jnp.argsort(jnp.where(known, -fitness, jnp.where(waits, middle, jnp.inf)), stable=True)
    donor = order[jax.random.randint(key_donor, (exploit.count,), 0, exploit.count)]
    receiver = order[num_members - exploit.count :]
    own = jnp.arange(num_members, dtype=jnp.int32)
    # a donor that is not known, where few are, gives nothing: its receiver keeps its own
    gives = known[donor] & ~waits[receiver]
    parent = own.at[receiver].set(jnp.where(gives, donor, receiver).astype(jnp.int32))

    def copy(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x[parent], tree)

    before = copy(state.values)
    factors = jnp.asarray(exploit.perturb)
    values = {}
    for i, (name, value) in enumerate(before.items()):
        factor = jax.random.choice(jax.random.fold_in(key_perturb, i), factors, (num_members,))
        moved = jnp.clip(value * factor, *exploit.bounds[name])  # the config's own range
        values[name] = jnp.where(parent == own, value, moved)
    # the optimizer holds its learning rate as an array: a copied one has to move with the member's value
    train = copy(state.members.train)
    train = jax.vmap(partial(_with_rates, make_optimizer=exploit.make_optimizer))(train, before, values)
    # a broken member's count stood still, and its parent's is the population's
    update = jnp.where(parent == own, state.members.update, state.update)
    members = replace(state.members, train=train, update=update)
    return replace(state, members=members, values=values, alive=state.alive[parent]), parent


def _maybe_exploit(
    state: PopulationState, metrics: Metrics, key: Key, exploit: Exploit
) -> tuple[PopulationState, Metrics]:
    seen = jax.vmap(episode_metrics)(state.members.episodes)
    # where episodes have ended, a mean that is not finite is the lowest, not one to wait for
    broken = jnp.isnan(seen[FITNESS]) & (seen["charts/num_episodes"] > 0)
    fitness = jnp.where(broken, -jnp.inf, seen[FITNESS])
    key = jax.random.fold_in(key, state.update)

    def go(state: PopulationState) -> tuple[PopulationState, Array]:
        return exploited(state, fitness, key, exploit)

    def stay(state: PopulationState) -> tuple[PopulationState, Array]:
        return state, jnp.arange(fitness.shape[0], dtype=jnp.int32)

    state, parent = jax.lax.cond(state.update % exploit.every == 0, go, stay, state)
    member_values = {f"population/{name}": value for name, value in state.values.items()}
    return state, {**metrics, **member_values, PARENT: parent.astype(jnp.float32)}


def _with_rates(
    train: TrainState, before: Values, now: Values, *, make_optimizer: Callable[[Values], optax.GradientTransformation]
) -> TrainState:
    """Move the learning rates in the optimizer's state, wherever a schedule has taken them, with their values."""
    starts = [make_optimizer(values).init(train.params["params"]) for values in (before, now)]

    def is_rate(node: Any) -> bool:
        return isinstance(node, LearningRate)

    def moved(there: Any, old: Any, new: Any) -> Any:
        if not is_rate(there):
            return there
        rate, old_start, new_start = there.learning_rate, old.learning_rate, new.learning_rate
        # a rate that no schedule has moved becomes the new value exactly, without rounding
        scaled = rate * (new_start / jnp.where(old_start > 0.0, old_start, 1.0))
        return LearningRate(jnp.where(rate == old_start, new_start, scaled))

    return replace(train, opt_state=jax.tree.map(moved, train.opt_state, *starts, is_leaf=is_rate))
