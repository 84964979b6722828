"""The data that flow through ejax: arrays in frozen dataclasses, and the interfaces between the layers. Batched data is
time-major, ``[T, N, ...]``.

Letters in shapes: T time steps, N parallel environments, A action dimensions, B a flat batch of T·N rows.
"""

from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from numpy.typing import NDArray

Array: TypeAlias = jax.Array
Key: TypeAlias = jax.Array
"""A typed PRNG key, made by ``jax.random.key``."""
PyTree: TypeAlias = Any
Params: TypeAlias = Any
"""Flax variables: ``{"params": trained arrays, <other collections>: arrays that are carried, not trained}``."""
Metrics: TypeAlias = dict[str, Array]
Phase: TypeAlias = Literal["train", "eval"]
"""The use of an environment in a run."""
PHASES: tuple[Phase, ...] = ("train", "eval")


def brief(arrays: Any) -> str:
    """Return a short ``repr`` of a dataclass of arrays."""
    sizes = [np.size(x) for x in jax.tree.leaves(arrays)]
    return f"<{type(arrays).__name__}: {len(sizes)} arrays of {sum(sizes):,} numbers; ejax.print_tree shows them>"


@struct.dataclass(kw_only=True)
class Timestep:
    """An environment's answer to one action. ``final_obs`` None: a single environment, which never resets itself;
    ``ejax.rollout.step`` fills it."""

    obs: PyTree
    """The observation to act on next. After an automatic reset: the first one of the new episode."""
    reward: Array
    """Reward of this control step, float32."""
    terminated: Array
    """The task ended (goal reached, failure): no value follows. bool."""
    truncated: Array
    """Only the episode ended (time limit, out of bounds): value follows ``final_obs``. bool."""
    info: dict[str, Any]
    """``success`` bool, ``metrics`` {name: array}, ``rewards`` {term: array}: taken before the reset; the same keys at
    every step. Each of the three may be missing."""
    final_obs: PyTree = None
    """The true next observation, before any reset: equal to ``obs`` in rows that did not end."""

    __repr__ = brief

    @property
    def done(self) -> Array:
        return self.terminated | self.truncated


@struct.dataclass(kw_only=True)
class Rollout:
    """T steps of N environments under one policy; every leaf is ``[T, N, ...]``."""

    obs: PyTree
    action: Array
    log_prob: Array
    """log π(action | obs) of the policy that acted, summed over action dimensions."""
    value: Array
    """V(obs)."""
    next_value: Array
    """V(the true next observation), also where the episode ended: truncation is handled by data, exactly."""
    reward: Array
    terminated: Array
    truncated: Array
    info: dict[str, Any] = struct.field(default_factory=dict)
    """As in ``Timestep``, of every step."""
    distribution: Any = None
    """The acting policy's distribution, where an update measures the exact KL to it."""
    dropout_seed: Array | None = None
    """uint32. Determines the dropped units of each row, so that the update drops the same. None: no dropout."""
    valid: Array | None = None
    """bool. False: not a transition, such as a step that only reset, or that was not simulated. None: all are."""
    version: Array | None = None
    """int32. Updates done by the parameters that acted, where a background collector made the rollout."""
    memory: PyTree = None
    """The memory of the policy when it acted: a sequence can be resumed at any step. None: no memory."""
    next_obs: PyTree = None
    """The true next observation, before any reset. None: it is large, and the policy no ``ActionValuePolicy``."""
    extras: dict[str, Any] = struct.field(default_factory=dict)
    """Your own arrays, for your own algorithm; ejax reads none of them."""

    __repr__ = brief

    @property
    def done(self) -> Array:
        """Mark the steps that ended an episode, for any reason. ``[T, N]`` bool."""
        return self.terminated | self.truncated


@struct.dataclass(kw_only=True)
class TrainState:
    """The state that an update reads and writes. Arrays only: policy, optimizer and config are static arguments."""

    step: Array
    """Updates done (those that were skipped not counted), int32: the clock of a learning-rate schedule."""
    params: Params
    opt_state: PyTree
    reference: Params = None
    """Frozen parameters that the policy is kept close to, where an algorithm has a ``kl_coef``."""
    target: Params = None
    """The parameters with a target critic, which follows the critic slowly, where an algorithm has one."""

    __repr__ = brief


def init_train_state(
    policy: "Policy", optimizer: Any, key: Key, obs: PyTree, *, reference: bool = False, target: bool = False
) -> TrainState:
    """Make fresh parameters and a fresh optimizer state, at step 0. ``obs``: leaves [N, ...], of which only the shapes
    count. ``reference``, ``target``: keep the first parameters as such."""
    params = policy.init(key, obs)
    kept = {name: params for name, keep in (("reference", reference), ("target", target)) if keep}  # shared, not copied
    return make_train_state(params, optimizer, **kept)


def make_train_state(params: Params, optimizer: Any, *, reference: Params = None, target: Params = None) -> TrainState:
    """Make a ``TrainState`` at step 0 from existing parameters."""
    step, opt_state = jnp.zeros((), jnp.int32), optimizer.init(params["params"])  # statistics are not trained
    return TrainState(step=step, params=params, opt_state=opt_state, reference=reference, target=target)


