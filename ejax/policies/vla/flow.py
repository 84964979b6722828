"""Chunks of actions from a learned flow, and their log-probability.

A velocity field v carries noise at τ = 0 to actions at τ = 1 in S steps of Δ = 1/S (flow matching, Lipman et al. 2023):

    cloning     x_τ = τ·a + (1 − τ)·ε,   L = E (1 − τ)²·‖v(x_τ, τ, o) − (a − ε)‖²,   ε ~ N(0, 1), p(τ) = 2(1 − τ)
    mode        x ← x + Δ·v(x, τ, o) from x = 0
    sample      the same from x = ε, but a stochastic step is
                x' = μ + σ·√Δ·n,   μ = x + Δ·(v − σ²/(2(1 − τ))·(x − τ·v)),   σ = a·√(1 − τ),   n ~ N(0, 1)

In the limit of small steps the actions are distributed as without the noise (Song et al. 2021). A stochastic step has
the density N(x'; μ, σ²Δ). With ``stochastic_steps: all`` a sample's log-probability is that of its whole path, given
its first noise; with ``one`` that of one step, drawn uniformly, with the rest as the environment's part: one evaluation
of v in an update, not S. Sources: Flow-GRPO (Liu et al. 2025); RLinf-VLA's Flow-SDE (2025).

A sample is a *decision* [D]: the chunk that the environment gets, ``env_action``, and the input of the log-probability.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ejax.distributions import Drawn
from ejax.policies.vla.config import HeadConfig
from ejax.types import Array, Distribution, Key, PyTree

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True)
class FlowSpec:
    """Constants of a flow for chunks [K, A]; hashable."""

    network: Any
    """``apply(variables, context, x [B, K, A], tau [B], method="velocity") -> v [B, K, A]``; hashable."""
    horizon: int
    action_dim: int
    head: HeadConfig
    robot_dim: int | None = None
    """Numbers of the robot's action, of a network of LeRobot's with its own units, which it converts:
    ``apply(variables, chunk [..., K, A], method="to_env")`` makes what the environment gets, ``"to_model"`` is its
    inverse. Its ``velocity`` takes 1 − τ, exact at each step: close times differ much to it. None: no other units."""

    @property
    def size(self) -> int:
        return self.horizon * self.action_dim

    @property
    def taught_size(self) -> int:
        """Numbers of a chunk that is cloned."""
        return self.horizon * (self.robot_dim or self.action_dim)


@struct.dataclass
class FlowChunk(Distribution):
    """The distribution of a chunk for each of a batch of observations, leading axes [...]: an ``ejax`` distribution. It
    carries the network's variables, so a rollout stores ``for_storage``."""

    is_flow = True

    variables: PyTree
    context: PyTree
    """The network's encoding of the observations, leaves [B, ...]."""
    spec: FlowSpec = struct.field(pytree_node=False)
    batch: tuple[int, ...] = struct.field(pytree_node=False)
    """The leading axes."""

    def sample(self, key: Key) -> Array:
        """Draw [..., D]: the chunk, then x around the stochastic step and its number, or x before each step."""
        steps, num_rows = self.spec.head.num_steps, math.prod(self.batch)
        whole_path = self.spec.head.stochastic_steps == "all"
        key_start, key_noise, key_which = jax.random.split(key, 3)  # three in either case, for the same draws
        shape = (num_rows, self.spec.horizon, self.spec.action_dim)
        first = jax.random.normal(key_start, shape)
        noise = jax.random.normal(key_noise, (steps, *shape))
        which = jax.random.randint(key_which, (num_rows,), 0, steps)
        chosen = (jnp.arange(steps)[:, None] == which[None]) | whole_path

        def one_step(x: Array, xs: tuple[Array, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
            number, noise, stochastic = xs
            mean, scale, plain = self._step(x, jnp.broadcast_to(number, (num_rows,)))
            after = jnp.where(stochastic[:, None, None], mean + scale * noise, plain)
            return after, (x, after)

        last, (before, after) = jax.lax.scan(one_step, first, (jnp.arange(steps), noise, chosen))
        if whole_path:
            parts = jnp.concatenate([last[None], before])
        else:  # the log-probability needs the one step alone: its ends and its number
            parts = jnp.stack([last, *(x[which, jnp.arange(num_rows)] for x in (before, after))])
        flat = jnp.moveaxis(parts, 0, 1).reshape(num_rows, -1)
        if not whole_path:
            flat = jnp.concatenate([flat, which[:, None].astype(jnp.float32)], axis=-1)
        return flat.reshape(*self.batch, -1)

    def mode(self) -> Array:
        """Make the environment's chunk of zero noise, [..., K·A]."""
        return self.env_action(self.from_noise(jnp.zeros((*self.batch, self.spec.size))))

    def from_noise(self, noise: Array) -> Array:
        """Make the chunk of ``noise`` [..., K·A], without noise on the way."""
        x = noise.reshape(-1, self.spec.horizon, self.spec.action_dim)

        def one_step(x: Array, number: Array) -> tuple[Array, None]:
            return self._step(x, jnp.broadcast_to(number, x.shape[:1]))[2], None

        x, _ = jax.lax.scan(one_step, x, jnp.arange(self.spec.head.num_steps))
        return x.reshape(*self.batch, -1)

    def continued(self, plan: Array, weight: Array, most: float) -> Array:
        """Make the environment's chunk of zero noise that goes on as ``plan`` [..., K, A], by ``weight`` [..., K]:

            v + min(β, (τ² + (1 − τ)²)/(τ·(1 − τ)))·Jᵀ(w·(plan − â)),   â = x + (1 − τ)·v,   J = ∂â/∂x

        is the velocity; β is ``most``, and w = 0 leaves ``mode``'s. Source: Black et al. 2025, equations 2 to 4.
        """
        num_rows, horizon, step = math.prod(self.batch), self.spec.horizon, 1.0 / self.spec.head.num_steps
        plan, weight = plan.reshape(num_rows, horizon, -1), weight.reshape(num_rows, horizon, 1)
        if self.spec.robot_dim is not None:
            plan = self.spec.network.apply(self.variables, plan, method="to_model")

        def one_step(x: Array, times: tuple[Array, Array]) -> tuple[Array, None]:
            tau, left = times

            def end_of(x: Array) -> tuple[Array, Array]:
                velocity = self._velocity(x, *(jnp.broadcast_to(time, x.shape[:1]) for time in times))
                return x + left * velocity, velocity

            end, pull, velocity = jax.vjp(end_of, x, has_aux=True)
            scale = jnp.minimum(most, (tau**2 + left**2) / (tau * left))  # of τ = 0: infinite
            return x + step * (velocity + scale * pull(weight * (plan - end))[0]), None

        tau = np.arange(self.spec.head.num_steps) * step
        x, _ = jax.lax.scan(one_step, jnp.zeros_like(plan), (jnp.asarray(tau), jnp.asarray(1.0 - tau)))
        return self.env_action(x.reshape(*self.batch, -1))

    def env_action(self, decision: Array) -> Array:
        """Return a decision's part for the environment, [..., K·A]."""
        chunk = decision[..., : self.spec.size]
        if self.spec.robot_dim is None:
            return chunk
        chunk = chunk.reshape(*chunk.shape[:-1], self.spec.horizon, self.spec.action_dim)
        given = self.spec.network.apply(self.variables, chunk, method="to_env")
        return given.reshape(*given.shape[:-2], -1)

    def log_prob(self, decision: Array) -> Array:
        """Compute log π [...] of the stochastic steps of a decision."""
        parts = decision.reshape(math.prod(self.batch), -1)
        size, steps = self.spec.size, self.spec.head.num_steps
        if self.spec.head.stochastic_steps == "one":
            before, after, number = parts[:, size : 2 * size], parts[:, 2 * size : 3 * size], parts[:, -1]
            return self._log_density(before, after, number).reshape(self.batch)
        path = jnp.concatenate([parts[:, size:], parts[:, :size]], axis=-1).reshape(-1, steps + 1, size)
        density = jax.vmap(self._log_density, in_axes=(1, 1, 0))
        numbers = jnp.broadcast_to(jnp.arange(steps, dtype=jnp.float32)[:, None], (steps, len(parts)))
        return density(path[:, :-1], path[:, 1:], numbers).sum(axis=0).reshape(self.batch)

    def entropy(self) -> Array:
        """Compute the entropy [...] of the added noise, the same for all observations."""
        numbers = jnp.arange(self.spec.head.num_steps)
        # of the steps alone: the first noise is given
        each = self.spec.size * (0.5 + _HALF_LOG_2PI + jnp.log(self._scale(numbers)))
        total = each.sum() if self.spec.head.stochastic_steps == "all" else each.mean()
        return jnp.broadcast_to(total, self.batch)

    def kl(self, other: Any) -> Array:
        """Raise ValueError: the divergence has no closed form."""
        del other
        raise ValueError("the divergence of two flows has no closed form: leave out schedule: adaptive")

    def for_storage(self, decision: Array) -> Drawn:
        """Keep for the rollout the log-probability of the draw."""
        return Drawn(self.log_prob(decision))

    def matching_loss(self, target: Array, key: Key) -> Array:
        """Compute the flow-matching loss of ``target``, [..., K, A], averaged over ``samples_per_row`` draws.

        A network of LeRobot's has LeRobot's: ‖v − (a − ε)‖², 1 − τ = 0.001 + 0.999·β, β ~ Beta(1.5, 1).
        """
        action = target.reshape(math.prod(self.batch), self.spec.horizon, target.shape[-1])
        theirs = self.spec.robot_dim is not None
        if theirs:
            action = self.spec.network.apply(self.variables, action, method="to_model")

        def at_one_time(key: Key) -> Array:
            key_noise, key_time = jax.random.split(key)
            noise = jax.random.normal(key_noise, action.shape)
            # more often near the noise, where the observation alone determines the action
            drawn = jax.random.uniform(key_time, action.shape[:1])
            left = 0.001 + 0.999 * drawn ** (2.0 / 3.0) if theirs else jnp.sqrt(drawn)
            tau = 1.0 - left
            share = tau[:, None, None]
            velocity = self._velocity(share * action + (1.0 - share) * noise, tau, left)
            error = velocity - (action - noise)
            return jnp.square(error if theirs else (1.0 - share) * error)

        keys = jax.random.split(key, self.spec.head.samples_per_row)
        return jax.vmap(at_one_time)(keys).mean(axis=0)[..., : target.shape[-1]].reshape(target.shape)

    def _velocity(self, x: Array, tau: Array, left: Array) -> Array:
        time = tau if self.spec.robot_dim is None else left
        return self.spec.network.apply(self.variables, self.context, x, time, method="velocity")

    def _step(self, x: Array, number: Array) -> tuple[Array, Array, Array]:
        """Compute ``(μ, σ·√Δ, x + Δ·v)`` of step ``number`` [B]; x: [B, K, A]."""
        step = 1.0 / self.spec.head.num_steps
        tau = number.astype(x.dtype) * step
        left = jnp.asarray(1.0 - np.arange(self.spec.head.num_steps) / self.spec.head.num_steps, x.dtype)
        velocity = self._velocity(x, tau, left[number.astype(jnp.int32)])
        share = tau[:, None, None]
        plain = x + step * velocity
        # σ² / (2(1 − τ)) = a² / 2
        drift = 0.5 * self.spec.head.noise_level**2 * (x - share * velocity)
        return plain - step * drift, self._scale(number)[:, None, None], plain

    def _scale(self, number: Array) -> Array:
        """Compute σ·√Δ of step ``number``."""
        step = 1.0 / self.spec.head.num_steps
        return self.spec.head.noise_level * jnp.sqrt((1.0 - number * step) * step)

    def _log_density(self, before: Array, after: Array, number: Array) -> Array:
        """Compute log N(after; μ, σ²Δ) [B]; before, after: [B, K·A]."""
        shape = (-1, self.spec.horizon, self.spec.action_dim)
        mean, scale, _ = self._step(before.reshape(shape), number)
        z = (after.reshape(shape) - mean) / scale
        return -jnp.sum(0.5 * jnp.square(z) + jnp.log(scale) + _HALF_LOG_2PI, axis=(1, 2))
