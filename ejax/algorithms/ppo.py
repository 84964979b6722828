"""Proximal policy optimization.

    L = E[−min(ρA, clip(ρ, 1 ± ε)A)] + vf_coef·E[(V − R)²] − ent_coef·E[H] + kl_coef·E[e^Δ − Δ − 1]

with Δ = log π_ref − log π, where ``kl_coef`` keeps the policy close to the one that training started from.

Source: Schulman et al. 2017; the options and the arithmetic of EmbodiChain 0.2.4 and 0.3.2.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import optax
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from ejax.algorithms.batch import (
    flatten,
    look,
    memory_problems,
    reference_log_prob,
    seen_by,
    sequence_length,
    sequence_problems,
    share_out,
    step_weight,
    strata_problems,
)
from ejax.algorithms.record import Algorithm, RunShape
from ejax.algorithms.sgd import MinibatchConfig, sgd_epochs
from ejax.losses import clipped_surrogate, clipped_value_loss, kl_k3, value_loss, weighted_sums
from ejax.numerics.traced_options import for_options, is_on
from ejax.optim import OptimizerConfig, ScheduleConfig, get_learning_rate, of_critic, restart, step_schedule
from ejax.policies.normalize import update_normalizer
from ejax.returns import gae, normalize, vtrace
from ejax.runtime.sharding import num_shards
from ejax.schema.problems import Problem
from ejax.types import Array, Key, Metrics, Params, Policy, PyTree, Rollout, TrainState, with_critic


class PPOConfig(BaseModel):
    """``algorithm.cfg`` of ``ppo``: EmbodiChain's names, and its 0.2.4 defaults unless a comment says otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    optimizer: OptimizerConfig = OptimizerConfig()
    """The update rule and the learning rate."""
    lr_scheduler: ScheduleConfig = ScheduleConfig()
    """How the learning rate changes from update to update."""
    gamma: float = Field(default=0.99, ge=0.0, le=1.0)
    """Discount of a step."""
    gae_lambda: float = Field(default=0.95, ge=0.0, le=1.0)
    """λ of generalized advantage estimation: 0 trusts the critic, 1 the returns."""
    n_epochs: PositiveInt = 10
    """Passes over a rollout in one update."""
    batch_size: PositiveInt = 64
    """Rows of one minibatch on each device; the last one of an epoch may be smaller."""
    num_mini_batches: PositiveInt | None = None
    """Instead of ``batch_size``: this many minibatches of equal size (the last may be smaller)."""
    minibatch_strata: PositiveInt | None = None
    """ejax: minibatches take equally many rows from each of this many groups of neighbouring environments. None: from
    each device, which then needs none of the others' rows; D devices compute what one does with D strata."""
    sequence_length: PositiveInt | None = None
    """ejax: of a policy with memory, successive steps that stay together in a minibatch, and that gradients go back
    over; divides ``buffer_size`` and ``batch_size``. None: the longest that does, up to 128."""
    clip_coef: PositiveFloat = 0.2
    """ε: beyond 1 ± ε the probability ratio earns nothing more."""
    ent_coef: NonNegativeFloat = 0.01
    """Weight of the entropy, which is to be large."""
    vf_coef: NonNegativeFloat = 0.5
    """Weight of the value loss (V − R)², which has no ½."""
    kl_coef: NonNegativeFloat = 0.0
    """ejax: weight of the divergence to the reference, as in GRPO: for ``policy.init_from``."""
    max_grad_norm: PositiveFloat = Field(default=0.5, allow_inf_nan=True)
    """Infinity: no clipping."""
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
    schedule: Literal["fixed", "adaptive"] = "fixed"
    """``adaptive``: the learning rate follows ``desired_kl``; excludes ``lr_scheduler``."""
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
    timeout_bootstrap: Literal["exact", "embodichain", "embodichain-0.2", "embodichain-0.3", "embodichain-seed"] = (
        "exact"
    )
    """Where an episode is only cut off: ``exact`` bootstraps from the true final observation, ``embodichain``
    (= ``embodichain-0.2``) from nothing, ``embodichain-0.3`` adds γ·V of the observation before the step,
    ``embodichain-seed`` takes the end of the rollout for an end of the episode too."""
    advantage_rule: Literal["embodichain-0.2", "embodichain-0.3", "embodichain-seed"] = "embodichain-0.2"
    """How advantages are normalized: (A − mean)/max(std, 1e-8); 0.3 divides by std + 1e-8; the seed version normalizes
    A with the mean and std of the already normalized A, which leaves it nearly as it is."""
    critic_warmup_updates: NonNegativeInt = 0
    """ejax: in so many first updates only the critic learns; parameters of the policy, its normalizer and its moments
    stay as they are. For ``policy.init_from`` of a policy without a critic that knows it: cloned, or distilled. The
    optimizer then starts anew, so that it corrects the bias of both alike."""
    staleness_correction: Literal["none", "decoupled", "vtrace"] = "none"
    """For rollouts that older parameters made. Both of the others clip around the policy that the update starts with,
    not around the one that acted, and take their values from it; the difference between the two is a weight.
    ``vtrace`` corrects the advantages and value targets too. Source: Hilton et al. 2022; Espeholt et al. 2018."""
    behave_weight_threshold: PositiveFloat = 2.0
    """With a correction: the most that a row's weight π(start of the update)/π(acted) may be. RLinf's name."""
    skip_nonfinite_updates: bool = True
    """Leave parameters and optimizer as they are when a minibatch's loss or gradient, or the step that the optimizer
    makes of it, is NaN or infinite, and count it; False: training stops with NonFiniteUpdateError."""

    @field_validator("schedule")
    @classmethod
    def _one_schedule(cls, schedule: str, info: ValidationInfo) -> str:
        lr_scheduler = info.data.get("lr_scheduler")
        if schedule == "adaptive" and lr_scheduler is not None and lr_scheduler.name is not None:
            raise ValueError(f"got 'adaptive' beside lr_scheduler '{lr_scheduler.name}'; keep one")
        return schedule

    @field_validator("desired_kl")
    @classmethod
    def _adaptive_has_a_target(cls, desired_kl: float | None, info: ValidationInfo) -> float | None:
        if desired_kl is None and info.data.get("schedule") == "adaptive":
            raise ValueError("is missing: schedule 'adaptive' needs it, such as 0.01")
        return desired_kl

    @field_validator("maximum_learning_rate")
    @classmethod
    def _range_is_ordered(cls, maximum: float, info: ValidationInfo) -> float:
        minimum = info.data.get("minimum_learning_rate", 0.0)
        if maximum < minimum:
            raise ValueError(f"got {maximum}, below minimum_learning_rate {minimum}")
        return maximum


