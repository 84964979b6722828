"""Relative entropy pathwise policy optimization: on-policy, by the gradient of a critic of actions.

    Gₜ = rₜ + γ·(1 − terminatedₜ)·(−α·log π(a'ₜ|s'ₜ) + (1 − λₜ)·Q(s'ₜ, a'ₜ) + λₜ·Gₜ₊₁),  a' ~ π(·|s')
    L(Q) = E[−Σₖ HL(G)ₖ·log pₖ(s, a)]
    L(π) = E[α·log π(a|s) − Q(s, a)] over states where KL < kl_bound, E[β·KL] over the others,  a ~ π(·|s)
    L(α) = α·E[−log π(a|s) − H̄],  L(β) = −β·E[KL − kl_bound],  H̄ = −ent_target_mult·A

λₜ is ``lmbda`` while the episode continues within the rollout, else 0; KL is from the policy that acted; pₖ are the
critic's probabilities of returns from ``vmin`` to ``vmax``, HL(G) is the projection of G on them (``hl_gauss``). log π
is of actions in [-1, 1]. There is no target critic, and no replay.

Source: Voelcker et al. 2025 (arXiv:2507.11019). Here KL is exact, not estimated from samples; a state after a
termination has no entropy; rows that were truncated are learned from, since their next observation is known; actor and
critic step together, from the same critic. The paper's prediction of the next state's features is left out: in its own
ablation on the DeepMind Control Suite it gains nothing after 200 M steps, and 39 points of 647 after 50 M.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import optax
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from ejax.algorithms.batch import Columns, Loss, cut_before_invalid, make_batch
from ejax.algorithms.off_policy import policy_problems
from ejax.algorithms.options import MINIBATCH_FIELDS, MinibatchOptions
from ejax.algorithms.record import Algorithm
from ejax.algorithms.sgd import Batch, sgd_epochs
from ejax.algorithms.soft_actor import sample_soft
from ejax.losses import weighted_sums
from ejax.numerics.checks import check_rollout
from ejax.numerics.kernels import has_large_rows
from ejax.numerics.traced_options import unjit_for_traced
from ejax.numerics.value_bins import expected_value, hl_gauss
from ejax.optim import get_learning_rate, step_schedule
from ejax.policies.actor_q import ActorQ
from ejax.policies.normalize import update_normalizer
from ejax.returns import gae
from ejax.schema.problems import Problem
from ejax.types import Array, Key, Metrics, Params, Policy, PyTree, Rollout, TrainState

_PRIOR = 40.0  # logits of the first critic: so many times the projection of 0, that returns begin near 0


class REPPOConfig(MinibatchOptions):
    """``algorithm.cfg`` of ``reppo``. Names and defaults: REPPO's for the DeepMind Control Suite."""

    gamma: float = Field(default=0.99, ge=0.0, le=1.0)
    """Discount of a step."""
    lmbda: float = Field(default=0.95, ge=0.0, le=1.0)
    """λ of the returns: 0 trusts the critic, 1 the rewards."""
    n_epochs: PositiveInt = 8
    """Passes over a rollout in one update."""
    batch_size: PositiveInt = 2048
    """Rows of one minibatch on each device; the last one of an epoch may be smaller."""
    kl_bound: PositiveFloat = 0.1
    """The most that the policy of a state may diverge from the one that acted, before it is drawn back."""
    ent_target_mult: NonNegativeFloat = 0.5
    """The entropy's target is this · −A."""
    vmin: float = 0.0
    """The lowest discounted return, entropy included, that the critic knows."""
    vmax: float = Field(default=150.0, validate_default=True)
    """The highest."""

    @field_validator("vmax")
    @classmethod
    def _range_is_ordered(cls, vmax: float, info: ValidationInfo) -> float:
        vmin = info.data.get("vmin", -jnp.inf)
        if vmax <= vmin:
            raise ValueError(f"got {vmax}, not above vmin {vmin}")
        return vmax


@partial(jax.jit, static_argnames=("policy", "optimizer", "config", "loss", "columns"))
def reppo_update(
    state: TrainState,
    rollout: Rollout,
    key: Key,
    *,
    policy: Any,
    optimizer: optax.GradientTransformation,
    config: REPPOConfig,
    loss: Loss | None = None,
    columns: Columns | None = None,
) -> tuple[TrainState, Metrics]:
    """Make one update: returns, ``n_epochs`` of minibatch steps, one step of the learning-rate schedule. The new state
    has ``step`` + 1; metrics are scalars.

    Args:
        rollout: leaves [T, N, ...], with ``next_obs`` and ``distribution``.
        config: an open ``lr_scheduler`` needs its horizon: ``bind_schedule``.
        loss: in place of ``reppo_loss``, which it may call, with the same arguments.
        columns: more columns of the batch, for such a loss.

    Raises:
        ValueError: a column's name that is taken.
    """
    check_rollout(rollout)
    key_target, key_epochs = jax.random.split(key)
    target = reppo_target(state.params, rollout, key_target, policy=policy, config=config)
    valid = rollout.valid
    own = {
        "value_target": target,
        "distribution": rollout.distribution,
        "mask": None if valid is None else valid.astype(jnp.float32),
    }
    batch, minibatches = make_batch(policy, rollout, config, columns, **own)
    bound = partial(loss or reppo_loss, policy=policy, config=config)
    minibatches = replace(minibatches, clip_per_network=True)  # actor and critic have a norm each
    given: Any = {"optimizer": optimizer, "minibatches": minibatches, "keyed": True}
    after, metrics = sgd_epochs(state, batch, key_epochs, loss=bound, **given)
    after = step_schedule(after, config.optimizer, config.lr_scheduler)
    # last: returns and losses see what the policy saw when it acted
    after = replace(after, params=update_normalizer(policy, after.params, rollout.obs, valid))
    return after, metrics | {"learning_rate": get_learning_rate(after.opt_state)}


