"""A model of an environment's steps, fitted to a replay buffer: increments of the observation, rewards, ends.

    s' = s + σ·f(s, a),   L = 1/h · Σₖ mean over numbers ((ŝₖ − sₖ)/σ)²,   ŝ₀ = s₀, ŝₖ₊₁ by the actions that were done
    error k = √(Σ ((ŝₖ − sₖ)/σ)² / Σ ((sₖ − s₀)/σ)²)   of rows that are never fitted: 0 is perfect, 1 as "nothing moves"

σ is the root mean square of each number's increments so far: a number that never moved, such as a goal, stays. Reward
and end of a predicted step are the task's own code where it can judge one (``JudgingEnv``), else a second network's.
Observations of several arrays are predicted as one vector of all their numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from flax import struct
from pydantic import PositiveInt

from ejax.algorithms.differentiable import Dynamics
from ejax.algorithms.replay_buffer import Replay, Transition, sample_rows, take_rows
from ejax.algorithms.soft_actor import step_networks
from ejax.distributions import ActionSpec
from ejax.numerics.moments import Moments, add_rows
from ejax.optim import OptimizerConfig, make_optimizer
from ejax.policies.calls import rows_like
from ejax.policies.mlp import MLP, Activation, NetworkConfig, widen
from ejax.policies.observations import flatten_observation
from ejax.rollout import EnvCarry
from ejax.schema.frozen import StrictModel
from ejax.types import Array, Env, Key, Metrics, PyTree, Rollout, Timestep, TrainState, make_train_state

_HELD_OUT = 16  # every 16th row of the ring is never fitted: it measures the model
_MOST = 10.0  # deviations from the mean, beyond which a network sees no more

StepRows = Callable[[PyTree, PyTree, Array], tuple[PyTree, Timestep]]
"""``(state, obs [N, ...], action [N, A]) -> (state, time step)`` of N rows, none of which is started again."""


@runtime_checkable
class JudgingEnv(Env, Protocol):
    """An environment whose own code gives reward and end of a step that a learned model predicts."""

    @property
    def judges(self) -> bool:
        """Observations [O] have all that reward and end depend on."""

    def state_of(self, obs: Array) -> PyTree:
        """Reconstruct the state of an observation."""

    def judge_prediction(self, obs: Array, action: Array, next_obs: Array) -> Timestep: ...


class DynamicsConfig(StrictModel):
    """``algorithm.cfg.model``."""

    width: PositiveInt = 256
    """Units of each hidden layer of f, and of the network of reward and end, where it is learned."""
    depth: PositiveInt = 2
    """Hidden layers."""
    activation: Activation = "silu"
    """After each of them: a smooth one, since gradients flow through it."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3)
    """The update rule and the learning rate of both."""
    batch_size: PositiveInt = 256
    """Transitions of a minibatch."""
    gradient_steps: PositiveInt = 8
    """Gradient steps of the model in an update."""
    horizon: PositiveInt = 1
    """h: steps that a minibatch is predicted over, fewer where the episode ends."""
    rewards: Literal["auto", "learned"] = "auto"
    """auto: reward and end are the task's own code, where it can judge predicted steps; else they are learned."""


@struct.dataclass(kw_only=True)
class LearnedDynamics:
    """The networks, and what they were normalized by."""

    train: TrainState
    seen: dict[str, Moments]
    """Moments of ``obs`` [O], ``increment`` [O] and ``reward`` [1]."""