@partial(jax.jit, static_argnames=("policy", "optimizer", "config"))
def ppo_update(
    state: TrainState,
    rollout: Rollout,
    key: Key,
    *,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    config: PPOConfig,
) -> tuple[TrainState, Metrics]:
    """One PPO update: advantages, ``n_epochs`` of minibatch steps, one step of the learning-rate schedule.

    Args:
        rollout: leaves [T, N, ...]; needs its ``distribution`` if ``schedule`` is adaptive.
        optimizer: from ``make_optimizer``, or any optax optimizer where the learning rate is fixed.
        config: an open ``lr_scheduler`` needs its horizon: ``bind_schedule``.

    Returns:
        The new state (``step`` + 1) and scalar metrics.

    Raises:
        ValueError: arrays of the rollout that are not [T, N]; ``kl_coef`` > 0 without a reference.
    """
    # older parameters made the rollout: clip around those that the update starts with, and weight by how far they are
    behaviour, correction = rollout.log_prob, config.staleness_correction != "none"
    num_strata = config.minibatch_strata or num_shards()
    batch_size = None if config.num_mini_batches else num_shards() * config.batch_size
    length = sequence_length(policy, rollout, config.sequence_length, batch_size, num_strata)
    lag_metrics: Metrics = {}
    if correction:
        rollout, lag_metrics = _seen_by(state.params, rollout, length, policy=policy, config=config)
    advantage, value_target = ppo_advantage(rollout, behaviour, config=config)
    # one flat batch; what the options do not ask for is not gathered in every minibatch
    batch = flatten(
        rollout,
        num_strata,
        length,
        value=rollout.value,
        advantage=advantage,
        value_target=value_target,
        distribution=rollout.distribution if config.schedule == "adaptive" else None,
        mask=None if rollout.valid is None else rollout.valid.astype(jnp.float32),
        behave_weight=_behave_weight(rollout.log_prob - behaviour, config) if correction else None,
        reference_log_prob=reference_log_prob(state, rollout, policy=policy, kl_coef=config.kl_coef),
    )
    was = state
    state, metrics = _learn(
        state,
        batch,
        key,
        policy=policy,
        optimizer=optimizer,
        config=config,
        minibatches=MinibatchConfig(
            n_epochs=config.n_epochs,
            batch_size=minibatch_size(config, rollout.reward.size, num_strata, length or 1),
            max_grad_norm=config.max_grad_norm,
            clip_per_network=config.clip_grad_per_network,
            skip_nonfinite=config.skip_nonfinite_updates,
            num_strata=num_strata,
        ),
    )
    state = step_schedule(state, config.optimizer, config.lr_scheduler)
    # after the epochs: in them the policy must see what it saw when it acted
    params = update_normalizer(policy, state.params, rollout.obs, rollout.valid)
    if config.critic_warmup_updates > 0:
        held = {name: with_critic(was.params[name], part) for name, part in params.items()}
        warming_up = was.step < config.critic_warmup_updates
        params = jax.tree.map(lambda held, new: jnp.where(warming_up, held, new), held, params)
    state = replace(state, params=params)
    metrics["learning_rate"] = get_learning_rate(state.opt_state)
    unexplained = jnp.var(value_target - rollout.value, where=rollout.valid)
    explained = 1.0 - unexplained / jnp.maximum(jnp.var(value_target, where=rollout.valid), 1e-8)
    return state, metrics | {"explained_variance": explained} | lag_metrics


