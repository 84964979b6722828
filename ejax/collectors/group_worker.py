"""One group of host environments and the steps of a rollout in it: a jitted policy call, then a step, T times.

Not by ``ejax.episodes``: here groups take turns, can be stopped and paused between two steps, and keep what they draw.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.envs.actions import action_form, to_action
from ejax.envs.host.calls import call_env
from ejax.envs.host.guarded import GuardedEnv
from ejax.envs.host.pure_host import PureHostEnv
from ejax.policies.calls import apply_policy, check_obs, first_memory, forget_outside
from ejax.types import (
    Array,
    ExploringPolicy,
    HostEnv,
    HostTimestep,
    Key,
    Params,
    Policy,
    PolicyWithMemory,
    PyTree,
    SavableHostEnv,
)

Gate = Callable[[], AbstractContextManager[bool]]
"""Entered around every call that advances an environment. True: the rollout is to be given up."""
Steps: TypeAlias = tuple[PyTree, NDArray[Any], tuple[PyTree, PyTree], HostTimestep]
"""Observations, actions, memories before and after them, timesteps; leaves [T, n, ...]."""


class CollectionStopped(Exception):
    """The caller stopped the rollout before it was complete."""


@dataclass(frozen=True, kw_only=True)
class HostStep:
    """One step of a group of environments, for listeners. The next step may overwrite its arrays [N, ...]."""

    update: int
    """The update that learns from it, counted from 1."""
    group: int
    obs: PyTree
    """Before the step."""
    action: NDArray[Any]
    timestep: HostTimestep
    """``reward``, ``terminated``, ``truncated``, ``info``, and ``obs`` after the step."""


class GroupWorker:
    """A group of environments with its episodes under way.

    Args:
        turns: held while the policy acts or listeners listen, so that one group at a time calls them.
    """

    def __init__(self, policy: Policy, env: HostEnv, number: int, turns: AbstractContextManager[Any]) -> None:
        self.policy, self.env, self.number, self.turns = policy, env, number, turns
        named = env.env if isinstance(env, PureHostEnv) else env
        self.name = env.name if isinstance(env, GuardedEnv) else type(named).__name__
        self.form = action_form(env.action_space)
        self.obs: PyTree = None
        self.memory = first_memory(policy, env.num_envs)  # the policy's memory of the episodes under way
        self.explores = isinstance(policy, ExploringPolicy)
        self.num_steps = 0  # steps taken of the rollout under way
        self.policy_s = self.env_s = 0.0  # of it or of the last one, seconds of policy calls and of environment steps
        self.idle = threading.Event()  # unless another thread is in a rollout of this group
        self.idle.set()

    def call(self, what: str, *args: Any) -> Any:
        """Call a method of the environments. A ``GuardedEnv`` records its environment's calls itself."""
        function = getattr(self.env, what)
        return function(*args) if isinstance(self.env, GuardedEnv) else call_env(self.name, what, function, *args)

    @property
    def savable(self) -> SavableHostEnv | None:
        """Return the environments whose state can be saved, outside any guard. None: it cannot."""
        bare = self.env.inner if isinstance(self.env, GuardedEnv) else self.env
        return bare if isinstance(bare, SavableHostEnv) else None

    def reset(self, seed: NDArray[np.uint32]) -> None:
        self.obs, self.memory = self.call("reset", seed), first_memory(self.policy, self.env.num_envs)

    def collect(
        self,
        params: Params,
        key: Key,
        rows: dict[str, NDArray[Any]],
        *,
        num_steps: int,
        gate: Gate,
        report: Callable[[str], None],
        update: int,
        listeners: Sequence[Callable[[HostStep], None]],
    ) -> Steps:
        """Make T steps, for update ``update``, counted from 1.

        Args:
            rows: arguments of the policy for each step, [T, N].
            report: called with the activity before each step.
        Raises CollectionStopped: ``gate`` was true.
        """
        key, self.policy_s, self.env_s = jax.random.fold_in(key, self.number), 0.0, 0.0
        before: Any = None
        after: Any = None
        for t in range(num_steps):
            with self.turns:
                began = time.perf_counter()
                row = {name: each[t] for name, each in rows.items()}
                check_obs(self.policy, self.obs)
                place = (np.int32((update - 1) * num_steps + t), np.int32(self.number)) if self.explores else None
                drawn, part, remembered = sample_action(
                    self.policy, params, self.obs, self.memory, key, np.int32(t), row, place
                )
                action = np.asarray(drawn)
                given = to_action(self.form, action if part is None else part)
                self.policy_s += time.perf_counter() - began
            # before the step: an environment may write the next observation over this one
            before = _write(before, t, num_steps, (self.obs, action, (self.memory, remembered)))
            with gate() as stop:  # outside ``turns``, so that other groups act while this one steps
                if stop:
                    raise CollectionStopped
                report(f"step {t + 1} of {num_steps}, group {self.number}: {self.name}")
                began = time.perf_counter()
                timestep = self.call("step", given.copy() if listeners else given)  # it may write into its own
                self.env_s += time.perf_counter() - began
            after = _write(after, t, num_steps, timestep)
            if listeners:
                seen = jax.tree.map(lambda page, t=t: page[t], before[0])
                step = HostStep(update=update, group=self.number, obs=seen, action=given, timestep=timestep)
                with self.turns:
                    for listener in listeners:
                        listener(step)
            # a step that only reset belongs to no episode
            ended = timestep.terminated | timestep.truncated | ~np.asarray(timestep.info.get("valid", True))
            self.obs, self.memory = timestep.obs, forget_outside(self.policy, remembered, ended)
            self.num_steps = t + 1
        return *before, after

    def compile(self, params: Params, row: dict[str, NDArray[Any]]) -> None:
        """Compile the policy, on zeros, and what ``collect`` calls of a ``PureHostEnv``; nothing moves."""
        key, _ = jax.random.split(jax.random.fold_in(jax.random.key(0), self.number))  # programs, as ``collect``'s are
        obs = gymnasium.vector.utils.create_empty_array(self.env.observation_space, self.env.num_envs, fn=np.zeros)
        memory = self.memory
        for t in range(2):  # the second time with a memory that a step has made
            place = (np.int32(t), np.int32(self.number)) if self.explores else None
            drawn, part, memory = sample_action(self.policy, params, obs, memory, key, np.int32(t), row, place)
        if isinstance(self.env, PureHostEnv):
            self.env.compile(to_action(self.form, drawn if part is None else part))

    def state(self) -> PyTree:
        """Return the environments' state, with the policy's memory where it has one; None: none to save."""
        if self.savable is None:
            return None
        env = call_env(self.name, "get_state", self.savable.get_state)
        if not isinstance(self.policy, PolicyWithMemory):
            return env
        return {"env": env, "memory": jax.tree.map(np.asarray, self.memory)}

    def restore(self, state: PyTree) -> None:
        if self.savable is None:
            raise ValueError(f"{self.name} has no state to set; the environments of a run must not change")
        if isinstance(self.policy, PolicyWithMemory):
            self.memory, state = jax.tree.map(jnp.asarray, state["memory"]), state["env"]
        self.obs = call_env(self.name, "set_state", self.savable.set_state, state)
        if isinstance(self.env, GuardedEnv):
            self.env.adopt(self.obs)

    def close(self, patience_s: float) -> None:
        """Close the environments. Raises TimeoutError: a step takes longer than that, and they are left open."""
        if not self.idle.wait(patience_s):
            raise TimeoutError(f"env '{self.name}' of group {self.number} is left open: its step has not returned")
        self.call("close")