@dataclass(frozen=True)
class Model:
    """The functions of a model; hashable. ``env`` None: reward and end are learned."""

    config: DynamicsConfig
    action_spec: ActionSpec
    env: JudgingEnv | None

    def init(self, key: Key, num_obs: int) -> LearnedDynamics:
        """Make networks that have seen nothing."""
        num_actions = self.action_spec.num_actions
        # both, so that a run may change what judges
        inputs = {"dynamics": num_obs + num_actions, "outcome": 2 * num_obs + num_actions}
        params = {
            name: self._network(name, num_obs).init(jax.random.fold_in(key, i), jnp.zeros((1, size)))["params"]
            for i, (name, size) in enumerate(inputs.items())
        }
        nothing = {
            name: (jnp.zeros(()), jnp.zeros(size), jnp.zeros(size))
            for name, size in {"obs": num_obs, "increment": num_obs, "reward": 1}.items()
        }
        return LearnedDynamics(train=make_train_state({"params": params}, self.optimizer), seen=nothing)

    @property
    def optimizer(self) -> optax.GradientTransformation:
        return make_optimizer(self.config.optimizer)

    def see(self, model: LearnedDynamics, rollout: Rollout) -> LearnedDynamics:
        """Add the steps of a rollout with ``next_obs`` to the moments."""
        obs, next_obs = flatten_observation(rollout.obs), flatten_observation(rollout.next_obs)
        steps = {"obs": obs, "increment": next_obs - obs, "reward": rollout.reward[..., None]}
        return replace(
            model, seen={name: add_rows(model.seen[name], rows, rollout.valid) for name, rows in steps.items()}
        )

    def fit(self, model: LearnedDynamics, replay: Replay, key: Key, options: Any) -> tuple[LearnedDynamics, Metrics]:
        """Make a gradient step on a minibatch; ``options`` limit its gradient."""
        steps = draw_steps(replay, key, self.config.batch_size, self.config.horizon)

        def loss(params: PyTree) -> tuple[Array, Metrics]:
            def predict(obs: Array, step: tuple[Transition, Array]) -> tuple[Array, dict[str, Array]]:
                batch, weight = step
                obs = self._next_obs(params, model.seen, obs, batch.action)
                losses = {"dynamics": jnp.square(self._scaled(model.seen, obs - batch.next_obs)).mean(axis=-1)}
                if self.env is None:
                    losses |= self._outcome_losses(params, model.seen, batch)
                total = jnp.maximum(weight.sum(), 1.0)
                return obs, {name: jnp.sum(weight * x) / total for name, x in losses.items()}

            _, losses = jax.lax.scan(predict, steps[0].obs[0], steps)
            means = {f"model_{name}_loss": x.mean() for name, x in losses.items()}
            return sum(means.values(), jnp.zeros(())), means

        networks = model.train.params["params"]
        train, metrics = step_networks(model.train, networks, loss, self.optimizer, options, "model")
        return replace(model, train=train), metrics

    def predict(
        self, model: LearnedDynamics, obs: PyTree, action: Array, rewards: tuple[Array, Array] | None = None
    ) -> Timestep:
        """Predict a step of rows ``obs`` [N, ...] by ``action`` [N, A]; a learned reward is clipped to ``rewards``."""
        params, numbers = model.train.params["params"], flatten_observation(obs)
        next_obs = self._next_obs(params, model.seen, numbers, action)
        if self.env is not None:
            # its observation is the task's own of what was predicted: numbers that follow from others agree with them
            return jax.vmap(self.env.judge_prediction)(obs, action, next_obs)
        reward, end = self._outcome(params, model.seen, numbers, action, next_obs)
        reward = reward if rewards is None else jnp.clip(reward, *rewards)
        never = jnp.zeros(reward.shape, bool)
        return Timestep(obs=_arrays_like(obs, next_obs), reward=reward, terminated=end > 0.0, truncated=never, info={})

    def errors(self, model: LearnedDynamics, replay: Replay, key: Key, num_steps: int) -> Array:
        """Measure error 1 … ``num_steps``, [num_steps], on rows that are never fitted."""
        steps = draw_steps(replay, key, self.config.batch_size, num_steps, held_out=True)
        start = steps[0].obs[0]

        def predict(obs: Array, step: tuple[Transition, Array]) -> tuple[Array, Array]:
            batch, weight = step
            obs = flatten_observation(self.predict(model, obs, batch.action).obs)
            wrong, moved = (
                jnp.sum(weight[:, None] * jnp.square(self._scaled(model.seen, x - batch.next_obs)))
                for x in (obs, start)
            )
            return obs, jnp.sqrt(wrong / jnp.maximum(moved, 1e-12))

        errors: Array = jax.lax.scan(predict, start, steps)[1]
        return errors

    def _network(self, name: str, num_obs: int) -> MLP:
        config = NetworkConfig(hidden_sizes=(self.config.width,) * self.config.depth, activation=self.config.activation)
        return MLP(config, num_obs if name == "dynamics" else 2)

    def _apply(self, name: str, params: PyTree, inputs: Array, num_obs: int) -> Array:
        network = self._network(name, num_obs)
        output: Array = network.apply({"params": params[name]}, inputs)  # type: ignore[assignment]  # it returns no state
        return output

    def _next_obs(self, params: PyTree, seen: dict[str, Moments], obs: Array, action: Array) -> Array:
        inputs = jnp.concatenate([_normalized(obs, seen["obs"]), self.action_spec.unit_action(action)], axis=-1)
        output = self._apply("dynamics", params, inputs, obs.shape[-1])
        return obs + output * widen(_scale(seen), obs)

    def _outcome(
        self, params: PyTree, seen: dict[str, Moments], obs: Array, action: Array, next_obs: Array
    ) -> tuple[Array, Array]:
        """Predict the reward, and the logit of an end of the task, [N] each, of a step to ``next_obs``."""
        moved = jnp.clip(self._scaled(seen, next_obs - obs), -_MOST, _MOST)
        inputs = [_normalized(obs, seen["obs"]), self.action_spec.unit_action(action), moved]
        output = self._apply("outcome", params, jnp.concatenate(inputs, axis=-1), obs.shape[-1])
        _, mean, variance = seen["reward"]
        return mean + output[..., 0] * (jnp.sqrt(variance) + 1e-6), output[..., 1]

    def _outcome_losses(self, params: PyTree, seen: dict[str, Moments], batch: Transition) -> dict[str, Array]:
        reward, end = self._outcome(params, seen, batch.obs, batch.action, batch.next_obs)
        deviation = jnp.sqrt(seen["reward"][2]) + 1e-6
        ended = (batch.discount == 0.0).astype(jnp.float32)
        return {
            "reward": jnp.square((reward - batch.reward) / deviation),
            "end": optax.sigmoid_binary_cross_entropy(end, ended),
        }

    def _scaled(self, seen: dict[str, Moments], increment: Array) -> Array:
        scale = widen(_scale(seen), increment)
        return jnp.where(scale > 0.0, increment / jnp.where(scale > 0.0, scale, 1.0), 0.0)