def ppo_advantage(
    rollout: Rollout, behaviour_log_prob: Array | None = None, *, config: PPOConfig
) -> tuple[Array, Array]:
    """``(advantage, value_target)``, [T, N], under the config's rule for truncated episodes.

    The advantage is normalized over the whole rollout unless that is off or left to the minibatches. Steps that are no
    transitions (``valid``) cut the episode before them and have no part in the normalization.

    Args:
        behaviour_log_prob: [T, N], of the policy that acted, for ``vtrace``. None: ``rollout.log_prob``.
    """
    reward = config.reward_scale * rollout.reward
    terminated, truncated, next_value = rollout.terminated, rollout.truncated, rollout.next_value
    valid = None
    if rollout.valid is not None:
        valid = rollout.valid.astype(jnp.float32)
        truncated = truncated.at[:-1].set(truncated[:-1] | ~rollout.valid[1:])
    if config.timeout_bootstrap == "embodichain-seed":
        next_value = next_value.at[-1].set(0.0)
    if config.timeout_bootstrap == "embodichain-0.3":
        reward = reward + config.gamma * rollout.value * rollout.truncated
    if config.timeout_bootstrap != "exact":
        terminated = rollout.done
    steps = (reward, rollout.value, next_value, terminated, truncated)
    rates = {"gamma": config.gamma, "gae_lambda": config.gae_lambda}
    estimate, corrected = (for_options(rule, *rates.values()) for rule in (gae, vtrace))
    if config.staleness_correction == "vtrace" and behaviour_log_prob is not None:
        advantage, value_target = corrected(*steps, rollout.log_prob - behaviour_log_prob, **rates)
    else:
        advantage, value_target = estimate(*steps, **rates)
    if config.normalize_advantage and not config.normalize_advantage_per_mini_batch:
        advantage = _normalize(advantage, valid, config)
    return advantage, value_target


def _seen_by(
    params: Params, rollout: Rollout, length: int | None, *, policy: Policy, config: PPOConfig
) -> tuple[Rollout, Metrics]:
    """The rollout with log-probabilities and values of ``params`` for those that acted, and how far apart they are."""
    log_prob, value = seen_by(params, rollout, length, policy=policy)
    # V of the true next observation is V of the next row, but where an episode ended; there the old one must do
    following = jnp.concatenate([value[1:], rollout.next_value[-1:]])
    goes_on = ~rollout.done & (jnp.arange(len(value)) < len(value) - 1)[:, None]
    seen = replace(
        rollout, log_prob=log_prob, value=value, next_value=jnp.where(goes_on, following, rollout.next_value)
    )
    log_ratio = log_prob - rollout.log_prob
    return seen, {
        "behave_approx_kl": kl_k3(log_ratio).mean(where=rollout.valid),
        "behave_weight_clipped": (jnp.exp(log_ratio) > config.behave_weight_threshold).mean(where=rollout.valid),
    }


def _behave_weight(log_ratio: Array, config: PPOConfig) -> Array:
    return jnp.minimum(jnp.exp(log_ratio), config.behave_weight_threshold)


