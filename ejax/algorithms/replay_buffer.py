"""Replay of transitions: a uniform ring, part of a run's state, written and sampled inside its programs.

A row is an n-step transition, made once, when its last step is there. With D strata (one for each device) the ring is D
rings side by side: each keeps the transitions of its share of the environments, and gives as many rows of a minibatch.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar, cast

import jax
import jax.numpy as jnp
from flax import struct
from pydantic import PositiveInt

from ejax.algorithms.host_rows import HostRows
from ejax.numerics.checks import check_rollout
from ejax.numerics.finite import finite_rows
from ejax.runtime.sharding import by_device
from ejax.schema.frozen import MayChange, PathText, StrictModel
from ejax.types import Array, Key, PyTree, Rollout

T = TypeVar("T")


class ReplayConfig(StrictModel):
    """``algorithm.cfg.replay``."""

    capacity: PositiveInt = 1_000_000
    """Transitions that are kept, on all devices together; the oldest give way."""
    n_step: PositiveInt = 1
    """Steps whose rewards a transition sums before the value of what follows."""
    strata: PositiveInt | None = None
    """Rings of equally many environments, which give equally many rows of a minibatch. None: one for each device. D
    devices compute what one does with D strata."""
    storage: MayChange[Literal["device", "host", "shared"]] = "device"
    """Memory that has the rows: the device's; the host's, for GPUs whose own is too small; or mapped files, which
    may be larger than it, and which other processes can read. The last two are for one device."""
    folder: MayChange[PathText] = "replay"
    """Folder of the files of ``shared``, ``<field>.npy``, which are there while the run trains: in the run's own. In an
    absolute one, such as /dev/shm, the run has its own folder."""


@struct.dataclass(kw_only=True)
class Transition:
    """Rows of experience, leaves [..., F]."""

    obs: PyTree
    action: Array
    reward: Array
    """Σₖ γᵏ·rₜ₊ₖ over the transition's steps, m ≤ n_step: fewer where the episode ended."""
    next_obs: PyTree
    """The true observation after the last of them, before any reset."""
    discount: Array
    """γᵐ, and 0 where the task ended: truncation does not end value."""


@struct.dataclass(kw_only=True)
class Replay:
    """D rings of C rows. Leaves [D, ...]."""

    rows: Transition | HostRows
    """[D, C, ...]; those from ``size`` on were never written."""
    head: Array
    """[D] int32: the row that is written next."""
    size: Array
    """[D] int32: rows that hold a transition."""
    added: Array
    """[D] uint32: rows written since the beginning, modulo 2³²."""
    tail: "Steps"
    """The last n_step − 1 steps, [D, n_step − 1, N/D, ...]: their transitions still lack steps."""

    @property
    def shapes(self) -> Transition:
        """Rows, or their shapes where they are on the host."""
        return self.rows.shapes if isinstance(self.rows, HostRows) else self.rows


@struct.dataclass(kw_only=True)
class Steps:
    """Single steps, leaves [T, N, ...]."""

    obs: PyTree
    action: Array
    reward: Array
    next_obs: PyTree
    terminated: Array
    done: Array
    valid: Array
    """False: not a transition, such as a step that only reset, or one with a number that is not finite."""


