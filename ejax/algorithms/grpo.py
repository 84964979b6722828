"""Group-relative policy optimization for control: the critic is replaced by a group of parallel environments.

    Gₜ = rₜ + γ·Gₜ₊₁·(1 − doneₜ)
    Aₜ = (Gₜ − mean_group Gₜ) / (std_group Gₜ + eps), over the members still in their first episode
    L = E[−min(ρA, clip(ρ)A)] + kl_coef·E[e^Δ − Δ − 1] − ent_coef·E[H],  Δ = log π_ref − log π

Source: Shao et al. 2024 (DeepSeekMath), step by step as in EmbodiChain 0.2.4.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from ejax.algorithms.batch import Columns, Loss, apply_to_batch, make_batch, reference_log_prob
from ejax.algorithms.options import COMPAT, MINIBATCH_FIELDS, MinibatchOptions
from ejax.algorithms.record import Algorithm, ResetPolicy, RunShape
from ejax.algorithms.sgd import Batch, sgd_epochs
from ejax.algorithms.teaching import TAUGHT_FIELDS, DistillationConfig, teacher_problems
from ejax.losses import clipped_surrogate, kl_k3, weighted_sums
from ejax.numerics.checks import check_rollout
from ejax.numerics.traced_options import is_active, unjit_for_traced
from ejax.optim import get_learning_rate, step_schedule
from ejax.policies.normalize import update_normalizer
from ejax.returns import discounted_returns, first_episode_mask, group_advantages
from ejax.schema.problems import Problem
from ejax.types import Array, Key, Metrics, Params, Policy, Rollout, TrainState


class GRPOConfig(MinibatchOptions):
    """``algorithm.cfg`` of ``grpo``: EmbodiChain's names and defaults, and below them what ejax adds."""

    ignored = ("gae_lambda",)
    gamma: float = Field(default=0.99, ge=0.0, le=1.0)
    """Discount of a step."""
    clip_coef: PositiveFloat = 0.2
    """ε: beyond 1 ± ε the probability ratio earns nothing more."""
    ent_coef: NonNegativeFloat = 0.0
    """Weight of the entropy, which is to be large."""
    kl_coef: NonNegativeFloat = 0.02
    """Weight of the divergence to the reference, which is the policy that training started from."""
    group_size: int = Field(default=4, ge=2)
    """Consecutive environments that form a group; divides ``num_envs``."""
    eps: PositiveFloat = 1e-8  # an option in the reward's unit, as EmbodiChain's, which goldens hold to 1e-6
    """Added to a group's deviation, by which its advantages are divided."""
    reset_every_rollout: bool = True
    """Every rollout starts with new episodes; False: those under way continue."""
    truncate_at_first_done: bool = True
    """Only each environment's first episode of a rollout counts."""
    shared_start: bool = True
    """ejax: the members of a group start from the same state, so that a baseline compares like with like. Needs
    ``reset_every_rollout``. EmbodiChain draws a start for each member."""
    clip_coef_high: PositiveFloat | None = None
    """ejax: the upper clip, where it differs from ``clip_coef``. Source: DAPO (Yu et al. 2025)."""
    distillation: DistillationConfig | None = None
    """ejax: imitate a teacher besides, as in PPO."""
    length_normalization: bool = False
    """ejax: each environment's episode has the same weight, however long it is, as in the original GRPO."""
    update_normalizers: bool = True
    """ejax: observation normalizers take in each rollout after its update, as PPO's do. EmbodiChain's GRPO leaves them
    as they are."""

    @model_validator(mode="before")
    @classmethod
    def _nothing_to_share(cls, given: Any) -> Any:
        """Write ``shared_start`` down as false where it is not given and nothing is reset."""
        if isinstance(given, dict) and given.get("reset_every_rollout") is False:
            return {"shared_start": False, **given}
        return given

    @model_validator(mode="after")
    def _shares_what_it_resets(self) -> "GRPOConfig":
        if "shared_start" in self.model_fields_set and self.shared_start and not self.reset_every_rollout:
            text = "shared_start is true, but without reset_every_rollout no start is common to the group"
            raise ValueError(f"{text}; set reset_every_rollout: true or leave shared_start out")
        return self


