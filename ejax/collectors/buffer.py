"""Buffers to hold: ``RolloutBuffer`` is filled step by step, by a custom training loop; ``RolloutQueue`` hands whole
rollouts from the thread that makes them to the one that learns."""

import queue
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np

from ejax.numerics.checks import check_rollout, value_errors
from ejax.numerics.shuffle import minibatch_rows
from ejax.returns import gae
from ejax.types import Array, Key, PyTree, Rollout

Item = TypeVar("Item", bound=Rollout)


class RolloutBuffer:
    """T steps of N environments, added one by one; then advantages, and minibatches. Used by one thread.

    Args:
        obs_dim: numbers of an observation; or arrays (or their shapes, ``jax.ShapeDtypeStruct``) as ``add`` is given.
        action_dim: numbers of an action, or an array likewise: of discrete actions one of int32 [N].
        device: None: JAX's default.
    """

    def __init__(
        self, num_steps: int, num_envs: int, obs_dim: int | PyTree, action_dim: int | PyTree, device: Any = None
    ) -> None:
        if num_steps < 1 or num_envs < 1:
            raise ValueError(f"num_steps and num_envs are at least 1, got {num_steps} and {num_envs}")
        self.num_steps, self.num_envs, self.device = num_steps, num_envs, device

        def rows(given: int | PyTree) -> PyTree:
            if isinstance(given, int | np.integer):
                return jax.ShapeDtypeStruct((num_envs, given), jnp.float32)
            return jax.eval_shape(lambda tree: tree, given)

        number, flag = (jax.ShapeDtypeStruct((num_envs,), dtype) for dtype in (jnp.float32, jnp.bool_))
        self._step = {"obs": rows(obs_dim), "action": rows(action_dim), "done": flag, "truncated": flag}
        self._step |= dict.fromkeys(("reward", "value", "log_prob", "final_value"), number)
        with value_errors(f"obs_dim and action_dim are numbers, or arrays of {num_envs} environments"):
            chex.assert_tree_shape_prefix(self._step, (num_envs,))
        self.clear()

    def clear(self) -> None:
        """Begin a new rollout. Arrays that were handed out stay as they are."""
        self._steps: dict[str, PyTree] = {}
        self._size = 0
        self._next_value: Array | None = None
        self._extras: dict[str, PyTree] = {}

    def __len__(self) -> int:
        """Count the steps that were added."""
        return self._size

    def is_full(self) -> bool:
        return self._size == self.num_steps

    def add(
        self,
        obs: PyTree,
        action: Array,
        reward: Array,
        done: Array,
        value: Array,
        logprob: Array,
        *,
        truncated: Array | None = None,
        final_value: Array | None = None,
    ) -> None:
        """Add a step: the observation that was acted on, what the policy answered, and what came of it, all [N, ...].

        Args:
            done: the episode ended, bool. Without ``truncated`` every end is the task's, with no value after it.
            truncated: those that only a limit of time ended, bool; then ``final_value`` is V of their last observation,
                in the other rows any number.

        Raises:
            ValueError: the buffer is full, or arrays of other shapes or types than it was made for.
        """
        if self.is_full():
            raise ValueError(f"the buffer has all of its {self.num_steps} steps; use them, then call clear()")
        if (truncated is None) != (final_value is None):
            raise ValueError("truncated and final_value belong together: what was cut off still has a value; pass both")
        cut = np.zeros(self.num_envs, bool) if truncated is None else truncated
        final_value = value if final_value is None else final_value
        given = {"action": action, "reward": reward, "value": value, "log_prob": logprob, "final_value": final_value}
        # copies: an environment may write its next answer over this one
        step = {name: jnp.array(x) for name, x in {**given, "done": done, "truncated": cut}.items()}
        step["obs"] = jax.tree.map(jnp.array, obs)
        with value_errors(f"step {self._size} of the buffer"):
            chex.assert_trees_all_equal_shapes_and_dtypes(step, self._step)
        if not self._steps:
            page = partial(jnp.zeros, device=self.device)
            self._steps = jax.tree.map(lambda x: page((self.num_steps, *x.shape), x.dtype), self._step)
        self._steps = _write(self._steps, self._size, step)
        self._size += 1

    @property
    def steps(self) -> dict[str, PyTree]:
        """``obs``, ``action``, ``reward``, ``value``, ``log_prob``, ``terminated``, ``truncated``, leaves [T, N, ...].
        Raises ValueError: it is not full."""
        if not self.is_full():
            raise ValueError(f"the buffer has {self._size} of {self.num_steps} steps; add the others first")
        steps = {name: x for name, x in self._steps.items() if name not in ("final_value", "done")}
        return {**steps, "terminated": self._steps["done"] & ~self._steps["truncated"]}

    def set_extras(self, extras: Mapping[str, PyTree]) -> None:
        """Attach more arrays, leaves [T, N, ...], to the minibatches and the rollout; ValueError: other shapes.
        A name that is there already gets the new ones."""
        with value_errors("extras have leaves [T, N, ...]"):
            chex.assert_tree_shape_prefix(dict(extras), (self.num_steps, self.num_envs))
        if taken := sorted({*self._step, "terminated"} & extras.keys()):
            raise ValueError(f"extras: got {taken}, which the steps already have; rename yours")
        self._extras = {**self._extras, **extras}

    def finalize(self, last_value: Array, *, gamma: float, gae_lambda: float) -> tuple[Array, Array]:
        """Compute ``(advantage, value_target)`` [T, N] by ``ejax.gae``, and keep both as extras by these names.

        ``last_value`` is V [N] of the observation after the last step. Raises ValueError: it is not full.
        """
        steps = self.steps
        with value_errors(f"last_value is V of {self.num_envs} environments"):
            chex.assert_shape(last_value, (self.num_envs,))
        following = jnp.concatenate([steps["value"][1:], jnp.asarray(last_value)[None]])
        self._next_value = jnp.where(steps["truncated"], self._steps["final_value"], following)
        ends = (steps["terminated"], steps["truncated"])
        made = gae(steps["reward"], steps["value"], self._next_value, *ends, gamma=gamma, gae_lambda=gae_lambda)
        self.set_extras({"advantage": made[0], "value_target": made[1]})
        return made

    @property
    def rollout(self) -> Rollout:
        """The steps as updates such as ``ejax.ppo_update`` take them. Raises ValueError: before ``finalize``."""
        if self._next_value is None:
            raise ValueError("the value after the last step is not known yet; call finalize(last_value, …) first")
        return Rollout(**self.steps, next_value=self._next_value, extras=dict(self._extras))

    def iterate_minibatches(self, batch_size: int, key: Key, n_epochs: int = 1) -> Iterator[dict[str, PyTree]]:
        """Return minibatches of ``steps`` and extras, leaves [B, ...], as ``ejax.sgd_epochs`` draws them by this key;
        the last one of an epoch has the rows that are left.

        Raises ValueError: not full, or neither ``finalize`` nor ``set_extras`` was called.
        """
        if not self._extras:
            raise ValueError("minibatches need advantages; call finalize(last_value, …), or set_extras({…}) with yours")
        rows = _flatten({**self.steps, **self._extras})
        num_rows = self.num_steps * self.num_envs
        draw = partial(minibatch_rows, num_rows=num_rows, size=min(batch_size, num_rows))
        return (
            _take(rows, chosen[chosen < num_rows])  # the others are padding
            for key_epoch in jax.random.split(key, n_epochs)
            for chosen in np.asarray(draw(key_epoch))[:, 0]
        )

    def get_stats(self) -> dict[str, float]:
        """Count the steps that were added and that have room, and those of all environments."""
        return _stats(self._size, self.num_steps, self._size * self.num_envs)