def ppo_loss(params: Params, batch: dict[str, PyTree], *, policy: Policy, config: PPOConfig) -> tuple[Array, Metrics]:
    """The loss of one minibatch (or of a chunk of it).

    Args:
        batch: ``obs``, ``action``, ``log_prob``, ``value``, ``advantage``, ``value_target`` with leaves [B, ...];
            optional ``weight`` [B], which adds up to one over a minibatch (default 1/B); optional ``distribution``
            (the acting policy's, for the exact KL), ``dropout_seed`` [B] and ``behave_weight`` [B], which multiplies
            the surrogate; ``reference_log_prob`` [B] where ``kl_coef`` > 0. Of a policy with memory: see ``flatten``.

    Returns:
        ``(loss, metrics)``; metrics are weighted means.
    """
    distribution, value, batch = look(policy, params, batch)
    log_prob = distribution.log_prob(batch["action"])
    log_ratio = log_prob - batch["log_prob"]
    weight = batch.get("weight", jnp.full_like(value, 1.0 / value.shape[0]))

    if config.use_clipped_value_loss:
        squared_error = clipped_value_loss(value, batch["value"], batch["value_target"], config.clip_coef)
    else:
        squared_error = value_loss(value, batch["value_target"])
    surrogate = clipped_surrogate(log_ratio, batch["advantage"], config.clip_coef)
    terms = {
        "actor_loss": batch.get("behave_weight", 1.0) * surrogate,
        "value_loss": squared_error,
        "entropy": distribution.entropy(),
        "approx_kl": kl_k3(log_ratio),
        "clip_fraction": (jnp.abs(jnp.exp(log_ratio) - 1.0) > config.clip_coef).astype(value.dtype),
    }
    coefficients = {"actor_loss": 1.0, "value_loss": config.vf_coef, "entropy": -config.ent_coef}
    if is_on(config.action_bound_coef):
        overshoot = jnp.maximum(jnp.abs(distribution.mode()) - 1.0, 0.0)
        terms["action_bound_loss"] = jnp.square(overshoot).mean(axis=-1)
        coefficients["action_bound_loss"] = config.action_bound_coef
    if is_on(config.kl_coef):
        terms["approx_ref_kl"] = kl_k3(batch["reference_log_prob"] - log_prob)
        coefficients["approx_ref_kl"] = config.kl_coef
    if "distribution" in batch:
        terms["kl"] = batch["distribution"].kl(distribution)
    return weighted_sums(terms, weight, coefficients)


def _learn(
    state: TrainState,
    batch: dict[str, PyTree],
    key: Key,
    *,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    config: PPOConfig,
    minibatches: MinibatchConfig,
) -> tuple[TrainState, Metrics]:
    """The epochs of an update: of all networks, or in the first ``critic_warmup_updates`` of the critic alone."""
    learn = partial(sgd_epochs, minibatches=minibatches, prepare=_prepare(config))
    learn_all = partial(
        learn,
        loss=partial(ppo_loss, policy=policy, config=config),
        optimizer=optimizer,
        adapt_rate=partial(_adapt_rate, config=config) if config.schedule == "adaptive" else None,
        stop=_stop_beyond(config.target_kl),
    )
    num_warmup = config.critic_warmup_updates
    if num_warmup == 0:
        return learn_all(state, batch, key)
    # what the critic's steps have counted would be taken for the policy's, whose moments are still those of a start
    begin = partial(restart, optimizer)
    state = jax.lax.cond(state.step == num_warmup, begin, lambda state: state, state)
    of_it_alone = partial(_critic_loss, policy=policy, config=config)
    learn_critic = partial(learn, loss=of_it_alone, optimizer=of_critic(optimizer))
    return jax.lax.cond(state.step < num_warmup, learn_critic, learn_all, state, batch, key)


def _critic_loss(
    params: Params, batch: dict[str, PyTree], *, policy: Policy, config: PPOConfig
) -> tuple[Array, Metrics]:
    """``ppo_loss``, whose gradient goes to the critic alone."""
    networks = params["params"]
    if "critic" not in networks:
        raise ValueError(f"critic_warmup_updates needs a network 'critic', got a policy with {', '.join(networks)}")
    held = with_critic(jax.lax.stop_gradient(networks), networks)
    return ppo_loss({**params, "params": held}, batch, policy=policy, config=config)


