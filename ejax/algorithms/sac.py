"""Soft actor-critic.

    y = r + discount·(minᵢ Q'ᵢ(s', a') − α·log π(a'|s')),  a' ~ π(·|s')
    L(Q) = ½·Σᵢ E[(Qᵢ(s, a) − y)²]
    L(π) = E[α·log π(a|s) − minᵢ Qᵢ(s, a)],  a ~ π(·|s), by the critics after their step
    L(α) = −log α·E[log π(a|s) + H̄],  H̄ the entropy's target

r is the sum over the transition's steps, discount its γᵐ, 0 after an end of the task. log π is of actions in [-1, 1]:
H̄ does not depend on the environment's units. Actor and α step together, from the same α.

Source: Haarnoja et al. 2018 (arXiv:1812.05905); the order and the arithmetic of Stable-Baselines3's SAC. Options of TD3
(Fujimoto et al. 2018) are ``policy_delay``, ``target_noise`` and ``ent_coef`` 0.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from pydantic import NonNegativeFloat, PositiveFloat

from ejax.algorithms.off_policy import (
    OFF_POLICY_FIELDS,
    OffPolicyOptions,
    OffPolicyState,
    off_policy_update,
    policy_problems,
)
from ejax.algorithms.record import Algorithm
from ejax.algorithms.replay_buffer import Transition
from ejax.algorithms.soft_actor import learned_alpha, sample_soft, step_networks, with_skipped_fraction
from ejax.optim import follow_critic
from ejax.policies.calls import BinnedPolicy
from ejax.schema.problems import Problem
from ejax.types import Array, Key, Metrics, Params, Policy, PyTree, Rollout, TrainState, split_critic, with_networks


class SACConfig(OffPolicyOptions):
    """``algorithm.cfg`` of ``sac``. Defaults: Stable-Baselines3's, but for ``learning_starts``."""

    ent_coef: Literal["auto"] | NonNegativeFloat = "auto"
    """α, the entropy's weight. auto: it is learned, from the policy's ``initial_alpha`` on."""
    target_entropy: Literal["auto"] | float = "auto"
    """H̄, of actions in [-1, 1]. auto: −A."""
    target_noise: NonNegativeFloat = 0.0
    """TD3: deviation of a noise on the target's action in units of [-1, 1]; it takes the place of the sample."""
    target_noise_clip: PositiveFloat = 0.5
    """TD3: the largest such noise."""


@partial(jax.jit, static_argnames=("policy", "optimizer", "config"))
def sac_update(
    state: tuple[TrainState, OffPolicyState],
    rollout: Rollout,
    key: Key,
    *,
    policy: Any,
    optimizer: optax.GradientTransformation,
    config: SACConfig,
) -> tuple[tuple[TrainState, OffPolicyState], Metrics]:
    """Add a rollout to the buffer and make ``gradient_steps`` steps of SAC; see ``off_policy_update``."""
    return off_policy_update(state, rollout, key, policy=policy, optimizer=optimizer, config=config, learn=_learn)


def _learn(state: TrainState, extra: PyTree, *given: Any, **static: Any) -> tuple[TrainState, PyTree, Metrics]:
    """Do ``sac_step`` in the form of ``Learn``: nothing extra is kept."""
    state, metrics = sac_step(state, *given, **static)
    return state, extra, metrics


@partial(jax.jit, static_argnames=("policy", "optimizer", "config", "moves_actor"))
def sac_step(
    state: TrainState,
    batch: Transition,
    key: Key,
    moves_actor: bool = True,
    *,
    policy: Any,
    optimizer: optax.GradientTransformation,
    config: SACConfig,
) -> tuple[TrainState, Metrics]:
    """Make one gradient step of the critics, one of the actor and α (``moves_actor``), and move the target.

    Args:
        batch: transitions, leaves [B, ...].
        optimizer: from ``ejax.optim.make_actor_critic_optimizer``.
    """
    key_target, key_actor = jax.random.split(key)
    y = sac_target(state, batch, key_target, policy=policy, config=config)
    actor, critic = split_critic(state.params["params"])

    def critic_loss(critic: PyTree) -> tuple[Array, Metrics]:
        q = _values(policy, with_networks(state.params, critic), batch.obs, batch.action)
        return 0.5 * jnp.square(q - y[None]).mean(axis=-1).sum(), {"q": q.mean()}

    state, metrics = step_networks(state, critic, critic_loss, optimizer, config, "critic")

    def actor_loss(actor: PyTree) -> tuple[Array, Metrics]:
        distribution, _ = policy.apply(with_networks(state.params, actor), batch.obs)
        action, log_prob = sample_soft(distribution, key_actor)
        alpha = _alpha(state.params, config)
        # the critics are held, though the gradient goes through them to the action
        q = _values(policy, state.params, batch.obs, action).min(axis=0)
        loss = jnp.mean(alpha * log_prob - q)
        if config.ent_coef == "auto":
            target = -policy.action_spec.num_actions if config.target_entropy == "auto" else config.target_entropy
            loss -= (actor["log_alpha"] * jax.lax.stop_gradient(log_prob + target)).mean()
        return loss, {"entropy": -log_prob.mean(), "alpha": alpha}

    if moves_actor:
        state, of_actor = step_networks(state, actor, actor_loss, optimizer, config, "actor")
        metrics |= of_actor
    target = follow_critic(state.target, state.params, config.tau)
    return replace(state, target=target), with_skipped_fraction(metrics)


def sac_target(state: TrainState, batch: Transition, key: Key, *, policy: Any, config: SACConfig) -> Array:
    """Compute y, [B], by the target critics."""
    distribution, _ = policy.apply(state.params, batch.next_obs)
    if config.target_noise > 0.0:
        mode, width, limit = distribution.mode(), distribution.half_width, config.target_noise_clip
        noise = jnp.clip(config.target_noise * jax.random.normal(key, mode.shape), -limit, limit)
        center = distribution.center
        action = jnp.clip(mode + noise * width, center - width, center + width)
        log_prob = jnp.zeros(mode.shape[:-1])
    else:
        action, log_prob = sample_soft(distribution, key)
    q = _values(policy, state.target, batch.next_obs, action).min(axis=0)
    return batch.reward + batch.discount * (q - _alpha(state.params, config) * log_prob)


def _values(policy: Any, params: Params, obs: PyTree, action: Array) -> Array:
    return policy.apply(params, obs, action, method="action_values")


def _alpha(params: Params, config: SACConfig) -> Array:
    return learned_alpha(params) if config.ent_coef == "auto" else jnp.asarray(config.ent_coef, jnp.float32)


def _policy_problems(options: SACConfig, policy: Policy) -> Iterator[Problem]:
    yield from policy_problems(options, policy)
    if isinstance(policy, BinnedPolicy) and policy.num_bins is not None:
        text = f"got {policy.num_bins}, but sac's critics give one value, not a distribution; leave it out"
        yield Problem("policy.cfg.num_bins", text)


ALGORITHM = Algorithm(
    Config=SACConfig, update=sac_update, **(OFF_POLICY_FIELDS | {"policy_problems": _policy_problems})
)