def init_replay(config: ReplayConfig, obs: PyTree, action: Array, *, num_strata: int = 1) -> Replay:
    """Make an empty ring. ``obs``, ``action``: of N environments, leaves [N, ...], of which only the forms count."""
    num_envs, capacity = action.shape[0], config.capacity // num_strata
    steps = (config.n_step - 1, num_envs // num_strata)
    numbers = {"obs": obs, "action": action, "next_obs": obs, "reward": jnp.zeros(num_envs)}
    flags = {name: jnp.zeros((num_strata, *steps), bool) for name in ("terminated", "done", "valid")}

    def tables(*shape: int) -> dict[str, Any]:
        return jax.tree.map(lambda x: jnp.zeros((num_strata, *shape, *x.shape[1:]), x.dtype), numbers)

    def make_rows() -> Transition:
        return Transition(**tables(capacity), discount=jnp.zeros((num_strata, capacity)))

    rows: Transition | HostRows
    if config.storage == "device":
        rows = make_rows()
    else:
        forms, structure = jax.tree.flatten(jax.eval_shape(make_rows))
        folder = config.folder if config.storage == "shared" else None
        rows = HostRows(token=jnp.zeros(2, jnp.int32), forms=tuple(forms), structure=structure, folder=folder)
    return Replay(
        rows=rows,
        head=jnp.zeros(num_strata, jnp.int32),  # separate arrays: a program overwrites each
        size=jnp.zeros(num_strata, jnp.int32),
        added=jnp.zeros(num_strata, jnp.uint32),
        tail=Steps(**tables(*steps), **flags),
    )


def drop_tails(tree: T) -> T:
    """Forget, in all replay buffers of a state, the steps whose transitions are not complete, as where episodes are
    broken off by a forced reset."""

    def drop(replay: Replay) -> Replay:
        return replace(replay, tail=replace(replay.tail, valid=jnp.zeros_like(replay.tail.valid)))

    return _map_replays(drop, tree)


def add_rollout(replay: Replay, rollout: Rollout, *, gamma: float) -> Replay:
    """Write the transitions of a rollout with ``next_obs``, leaves [T, N, ...]. ValueError: more than the ring holds,
    or arrays of other forms than its rows.

    Steps that are not ``valid``, and those with a number that is not finite, are left out and end those before them.
    """

    def write(ring: Replay, steps: Steps) -> Replay:
        after, made, places = _complete(ring, steps, gamma, ring.shapes.discount.shape[0])
        return replace(after, rows=jax.tree.map(lambda page, x: page.at[places].set(x, mode="drop"), ring.rows, made))

    return by_device(jax.vmap(write), len(replay.size))(replay, _steps_of(replay, rollout))


def add_and_take(
    replay: Replay, rollout: Rollout, draw: Callable[[Replay], Array], *, gamma: float
) -> tuple[Replay, Replay, Array]:
    """Do ``add_rollout`` to rows on the host, then take those that ``draw`` gives, [..., 1, M] as ``sample_rows``.
    Returns the replay buffer, one with only the taken rows, and their numbers in that, [..., 1, M]."""
    host = cast(HostRows, replay.rows)
    complete = jax.vmap(partial(_complete, gamma=gamma, capacity=host.shapes.discount.shape[1]))
    ring, made, places = complete(without_rows(replay), _steps_of(replay, rollout))
    drawn = draw(ring)
    host, taken = host.exchange(places[0], jax.tree.map(lambda x: x[0], made), drawn.reshape(1, -1))
    return replace(ring, rows=host), replace(ring, rows=taken), jnp.arange(drawn.size).reshape(drawn.shape)


def _steps_of(replay: Replay, rollout: Rollout) -> Steps:
    check_rollout(rollout, judged=())
    for name in ("obs", "action", "next_obs"):  # JAX would cut a fraction to an integer, and repeat a lone row
        made = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape[1:])}", getattr(rollout, name))
        kept = jax.tree.map(lambda x: f"{x.dtype}{[x.shape[0] * x.shape[2], *x.shape[3:]]}", getattr(replay.tail, name))
        if made != kept:
            raise ValueError(f"{name} of a step of a rollout is {made}, but this replay buffer was made for {kept}")
    num_strata, capacity = replay.shapes.discount.shape
    num_steps, num_envs = rollout.reward.shape
    if num_steps * num_envs // num_strata > capacity:
        text = f"a rollout of {num_steps} x {num_envs} steps does not fit a ring of {capacity} rows"
        raise ValueError(f"{text} on each of {num_strata} strata; raise replay.capacity")
    numbers = (rollout.obs, rollout.action, rollout.reward, rollout.next_obs)
    flat = jax.tree.map(lambda x: x.reshape(num_steps * num_envs, -1), numbers)
    finite = finite_rows(flat).reshape(num_steps, num_envs)
    steps = Steps(
        obs=rollout.obs,
        action=rollout.action,
        reward=rollout.reward,
        next_obs=rollout.next_obs,
        terminated=rollout.terminated,
        done=rollout.done,
        valid=finite if rollout.valid is None else finite & rollout.valid,
    )
    # by environment: [D, T, N/D, ...]
    return jax.tree.map(lambda x: x.reshape(num_steps, num_strata, -1, *x.shape[2:]).swapaxes(0, 1), steps)


def sample_rows(replay: Replay, key: Key, num_rows: int) -> Array:
    """Draw rows uniformly, with replacement, equally many of each stratum: [D, num_rows / D] int32."""
    num_strata = replay.size.shape[0]
    draws = jax.random.bits(key, (num_strata, num_rows // num_strata), jnp.uint32)
    # a float's 24 bits would never draw some rows of a large ring
    return (draws % jnp.maximum(replay.size, 1)[:, None].astype(jnp.uint32)).astype(jnp.int32)


def take_rows(replay: Replay, rows: Array) -> Transition:
    """Take ``rows`` [D, M] of each stratum: leaves [D·M, ...]."""

    def take(page: Array, rows: Array) -> Array:
        return jax.vmap(lambda x, i: x.at[i].get(mode="promise_in_bounds", wrap_negative_indices=False))(page, rows)

    take_all = by_device(lambda pages, rows: jax.tree.map(lambda page: take(page, rows), pages), rows.shape[0])
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), take_all(replay.rows, rows))