def start_from(state: TrainState, params: Params) -> TrainState:
    """Begin a training with ``params``, its reference and target too where it has them; keep optimizer and step."""
    # both begin where this training does
    kept = {name: params for name in ("reference", "target") if getattr(state, name) is not None}
    return replace(state, params=params, **kept)


def split_critic(networks: PyTree) -> tuple[PyTree, PyTree]:
    """Split ``(all but the critic, the critic)`` of one collection of variables, or its gradients, by network's name.
    Names that begin with ``critic`` are the critic's: its network, its memory, its normalizer."""
    # by name: gradients too
    critic = {name: network for name, network in networks.items() if name.startswith("critic")}
    return {name: network for name, network in networks.items() if name not in critic}, critic


def with_critic(networks: PyTree, others: PyTree) -> PyTree:
    """Replace the critic of ``networks`` by that of ``others``."""
    return {**split_critic(networks)[0], **split_critic(others)[1]}


def with_networks(params: Params, networks: PyTree) -> Params:
    """Replace these networks of the parameters."""
    return {**params, "params": {**params["params"], **networks}}


class Distribution(Protocol):
    """A batch of action distributions; a pytree. Inherit from it: the last three members are defaults."""

    def sample(self, key: Key) -> Array: ...
    def mode(self) -> Array: ...
    def log_prob(self, action: Array) -> Array: ...
    def entropy(self) -> Array: ...
    def kl(self, other: Any) -> Array: ...

    is_flow: ClassVar[bool] = False
    """It learns by its ``matching_loss`` and goes on as a plan, ``continued``, as ``ejax.policies.vla.flow`` does."""

    def env_action(self, action: Array) -> Array:
        """Take the part of a sampled action that the environment is given."""
        return action  # a flow draws more than the chunk

    def for_storage(self, action: Array) -> Any:
        """Take the part that a rollout stores, with ``log_prob`` of the sampled ``action`` and ``kl``."""
        del action  # most are small, and stored whole
        return self


class Policy(Protocol):
    """Two pure functions over pytrees, as of a Flax Linen module. Hashable: it is a static argument.

    Keywords reach ``apply`` only where they are of use: ``dropout_seed`` if a network has dropout, or a policy of your
    own takes it; ``observe`` and ``mutable`` if the parameters have a collection ``normalizer`` or ``batch_stats``.
    """

    def init(self, key: Key, obs: PyTree) -> Params: ...
    def apply(self, params: Params, obs: PyTree, **kwargs: Any) -> Any:
        """``(Distribution, value [...])`` for observations with leaves [..., F]."""


@runtime_checkable
class PolicyWithMemory(Policy, Protocol):
    """A policy that remembers: ``apply(params, obs, memory=…)`` gives ``(distribution, value, memory after it)``.

    Memory is a pytree with leaves [..., M] and starts again with each episode; without it an episode starts here.

    Updates ask about sequences: ``apply(params, obs, memory=…, first=…)``, observations with leaves [L, B, F], memory
    [B, M] from before the first step, and ``first`` [L, B] bool, the steps that an episode starts at. Distribution and
    value are [L, B, ...], as of L steps one after the other.
    """

    def init_memory(self, num_rows: int) -> PyTree:
        """Make the memory of an episode's start, leaves [num_rows, ...]."""


@runtime_checkable
class ActionValuePolicy(Policy, Protocol):
    """A policy whose critics value actions, Q(obs, action), as a method of its Flax module; its ``value`` is zeros, and
    its rollouts always keep ``next_obs``. Parameters of the critics have names that begin with ``critic``."""

    def action_values(self, obs: PyTree, action: Array) -> Array:
        """Evaluate each critic, [critics, ...]: ``policy.apply(params, obs, action, method="action_values")``."""


@runtime_checkable
class ExploringPolicy(Policy, Protocol):
    """A policy that draws the actions of a run's rollouts itself, by its own rules about the run's steps."""

    def explore(self, params: Params, distribution: Any, key: Key, step: Array, group: int | Array = 0) -> Array:
        """Draw the actions [N, A] of step number ``step``, int32, of the run, all environments together one step.
        ``key`` is the step's own; groups of environments that are stepped apart have numbers."""


@runtime_checkable
class PredictingPolicy(Policy, Protocol):
    """A policy that predicts parts of the observation, which it does not read, where it is cloned: ``apply(params, obs,
    predict=True)`` gives ``(distribution, value, {part: prediction [..., F]})``."""

    @property
    def predicts(self) -> tuple[str, ...]: ...


@runtime_checkable
class ReadingPolicy(Policy, Protocol):
    """A policy that reads an instruction word by word."""

    @property
    def text(self) -> str | None:
        """The part of the observation that is the instruction, uint8 [..., L]. None: there is none."""


class Env(Protocol):
    """One environment, pure. Hashable: it is a static argument. ``step`` does not reset; it keeps its own time limit in
    its state and reports it as ``truncated``."""

    @property
    def observation_space(self) -> gymnasium.Space: ...
    @property
    def action_space(self) -> gymnasium.Space: ...
    @property
    def max_episode_steps(self) -> int: ...
    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        """``(state, obs)`` of a new episode."""

    def step(self, state: PyTree, action: Array, key: Key) -> tuple[PyTree, Timestep]: ...