def _write(pages: PyTree, t: int, num_steps: int, tree: PyTree) -> PyTree:
    """Copy a tree into row ``t`` of arrays [T, ...], which the first step makes."""
    if t == 0:
        pages = jax.tree.map(lambda x: np.empty((num_steps, *np.shape(x)), np.asarray(x).dtype), tree)
    jax.tree.map(lambda page, x: page.__setitem__(t, x), pages, tree)
    return pages


@partial(jax.jit, static_argnames="policy")
def sample_action(
    policy: Policy,
    params: Params,
    obs: PyTree,
    memory: PyTree,
    key: Key,
    t: Array,
    rows: dict[str, Array],
    place: tuple[Array, Array] | None = None,
) -> tuple[Array, Array | None, PyTree]:
    """Return step t's actions [N, ...], their part for the environments (None: all), and the memory after it.
    ``place``: the run's number of the step, and the group's, for an ``ExploringPolicy``."""
    distribution, _, remembered = apply_policy(policy, params, obs, memory, **rows)
    key = jax.random.fold_in(key, t)
    if place is not None and isinstance(policy, ExploringPolicy):
        action = policy.explore(params, distribution, key, *place)
    else:
        action = distribution.sample(key)
    given = distribution.env_action(action)
    return action, None if given is action else given, remembered