def minibatch_size(config: PPOConfig, num_steps: int, num_strata: int = 1, length: int = 1) -> int:
    """Rows of ``length`` steps in a minibatch on all devices: ``batch_size`` steps on each, or those of
    ``num_mini_batches`` equal parts, as ``torch.chunk`` cuts each stratum."""
    if config.num_mini_batches is None:
        return num_shards() * config.batch_size // length
    return num_strata * -(-num_steps // (length * num_strata * config.num_mini_batches))


def _prepare(config: PPOConfig) -> Callable[[dict[str, PyTree]], dict[str, PyTree]] | None:
    return partial(_normalize_minibatch, config=config) if config.normalize_advantage_per_mini_batch else None


def _normalize_minibatch(minibatch: dict[str, Any], *, config: PPOConfig) -> dict[str, Any]:
    valid = (step_weight(minibatch) > 0).astype(jnp.float32)
    return {**minibatch, "advantage": _normalize(minibatch["advantage"], valid, config)}


def _normalize(advantage: Array, valid: Array | None, config: PPOConfig) -> Array:
    if config.advantage_rule == "embodichain-0.2":
        return normalize(advantage, valid)
    normalized = normalize(advantage, valid, offset=1e-8)
    if config.advantage_rule == "embodichain-0.3":
        return normalized
    counts = None if valid is None else valid > 0
    deviation = jnp.std(normalized, ddof=1, where=counts)  # 0 where all advantages are equal, else about 1
    return jnp.where(deviation == 0.0, 0.0, (advantage - normalized.mean(where=counts)) / (deviation + 1e-8))


def _stop_beyond(target_kl: float | None) -> Callable[[Metrics], Array] | None:
    """Stable-Baselines3's rule."""
    return None if target_kl is None else lambda metrics: metrics["approx_kl"] > 1.5 * target_kl


def _adapt_rate(rate: Array, metrics: Metrics, *, config: PPOConfig) -> Array:
    """Slower where the policy moved more than twice the desired KL, faster where less than half. Source: RSL-RL."""
    kl, desired = metrics["kl"], cast(float, config.desired_kl)  # the config sees to it
    slower = jnp.maximum(rate / 1.5, config.minimum_learning_rate)
    faster = jnp.minimum(rate * 1.5, config.maximum_learning_rate)
    return jnp.where(kl > 2.0 * desired, slower, jnp.where((kl < 0.5 * desired) & (kl > 0.0), faster, rate))


def _problems(options: PPOConfig, run: RunShape) -> Iterator[Problem]:
    if run.rows < 2:
        text = f"got {run.buffer_size} with num_envs {run.num_envs}; advantages are normalized over at least 2 rows"
        yield Problem("trainer.buffer_size", text)
    if options.num_mini_batches is None and options.batch_size > run.rows:
        yield run.too_many("batch_size", options.batch_size)
    if options.num_mini_batches is not None and options.num_mini_batches > run.rows:
        yield run.too_many("num_mini_batches", options.num_mini_batches)
    if options.critic_warmup_updates > 0 and run.policy == "actor_only":
        text = f"got {options.critic_warmup_updates}, but actor_only has no critic to warm up; leave it out"
        yield Problem("algorithm.cfg.critic_warmup_updates", text)
    batch_size = None if options.num_mini_batches else options.batch_size
    yield from sequence_problems(options, run, batch_size)
    whole = None if batch_size is None else batch_size // (options.sequence_length or 1)
    yield from strata_problems(options.minibatch_strata, whole, run)


def _share_out(options: PPOConfig, was: int, now: int) -> PPOConfig:
    if options.num_mini_batches is not None:  # parts of all rows, whoever has them
        return options.model_copy(update={"minibatch_strata": options.minibatch_strata or was})
    return options.model_copy(update=share_out(options.batch_size, options.minibatch_strata, was, now))


ALGORITHM = Algorithm(
    Config=PPOConfig,
    update=ppo_update,
    keeps_reference=lambda options: options.kl_coef > 0.0,
    stops_at_nonfinite=lambda options: not options.skip_nonfinite_updates,
    share_out=_share_out,
    problems=_problems,
    policy_problems=memory_problems,
    compat={
        "embodichain-0.2": {"timeout_bootstrap": "embodichain-0.2", "skip_nonfinite_updates": False},
        "embodichain-0.3": {
            "timeout_bootstrap": "embodichain-0.3",
            "advantage_rule": "embodichain-0.3",
            "clip_grad_per_network": True,
            "skip_nonfinite_updates": False,
        },
        "embodichain-seed": {
            "timeout_bootstrap": "embodichain-seed",
            "advantage_rule": "embodichain-seed",
            "skip_nonfinite_updates": False,
        },
    },
)