def take_out(tree: T) -> tuple[T, list[Replay]]:
    """Split the replay buffers off a run's state, for a program to write them where they are: see ``put_back``."""
    empty = Replay(rows=None, head=None, size=None, added=None, tail=None)  # type: ignore[arg-type]  # holds a place
    return _map_replays(lambda replay: empty, tree), replays_in(tree)


def put_back(tree: T, replays: Sequence[Replay]) -> T:
    """Put replay buffers where ``take_out`` found them."""
    left = iter(replays)
    return _map_replays(lambda replay: next(left), tree)


def without_rows(tree: T) -> T:
    """Leave out the rows of all replay buffers."""
    return with_rows(tree, [None] * len(replays_in(tree)))


def with_rows(tree: T, rows: Sequence[Any]) -> T:
    """Put rows into the replay buffers of a state, in their order."""
    return put_back(tree, [replace(replay, rows=each) for replay, each in zip(replays_in(tree), rows, strict=True)])


def replays_in(tree: PyTree) -> list[Replay]:
    """List the replay buffers of a run's state."""
    return [x for x in jax.tree.leaves(tree, is_leaf=_is_replay) if _is_replay(x)]


def _map_replays(change: Callable[[Replay], Any], tree: T) -> T:
    return cast(T, jax.tree.map(lambda x: change(x) if _is_replay(x) else x, tree, is_leaf=_is_replay))


def _is_replay(x: Any) -> bool:
    return isinstance(x, Replay)


def row_bytes(replay: Replay) -> int:
    """Count the bytes of one row; shapes will do."""
    num_rows = replay.shapes.discount.size
    return sum(x.dtype.itemsize * x.size // num_rows for x in jax.tree.leaves(replay.shapes))


def _complete(ring: Replay, steps: Steps, gamma: float, capacity: int) -> tuple[Replay, Transition, Array]:
    """Count the transitions that ``steps``, [T, N, ...], complete: the ring, them, and the rows that they get."""
    num_held, num_steps = ring.tail.reward.shape[0], steps.reward.shape[0]
    steps = jax.tree.map(lambda held, new: jnp.concatenate([held, new]), ring.tail, steps)
    made, valid = _transitions(steps, num_steps, num_held + 1, gamma)
    made = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), made)
    counts = valid.reshape(-1)
    added = counts.sum()
    # rows that do not count have a place outside, where nothing is written
    places = jnp.where(counts, (ring.head + jnp.cumsum(counts) - 1) % capacity, capacity)
    after = replace(
        ring,
        head=(ring.head + added) % capacity,
        size=jnp.minimum(ring.size + added, capacity),
        added=ring.added + added.astype(jnp.uint32),
        tail=jax.tree.map(lambda x: x[num_steps:], steps),
    )
    return after, made, places


def _transitions(steps: Steps, num_starts: int, n_step: int, gamma: float) -> tuple[Transition, Array]:
    """Make the transitions that begin at each of the first ``num_starts`` steps, and mark those that count."""

    def at(x: Array, k: int) -> Array:
        return x[k : k + num_starts]

    reward, alive = at(steps.reward, 0), ~at(steps.done, 0)
    last = jnp.zeros(reward.shape, jnp.int32)
    for k in range(1, n_step):
        # a step that is not a transition ends those before it, though the environment did not report it
        alive &= at(steps.valid, k)
        reward += jnp.where(alive, gamma**k * at(steps.reward, k), 0.0)
        last += alive
        alive &= ~at(steps.done, k)
    ends = (jnp.arange(num_starts)[:, None] + last, jnp.arange(reward.shape[1]))
    discount = jnp.where(steps.terminated[ends], 0.0, gamma ** (last + 1.0))
    made = Transition(
        obs=jax.tree.map(lambda x: at(x, 0), steps.obs),
        action=at(steps.action, 0),
        reward=reward,
        next_obs=jax.tree.map(lambda x: x[ends], steps.next_obs) if n_step > 1 else steps.next_obs,
        discount=discount,
    )
    return made, at(steps.valid, 0)