@runtime_checkable
class PersistentEnv(Env, Protocol):
    """An environment of which something outlasts an episode: what was drawn once, how far a curriculum has come.
    ``reset`` knows nothing of it: the caller hands it over."""

    def persist(self, ended: PyTree, started: PyTree, obs: PyTree) -> tuple[PyTree, PyTree]:
        """Return ``(state, obs)`` of a new episode, ``started`` by ``reset``, after one of the last state ``ended``."""


def persist(env: Env, ended: PyTree, started: PyTree, obs: PyTree) -> tuple[PyTree, PyTree]:
    """Return ``(state, obs)`` of a new episode after another, of an environment of any kind."""
    return env.persist(ended, started, obs) if isinstance(env, PersistentEnv) else (started, obs)  # most keep nothing


@struct.dataclass(kw_only=True)
class HostTimestep:
    """The answer of N environments outside JAX to one action each: NumPy arrays [N, ...]."""

    obs: PyTree
    """The observation to act on next, of a new episode where one ended."""
    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    info: dict[str, Any]
    """As in ``Timestep``, and ``valid`` bool, see ``Rollout``; ``nonfinite`` bool where it is not a transition because
    something was not finite, which ended the episode. The same keys at every step."""
    final_obs: PyTree
    """The true next observation, before any reset."""


@runtime_checkable
class HostEnv(Protocol):
    """N environments outside JAX, stepped together, in one thread at a time, with something to close. ``step`` resets
    the rows that ended; all arrays are NumPy's, [N, ...]. The spaces are of one environment, with a vector for every
    leaf of an observation; ``max_episode_steps`` 0: not known."""

    @property
    def num_envs(self) -> int: ...
    @property
    def observation_space(self) -> gymnasium.Space: ...
    @property
    def action_space(self) -> gymnasium.Space: ...
    @property
    def max_episode_steps(self) -> int: ...

    @property
    def seeds_rows(self) -> bool:
        """Every row's start state follows from its own seed."""

    @property
    def row_seed(self) -> NDArray[np.uint32]:
        """[N]: the seed of the episode under way in each row, where ``seeds_rows``."""

    def reset(self, seed: NDArray[np.uint32], rows: NDArray[np.bool_] | None = None) -> PyTree:
        """Start episodes, in all rows or in some; return the observations of all. ``seed`` [N] seeds the episodes
        that follow by automatic resets too."""

    def step(self, action: NDArray[Any]) -> HostTimestep: ...

    def close(self) -> None: ...


@runtime_checkable
class SavableHostEnv(HostEnv, Protocol):
    """A host environment whose running episodes can be saved: a resumed run continues them."""

    def get_state(self) -> PyTree:
        """Return the state as arrays, of the same shapes at every step."""

    def set_state(self, state: PyTree) -> PyTree:
        """Restore a state. Returns the observations to act on next."""


@runtime_checkable
class RenderableHostEnv(HostEnv, Protocol):
    """A host environment that can be recorded."""

    @property
    def frames_per_second(self) -> float:
        """Steps in a second, as they are to be seen."""

    def pictures(self) -> NDArray[np.uint8]:
        """[N, height, width, 3] RGB: every row as it is now; after an episode's end that is the start of the next."""


@runtime_checkable
class ReportingHostEnv(HostEnv, Protocol):
    """A host environment that has messages for the user, such as on a feature that it lacks."""

    def reports(self) -> list[str]: ...


class CameraView(NamedTuple):
    """A pinhole camera in the world's frame."""

    eye: tuple[float, float, float]
    """m"""
    target: tuple[float, float, float]
    """m"""
    fovy: float
    """Vertical field of view, degrees."""
    effects: bool = True
    """Shadows, reflections, smooth edges. Software rendering is about ten times faster without them."""
    up: tuple[float, float, float] = (0.0, 0.0, 1.0)
    """The direction that points up in the picture; its part along the line of sight has no effect."""
    fovx: float | None = None
    """Horizontal field of view, degrees. None: square pixels."""
    center: tuple[float, float] = (0.5, 0.5)
    """The point where the line of sight meets the picture: fractions of width and height, from the upper left."""


@runtime_checkable
class ChunkedEnv(Env, Protocol):
    """An environment whose action is a decision on several actions."""

    @property
    def actions_per_decision(self) -> int: ...
    def trajectory(self, state: PyTree, action: Array, key: Key) -> PyTree:
        """Return the states after each action of a decision, leaves [actions_per_decision, ...]."""


@runtime_checkable
class RenderableEnv(Env, Protocol):
    """An environment that can be recorded."""

    @property
    def control_period(self) -> float:
        """Seconds of simulated time in one step."""

    def render(
        self, state: PyTree, width: int = 640, height: int = 480, camera: CameraView | None = None
    ) -> NDArray[np.uint8]:
        """[height, width, 3] RGB of one environment's state, seen by its own camera or by ``camera``. On the host."""