def draw_steps(
    replay: Replay, key: Key, num_rows: int, num_steps: int, *, held_out: bool = False
) -> tuple[Transition, Array]:
    """Draw rows, and those of the steps after them: transitions, leaves [T, M, ...], observations flat [T, M, O], and
    weights [T, M], which are 0 from where the episode, or what the ring has of it, ends. ``held_out``: rows that are
    never fitted."""
    num_envs = replay.tail.reward.shape[-1]  # an environment's next step is so many rows later
    rows = sample_rows(replay, key, num_rows)
    if held_out:
        rows = rows // _HELD_OUT * _HELD_OUT
    at = (rows + num_envs * jnp.arange(num_steps)[:, None]) % jnp.maximum(replay.size[0], 1)
    steps = jax.tree.map(
        lambda x: x.reshape(num_steps, num_rows, *x.shape[1:]), take_rows(replay, at.reshape(1, num_steps * num_rows))
    )
    steps = replace(steps, obs=flatten_observation(steps.obs), next_obs=flatten_observation(steps.next_obs))
    # the ring does not say where an episode ends: its next row then begins elsewhere
    follows = jnp.all(steps.next_obs[:-1] == steps.obs[1:], axis=-1) & (steps.discount[:-1] > 0.0)
    counts = jnp.concatenate([jnp.ones((1, num_rows), bool), follows]) & (held_out | (at % _HELD_OUT != 0))
    return steps, jnp.cumprod(counts.astype(jnp.float32), axis=0)


def reward_range(replay: Replay) -> tuple[Array, Array]:
    """Return the lowest and the highest reward in the buffer, [], of which one is 0 where all have the same sign."""
    rewards = cast(Transition, replay.rows).reward  # 0 where nothing was written
    return rewards.min(initial=0.0), rewards.max(initial=0.0)


def imagine(
    step_rows: StepRows, start: EnvCarry, horizon: Array | int, values: tuple[Array, Array] | None = None
) -> tuple[Dynamics, EnvCarry]:
    """Make dynamics of episodes of ``horizon`` steps that are then cut off; a row that ends begins at its ``start``
    again, a row of the replay buffer. Returns them, with the ``values`` of ``Dynamics``, and the rows to begin with."""
    count = jnp.zeros(jax.tree.leaves(start.obs)[0].shape[0], jnp.int32)
    first = EnvCarry(state=(count, start.state), obs=start.obs)

    def step(carry: EnvCarry, action: Array) -> tuple[EnvCarry, Timestep]:
        count, state = carry.state
        state, timestep = step_rows(state, carry.obs, action)
        timestep = replace(timestep, truncated=timestep.truncated | (count + 1 >= horizon), final_obs=timestep.obs)
        after = EnvCarry(state=(count + 1, state), obs=timestep.obs)
        after = jax.tree.map(lambda one, other: jnp.where(rows_like(timestep.done, one), one, other), first, after)
        return after, replace(timestep, obs=after.obs)

    return Dynamics(step, values=values), first


def trusted_horizon(errors: Array, bound: float) -> Array:
    """Count the first steps whose ``errors`` [h] are within the bound, [] int32, at least 1."""
    return jnp.maximum(jnp.cumprod((errors <= bound).astype(jnp.int32)).sum(), 1)


def _arrays_like(obs: PyTree, numbers: Array) -> PyTree:
    """Split ``numbers`` [N, O] into the arrays of ``obs``: the inverse of ``flatten_observation``."""
    arrays, form = jax.tree.flatten(obs)
    ends = list(accumulate(x.shape[-1] for x in arrays))
    return jax.tree.unflatten(form, jnp.split(numbers, ends[:-1], axis=-1))


def _normalized(x: Array, moments: Moments) -> Array:
    _, mean, variance = moments
    return jnp.clip((x - widen(mean, x)) / widen(jnp.sqrt(variance) + 1e-4, x), -_MOST, _MOST)


def _scale(seen: dict[str, Moments]) -> Array:
    """σ, [O]; 0 where a number moves by no more than float32 rounds it."""
    (_, mean, variance), (_, center, spread) = seen["increment"], seen["obs"]
    scale = jnp.sqrt(variance + jnp.square(mean))
    return jnp.where(scale > 1e-6 * (jnp.abs(center) + jnp.sqrt(spread)), scale, 0.0)