def reppo_target(params: Params, rollout: Rollout, key: Key, *, policy: Any, config: REPPOConfig) -> Array:
    """Compute G, [T, N], by the critic and the policy that ``params`` are. Steps that are not transitions (``valid``)
    cut the episode before them."""

    def evaluate(xs: tuple[PyTree, Key]) -> tuple[Array, Array]:
        obs, key = xs
        distribution, _ = policy.apply(params, obs)
        action, log_prob = sample_soft(distribution, key)
        return _value(policy, params, obs, action, config), log_prob

    if has_large_rows(jax.tree.map(lambda x: x[0], rollout.next_obs)):
        keys = jax.random.split(key, rollout.reward.shape[0])
        next_value, log_prob = jax.lax.map(evaluate, (rollout.next_obs, keys))
    else:
        next_value, log_prob = evaluate((rollout.next_obs, key))
    alpha = jnp.exp(params["params"]["log_alpha"])
    entropy_bonus = jnp.where(rollout.terminated, 0.0, -config.gamma * alpha * log_prob)
    # with V of a state as it was seen from the state before, the targets of GAE are these returns
    value = jnp.concatenate([jnp.zeros_like(next_value[:1]), next_value[:-1]])
    rates = {"gamma": config.gamma, "gae_lambda": config.lmbda}
    estimate = unjit_for_traced(gae, *rates.values())
    ends = rollout.terminated, cut_before_invalid(rollout)
    return estimate(rollout.reward + entropy_bonus, value, next_value, *ends, **rates)[1]


def reppo_loss(params: Params, batch: Batch, *, policy: Any, config: REPPOConfig) -> tuple[Array, Metrics]:
    """Compute the loss of one minibatch (or of a chunk of it), the sum of all four, and metrics: weighted means.

    Args:
        batch: ``obs``, ``action``, ``value_target``, ``distribution`` (of the policy that acted), with leaves [B, ...];
            ``key`` [B], of the actions drawn; optional ``weight`` [B], of sum one over a minibatch (default 1/B).
    """
    distribution, _ = policy.apply(params, batch["obs"])
    action, log_prob = jax.vmap(sample_soft)(distribution, batch["key"])
    # the critic is held, though the gradient goes through it to the action
    value = _value(policy, jax.lax.stop_gradient(params), batch["obs"], action, config)
    kl = batch["distribution"].kl(distribution)
    alpha, kl_coef = (jnp.exp(params["params"][name]) for name in ("log_alpha", "log_kl_coef"))
    improves = jax.lax.stop_gradient(alpha) * log_prob - value
    stays = jax.lax.stop_gradient(kl_coef) * kl
    target_entropy = -config.ent_target_mult * policy.action_spec.num_actions

    logits = _logits(policy, params, batch["obs"], batch["action"], config)
    target = hl_gauss(batch["value_target"], config.vmin, config.vmax, logits.shape[-1])
    q = expected_value(jax.lax.stop_gradient(logits), config.vmin, config.vmax)
    terms = {
        "critic_loss": -jnp.sum(target[None] * jax.nn.log_softmax(logits), axis=(0, -1)),
        "actor_loss": jnp.where(kl < config.kl_bound, improves, stays),
        "alpha_loss": alpha * jax.lax.stop_gradient(-log_prob - target_entropy),
        "kl_coef_loss": -kl_coef * jax.lax.stop_gradient(kl - config.kl_bound),
        "entropy": -log_prob,
        "kl": kl,
        "kl_exceeded": (kl >= config.kl_bound).astype(kl.dtype),
        "q": q.mean(axis=0),
        "value_target": batch["value_target"],
        "alpha": jnp.broadcast_to(alpha, kl.shape),
        "kl_coef": jnp.broadcast_to(kl_coef, kl.shape),
    }
    weight = batch.get("weight", jnp.full_like(kl, 1.0 / kl.shape[0]))
    losses = ("critic_loss", "actor_loss", "alpha_loss", "kl_coef_loss")
    return weighted_sums(terms, weight, dict.fromkeys(losses, 1.0))


def _value(policy: Any, params: Params, obs: PyTree, action: Array, config: REPPOConfig) -> Array:
    """Evaluate an action by the lowest of the critics: [...]."""
    logits = _logits(policy, params, obs, action, config)
    return expected_value(logits, config.vmin, config.vmax).min(axis=0)


def _logits(policy: Any, params: Params, obs: PyTree, action: Array, config: REPPOConfig) -> Array:
    logits = policy.apply(params, obs, action, method="action_values")
    prior = _PRIOR * hl_gauss(jnp.zeros(()), config.vmin, config.vmax, logits.shape[-1])
    return logits + jnp.broadcast_to(prior, logits.shape)


def _policy_problems(options: REPPOConfig, policy: Policy) -> Iterator[Problem]:
    yield from policy_problems(options, policy)
    if isinstance(policy, ActorQ):
        for name, use, example in (
            ("num_bins", "reppo's critic gives a distribution over returns", 151),
            ("initial_kl_coef", "reppo learns the weight of the divergence, from a first one on", 0.01),
        ):
            if getattr(policy, name) is None:
                yield Problem(f"policy.cfg.{name}", f"is missing: {use}; set it to a number such as {example}")


ALGORITHM = Algorithm(
    Config=REPPOConfig,
    update=reppo_update,
    actions=(gymnasium.spaces.Box,),
    problems=lambda options, run: options.problems(run),
    **{**MINIBATCH_FIELDS, "policy_problems": _policy_problems},
)
