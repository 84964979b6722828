"""Proximal policy optimization.

    L = E[−min(ρA, clip(ρ, 1 ± ε)A)] + vf_coef·E[(V − R)²] − ent_coef·E[H] + kl_coef·E[e^Δ − Δ − 1]

with Δ = log π_ref − log π, where ``kl_coef`` keeps the policy close to the one that training started from.

Source: Schulman et al. 2017; the options and the arithmetic of EmbodiChain 0.2.4 and 0.3.2.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self, cast

import jax
import jax.numpy as jnp
import optax
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from ejax.algorithms.batch import (
    Columns,
    Loss,
    apply_to_batch,
    cut_before_invalid,
    make_batch,
    recompute_behaviour,
    reference_log_prob,
    step_weight,
)
from ejax.algorithms.embodichain_rules import ADVANTAGE_RULES, TIMEOUT_RULES, AdvantageRule, TimeoutRule
from ejax.algorithms.options import COMPAT, MINIBATCH_FIELDS, MinibatchOptions
from ejax.algorithms.record import Algorithm, RunShape
from ejax.algorithms.sgd import Batch, MinibatchConfig, sgd_epochs
from ejax.algorithms.teaching import TAUGHT_FIELDS, DistillationConfig, teacher_problems
from ejax.losses import clipped_surrogate, clipped_value_loss, kl_k3, value_loss, weighted_sums
from ejax.numerics.checks import check_rollout
from ejax.numerics.traced_options import is_active, unjit_for_traced
from ejax.optim import get_learning_rate, set_learning_rate, step_schedule
from ejax.policies.normalize import update_normalizer
from ejax.returns import explained_variance, gae, vtrace
from ejax.schema.problems import Problem
from ejax.types import Array, Key, Metrics, Params, Policy, Rollout, TrainState


class PPOConfig(MinibatchOptions):
    """``algorithm.cfg`` of ``ppo``: EmbodiChain's names, and its 0.2.4 defaults unless a comment differs."""

    gamma: float = Field(default=0.99, ge=0.0, le=1.0)
    """Discount of a step."""
    gae_lambda: float = Field(default=0.95, ge=0.0, le=1.0)
    """λ of generalized advantage estimation: 0 trusts the critic, 1 the returns."""
    num_mini_batches: PositiveInt | None = None
    """Instead of ``batch_size``: this many minibatches of equal size (the last may be smaller)."""
    clip_coef: PositiveFloat = 0.2
    """ε: beyond 1 ± ε the probability ratio earns nothing more."""
    ent_coef: NonNegativeFloat = 0.01
    """Weight of the entropy, which is to be large."""
    vf_coef: NonNegativeFloat = 0.5
    """Weight of the value loss (V − R)², which has no ½."""
    kl_coef: NonNegativeFloat = 0.0
    """ejax: weight of the divergence to the reference, as in GRPO: for ``policy.init_from``."""
    mirror_coef: NonNegativeFloat = 0.0
    """ejax: weight of E[‖μ(s′) − μ(s)′‖²/A], s′ and a′ the mirror images of observations and actions: for legs that do
    the same on both sides. For robots of VelocityRL. Source: Yu et al. 2018."""
    distillation: DistillationConfig | None = None
    """ejax: imitate a teacher besides, by a loss whose weight follows a schedule. See docs/distill.md."""
    clip_grad_per_network: bool = False
    """EmbodiChain 0.3: clip the critic's gradient apart from the rest."""
    use_clipped_value_loss: bool = False
    """The larger of the losses of V and of V clipped to ± ``clip_coef`` around its old value."""
    action_bound_coef: NonNegativeFloat = 0.0
    """Weight of E[max(|mean action| − 1, 0)²]: keeps an unbounded Gaussian's mean inside ±1."""
    normalize_advantage: bool = True
    """Advantages have mean 0 and deviation 1 over the rollout."""
    normalize_advantage_per_mini_batch: bool = False
    """Over each minibatch instead."""
    schedule: Literal["fixed", "adaptive", "adaptive_per_update"] = "fixed"
    """Not fixed: the learning rate follows ``desired_kl``; excludes ``lr_scheduler``. ``adaptive`` is RSL-RL's rule:
    each minibatch may change the rate by 1.5, so that more than about 20 an update drive it from limit to limit.
    ``adaptive_per_update`` changes it once an update, by the update's mean divergence."""
    desired_kl: PositiveFloat | None = Field(default=None, validate_default=True)
    """adaptive: the KL divergence of an update that the learning rate is steered to, such as 0.01."""
    minimum_learning_rate: PositiveFloat = 1e-5
    """adaptive: the lowest learning rate."""
    maximum_learning_rate: PositiveFloat = Field(default=1e-2, validate_default=True)
    """adaptive: the highest learning rate."""
    target_kl: PositiveFloat | None = None
    """Stop the update's remaining minibatches once their approximate KL exceeds 1.5 · target_kl."""
    reward_scale: PositiveFloat = 1.0
    """Rewards are multiplied by it before advantages are computed; logs show them as they come."""
    timeout_bootstrap: TimeoutRule = "exact"
    """The rule for episodes that are only cut off: ``exact`` bootstraps from the true final observation,
    ``embodichain`` (= ``embodichain-0.2``) from nothing, ``embodichain-0.3`` adds γ·V of the observation before the
    step, ``embodichain-seed`` takes the end of the rollout for an end of the episode too."""
    advantage_rule: AdvantageRule = "embodichain-0.2"
    """The normalization of advantages: (A − mean)/std; 0.3 divides by std + 1e-8; the seed version
    normalizes A with the mean and std of the already normalized A, which leaves it nearly as it is."""
    critic_warmup_updates: NonNegativeInt = 0
    """ejax: in so many first updates only the critic learns; parameters of the policy, its normalizer and its moments
    stay as they are. For ``policy.init_from`` of a policy without a critic that knows it: cloned, or distilled. The
    optimizer then starts again, so that it corrects the bias of both alike."""
    staleness_correction: Literal["none", "decoupled", "vtrace"] = "none"
    """For rollouts that older parameters made. Both of the others clip around the policy that the update starts with,
    not around the one that acted, and take their values from it; the difference between the two is a weight.
    ``vtrace`` corrects the advantages and value targets too. Source: Hilton et al. 2022; Espeholt et al. 2018."""
    behave_weight_threshold: PositiveFloat = 2.0
    """With a correction: the most that a row's weight π(start of the update)/π(acted) may be. RLinf's name."""

    @field_validator("schedule")
    @classmethod
    def _one_schedule(cls, schedule: str, info: ValidationInfo) -> str:
        lr_scheduler = info.data.get("lr_scheduler")
        if schedule != "fixed" and lr_scheduler is not None and lr_scheduler.name is not None:
            raise ValueError(f"got '{schedule}' together with lr_scheduler '{lr_scheduler.name}'; keep one")
        return schedule

    @field_validator("desired_kl")
    @classmethod
    def _adaptive_has_a_target(cls, desired_kl: float | None, info: ValidationInfo) -> float | None:
        if desired_kl is None and (schedule := info.data.get("schedule", "fixed")) != "fixed":
            raise ValueError(f"is missing: schedule '{schedule}' needs it, such as 0.01")
        return desired_kl

    @field_validator("maximum_learning_rate")
    @classmethod
    def _range_is_ordered(cls, maximum: float, info: ValidationInfo) -> float:
        minimum = info.data.get("minimum_learning_rate", 0.0)
        if maximum < minimum:
            raise ValueError(f"got {maximum}, below minimum_learning_rate {minimum}")
        return maximum

    @property
    def minibatch_steps(self) -> int | None:
        return None if self.num_mini_batches else self.batch_size

    def minibatches(self, num_steps: int, num_strata: int, length: int) -> MinibatchConfig:
        # ``num_mini_batches`` equal parts, as ``torch.chunk`` cuts each stratum
        made: MinibatchConfig = super().minibatches(num_steps, num_strata, length)
        if self.num_mini_batches is not None:
            rows = num_strata * -(-num_steps // (length * num_strata * self.num_mini_batches))
            made = replace(made, batch_size=rows)
        return replace(made, clip_per_network=self.clip_grad_per_network)

    def rescale_for_devices(self, was: int, now: int) -> Self:
        if self.num_mini_batches is None:
            return super().rescale_for_devices(was, now)
        # parts of all rows, whichever device has them
        return self.model_copy(update={"minibatch_strata": self.minibatch_strata or was})


@partial(jax.jit, static_argnames=("policy", "optimizer", "config", "loss", "columns"))
def ppo_update(
    state: TrainState,
    rollout: Rollout,
    key: Key,
    *,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    config: PPOConfig,
    loss: Loss | None = None,
    columns: Columns | None = None,
) -> tuple[TrainState, Metrics]:
    """Make one PPO update: advantages, ``n_epochs`` of minibatch steps, one step of the learning-rate schedule. The new
    state has ``step`` + 1; metrics are scalars.

    Args:
        rollout: leaves [T, N, ...]; needs its ``distribution`` if ``schedule`` is adaptive.
        optimizer: from ``make_optimizer``, or any optax optimizer where the learning rate is fixed.
        config: an open ``lr_scheduler`` needs its horizon: ``bind_schedule``.
        loss: in place of ``ppo_loss``, which it may call, with the same arguments: a term of yours is a line
            (docs/tutorials/09_ppo_plus_a_term.py).
        columns: more columns of the batch, for such a loss.

    Raises:
        ValueError: arrays of the rollout that are not [T, N]; ``kl_coef`` > 0 without a reference; a column's name that
            is taken.
    """
    check_rollout(rollout)
    rollout, own, lag_metrics = _columns(state, rollout, policy=policy, config=config)
    batch, minibatches = make_batch(policy, rollout, config, columns, **own)
    num_warmup, target_kl = config.critic_warmup_updates, config.target_kl
    learn: Any = sgd_epochs
    if num_warmup > 0:
        from ejax.algorithms.critic_warmup import hold_policy, warm_up_critic  # of few runs

        learn = partial(warm_up_critic, num_updates=num_warmup)
    after, metrics = learn(
        state,
        batch,
        key,
        loss=partial(loss or ppo_loss, policy=policy, config=config),
        optimizer=optimizer,
        minibatches=minibatches,
        prepare=partial(_normalize_minibatch, config=config) if config.normalize_advantage_per_mini_batch else None,
        adapt_rate=partial(_adapt_rate, config=config) if config.schedule == "adaptive" else None,
        # Stable-Baselines3's rule
        stop=None if target_kl is None else lambda metrics: metrics["approx_kl"] > 1.5 * target_kl,
    )
    if config.schedule == "adaptive_per_update":
        rate = _adapt_rate(get_learning_rate(after.opt_state), metrics, config=config)
        after = replace(after, opt_state=set_learning_rate(after.opt_state, rate))
    # once per update, however many minibatches it has: schedules count updates
    after = step_schedule(after, config.optimizer, config.lr_scheduler)
    # last: in the epochs the policy sees what it saw when it acted, so that the ratio begins at 1
    after = replace(after, params=update_normalizer(policy, after.params, rollout.obs, rollout.valid))
    if num_warmup > 0:
        after = hold_policy(state, after, num_warmup)
    rate = get_learning_rate(after.opt_state)
    if config.schedule != "fixed":
        at_limit = (rate <= config.minimum_learning_rate) | (rate >= config.maximum_learning_rate)
        metrics["rate_at_limit"] = at_limit.astype(rate.dtype)
    metrics |= lag_metrics | {
        "learning_rate": rate,
        # by the values that advantages were made from, before the critic learned from them
        "explained_variance": explained_variance(own["value"], own["value_target"], rollout.valid),
    }
    return after, metrics


def _columns(
    state: TrainState, rollout: Rollout, *, policy: Policy, config: PPOConfig
) -> tuple[Rollout, dict[str, Any], Metrics]:
    """Make the rollout that the loss compares with, the further columns that it reads, and metrics of staleness."""
    behaviour, behave_weight = rollout.log_prob, None
    lag_metrics: Metrics = {}
    # the ratio then begins at 1 for stale rollouts too, and clipping limits this update's own change alone
    if config.staleness_correction != "none":
        rollout, behave_weight, lag_metrics = recompute_behaviour(
            state.params, rollout, config, policy=policy, weight_threshold=config.behave_weight_threshold
        )
    advantage, value_target = ppo_advantage(rollout, behaviour, config=config)
    # what the options do not ask for is not gathered in every minibatch
    columns = {
        "value": rollout.value,
        "advantage": advantage,
        "value_target": value_target,
        "distribution": rollout.distribution if config.schedule != "fixed" else None,
        "mask": None if rollout.valid is None else rollout.valid.astype(jnp.float32),
        "behave_weight": behave_weight,
        "reference_log_prob": reference_log_prob(state, rollout, policy=policy, kl_coef=config.kl_coef),
    }
    return rollout, columns, lag_metrics


def ppo_advantage(
    rollout: Rollout, behaviour_log_prob: Array | None = None, *, config: PPOConfig
) -> tuple[Array, Array]:
    """Compute ``(advantage, value_target)``, [T, N], the advantage normalized unless that is off or left to the
    minibatches. Steps that are not transitions (``valid``) cut the episode before them and do not count.
    ``behaviour_log_prob``, [T, N], is of the policy that acted, for ``vtrace``."""
    reward = config.reward_scale * rollout.reward
    truncated = cut_before_invalid(rollout)
    reward, next_value, terminated = TIMEOUT_RULES[config.timeout_bootstrap](rollout, reward, config.gamma)
    steps = (reward, rollout.value, next_value, terminated, truncated)
    rates = {"gamma": config.gamma, "gae_lambda": config.gae_lambda}
    estimate, corrected = (unjit_for_traced(rule, *rates.values()) for rule in (gae, vtrace))
    if config.staleness_correction == "vtrace" and behaviour_log_prob is not None:
        advantage, value_target = corrected(*steps, rollout.log_prob - behaviour_log_prob, **rates)
    else:
        advantage, value_target = estimate(*steps, **rates)
    if config.normalize_advantage and not config.normalize_advantage_per_mini_batch:
        valid = None if rollout.valid is None else rollout.valid.astype(jnp.float32)
        advantage = ADVANTAGE_RULES[config.advantage_rule](advantage, valid)
    return advantage, value_target


def ppo_loss(params: Params, batch: Batch, *, policy: Policy, config: PPOConfig) -> tuple[Array, Metrics]:
    """Compute the loss of one minibatch (or of a chunk of it), and metrics: weighted means.

    Args:
        batch: ``obs``, ``action``, ``log_prob``, ``value``, ``advantage``, ``value_target`` with leaves [B, ...];
            optional ``weight`` [B], of sum one over a minibatch (default 1/B); ``distribution`` (the acting policy's,
            for the exact KL); ``dropout_seed`` [B]; ``behave_weight`` [B], a factor of the surrogate;
            ``reference_log_prob`` [B] where ``kl_coef`` > 0; with ``distillation`` a teacher's ``label`` and its
            ``label_weight`` [B]. Of a policy with memory: see ``flatten_rollout``.
    """
    distribution, value, batch = apply_to_batch(policy, params, batch, joint=True)
    log_prob = distribution.log_prob(batch["action"])
    log_ratio = log_prob - batch["log_prob"]
    weight = batch.get("weight", jnp.full_like(value, 1.0 / value.shape[0]))

    if config.use_clipped_value_loss:
        squared_error = clipped_value_loss(value, batch["value"], batch["value_target"], config.clip_coef)
    else:
        squared_error = value_loss(value, batch["value_target"])
    surrogate = clipped_surrogate(log_ratio, batch["advantage"], config.clip_coef)
    # every term is measured; those with a coefficient make the loss
    terms = {
        "actor_loss": batch.get("behave_weight", 1.0) * surrogate,
        "value_loss": squared_error,
        "entropy": distribution.entropy(),
        "approx_kl": kl_k3(log_ratio),
        "clip_fraction": (jnp.abs(jnp.exp(log_ratio) - 1.0) > config.clip_coef).astype(value.dtype),
    }
    coefficients = {"actor_loss": 1.0, "value_loss": config.vf_coef, "entropy": -config.ent_coef}
    if is_active(config.action_bound_coef):
        overshoot = jnp.maximum(jnp.abs(distribution.mode()) - 1.0, 0.0)
        terms["action_bound_loss"] = jnp.square(overshoot).mean(axis=-1)
        coefficients["action_bound_loss"] = config.action_bound_coef
    if is_active(config.kl_coef):
        terms["approx_ref_kl"] = kl_k3(batch["reference_log_prob"] - log_prob)
        coefficients["approx_ref_kl"] = config.kl_coef
    if is_active(config.mirror_coef):
        mirror = _mirror_of(policy)
        other, _ = policy.apply(params, mirror.observed(batch["obs"]))
        terms["mirror_loss"] = jnp.square(other.mode() - mirror.acted(distribution.mode())).mean(axis=-1)
        coefficients["mirror_loss"] = config.mirror_coef
    if config.distillation is not None:
        from ejax.algorithms.taught import distillation_terms  # of few runs

        terms |= distillation_terms(batch, distribution, config.distillation)
        coefficients["distillation_loss"] = 1.0
    # exact, for the adaptive learning rate: the sampled estimate of a minibatch would steer it by its noise
    if "distribution" in batch:
        terms["kl"] = batch["distribution"].kl(distribution)
    return weighted_sums(terms, weight, coefficients)


def _mirror_of(policy: Policy) -> Any:
    """Return the policy's ``ejax.envs.locomotion.mirror.Mirror``. ValueError: it knows none."""
    if (mirror := getattr(policy, "mirror", None)) is None:
        text = "needs mirror images of observations and actions: those of actor_critic without memory, in"
        raise ValueError(f"mirror_coef > 0 {text} VelocityRL, with a robot of two equal sides; leave it out")
    return mirror


def _normalize_minibatch(minibatch: Batch, *, config: PPOConfig) -> Batch:
    # rows without weight must not move the mean and deviation of the others
    valid = (step_weight(minibatch) > 0).astype(jnp.float32)
    return {**minibatch, "advantage": ADVANTAGE_RULES[config.advantage_rule](minibatch["advantage"], valid)}


def _adapt_rate(rate: Array, metrics: Metrics, *, config: PPOConfig) -> Array:
    """Slow down where the policy moved more than twice the desired KL, speed up below half. Source: RSL-RL."""
    kl, desired = metrics["kl"], cast(float, config.desired_kl)  # the config sees to it
    slower = jnp.maximum(rate / 1.5, config.minimum_learning_rate)
    faster = jnp.minimum(rate * 1.5, config.maximum_learning_rate)
    # a KL of exactly 0 is that of parameters that have not moved yet: no reason to be faster
    return jnp.where(kl > 2.0 * desired, slower, jnp.where((kl < 0.5 * desired) & (kl > 0.0), faster, rate))


def _problems(options: PPOConfig, run: RunShape) -> Iterator[Problem]:
    if run.rows < 2:
        text = f"got {run.buffer_size} with num_envs {run.num_envs}; advantages are normalized over at least 2 rows"
        yield Problem("trainer.buffer_size", text)
    if options.num_mini_batches is not None and options.num_mini_batches > run.rows:
        yield run.too_many("num_mini_batches", options.num_mini_batches)
    if options.critic_warmup_updates > 0 and run.policy == "actor_only":
        text = f"got {options.critic_warmup_updates}, but actor_only has no critic to warm up; leave it out"
        yield Problem("algorithm.cfg.critic_warmup_updates", text)
    yield from teacher_problems(options.distillation, "algorithm.cfg.distillation")
    yield from options.problems(run)


def _policy_problems(options: PPOConfig, policy: Policy) -> Iterator[Problem]:
    yield from MINIBATCH_FIELDS["policy_problems"](options, policy)
    if options.mirror_coef > 0.0:
        try:
            _mirror_of(policy)
        except ValueError as error:
            yield Problem("algorithm.cfg.mirror_coef", str(error))


ALGORITHM = Algorithm(
    Config=PPOConfig,
    update=ppo_update,
    keeps_reference=lambda options: options.kl_coef > 0.0,
    problems=_problems,
    **MINIBATCH_FIELDS | TAUGHT_FIELDS | {"policy_problems": _policy_problems},
    compat=COMPAT["ppo"],
)