def _flatten(tree: PyTree) -> PyTree:
    """Make rows of leaves [T, N, ...]: [T·N, ...]."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


@partial(jax.jit, donate_argnames="steps")
def _write(steps: dict[str, PyTree], t: Array, step: dict[str, PyTree]) -> dict[str, PyTree]:
    return jax.tree.map(lambda page, x: page.at[t].set(x), steps, step)


_take = jax.jit(lambda rows, chosen: jax.tree.map(lambda x: x[chosen], rows))


class RolloutQueue(Generic[Item]):
    """A bounded queue of whole rollouts between threads: each is delivered once, in order, and none is overwritten.

    Args:
        capacity: rollouts that wait at most.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        self._waiting: queue.Queue[Item] = queue.Queue(capacity)
        self._added = 0

    def __len__(self) -> int:
        return self._waiting.qsize()

    def is_full(self) -> bool:
        return self._waiting.full()

    def add_rollout(self, rollout: Item, timeout_s: float | None = 0.0) -> None:
        """Add a rollout, leaves [T, N, ...]; wait ``timeout_s`` for room, None: until there is.

        Raises:
            queue.Full: there was none.
            TypeError, ValueError: not a rollout of this layout, such as rows that are flat already.
        """
        check_rollout(rollout)
        try:
            self._waiting.put(rollout, timeout=timeout_s)
        except queue.Full:
            raise queue.Full(f"{self.capacity} of {self.capacity} rollouts wait; get one, or pass timeout_s") from None
        with self._waiting.mutex:
            self._added += 1

    def get(self, flatten: bool = False, timeout_s: float | None = 0.0) -> Any:
        """Take the oldest rollout; wait ``timeout_s`` for one, None: until there is. Raises queue.Empty: none came.

        ``flatten``: its arrays by name, leaves [T·N, ...], which no update takes: they have lost their order in time.
        """
        try:
            taken = self._waiting.get(timeout=timeout_s)
        except queue.Empty:
            raise queue.Empty("no rollout waits; add one, or pass timeout_s") from None
        return _flatten({name: x for name, x in vars(taken).items() if jax.tree.leaves(x)}) if flatten else taken

    def clear(self) -> None:
        """Give up the rollouts that wait."""
        with suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()

    def get_stats(self) -> dict[str, float]:
        """Count: rollouts that wait and may wait, their steps of all environments, the share that is in use, and all
        rollouts that were ever added."""
        with self._waiting.mutex:
            waiting, added = list(self._waiting.queue), self._added
        transitions = sum(rollout.reward.size for rollout in waiting)
        return _stats(len(waiting), self.capacity, transitions) | {"total_added": added}


def _stats(size: int, capacity: int, transitions: int) -> dict[str, float]:
    stats = {"buffer_size": size, "buffer_capacity": capacity, "buffer_usage": size / capacity}
    return stats | {"total_transitions": transitions}