@partial(jax.jit, static_argnames=("policy", "optimizer", "config", "loss", "columns"))
def grpo_update(
    state: TrainState,
    rollout: Rollout,
    key: Key,
    *,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    config: GRPOConfig,
    loss: Loss | None = None,
    columns: Columns | None = None,
) -> tuple[TrainState, Metrics]:
    """Make one GRPO update from a rollout with leaves [T, N, ...], whose values are not used. The new state has
    ``step`` + 1; metrics are scalars.

    Args:
        loss: in place of ``grpo_loss``, which it may call, with the same arguments.
        columns: more columns of the batch, for such a loss.

    Raises:
        ValueError: N is not divisible by ``group_size``; ``kl_coef`` > 0 without ``state.reference``; a column's name
            that is taken.
    """
    check_rollout(rollout)
    mask = first_episode_mask(rollout.done) if config.truncate_at_first_done else jnp.ones_like(rollout.reward)
    valid = rollout.valid
    if valid is not None:  # an episode that ends with a step that is not a transition has no return to compare
        broken = discounted_returns((rollout.done & ~valid).astype(jnp.float32), rollout.done, gamma=1.0) > 0.0
        mask = mask * (valid & ~broken)
    returns = unjit_for_traced(discounted_returns, config.gamma)
    # no bootstrap: a group's members are compared by rewards alone, since there is no critic
    step_return = returns(rollout.reward, rollout.done, gamma=config.gamma)
    relative = unjit_for_traced(group_advantages, config.eps)
    advantage = relative(step_return, mask, group_size=config.group_size, eps=config.eps)
    weight = mask
    if config.length_normalization:  # lengths relative to the rollout's, so that a minibatch's weights do not get small
        share_of_rollout = mask.mean(axis=0, keepdims=True)
        weight = mask / jnp.maximum(share_of_rollout, 1.0 / mask.shape[0])
    reference = reference_log_prob(state, rollout, policy=policy, kl_coef=config.kl_coef)
    batch, minibatches = make_batch(
        policy, rollout, config, columns, advantage=advantage, mask=weight, reference_log_prob=reference
    )
    bound = partial(loss or grpo_loss, policy=policy, config=config)
    state, metrics = sgd_epochs(state, batch, key, loss=bound, optimizer=optimizer, minibatches=minibatches)
    state = step_schedule(state, config.optimizer, config.lr_scheduler)
    if config.update_normalizers:
        state = replace(state, params=update_normalizer(policy, state.params, rollout.obs, rollout.valid))
    metrics |= {"learning_rate": get_learning_rate(state.opt_state), "mask_fraction": mask.mean()}
    return state, metrics


def grpo_loss(params: Params, batch: Batch, *, policy: Policy, config: GRPOConfig) -> tuple[Array, Metrics]:
    """Compute the loss of one minibatch (or of a chunk of it).

    Args:
        batch: ``obs``, ``action``, ``log_prob``, ``advantage`` with leaves [B, ...]; ``weight`` [B], of sum one over a
            minibatch; ``reference_log_prob`` [B] where ``kl_coef`` > 0; with ``distillation`` a teacher's ``label`` and
            its ``label_weight`` [B]; optional ``dropout_seed`` [B]. Of a policy with memory: see ``flatten_rollout``.
    """
    distribution, _, batch = apply_to_batch(policy, params, batch)
    log_prob = distribution.log_prob(batch["action"])
    log_ratio = log_prob - batch["log_prob"]

    surrogate = clipped_surrogate(log_ratio, batch["advantage"], config.clip_coef, config.clip_coef_high)
    terms = {
        "actor_loss": surrogate,
        "entropy": distribution.entropy(),
        "approx_kl": kl_k3(log_ratio),
        "clip_fraction": (jnp.abs(jnp.exp(log_ratio) - 1.0) > config.clip_coef).astype(surrogate.dtype),
        # zero without a coefficient, so that logs have the same columns whichever options are given
        "approx_ref_kl": jnp.zeros_like(surrogate),
    }
    coefficients = {"actor_loss": 1.0, "entropy": -config.ent_coef}
    if is_active(config.kl_coef):
        terms["approx_ref_kl"] = kl_k3(batch["reference_log_prob"] - log_prob)
        coefficients["approx_ref_kl"] = config.kl_coef
    if config.distillation is not None:
        from ejax.algorithms.taught import distillation_terms  # of few runs

        terms |= distillation_terms(batch, distribution, config.distillation)
        coefficients["distillation_loss"] = 1.0
    return weighted_sums(terms, batch["weight"], coefficients)


def _resets(options: GRPOConfig) -> ResetPolicy:
    return ResetPolicy(
        restart=options.reset_every_rollout,
        group_size=options.group_size if options.reset_every_rollout and options.shared_start else 1,
        first_only=options.truncate_at_first_done,
    )


def _problems(options: GRPOConfig, run: RunShape) -> Iterator[Problem]:
    if rest := run.num_envs % options.group_size:
        text = f"got {run.num_envs}, not divisible by algorithm.cfg.group_size {options.group_size}"
        yield Problem("trainer.num_envs", f"{text}; use {max(options.group_size, run.num_envs - rest)}")
    yield from teacher_problems(options.distillation, "algorithm.cfg.distillation")
    yield from options.problems(run)


ALGORITHM = Algorithm(
    Config=GRPOConfig,
    update=grpo_update,
    resets=_resets,
    keeps_reference=lambda options: options.kl_coef > 0.0,
    problems=_problems,
    **MINIBATCH_FIELDS | TAUGHT_FIELDS,
    ignored_options=GRPOConfig.ignored,
    compat=COMPAT["grpo"],
)
